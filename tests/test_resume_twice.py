"""A run that is resumed twice, once amid an evaluation, equals an undisturbed one bit for bit."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain
from records.checkpoint.format import Progress
from records.lock import RunLock
from tests import runs
from tests.in_process import SINGLE, Begun, begin, train_here
from tests.models.helpers import arch_files
from tests.runs import assert_same_run, rows, settings
from tests.spawn import run_ranks
from tests.test_family import OPTIMS
from training.resume import read_start
from training.state import TrainState
from utils.ranks.launch import Launch
from utils.ranks.world import World
from utils.stop import StopSignal

# The middle of an epoch, amid the evaluation of step 5, and the middle of the next epoch.
STOPS = (4, 5, 8)
_STAGES = ["parallel.stages=2", "parallel.microbatches=2"]


class _StopAt(StopSignal):
    """Asks a run to stop from a step on, also amid its evaluation."""

    def __init__(self, progress: Progress, step: int) -> None:
        super().__init__()
        self._progress, self._step = progress, step

    def requested(self) -> bool:
        return self._progress.step >= self._step


def _generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]


def _begin(overrides: list[str], world: World) -> Begun:
    if world.size == 1:
        return begin(overrides, world)
    lock = RunLock()
    start = world.from_main(lambda: read_start(overrides, lock, Launch()))
    world, opened = pretrain.open_run(start, world)
    return Begun(start, opened, pretrain.build_state(start, opened, world), lock, world)


def _train(overrides: list[str], world: World, last: int = 10**6) -> TrainState:
    """Train until a stop is asked for from step `last` on, and return the state."""
    begun = _begin(overrides, world)
    with begun.lock:
        stop = _StopAt(begun.state.progress, last)
        pretrain.train(begun.start, begun.data, begun.state, stop, begun.lock, begun.world)
    return begun.state


def _resumed_often(overrides: list[str], world: World = SINGLE) -> None:
    """Start and resume a run, each time with other global generators, which nobody draws from."""
    for number, step in enumerate((*STOPS, 10**6)):
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        before = _generators()
        progress = _train([*overrides, "resume=auto"], world, step).progress
        assert _generators() == before, "a global generator moved on, so that a resume would draw other numbers"
        assert progress.step == min(step, runs.LAST_STEP)
        assert (progress.pending_row is not None) == (step == 5)


def _compare(world: World, typed: Callable[[Path], list[str]], folder: Path) -> None:
    _train(typed(folder / "quiet"), world)
    _resumed_often(typed(folder / "run"), world)
    if world.is_main:
        assert_same_run(folder / "run", folder / "quiet")


@pytest.mark.parametrize(
    "options",
    [[f"arch={arch}"] for arch in arch_files("puzzles")]
    + [["arch=trm", f"optim={optim}"] for optim in OPTIMS]
    + [["arch=trm", "arch.num_states=3"], ["augment=online", "ema=true", "arch=trm_mlp", "arch.noise=annealed"]],
    ids=" ".join,
)
def test_puzzles(data: Path, tmp_path: Path, options: list[str]) -> None:
    kept = [word for word in settings(data, None, eval_batch_size=8) if not word.startswith("arch.")]
    _compare(SINGLE, lambda run: [*kept, f"checkpoint_path={run}", *options], tmp_path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dataset.build_text_dataset import main as build

    folder = tmp_path_factory.mktemp("text")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    for name, seed in (("train", 0), ("test", 1)):
        drawn = random.Random(seed).choices(words, k=4000)
        (folder / f"{name}.txt").write_text(" ".join(drawn))
    sources = f"--source {folder}/train.txt --test-source {folder}/test.txt".split()
    assert build(["--output-dir", str(folder / "data"), "--max-len", "32", *sources]) == 0
    return folder / "data"


def _typed_text(text: Path, options: list[str], run: Path) -> list[str]:
    small = ["arch.hidden_size=16", "arch.num_heads=2", "arch.forward_dtype=float32", "rows_per_step=4"]
    steps = [f"max_steps={runs.LAST_STEP}", "log_interval=5", "eval_every_n_steps=5", "checkpoint_every_n_steps=2"]
    sizes = ["global_batch_size=256", "eval_batch_size=128", "wandb.mode=disabled", "device=cpu", "eval_interval=null"]
    return [*options, *small, *steps, *sizes, f"data_path={text}", f"checkpoint_path={run}"]


@pytest.mark.parametrize("arch", ["gpt", "hrm_text", "trm_text", "ut_text", "rins_text", "transformer_text"])
def test_text(text: Path, tmp_path: Path, arch: str) -> None:
    _compare(SINGLE, partial(_typed_text, text, [f"arch={arch}"]), tmp_path)


_SLOW = (("tp", 2), ("pipeline", 2), ("hsdp", 4), ("fsdp_tp", 4))


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [("ddp", 2), ("fsdp", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in _SLOW)],
)
def test_every_strategy(data: Path, text: Path, tmp_path: Path, parallel: str, ranks: int) -> None:
    options = [f"parallel={parallel}", *(_STAGES if parallel == "pipeline" else [])]
    run_ranks(_compare, ranks, partial(_typed_text, text, ["arch=transformer_text", *options]), tmp_path, timeout_s=600)


def _some_steps(world: World, typed: list[str], last: int) -> None:
    _train([*typed, "resume=auto"], world, last)


def test_other_ranks_and_back(data: Path, tmp_path: Path) -> None:
    """The order of sums differs, so that the last bits do."""
    train_here(settings(data, tmp_path / "quiet"))
    typed = settings(data, tmp_path / "run")
    for ranks, last in ((2, 4), (1, 7), (4, 9), (2, 10**6)):
        run_ranks(_some_steps, ranks, typed, last)
    assert [row["step"] for row in rows(tmp_path / "run")] == [row["step"] for row in rows(tmp_path / "quiet")]
    for row, expected in zip(rows(tmp_path / "run"), rows(tmp_path / "quiet"), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5), f"step {row['step']}"
