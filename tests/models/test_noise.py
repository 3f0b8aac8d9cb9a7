"""Annealed noise: what each segment reads of the answer, in training and at test time."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.act import ActObjective, ActSettings, draw_own_answers, initial_carry, segment
from models.base import RecursiveModel
from models.carry import NOISY, State
from models.dropout import derived
from models.hrm import HRM
from models.inference import trace
from models.noise import annealed, full_strength, uniform
from models.se_mixer import SEMixer
from models.se_rrm import SERRM
from models.trajectories import Trajectories
from models.trm import TRM
from models.urm import URM
from tests.models.helpers import ARCH_NAMES, random_batch, small_model, small_symbol_model

NUM_SLOTS, NUM_STEPS, VOCAB_SIZE = 3, 5, 6
SEEDS = torch.tensor([3, 2**32 - 1, 77])
LABELS = torch.tensor([[0, 4, 5, 1], [2, 2, 0, -100], [5, 3, 1, 0]])
ARCHS = [*(name for name in ARCH_NAMES if name != "transformer"), "se_rrm", "se_mixer"]


def _model(name: str, **changes: Any) -> RecursiveModel:
    build = small_model if name in ARCH_NAMES else small_symbol_model
    return build(name, **{"noise": "annealed", "halt_max_steps": NUM_STEPS, **changes})


def _copies(own: bool = False, answers: Tensor | None = None) -> Tensor:
    """Return what the segments of three sequences read, (K, B, S, V)."""
    answers = torch.zeros(*LABELS.shape, VOCAB_SIZE) if answers is None else answers
    own_B = torch.full((NUM_SLOTS,), own)
    steps = [torch.full((NUM_SLOTS,), step) for step in range(1, NUM_STEPS + 1)]
    return torch.stack([annealed(SEEDS, each_B, LABELS, answers, own_B, num_steps=NUM_STEPS) for each_B in steps])


def test_the_noise_of_a_sequence_is_one_draw_that_falls() -> None:
    copies, noise = _copies(), full_strength("annealed", SEEDS, LABELS.shape[1], VOCAB_SIZE)
    # Where there is no label, the copy is (1 - t) x_0.
    left_KB = (copies[:, 1, 3] / noise[1, 3])[:, :1]
    torch.testing.assert_close(copies[:, 1, 3], left_KB * noise[1, 3])
    assert (left_KB.diff(dim=0) < 0).all() and left_KB.min() > 0 and left_KB.max() < 1
    # And where there is one, t x_1 comes on top.
    torch.testing.assert_close(copies[:, 1, 0, 2], left_KB[:, 0] * noise[1, 0, 2] + (1 - left_KB[:, 0]))
    assert not torch.allclose(noise[0], noise[2]), "each sequence has its own noise"


def test_pseudo_targets_take_the_place_of_the_label_after_the_first_segment() -> None:
    answers = torch.rand(*LABELS.shape, VOCAB_SIZE).softmax(-1)
    labels, own = _copies(), _copies(own=True, answers=answers)
    assert torch.equal(own[0], labels[0])
    noise = full_strength("annealed", SEEDS, LABELS.shape[1], VOCAB_SIZE)
    left_K = (labels[:, 0, 0, 5] / noise[0, 0, 5])[:, None, None]
    torch.testing.assert_close(own[1:, 0], left_K[1:] * noise[0] + (1 - left_K[1:]) * answers[0])


@pytest.mark.parametrize("kind, std", [("annealed", 1 / math.sqrt(9)), ("fresh", 1)])
def test_noise_has_the_moments_of_its_kind(kind: str, std: float) -> None:
    noise = full_strength(kind, torch.arange(50), 81, 9)
    assert float(noise.mean()) == pytest.approx(0, abs=0.01)
    assert float(noise.std()) == pytest.approx(std, rel=0.02)
    assert float((noise**4).mean() / noise.var() ** 2) == pytest.approx(3, rel=0.05), "not normal"
    assert torch.isfinite(torch.erfinv(2 * uniform(torch.tensor([0, 2**32 - 1])) - 1)).all()


def test_pseudo_targets_come_with_a_growing_probability() -> None:
    def share(step: int, growing_steps: int = 100) -> float:
        return float(draw_own_answers(0, step, 1000, growing_steps).float().mean())

    assert share(50) == pytest.approx(0.5, abs=0.06)
    assert share(100) == share(1000) == 1 and share(5) < 0.1 and share(1000, growing_steps=0) == 0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the list to which each segment of a model adds what it reads, (N, S, V)."""
    seen = list[Tensor]()

    def spied(self: RecursiveModel, state: State, *given: object, **more: object) -> object:
        seen.append(state[NOISY])
        return forwards[type(self)](self, state, *given, **more)

    forwards: dict[type, Callable[..., object]] = {each: each.forward for each in (HRM, SEMixer, SERRM, TRM, URM)}
    for each in forwards:
        monkeypatch.setattr(each, "forward", spied)
    return seen


