"""The lock of a run's folder, within one process.

tests/test_lost_ranks.py tests the lock between processes, with real runs.
"""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from utils.errors import UserError
from utils.run import lock
from utils.run.lock import RunLock


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.2)


def _no_warning(text: str) -> None:
    raise AssertionError(text)


def test_only_one_run_holds_the_lock(tmp_path: Path) -> None:
    with RunLock() as first, RunLock() as second:
        first.take(tmp_path, _no_warning)
        first.take(tmp_path, _no_warning)  # taking the lock twice is allowed
        with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on .*; wait for its end or stop it"):
            second.take(tmp_path, _no_warning)
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on "), (
            "the lock file names the run that was refused"
        )
    with RunLock() as third:
        third.take(tmp_path, _no_warning)


@pytest.mark.parametrize(("error", "is_kept"), [(UserError("mistake"), False), (RuntimeError("fault"), True)])
def test_after_a_fault_the_process_keeps_the_lock(tmp_path: Path, error: Exception, is_kept: bool) -> None:
    lock = RunLock()
    with pytest.raises(type(error)), lock:
        lock.take(tmp_path, _no_warning)
        raise error
    with RunLock() as other:
        if is_kept:
            with pytest.raises(ValueError, match="is in use by"):
                other.take(tmp_path, _no_warning)
        else:
            other.take(tmp_path, _no_warning)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").symlink_to(outside)
    with RunLock() as lock, pytest.raises(OSError):
        lock.take(run, _no_warning)
    assert outside.read_text() == "precious"


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    with RunLock() as lock:
        lock.take(tmp_path, said.append)
    assert len(said) == 1 and "without locks" in said[0]


def test_the_name_of_the_holder_replaces_a_longer_name(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1234567 on a-host-with-a-very-long-name-that-is-gone.example.com\n" * 2)
    with RunLock() as lock:
        lock.take(tmp_path, print)
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
