"""A run says at its start what its user would otherwise find out late."""

from typing import Any

import pytest

from dataset.evaluators import NO_EVALUATORS
from models import shapes_of
from tests.in_process import SINGLE, pretrain_config
from training import advice as of_advice
from training.config import PretrainConfig
from training.data import Sizes
from training.flops import FlopsOfRun
from training.plan import Plan
from utils.ranks.world import World
from utils.text import in_words

SIZES = Sizes(seq_len=36, vocab_size=8, num_puzzle_identifiers=1)


def _typed(*overrides: str) -> PretrainConfig:
    return pretrain_config("arch.forward_dtype=float32", *overrides)


def _advice(config: PretrainConfig, *, last_step: int, first_step: int = 1, world: World = SINGLE) -> list[str]:
    """Return the lines for a model without memory."""
    no_sampler: Any = None
    plan = Plan(config, no_sampler, last_step, True, NO_EVALUATORS, "", None)
    model = shapes_of(config.arch, **SIZES.as_dict())
    return of_advice.advice(plan, FlopsOfRun(config, SIZES, last_step), model, first_step, world)


def test_a_small_run_needs_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted or measured for it: tests and demos start many such runs."""
    monkeypatch.setattr(of_advice, "products_per_s", lambda *given: pytest.fail("measured"))
    monkeypatch.setattr("training.flops.flops_of_step", lambda *given: pytest.fail("counted"))
    assert _advice(_typed("experiment=demo"), last_step=1200) == []


def test_a_long_warm_up_and_an_emulated_dtype_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for last_step, is_told in ((2000, True), (2001, False)):
        told = _advice(_typed("debug=tiny", "lr_warmup_steps=2000"), last_step=last_step)
        assert [line.endswith(f"set lr_warmup_steps={last_step // 10}") for line in told] == [True] * is_told
    for dtype, in_hardware, is_told in (
        ("bfloat16", False, True),
        ("bfloat16", True, False),
        ("float32", False, False),
    ):
        monkeypatch.setattr(of_advice, "multiplies_bfloat16", lambda device, answer=in_hardware: answer)
        told = _advice(_typed("debug=tiny", f"arch.forward_dtype={dtype}"), last_step=20)
        assert [line.endswith("set arch.forward_dtype=float32") for line in told] == [True] * is_told


def test_a_run_that_is_too_large_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As typed: pretrain.py data_path=data/sudoku-6x6, the published model on a laptop."""
    config, last_step = _typed("data_path=data/sudoku-6x6", "lr_warmup_steps=0"), 130_208
    per_s = FlopsOfRun(config, SIZES, last_step).of(1) * of_advice._OVERHEAD / 60  # a step takes a minute
    monkeypatch.setattr(of_advice, "products_per_s", lambda *given: per_s)
    (line,) = _advice(config, last_step=last_step, first_step=11)
    assert line.startswith(f"warning: this run needs about {in_words((last_step - 10) * 60)} "), line
    assert "130,198 steps of about 1 min, the first row after about 10 min)" in line, "rows come every ten steps"
    (line,) = _advice(config, last_step=1000)
    assert line == "1,000 steps of about 1 min: the first row comes after about 1 min, the end after about 16 h 40"
    assert _advice(config, last_step=1000, first_step=1001) == [], "only an evaluation is left"
    assert _advice(config, last_step=1000, world=World(rank=1, size=2)) == []
    monkeypatch.setattr(of_advice, "products_per_s", lambda *given: 60 * per_s)
    assert _advice(config, last_step=1000) == [], "who waits for a second needs no warning"
