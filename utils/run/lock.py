"""One run at a time: its folder is locked while its rank 0 lives, which alone writes outside of half-written steps."""

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

# A run may be taken up at once after its launcher was killed: its workers notice that within two seconds.
_PATIENCE_S = 5.0
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Rank 0 takes it before it looks for what to go on from; the system gives it up when the process has gone, however
    it went, so that none is ever left behind.

    After a fault it isn't given up in order: a checkpoint may still be on its way to the disk until the process ends.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if self._file is not None and (error is None or isinstance(error, UserError)):
            self._file.close()

    def take(self, run: Path, warn: Callable[[str], None]) -> None:
        """Lock a folder that exists; nothing changes where this run has it already.

        Raises UserError that names the process which has it. A file system that knows no locks is warned about.
        """
        if self._file is not None:
            return
        # Not followed where it is a link: what it names isn't ours to write to.
        descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(descriptor, "r+", errors="replace")
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.1)
                    continue
                holder = " ".join(file.read(200).split()) or "another process"
                file.close()
                raise UserError(
                    f"{run} is in use by {holder}; wait for its end or stop it, or give another checkpoint_path"
                ) from None
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
                warn(f"{run} lies on a file system without locks: nothing keeps a second run out of it")
                break
        with suppress(OSError):  # of a full disk, and the lock holds without a name in it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._file = file
