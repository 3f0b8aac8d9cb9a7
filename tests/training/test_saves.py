"""With on_save_error=continue, a run survives a full disk. It loses no last checkpoint silently."""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from records.checkpoint import storage
from records.checkpoint import writer as writer_module
from records.checkpoint.reader import Checkpoint
from records.checkpoint.writer import Checkpointer
from records.folder import Launched
from tests import runs
from tests.in_process import SINGLE, begin
from tests.records.checkpoint.helpers import snapshot_at
from tests.runs import assert_same_run, rows, settings, train, with_arguments
from tests.training.test_recovery import explodes
from training import saves as saves_module
from training.saves import Saves
from utils import files
from utils.errors import UserError

pytestmark = pytest.mark.faults

ON = {"on_save_error": "continue"}


@pytest.mark.parametrize(("ranks", "full_on"), [(1, [0]), (2, [1]), (2, [0, 1])])
def test_a_run_survives_a_full_disk(
    data: Path, quiet: Path, quiet_2: Path, tmp_path: Path, log: Path, ranks: int, full_on: list[int]
) -> None:
    """The saves of steps 4 to 8 fail. Rank 0 can't write the row of step 5 in time, either."""
    run = tmp_path / "run"
    typed = settings(data, run, max_failed_saves=10, **ON)
    output = train(typed, log, ranks=ranks, hook=partial(runs.full_disk, 4, 9, full_on, num_bytes=1000)).ok()
    for step in (4, 5, 6, 8):
        assert output.count(f"WARNING: the checkpoint of step {step} could not be written: ") == 1, output
    assert "failed saves in a row: 4; the run ends at 10" in output
    assert ("the row waits in memory" in output) == (0 in full_on), output
    assert [(row["step"], row.get("train/failed_saves")) for row in rows(run)][:3] == [(1, None), (5, 1), (10, 4)]
    undisturbed = quiet if ranks == 1 else quiet_2
    assert_same_run(run, undisturbed, metrics=False)
    logged = [{name: value for name, value in row.items() if name != "train/failed_saves"} for row in rows(run)]
    assert logged == rows(undisturbed) and (run / "best").read_text() == (undisturbed / "best").read_text()
    assert {path.name for path in run.glob("step_*")} == {f"step_{step:08d}" for step in (2, 10, 12)}
    Checkpoint.open(run / "step_00000012")
    assert (launched := Launched.read(run)) is not None and launched.ranks == ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_ends_after_as_many_failed_saves_in_a_row(
    data: Path, quiet: Path, quiet_2: Path, tmp_path: Path, log: Path, ranks: int
) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, max_failed_saves=2, **ON)
    message = train(typed, log, ranks=ranks, hook=with_arguments(runs.full_disk, 4, 100, [0])).error()
    assert "the checkpoint of step 5 could not be written" in message
    assert f"2 saves in a row failed (max_failed_saves); the last good checkpoint is {run / 'step_00000002'}" in message
    assert runs.latest(run) == 2
    train([*typed, "resume=auto"], log, ranks=ranks).ok()
    assert_same_run(run, quiet if ranks == 1 else quiet_2)


@pytest.mark.parametrize(("each_is_saved", "ends_at"), [(True, 6), (False, 7)])
def test_a_failure_that_an_evaluation_notices_counts(
    data: Path, tmp_path: Path, log: Path, each_is_saved: bool, ends_at: int
) -> None:
    """The evaluation of the next step, and no log, finds that the second save has failed."""
    run = tmp_path / "run"
    changes = {"eval_every_n_steps": 1, "checkpoint_every_eval": each_is_saved, "log_interval": 100}
    typed = settings(data, run, max_failed_saves=2, **ON, **changes)
    done = train(typed, log, hook=with_arguments(_full_without_best, 4, 11))
    assert "2 saves in a row failed (max_failed_saves)" in done.error()
    assert done.output.count("WARNING: the checkpoint of step") == 2, done.output
    assert [row["step"] for row in rows(run)][-1] == ends_at, "the run went on, or lost the row of its last step"


def _full_without_best(first_step: int, end_step: int, rank: int) -> None:
    """Fill the disk for the first rank. No evaluation is the best, which would be saved anyhow."""
    from training.plan import Plan

    Plan.update_best = lambda *args: False  # type: ignore[method-assign]
    runs.full_disk(first_step, end_step, [0], rank)


