"""compile=auto: rank 0 decides by the size of the run, the config stores it, and nothing fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import yaml

from models import shapes_of
from models.base import RecursiveModel
from models.text.config import LONGEST_RUN
from models.text.model import TextModel
from pretrain import build_state, open_run, train
from records.lock import RunLock
from tests.in_process import pretrain_config
from tests.runs import settings
from tests.spawn import run_ranks
from training import compiling
from training.compiling import LEAST_FLOPS, estimated_flops_of_step, with_compile
from training.config import PretrainConfig
from training.data import AnySizes, Sizes, TextSizes
from training.flops import flops_of_step
from training.resume import read_start
from training.splits import open_data
from utils.errors import UserError
from utils.ranks.launch import Launch
from utils.ranks.world import World
from utils.stop import StopSignal

SINGLE = World.single()
ON = {"max_steps": 10**12, "epochs": 10**7}  # so long that compiling pays, however small the model is


def _config(data: Path, **changes: object) -> PretrainConfig:
    typed = settings(data, None, **{"compile": "auto", "arch.forward_dtype": "float32"} | changes)
    return pretrain_config(*typed)


def _model(config: PretrainConfig, sizes: AnySizes) -> RecursiveModel:
    model = shapes_of(config.arch, **sizes.of_model())
    assert isinstance(model, RecursiveModel)
    return model


def _decided(config: PretrainConfig, world: World = SINGLE, *, before: Any = None) -> tuple[Any, str]:
    data = open_data(config, SINGLE)
    config, notes = with_compile(config, _model(config, data.sizes), data, world, before=before)
    return config.compile, " ".join(notes)


@pytest.mark.parametrize("arch", ["hrm", "trm", "trm_mlp", "urm", "transformer"])
def test_the_estimate_is_near_the_exact_count(arch: str) -> None:
    typed = [f"arch={arch}", "arch.hidden_size=256", "arch.num_heads=4", "global_batch_size=8"]
    typed.append("arch.forward_dtype=float32")
    config, sizes = pretrain_config(*typed), Sizes(81, 11, 10)
    exact = flops_of_step(config, sizes, config.puzzle_arch.depth)
    assert 0.5 < estimated_flops_of_step(config, _model(config, sizes), sizes) / exact < 2


@pytest.mark.parametrize("arch", ["gpt", "hrm_text", "trm_text"])
def test_the_estimate_is_near_the_exact_count_for_text(arch: str) -> None:
    typed = ["debug=tiny_text", f"arch={arch}", "arch.hidden_size=64", "arch.forward_dtype=float32"]
    config = pretrain_config(*typed)
    sizes = TextSizes(vocab_size=256, max_len=100, mean_context=100, tokenizer="bytes", special_tokens={})
    model = shapes_of(config.arch, **sizes.of_model())
    assert isinstance(model, TextModel)
    exact = flops_of_step(config, sizes, model.config.grad_calls_at(LONGEST_RUN, LONGEST_RUN))
    assert 0.8 < estimated_flops_of_step(config, model, sizes) / exact < 1.25


@pytest.fixture
def can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the attempt to compile, which takes seconds."""
    monkeypatch.setattr(compiling, "why_compiling_fails", lambda device: "")


@pytest.mark.usefixtures("can_compile")
def test_a_long_run_is_compiled_where_that_was_tested(data: Path) -> None:
    for short in ({}, ON | {"max_steps": 12}):
        assert _decided(_config(data, **short)) == (False, ""), "a short run says nothing"
    config = _config(data, **ON)
    opened = open_data(config, SINGLE)
    of_a_rank = compiling._decide(config, _model(config, opened.sizes), opened, replace(SINGLE, size=10**12))
    assert of_a_rank == (False, ""), "each of the ranks does little"
    cases: list[tuple[dict[str, object], str, str]] = [
        ({}, "cpu", "on, because "),
        ({"deterministic": True}, "cpu", "off, because deterministic=true"),
        ({"parallel": "hsdp"}, "cpu", "off, because compiling was never tested with"),
        ({}, "mps", "off, because compiling was never tried on mps"),
        ({"arch.hidden_size": 128}, "cuda", "on, because "),
    ]
    for changes, device, expected in cases:
        _, note = _decided(_config(data, **ON | changes), replace(SINGLE, device=torch.device(device)))
        assert note.startswith(f"compile=auto: {expected}")


