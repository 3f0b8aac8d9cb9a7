"""The state of a run is read from the files in its folder, none of which changes.

tests/test_watch.py does the same with runs that were killed, stopped and finished.
"""

import errno
import fcntl
import json
import os
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from records.folder import Launched
from records.lock import RunLock
from tests.runs import contents
from viewer.curves import LOSSES
from viewer.live import COLUMNS, Watched, panel, runs_in, table

Row = dict[str, Any]


def _row(step: int, **metrics: float) -> Row:
    return {"step": step, "time_s": 2.0 * step, **metrics}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run that was killed at step 30 of 100."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("lr: 0.1\n")
    Launched(last_step=100, ranks=2, device="cpu", host="a").write(folder)
    _log(folder, [_row(1), _row(10), _row(20), _row(30)])
    (folder / "latest").write_text("step_00000020\n")
    (folder / ".lock").touch()
    return folder


def _log(run: Path, rows: list[Row]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- states ------------------------------------------------------------------------------------


def test_the_state_without_a_living_process(run: Path) -> None:
    def state() -> tuple[str, str]:
        before, watched = contents(run), Watched(run)
        assert contents(run) == before and watched.eta_s is None
        return watched.state, watched.note

    assert state() == ("dead", "")
    saved = {"step": 20, "draws": 0, "wandb_run_id": "", "fingerprint": {}, "task": {}}
    saved["config"] = {"early_stop_patience": 2}
    (run / "step_00000020").mkdir()
    for since_best, expected in ((1, ("dead", "")), (2, ("finished", "out of patience"))):
        file = run / "step_00000020" / "state.json"
        file.write_text(json.dumps(saved | {"evaluations_since_best": since_best}))
        assert state() == expected
    file.unlink()
    _log(run, [_row(100)])
    assert state() == ("finished", "")
    (run / "launch.json").unlink()
    assert state() == ("ended", "")
    for name in ("metrics.jsonl", "latest", ".lock"):
        (run / name).unlink()
    (run / "step_00000020").rmdir()
    assert state() == ("not begun", "")


def test_a_run_is_running_while_its_lock_is_held(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("records.lock._PATIENCE_S", 0.0)
    (run / "stopped").write_text("SIGTERM\n")
    with RunLock() as lock, RunLock() as refused:
        lock.take(run, print)
        assert Watched(run).state == "running"
        with pytest.raises(ValueError, match="is in use"):  # looking has not released the lock
            refused.take(run, print)
    assert (Watched(run).state, Watched(run).note) == ("stopped", "SIGTERM")


def test_without_locks_only_an_end_that_a_file_tells_counts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert Watched(run).state == "running"
    (run / "stopped").write_text("SIGTERM\n")
    assert Watched(run).state == "stopped"
    (run / "stopped").unlink()
    (run / "latest").write_text("step_00000100\n")
    assert Watched(run).state == "finished"


# ---- numbers -----------------------------------------------------------------------------------


def test_the_newest_value_of_each_metric(run: Path) -> None:
    rows = [
        _row(10, **{"train/exact_accuracy": 0.1, "eval/a/exact_accuracy": 0.2, "eval/b/exact_accuracy": 0.3}),
        _row(20, **{"train/exact_accuracy": 0.4, "eval/a/exact_accuracy": 0.5, "perf/examples_per_second": 6.0}),
        _row(30, **{"train/lm_loss": 0.7, "eval/a/exact_accuracy_at_step/1": 0.8}),
    ]
    _log(run, rows)
    (run / "best").write_text("step_00000010\n")
    status = Watched(run)
    assert (status.exact, status.loss) == (0.4, 0.7)
    assert status.test == {"a": 0.5, "b": 0.3}
    assert (status.step, status.last_step, status.checkpoint, status.best) == (30, 100, 20, 10)
    assert status.speed == (6.0, "examples")
    assert status.launched is not None and status.launched.ranks == 2
    cells = [text_of("x", status) for _, text_of in COLUMNS.values()]
    assert cells == ["x", "dead", "30", "100", "0.7", "0.400", "0.500", "6", "-", "20", "10", "-", "2 x cpu", ""]


def test_values_follow_the_rows(run: Path) -> None:
    watched = Watched(run)
    for rows, loss in (([4.0, 3.0], 3.0), ([4.0, 3.0, 2.0], 2.0), ([5.0], 5.0)):  # the run goes on, and is resumed
        _log(run, [_row(step, **{LOSSES[0]: value}) for step, value in enumerate(rows)])
        watched.look()
        assert watched.loss == loss and [row[LOSSES[0]] for row in watched.rows] == rows
    run.rename(run.parent / "elsewhere")
    watched.look()
    assert (watched.state, watched.step, watched.loss) == ("not begun", 0, None), "a folder that vanished is no error"


def test_numbers_that_no_program_computes_with_are_no_error(run: Path) -> None:
    names = ("time_s", "perf/examples_per_second", LOSSES[0], "train/exact_accuracy", "eval/all/exact_accuracy")
    with RunLock() as lock:
        lock.take(run, print)
        for name, huge in product(names, ("1e18", "-Infinity", "NaN")):
            rows = "".join(f'{{"step": {step}, "{name}": {step % 2 and huge}}}\n' for step in range(1, 30))
            (run / "metrics.jsonl").write_text(rows)
            status = Watched(run)
            assert status.state == "running"
            panel("a", status, 40)
            table({"a": status}, 80)


def test_the_time_left_follows_from_the_speed(run: Path) -> None:
    """A run is silent after three of its longest waits."""
    with RunLock() as lock:
        lock.take(run, print)
        for seconds_ago in (0, 10):
            _set_age(run, seconds_ago)
            assert Watched(run).eta_s == pytest.approx(70 * 2.0 - seconds_ago, abs=2)
            assert COLUMNS["ETA"][1]("x", Watched(run)) == "2 min"
        _log(run, [_row(1), _row(10), _row(20), _row(60)])  # the longest wait takes 80 seconds
        _set_age(run, 230)
        assert Watched(run).note == ""
        _set_age(run, 250)
        assert (Watched(run).note, Watched(run).eta_s) == ("silent 4 min", None)
        (run / "launch.json").touch()
        assert Watched(run).note == "", "it was resumed a moment ago"


def _set_age(run: Path, seconds: float) -> None:
    for name in ("metrics.jsonl", "launch.json"):
        os.utime(run / name, (time.time() - seconds,) * 2)


# ---- folders -----------------------------------------------------------------------------------


def test_the_runs_of_a_folder_are_sorted_by_name(run: Path) -> None:
    for name in ("old", "new", ".hidden", "no_run"):
        folder = run.parent / name
        folder.mkdir()
        if name != "no_run":
            (folder / "config.yaml").touch()
    (run.parent / "study.db").touch()
    assert [path.name for path in runs_in(run.parent)] == ["new", "old", "run"]
    assert runs_in(run) == [run]
    assert runs_in(run.parent / "no_run") == [] == runs_in(run.parent / "nothing")