@pytest.mark.parametrize("name", ARCHS)
def test_a_sequence_keeps_its_noise_and_hands_on_its_answer(name: str, read: list[Tensor]) -> None:
    model = _model(name, **{"no_ACT_continue": True} if name in ("hrm", "trm") else {})
    batch = {each: tensor % model.vocab_size for each, tensor in random_batch(NUM_SLOTS).items()}
    carry = initial_carry(model, batch, training=True)
    own_B, stay_B = torch.ones(NUM_SLOTS, dtype=torch.bool), torch.full((NUM_SLOTS,), NUM_STEPS)
    answers, logits = [], []
    for seeds_B in (SEEDS, SEEDS + 1):
        settings = ActSettings(model.config.depth, NUM_SLOTS, stay_B, seeds_B, own_B)
        carry, outputs = segment(model, carry, batch, settings)
        answers.append(carry.current["answers"])
        logits.append(outputs.logits_BSV)
    assert torch.equal(carry.current["noise_seeds"], SEEDS), "it took the seeds of a later step"
    second_B = torch.full((NUM_SLOTS,), 2)
    expected = annealed(derived(SEEDS, 0), second_B, batch["labels"], answers[0], own_B, num_steps=NUM_STEPS)
    torch.testing.assert_close(read[1], expected)
    torch.testing.assert_close(answers[0].sum(-1), torch.ones(batch["labels"].shape))
    assert torch.equal(answers[0].argmax(-1), logits[0].argmax(-1))
    rows = None if model.puzzle_embedding is None else model.puzzle_embedding.rows(batch["puzzle_identifiers"])
    state = {each: tensor.clone() for each, tensor in carry.state.items()}
    one, other = (model(state | {NOISY: each}, batch["inputs"], rows, model.config.depth)[1] for each in read[:2])
    assert not torch.allclose(one, other), "the model does not read the copy"


def test_every_segment_and_every_trajectory_reads_new_noise(read: list[Tensor]) -> None:
    model, batch = _model("trm", noise="fresh", num_states=2), random_batch(NUM_SLOTS)
    settings = ActSettings(model.config.depth, NUM_SLOTS, seeds_B=SEEDS)
    ActObjective(model).run(initial_carry(model, batch, training=True), batch, settings)
    assert len(torch.unique(read[0].flatten(1), dim=0)) == 2 * NUM_SLOTS
    is_own = (read[1][:, None] == read[0].unflatten(0, (NUM_SLOTS, 2))).flatten(2).all(2).any(1)
    assert is_own.all(), "the winner's second pass reads other noise than its first"
    # In an evaluation all sequences read the same noise, and each trajectory reads its own.
    read.clear()
    trace(model, batch, 2)
    trace(model, batch, 2, trajectories=Trajectories(2, 0.0, seed=0), numbers_N=np.array([0, 1, 2]))
    plain, later, spread, _ = read
    assert torch.equal(plain[0], plain[1]) and not torch.allclose(plain, later)
    assert torch.equal(spread[0], plain[0]) and torch.equal(spread[0], spread[2])
    assert not torch.allclose(spread[0], spread[1])
