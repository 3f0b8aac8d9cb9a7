"""Where the time of a run went, over kills, stops, branches and rewinds."""

import os
from pathlib import Path

import pytest

from records.checkpoint.format import Progress
from records.folder import LAUNCH_FILE, Launched, mark_stopped
from training import goodput
from training.goodput import Past, best_interval_s

SAVED = Progress(step=10, spent_s={"steps": 80.0, "lost": 1.0}, spent_until=1000.0)
STARTED = Launched(last_step=100, ranks=1, device="cpu", host="a", began_at=900.0, since=900.0, faults=2)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run from 900 on, with a save at 1000, a row at 1030, and a new start at 1050."""
    write(tmp_path, STARTED)
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (1030, 1030))
    monkeypatch.setattr(goodput, "program_began", lambda: 1050.0)
    return tmp_path


def write(run: Path, launched: Launched) -> None:
    launched.write(run)
    os.utime(run / LAUNCH_FILE, (launched.since, launched.since))


def past(run: Path, progress: Progress = SAVED) -> Past:
    return Past.of(run, progress, goes_back=False)


def test_a_killed_run_lost_its_last_steps_and_was_down(run: Path) -> None:
    assert past(run) == ({"steps": 80.0, "lost": 31.0, "down": 20.0}, 1050.0, 900.0, 3, True)


def test_a_run_without_a_checkpoint_lost_everything(run: Path) -> None:
    assert past(run, Progress()) == ({"lost": 130.0, "down": 20.0}, 1050.0, 900.0, 3, True)


@pytest.mark.parametrize(("reason", "down"), [("SIGTERM", 50.0), ("SIGINT", 0.0)])
def test_the_time_after_ctrl_c_does_not_count(run: Path, reason: str, down: float) -> None:
    """Nor do later times of files: somebody may have copied the folder."""
    mark_stopped(run, reason)
    assert past(run) == ({"steps": 80.0, "lost": 1.0, "down": down}, 1050.0, 900.0, 2, False)


def test_the_time_after_the_end_does_not_count(run: Path) -> None:
    Launched.note_end(run)
    assert past(run) == ({"steps": 80.0, "lost": 1.0, "down": 0.0}, 1050.0, 900.0, 2, False)


def test_a_start_that_never_saved_does_not_bring_the_time_before_it_back(run: Path) -> None:
    """The run was stopped by Ctrl-C at 1000, went on at 1020 and was killed at 1030."""
    write(run, STARTED.model_copy(update={"since": 1020.0, "spent_s": {"steps": 80.0, "lost": 1.0}}))
    assert past(run) == ({"steps": 80.0, "lost": 11.0, "down": 20.0}, 1050.0, 900.0, 3, True)


def test_a_branch_goes_on_with_the_account_of_its_run(run: Path, tmp_path: Path) -> None:
    progress = SAVED.of_branch("id")
    assert past(tmp_path / "branch", progress) == (SAVED.spent_s, 1050.0, 1050.0, 0, False)
    # Killed before its first save, after its last row at 1030.
    write(run, STARTED.model_copy(update={"since": 1010.0, "began_at": 1010.0, "spent_s": SAVED.spent_s, "faults": 0}))
    assert past(run, progress) == ({"steps": 80.0, "lost": 21.0, "down": 20.0}, 1050.0, 1010.0, 1, True)


def test_a_rewind_lost_its_last_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.goodput.time.time", lambda: 1060.0)
    found = Past.of(run, SAVED, goes_back=True)
    assert found == ({"steps": 80.0, "lost": 61.0, "down": 0.0}, 1060.0, 900.0, 2, False)


def test_a_process_that_opens_a_run_again_counts_its_start_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "program_began", lambda: 890.0)
    Launched.note_end(run)
    assert past(run).since == 1000.0, "the time until the last save is in its account already"


def test_what_a_stranger_wrote_into_an_account_is_left_out(run: Path) -> None:
    odd = SAVED.model_copy(update={"spent_s": {"steps": -1.0, "data": float("nan"), "\x1b[31m": 5.0, "save": 2.0}})
    assert past(run, odd).spent_s == {"save": 2.0, "lost": 30.0, "down": 20.0}


def test_more_faults_and_cheaper_saves_mean_more_saves() -> None:
    assert best_interval_s(0.5, 3000.0, 0) == pytest.approx(3600**0.5)
    assert best_interval_s(0.5, 3000.0, 3) == pytest.approx(900**0.5)
    assert best_interval_s(0.02, 3000.0, 3) == pytest.approx(36**0.5)
