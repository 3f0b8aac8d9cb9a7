"""The lock of a run's folder, within one process.

tests/test_lost_ranks.py tests the lock between processes, with real runs.
"""

import errno
import fcntl
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from records import lock
from records.lock import RunLock
from utils.errors import UserError


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.2)


def test_only_one_run_holds_the_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1234567 on a-host-with-a-very-long-name-that-is-gone.example.com\n" * 2)
    with RunLock() as first, RunLock() as second:
        first.take(tmp_path, pytest.fail)
        first.take(tmp_path, pytest.fail)  # taking the lock twice is allowed
        with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on .*; wait for its end or stop it"):
            second.take(tmp_path, pytest.fail)
        name = (tmp_path / ".lock").read_text()
        assert name.startswith(f"process {os.getpid()} on ") and name.count("\n") == 1
    with RunLock() as third:
        third.take(tmp_path, pytest.fail)


@pytest.mark.parametrize(("error", "is_kept"), [(UserError("mistake"), False), (RuntimeError("fault"), True)])
def test_after_a_fault_the_process_keeps_the_lock(tmp_path: Path, error: Exception, is_kept: bool) -> None:
    lock = RunLock()
    with pytest.raises(type(error)), lock:
        lock.take(tmp_path, pytest.fail)
        raise error
    with RunLock() as other:
        if is_kept:
            with pytest.raises(ValueError, match="is in use by"):
                other.take(tmp_path, pytest.fail)
        else:
            other.take(tmp_path, pytest.fail)


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    said: list[str] = []
    with RunLock() as lock:
        lock.take(tmp_path, said.append)
    assert len(said) == 1 and "without locks" in said[0]
