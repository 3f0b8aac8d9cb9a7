"""The seconds of a step: of all slots of a rank, although fewer are timed."""

import pytest

from tests.in_process import pretrain_config
from training import step_time
from training.config import PretrainConfig
from training.data import Sizes, TextSizes
from training.kinds import PUZZLES
from training.step_time import seconds_of_step
from utils.ranks.world import World

SIZES = Sizes(seq_len=16, vocab_size=6, num_puzzle_identifiers=3)
TEXT = TextSizes(vocab_size=256, max_len=32, mean_context=20, tokenizer="bytes", special_tokens={})


def _config(*overrides: str) -> PretrainConfig:
    return pretrain_config("device=cpu", *overrides)


class _Clock:
    """A clock that goes on while steps are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slot_s: float, step_s: float) -> None:
        self.now, self.steps, self._slot_s, self._step_s = 0.0, list[int](), slot_s, step_s
        monkeypatch.setattr(step_time, "time", self)
        monkeypatch.setattr(PUZZLES, "example_step", lambda *given: (given[3],))
        monkeypatch.setattr("training.step_time.Layout.forward_backward", lambda _, num_slots: self.take(num_slots))

    def perf_counter(self) -> float:
        return self.now

    def take(self, num_slots: int) -> None:
        self.steps.append(num_slots)
        self.now += self._step_s + num_slots * self._slot_s


@pytest.mark.parametrize(
    ("slot_s", "step_s", "ranks", "parts", "expected", "most"),
    [
        (0.001, 0.01, 1, 1, 0.074, 64),  # whole steps
        (0.001, 0.01, 4, 1, 0.026, 16),
        (0.001, 0.01, 1, 8, 8 * 0.018, 8),  # a microbatch is the most that is timed
        (2.0, 0.0, 1, 1, 128.0, 1),  # a slot is long enough
        (0.1, 0.0, 1, 1, 6.4, 16),
    ],
)
def test_fewer_slots_tell_the_time_of_all(
    monkeypatch: pytest.MonkeyPatch, slot_s: float, step_s: float, ranks: int, parts: int, expected: float, most: int
) -> None:
    clock = _Clock(monkeypatch, slot_s, step_s)
    config = _config("debug=tiny", "global_batch_size=64", f"grad_accumulation={parts}")
    assert seconds_of_step(config, SIZES, ranks, World.single()) == pytest.approx(expected)
    assert max(clock.steps) == most


@pytest.mark.parametrize(
    "typed", ["arch=hrm", "arch=trm arch.num_states=2 freeze_weights=true", "arch=se_rrm", "arch=gpt", "arch=hrm_text"]
)
def test_steps_of_every_kind_can_be_timed(typed: str) -> None:
    is_text = typed in ("arch=gpt", "arch=hrm_text")
    config = _config("debug=tiny_text" if is_text else "debug=tiny", "arch.forward_dtype=auto", *typed.split())
    assert 0 < seconds_of_step(config, TEXT if is_text else SIZES, 1, World.single()) < 600