def test_segments_need_ddp_and_one_depth(data: Path, can_compile: None) -> None:
    assert _decided(_config(data, compile="segment"))[0] == "segment"
    assert _decided(_config(data), before="segment")[0] == "segment"
    for changes in ({"arch.backprop_warmup_steps": 5}, {"parallel": "fsdp"}):
        for compile, before in (("segment", None), ("auto", "segment")):
            with pytest.raises(UserError, match=r"compile=segment .*give compile=true"):
                _decided(_config(data, **changes, compile=compile), before=before)


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_keeps_what_it_did(data: Path, before: bool, can_compile: None) -> None:
    changes = {} if before else ON  # a new run would decide otherwise
    assert _decided(_config(data, **changes), before=before)[0] is before
    assert _decided(_config(data, compile=not before), before=before)[0] is not before, "what is typed counts"


def test_without_a_compiler_auto_is_off_and_true_is_a_mistake(data: Path) -> None:
    """A run that goes on from a machine with a compiler is refused, too."""
    with inductor.patch({"cpp.cxx": (None, "/nonexistent")}):
        compiled, note = _decided(_config(data, **ON))
        for typed, before in ((True, None), ("auto", True)):
            with pytest.raises(UserError, match=r"can't compile here: .*C\+\+ compiler.*give compile=false"):
                _decided(_config(data, compile=typed), before=before)
    assert compiled is False
    assert note.startswith("compile=auto: off, because PyTorch can't compile here: ") and "nonexistent" in note


def _decide_on_ranks(world: World, data: Path) -> tuple[Any, str]:
    patch = pytest.MonkeyPatch()  # of a process of its own, which ends here
    patch.setattr(compiling, "keep_compiled_code", lambda: None)
    patch.setattr(compiling, "why_compiling_fails", lambda device: "no compiler" if world.rank == 1 else "")
    config = _config(data, **ON)
    if world.rank == 1:  # a rank whose own decision would be another
        config = config.model_copy(update={"deterministic": True})
    return _decided(config, world)


def test_all_ranks_do_the_same(data: Path) -> None:
    decided = run_ranks(_decide_on_ranks, 2, data)
    assert decided == [(False, "compile=auto: off, because PyTorch can't compile here: no compiler")] * 2


def _train(overrides: list[str]) -> list[str]:
    """Train as pretrain.py does, and return the notes at the start."""
    with RunLock() as lock:
        start = read_start(overrides, lock, Launch())
        world, data = open_run(start, SINGLE)
        state = build_state(start, data, world)
        notes = list(start.notes)
        train(start, data, state, StopSignal(), lock, world)
    return notes


def test_the_choice_is_stored_with_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_compile: None
) -> None:
    """The backend runs the graph as it is, because a compiler for the CPU takes a minute."""
    called: list[int] = []
    monkeypatch.setattr("models.model.compile_each", lambda levels: called.append(1))
    monkeypatch.setitem(LEAST_FLOPS, "cpu", 1.0)
    run = tmp_path / "run"
    notes = _train(settings(data, run, compile="auto", max_steps=2, eval_every_n_steps=None))
    assert any(note.startswith("compile=auto: on") for note in notes) and len(called) == 1
    assert any(note.startswith("the first step compiles") for note in notes), "it is silent for a minute"
    assert yaml.safe_load((run / "config.yaml").read_text())["compile"] is True
    monkeypatch.setitem(LEAST_FLOPS, "cpu", 1e30)  # a new run would not be compiled
    assert not any("compile=auto" in note for note in _train([f"resume={run}", "max_steps=3"]))
    notes = _train([f"resume={run}", "max_steps=4", "compile=auto"])
    assert "compile=auto: on, as before in this run" in notes and len(called) == 3
    assert yaml.safe_load((run / "config.yaml").read_text())["compile"] is True