def _full_at_the_end(first_step: int, freed_in_pause: int, rank: int, *, stops: bool = False) -> None:
    """Free the disk in the n-th pause before another attempt to save; 0: never."""
    runs.full_disk(first_step, 100, [0], rank, num_bytes=3000)
    pauses = iter(range(1, 100))

    def sleep(seconds: float) -> None:
        assert seconds == 10.0
        if next(pauses) == freed_in_pause:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    saves_module.time = SimpleNamespace(sleep=sleep)  # type: ignore[attr-defined,assignment]
    if stops:
        runs.stopped_after(first_step, rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_save_is_tried_again(
    data: Path, quiet: Path, quiet_2: Path, tmp_path: Path, log: Path, ranks: int
) -> None:
    """It has attempts of its own, also if the save before it was the last one that may fail."""
    run = tmp_path / "run"
    typed = settings(data, run, max_failed_saves=2, checkpoint_every_n_steps=None, **ON)
    output = train(typed, log, ranks=ranks, hook=with_arguments(_full_at_the_end, 4, 1)).ok()
    assert "failed saves in a row: 2; the run ends at 2" in output
    assert "this is the last checkpoint of the run: trying again in 10 s (attempt 2 of 2)" in output
    assert_same_run(run, quiet if ranks == 1 else quiet_2, metrics=False)
    assert [row["step"] for row in rows(run)] == [1, 5, 10, 12], "rows that had to wait are lost"


def test_a_failure_that_the_last_log_notices_leaves_the_last_save_its_attempts(
    data: Path, tmp_path: Path, log: Path
) -> None:
    """The save of step 11 fails, and step 12 is logged before its own save."""
    changes = {"max_failed_saves": 1, "checkpoint_every_n_steps": 11, "eval_every_n_steps": 12, "log_interval": 4}
    typed = settings(data, tmp_path / "run", **(changes | ON))
    done = train(typed, log, hook=with_arguments(_full_at_the_end, 9, 0))
    assert "failed saves in a row: 1; the run ends at 1" in done.output
    assert "the checkpoint of step 12 could not be written" in done.error(), "the last save was not tried"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_last_save_that_fails_for_good_is_an_error(data: Path, tmp_path: Path, log: Path, ranks: int) -> None:
    run = tmp_path / "run"
    done = train(settings(data, run, **ON), log, ranks=ranks, hook=with_arguments(_full_at_the_end, 12, 0))
    message = done.error()
    assert "the checkpoint of step 12 could not be written" in message
    assert f"3 saves in a row failed (max_failed_saves); the last good checkpoint is {run / 'step_00000010'}" in message
    assert done.output.count("trying again") == 2 and runs.latest(run) == 10


@pytest.mark.parametrize("freed_in_pause", [1, 0])
def test_a_graceful_stop_tries_its_save_again(
    data: Path, quiet: Path, tmp_path: Path, log: Path, freed_in_pause: int
) -> None:
    run = tmp_path / "run"
    done = train(settings(data, run, **ON), log, hook=partial(_full_at_the_end, 3, freed_in_pause, stops=True))
    if freed_in_pause:
        assert "resume=auto goes on from here" in done.ok() and (run / "stopped").exists() and runs.latest(run) == 3
        train(settings(data, run, resume="auto"), log).ok()
        assert_same_run(run, quiet)
    else:
        assert "the checkpoint of step 3 could not be written" in done.error()
        assert not (run / "stopped").exists() and runs.latest(run) == 2


def _explodes_after_a_failed_save(rank: int) -> None:
    """Let step 7 go wrong, after the saves of steps 5 and 6 failed."""
    explodes((7,), rank)
    runs.full_disk(5, 7, [0], rank)


def test_a_rewind_goes_back_to_the_last_checkpoint_that_was_written(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, max_failed_saves=10, on_nonfinite="rewind", log_interval=1, **ON)
    output = train(typed, log, hook=_explodes_after_a_failed_save).ok()
    assert f"going on from {run / 'step_00000004'} at step 4, without the batch of step 7" in output
    assert "WARNING: the checkpoint of step 6 could not be written" in output
    assert rows(run)[-1]["train/skipped_steps"] == 1
    assert rows(run)[-1]["train/failed_saves"] == 2, "the rewind forgot the failed saves"


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    write, refuses = storage.write_tensors, [False]  # type: ignore[attr-defined]

    def perhaps(*args: Any) -> Any:
        if refuses[0]:
            raise OSError(28, os.strerror(28))
        return write(*args)

    monkeypatch.setattr(storage, "write_tensors", perhaps)
    return lambda yes: refuses.__setitem__(0, yes)


class _Run:
    """The saves of a run, with its progress and what was said."""

    def __init__(self, data: Path, folder: Path, **changes: Any) -> None:
        begun = begin(settings(data, folder, **(ON | changes)))
        self.progress, self.said = begun.state.progress, list[str]()
        folder.mkdir()
        self.checkpointer = Checkpointer(folder, SINGLE, begun.start.config.keep_last_k)
        self.config = begun.start.config
        self.saves = Saves(self.checkpointer, self.config, self.progress, self.said.append)

    def begin(self, step: int, *, best: float | None = None) -> None:
        """Save as the session does. `best`: the value of an evaluation that is the best so far."""
        if best is not None:
            self.progress.best = best
        snapshot = snapshot_at(step, SINGLE)
        values = {"step": step, "best": self.progress.best}
        self.saves.finish()
        snapshot = replace(snapshot, state=snapshot.state.model_copy(update=values))
        self.saves.begin(snapshot, is_best=best is not None, first=lambda: None, then=lambda folder: None)

    def save(self, step: int, *, best: float | None = None) -> None:
        self.begin(step, best=best)
        self.saves.finish()


def test_a_best_step_that_is_lost_is_the_best_no_more(
    data: Path, tmp_path: Path, refuse: Callable[[bool], None]
) -> None:
    run = _Run(data, tmp_path / "run")
    run.save(1, best=0.5)
    refuse(True)
    run.save(2, best=0.9)
    assert run.progress.best == 0.5 and "it was the best step, and `best` stays as it is" in run.said[-1]
    run.save(3)  # a failed save of another step does not change the best
    assert run.progress.best == 0.5 and "best step" not in run.said[-1]
    refuse(False)
    run.save(5)  # a good save of another step does not change the best either
    refuse(True)
    run.save(6, best=0.8)
    assert run.progress.best == 0.5
    run.saves = Saves(run.checkpointer, run.config, run.progress, run.said.append)  # as after a resume
    run.save(7, best=0.9)
    assert run.progress.best == 0.5


@pytest.mark.parametrize("saved_before", [True, False])
@pytest.mark.parametrize(
    "refused", ["writing best", "writing latest", "naming best", "naming latest", "syncing best", "syncing latest"]
)
def test_a_failed_save_leaves_best_latest_and_the_progress_as_they_were(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, saved_before: bool
) -> None:
    folder = tmp_path / "run"
    run = _Run(data, folder)
    if saved_before:
        run.save(1, best=0.5)
    before = runs.contents(folder)
    with monkeypatch.context() as patch:
        _refuse_once(patch, folder, *refused.split())
        run.save(2, best=0.9)
    assert run.progress.failed_saves == 1 and run.progress.best == (0.5 if saved_before else None)
    assert runs.contents(folder) == before
    run.save(3, best=0.7)
    assert (folder / "best").read_text() == (folder / "latest").read_text() == "step_00000003\n"


def test_a_failed_save_of_a_step_that_is_saved_already_keeps_the_old_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved twice if a stop puts its evaluation off."""
    run = _Run(data, tmp_path / "run")
    run.save(1)
    _refuse_once(monkeypatch, tmp_path / "run", "naming", "latest")
    run.save(1, best=0.9)
    assert run.progress.best is None and Checkpoint.open(tmp_path / "run/step_00000001").state.best is None
    assert not (tmp_path / "run/best").exists()


def test_a_step_is_saved_even_if_an_older_one_cannot_be_removed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = _Run(data, tmp_path / "run", keep_last_k=1)
    run.save(1, best=0.5)

    def refuse(self: Checkpointer, folder: Path) -> None:
        if folder.name == "step_00000001":
            raise OSError(16, os.strerror(16), str(folder))

    monkeypatch.setattr(Checkpointer, "_remove", refuse)
    run.save(2, best=0.9)
    assert run.progress.failed_saves == 0 and run.progress.best == 0.9
    assert (tmp_path / "run/best").read_text() == (tmp_path / "run/latest").read_text() == "step_00000002\n"
    assert "step_00000001 can't be used (Device or resource busy)" in capfd.readouterr().err


def _refuse_once(patch: pytest.MonkeyPatch, run: Path, what: str, name: str) -> None:
    """Let the disk refuse to write or sync `latest` or `best`, or to rename another file to it."""
    write, replace, sync = files.write_synced, Path.replace, files.sync_folder
    refused, named = list[bool](), list[str]()

    def perhaps_refuse(when: bool) -> None:
        if when and not refused:
            refused.append(True)
            raise OSError(28, os.strerror(28))

    def writing(path: Path, contents: bytes) -> None:
        perhaps_refuse(what == "writing" and path.name == f".incomplete_{name}")
        write(path, contents)

    def naming(self: Path, target: Path) -> Path:
        perhaps_refuse(what == "naming" and target == run / name)
        named.append(target.name)
        return replace(self, target)

    def syncing(folder: Path) -> None:
        perhaps_refuse(what == "syncing" and folder == run and named[-1:] == [name])
        sync(folder)

    for module in (files, writer_module):
        patch.setattr(module, "write_synced", writing)
        patch.setattr(module, "sync_folder", syncing)
    patch.setattr(Path, "replace", naming)


def test_an_evaluation_is_compared_with_the_best_on_the_disk(data: Path, tmp_path: Path, log: Path) -> None:
    """The accuracies are 0.9, lost with its checkpoint, then 0.7, and 0.8 at the end."""
    run = tmp_path / "run"
    hook = with_arguments(_evaluations_give, [0.9, 0.7, 0.8])
    typed = settings(data, run, eval_every_n_steps=4, checkpoint_every_n_steps=None, log_interval=100, **ON)
    output = train(typed, log, hook=hook).ok()
    assert "the checkpoint of step 4 could not be written" in output and "it was the best step" in output
    assert (run / "best").read_text() == "step_00000012\n"
    states = [Checkpoint.open(run / f"step_{step:08d}").state for step in (8, 12)]
    assert [(state.best, state.evaluations_since_best) for state in states] == [(0.7, 0), (0.8, 0)]


def _evaluations_give(values: list[float], rank: int) -> None:
    from training import kinds

    left = iter(values)
    kinds.PUZZLES.evaluate = lambda *args, **kwargs: {"eval/all/exact_accuracy": next(left)}
    runs.full_disk(4, 6, [0], rank)


def test_the_count_in_a_row_begins_anew_after_a_save(
    data: Path, tmp_path: Path, refuse: Callable[[bool], None]
) -> None:
    run = _Run(data, tmp_path / "run", max_failed_saves=2)
    for step in (1, 2, 3):
        for refused in (True, False):
            refuse(refused)
            run.save(2 * step - refused)
    assert run.progress.failed_saves == 3


def test_failed_saves_end_a_run_that_would_go_back(data: Path, tmp_path: Path, refuse: Callable[[bool], None]) -> None:
    """It asks for the last good checkpoint. A rewind would begin a new count."""
    for reaction in ("rewind", "stop"):
        run = _Run(data, tmp_path / reaction, max_failed_saves=1, on_nonfinite=reaction)
        refuse(True)
        run.begin(1)
        if reaction == "rewind":
            with pytest.raises(UserError, match=r"1 saves in a row failed \(max_failed_saves\)"):
                run.saves.last_good()
        else:  # the run ends in any case, and with the message about the step
            assert run.saves.last_good() == "there is no checkpoint yet"


def test_a_failed_save_is_noticed_without_another_save(
    data: Path, tmp_path: Path, refuse: Callable[[bool], None]
) -> None:
    run = _Run(data, tmp_path / "run")
    refuse(True)
    run.begin(1)
    until = time.monotonic() + 30
    while not run.said and time.monotonic() < until:
        run.saves.look()
    assert len(run.said) == 1 and run.progress.failed_saves == 1
    run.saves.look()
    assert len(run.said) == 1


def test_weights_that_are_not_finite_end_the_run_all_the_same(data: Path, tmp_path: Path) -> None:
    run = _Run(data, tmp_path / "run")
    snapshot = snapshot_at(1, SINGLE, weights={"w": torch.tensor([float("nan")])})
    with pytest.raises(UserError, match="w is not finite at step 1"):
        run.saves.begin(snapshot, is_best=False, first=lambda: None, then=lambda folder: None)
    assert run.progress.failed_saves == 0
