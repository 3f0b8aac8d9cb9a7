"""A run whose steps another program takes has the curve of pretrain.py, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.stepping import SteppedRun
from records.checkpoint.format import read_state
from tests import runs
from tests.runs import Row
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.world import World

pytestmark = pytest.mark.launch

LAST_STEP = 6


def _settings(data: Path, run: Path | None, **changes: object) -> list[str]:
    usual: dict[str, object] = {
        "max_steps": LAST_STEP,
        "log_interval": 1,
        "eval_every_n_steps": LAST_STEP,
        "checkpoint_every_n_steps": None,
        "ema": True,
        "wandb.mode": "disabled",
    }
    return runs.settings(data, run, **(usual | changes))


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("pretrain")
    for ranks in (1, 2):
        runs.train(_settings(data, folder / str(ranks)), folder / f"log_{ranks}", ranks=ranks).ok()
    return {ranks: folder / str(ranks) for ranks in (1, 2)}


def _numbers(row: Row) -> Row:
    return {name: value for name, value in row.items() if not name.startswith("perf/")}


def _on_ranks(ranks: int, check: Any, *arguments: object) -> Any:
    return check(World.single(), *arguments) if ranks == 1 else run_ranks(check, ranks, *arguments)[0]


def _drive(world: World, overrides: list[str]) -> tuple[list[Row], Row, str]:
    run = SteppedRun(overrides, world)
    rows = [_numbers(run.train_step()) for _ in range(LAST_STEP)]
    found = rows, _numbers(run.evaluate()), str(run.save())
    run.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_curve_is_that_of_pretrain(ranks: int, data: Path, tmp_path: Path, expected: dict[int, Path]) -> None:
    run, arguments = tmp_path / "run", _settings(data, tmp_path / "run", log_interval=10)
    rows, evaluation, saved = _on_ranks(ranks, _drive, arguments)
    quiet = runs.rows(expected[ranks])
    assert [*rows[:-1], rows[-1] | evaluation] == quiet
    assert runs.rows(run) == quiet, "metrics.jsonl is that of pretrain.py"
    assert Path(saved) == run / f"step_{LAST_STEP:08d}"
    assert (run / "best").read_text() == (expected[ranks] / "best").read_text()
    mine, theirs = runs.tensors(run, LAST_STEP), runs.tensors(expected[ranks], LAST_STEP)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def test_pretrain_resumes_what_was_saved(data: Path, tmp_path: Path, log: Path, expected: dict[int, Path]) -> None:
    arguments = _settings(data, tmp_path / "run")
    run = SteppedRun(arguments, World.single())
    for _ in range(3):
        run.train_step()
    assert run.save() == tmp_path / "run" / "step_00000003"
    run.close()
    runs.train([*arguments, "resume=auto"], log).ok()
    runs.assert_same_run(tmp_path / "run", expected[1])


def test_a_pending_evaluation_is_not_saved_again(data: Path, tmp_path: Path, log: Path) -> None:
    arguments = _settings(data, tmp_path / "run", eval_every_n_steps=3, eval_batch_size=9)
    runs.train(arguments, log, hook=runs.with_arguments(runs.stopped_in_evaluation, 1, 0)).ok()
    assert read_state(tmp_path / "run" / "step_00000003").pending_row is not None
    run = SteppedRun([*arguments, "resume=auto"], World.single())
    run.train_step()
    assert read_state(run.save()).pending_row is None
    run.close()


def _hand_over(world: World, overrides: list[str], others: list[str]) -> list[Row]:
    """Hand the state of one run to another after three steps. Every rank."""
    first, second = SteppedRun(overrides, world), SteppedRun(others, world)
    second.train_step()  # it has come somewhere else before
    for _ in range(3):
        first.train_step()
    copy = first.get_state()
    assert all(tensor.device.type == "cpu" for tensor in copy.tensors.values())
    first.train_step()  # the copy does not change with the run
    second.set_state(copy)
    return [_numbers(second.train_step()) for _ in range(LAST_STEP - 3)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_run_goes_on_from_a_state(ranks: int, data: Path, tmp_path: Path, expected: dict[int, Path]) -> None:
    arguments = [_settings(data, tmp_path / name) for name in ("one", "other")]
    rows = _on_ranks(ranks, _hand_over, *arguments)
    quiet = [
        {name: of for name, of in row.items() if not name.startswith("eval/")} for row in runs.rows(expected[ranks])
    ]
    assert rows == quiet[3:]
    assert [row["step"] for row in runs.rows(tmp_path / "other")] == [1, 4, 5], "a step is logged when it is left"


def test_a_state_of_another_run_is_refused(data: Path, tmp_path: Path) -> None:
    """After a later step, the folder holds rows that would be of another run then."""
    run = SteppedRun(_settings(data, tmp_path / "run"), World.single())
    earlier = run.get_state()
    ahead = earlier.progress.model_copy(update={"draws": 5})
    with pytest.raises(UserError, match="another global_batch_size"):
        run.set_state(replace(earlier, progress=ahead))
    later = SteppedRun(_settings(data, tmp_path / "later"), World.single())
    later.train_step()
    later.set_state(later.get_state())  # another run's of the same step is welcome
    with pytest.raises(UserError, match=r"the state is of step 0, but .*/later holds the steps up to 1 already"):
        later.set_state(earlier)


def test_the_best_step_is_kept_whenever_the_program_saves(data: Path, tmp_path: Path) -> None:
    run = SteppedRun(_settings(data, tmp_path / "run"), World.single())
    run.train_step()
    metrics = run.evaluate()
    run.train_step()
    run.save()
    assert (tmp_path / "run" / "best").read_text().strip() == "step_00000001"
    assert read_state(tmp_path / "run" / "step_00000002").best is not None
    late = run.evaluate()  # its row was written already
    first, second = runs.rows(tmp_path / "run")
    assert (first["step"], second["step"]) == (1, 2)
    assert _numbers(metrics).items() <= first.items()
    assert any(name.startswith("eval/") for name in late) and not late.keys() & second.keys() - {"step"}
    # The best step of one folder is not that of another.
    other = SteppedRun(_settings(data, tmp_path / "other"), World.single())
    other.set_state(run.get_state())
    assert read_state(other.save()).best is None and not (tmp_path / "other" / "best").exists()


def test_the_end_and_a_run_without_evaluations_are_mistakes(data: Path, tmp_path: Path) -> None:
    run = SteppedRun(_settings(data, tmp_path / "run", max_steps=1), World.single())
    run.train_step()
    with pytest.raises(UserError, match="has done all 1 steps"):
        run.train_step()
    settings = _settings(data, tmp_path / "silent", eval_every_n_steps=None, eval_interval=None)
    silent = SteppedRun(settings, World.single())
    with pytest.raises(UserError, match="never evaluates"):
        silent.evaluate()
    silent.train_step()
    silent.close()
    assert [row["step"] for row in runs.rows(tmp_path / "silent")] == [1]
