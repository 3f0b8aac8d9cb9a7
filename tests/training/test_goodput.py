"""Where the time of a run went, over kills, stops, branches and rewinds."""

import os
from pathlib import Path

import pytest

from records.checkpoint.format import Progress
from records.folder import LAUNCH_FILE, Launched, mark_stopped
from training import goodput
from training.goodput import Past, best_interval_s

SAVED = Progress(step=10, spent_s={"steps": 80.0, "lost": 1.0}, spent_until=1000.0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run from 900 on, with a save at 1000, a row at 1030, and a new start at 1050."""
    Launched(last_step=100, ranks=1, device="cpu", host="a", began_at=900.0, faults=2).write(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / LAUNCH_FILE, (900, 900))
    os.utime(tmp_path / "metrics.jsonl", (1030, 1030))
    monkeypatch.setattr(goodput, "program_began", lambda: 1050.0)
    return tmp_path


def test_a_killed_run_lost_its_last_steps_and_was_down(run: Path) -> None:
    assert Past.of(run, SAVED) == ({"steps": 80.0, "lost": 31.0, "down": 20.0}, 1050.0, 900.0, 3, True)


def test_a_run_without_a_checkpoint_lost_everything(run: Path) -> None:
    assert Past.of(run, Progress()) == ({"lost": 130.0, "down": 20.0}, 1050.0, 900.0, 3, True)


@pytest.mark.parametrize(("reason", "down"), [("SIGTERM", 20.0), ("SIGINT", 0.0)])
def test_the_time_after_ctrl_c_does_not_count(run: Path, reason: str, down: float) -> None:
    mark_stopped(run, reason)
    assert Past.of(run, SAVED) == ({"steps": 80.0, "lost": 31.0, "down": down}, 1050.0, 900.0, 2, False)


def test_the_time_after_the_end_does_not_count(run: Path) -> None:
    done = SAVED.model_copy(update={"step": 100})
    assert Past.of(run, done) == ({"steps": 80.0, "lost": 31.0, "down": 0.0}, 1050.0, 900.0, 2, False)


def test_a_branch_goes_on_with_the_account_of_its_run(run: Path, tmp_path: Path) -> None:
    progress = SAVED.of_branch("id")
    assert Past.of(tmp_path / "branch", progress) == (SAVED.spent_s, 1050.0, 1050.0, 0, False)
    Launched(last_step=100, ranks=1, device="cpu", host="a", began_at=1040.0).write(run)  # killed before its first save
    os.utime(run / LAUNCH_FILE, (1040, 1040))
    assert Past.of(run, progress) == ({"steps": 80.0, "lost": 1.0, "down": 10.0}, 1050.0, 1040.0, 1, True)


def test_a_rewind_lost_its_last_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "program_began", lambda: 950.0)
    monkeypatch.setattr("training.goodput.time.time", lambda: 1060.0)
    assert Past.of(run, SAVED) == ({"steps": 80.0, "lost": 61.0, "down": 0.0}, 1060.0, 900.0, 2, False)


def test_more_faults_and_cheaper_saves_mean_more_saves() -> None:
    assert best_interval_s(0.5, 3000.0, 0) == pytest.approx(3600**0.5)
    assert best_interval_s(0.5, 3000.0, 3) == pytest.approx(900**0.5)
    assert best_interval_s(0.02, 3000.0, 3) == pytest.approx(36**0.5)
