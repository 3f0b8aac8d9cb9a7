"""Lock a run's folder, so that only one run at a time writes there. Rank 0 holds the lock."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from utils.errors import UserError

# A run may be resumed right after its launcher was killed, whose workers end within two seconds.
_PATIENCE_S = 5.0
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """The lock of a run's folder, which rank 0 takes before it looks for a checkpoint.

    The operating system releases it when the process ends. After a fault the lock stays until then,
    because a checkpoint may still be on its way to the disk.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if self._file is not None and (error is None or isinstance(error, UserError)):
            self._file.close()

    def take(self, run: Path, warn: Callable[[str], None]) -> None:
        """Lock an existing folder, or raise UserError. Without locks of the file system, warn."""
        if self._file is not None:
            return
        # O_NOFOLLOW refuses a link: its target is not this run's file to write to.
        descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(descriptor, "r+", errors="replace")
        end = time.monotonic() + _PATIENCE_S
        while (locked := take_lock(descriptor, fcntl.LOCK_EX)) is False:
            if time.monotonic() >= end:
                holder = " ".join(file.read(200).split()) or "another process"
                file.close()
                raise UserError(
                    f"{run} is in use by {holder}; wait for its end or stop it, or give another checkpoint_path"
                )
            time.sleep(0.1)
        if locked is None:
            warn(f"{run} lies on a file system without locks: nothing keeps a second run out of it")
        with suppress(OSError):  # on a full disk the lock holds without a name in the file
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._file = file


def is_locked(run: Path) -> bool | None:
    """Return whether a process holds the lock of a folder; None on a file system without locks.

    The lock is taken for an instant. A run that begins then tries again (see `_PATIENCE_S`).
    """
    try:
        descriptor = os.open(run / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # no run has begun here, or the folder is not for this user to look into
        return False
    try:
        taken = take_lock(descriptor, fcntl.LOCK_SH)
        return None if taken is None else not taken
    except OSError:
        return False
    finally:
        os.close(descriptor)  # which releases the lock


def take_lock(descriptor: int, kind: int) -> bool | None:
    """Return whether a lock was taken; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return None
