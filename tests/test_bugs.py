"""A bug keeps its traceback on the rank where it happened, and ends all ranks as any fault does.

Only errors that were raised for the user become one line. So bugs are planted here where the
program expects mistakes of the user: a ValueError as NumPy raises it, a shape that does not fit, an
OSError that nobody wrapped.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.runs import REPOSITORY, command, settings, train, with_arguments

pytestmark = pytest.mark.faults

MESSAGE = "operands could not be broadcast together with shapes (3,) (4,)"


def _plant(where: str, error: type[Exception], on_rank: int, rank: int) -> None:
    """Make the function with this dotted name raise an error on one rank."""
    if rank != on_rank:
        return
    import importlib

    parts = where.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:-1]:
            owner = getattr(owner, name)
        break

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise error(MESSAGE)

    assert callable(getattr(owner, parts[-1])), f"there is no {where} any more; change the name in this test"
    setattr(owner, parts[-1], broken)


PLACES: dict[str, tuple[str, type[Exception]]] = {
    "config": ("pretrain.read_start", ValueError),
    "data": ("training.kinds.PUZZLES.check", ValueError),
    "reader": ("dataset.loader._read", ValueError),
    "model": ("models.hrm.HRM.forward", RuntimeError),
    "weights": ("training.trained.build_arch", ValueError),
    "evaluator": ("dataset.evaluators.Evaluators.judge", ValueError),
    "metrics": ("records.metrics.Metrics.write", OSError),
    "staging": ("records.checkpoint.writer.Checkpointer._stage", OSError),
    "saving thread": ("records.checkpoint.writer.Checkpointer._publish", ValueError),
}


@pytest.mark.parametrize("place", [place for place in PLACES if place != "weights"])
def test_a_bug_keeps_its_traceback(data: Path, tmp_path: Path, log: Path, place: str) -> None:
    where, error = PLACES[place]
    done = train(settings(data, tmp_path / "run"), log, hook=with_arguments(_plant, where, error, 0))
    assert done.status == 1, f"the status of a bug must be 1:\n{done.output}"
    assert f"fault on rank 0: {error.__name__}: {MESSAGE}" in done.output
    assert "Traceback (most recent call last)" in done.output and "in broken" in done.output
    assert not [line for line in done.output.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("place", ["reader", "evaluator", "staging"])
def test_a_bug_on_one_rank_ends_all_ranks(data: Path, tmp_path: Path, log: Path, place: str) -> None:
    where, error = PLACES[place]
    hook = with_arguments(_plant, where, error, 1)
    done = train(settings(data, tmp_path / "run", **{"dist.timeout_s": 20}), log, ranks=2, hook=hook)
    assert done.status == 1, done.output
    assert f"fault on rank 1: {error.__name__}: {MESSAGE}" in done.output and "in broken" in done.output
    assert "fault on rank 0: " in done.output, "rank 0 did not report the fault of rank 1"
    assert not [line for line in done.output.splitlines() if line.startswith("error: ")]


def test_a_bug_in_evaluate_keeps_its_traceback(quiet: Path, tmp_path: Path, log: Path) -> None:
    """All commands share the code that loads a model and judges answers."""
    for place in ("weights", "evaluator"):
        where, error = PLACES[place]
        typed = [f"checkpoint={quiet}", "device=cpu"]
        done = train(typed, log, program="evaluate", hook=with_arguments(_plant, where, error, 0))
        assert done.status == 1 and f"fault on rank 0: {error.__name__}: {MESSAGE}" in done.output
        assert "in broken" in done.output


@pytest.mark.parametrize(("debug", "shown"), [("1", True), ("0", False), ("", False)])
def test_debug_shows_the_traceback_of_a_mistake(tmp_path: Path, debug: str, shown: bool) -> None:
    program = [f"DEBUG={debug}", "python", str(REPOSITORY / "pretrain.py")]
    done = command(shlex.join([*program, *settings(tmp_path / "nowhere", tmp_path / "run")]), tmp_path)
    assert done.status == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")], done.stderr
    assert ("Traceback (most recent call last)" in done.stderr) == shown
    assert ("in open_split" in done.stderr) == shown, "the traceback must lead to the function that found the mistake"
