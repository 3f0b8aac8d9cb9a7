"""What the launcher's environment says, and what becomes of a worker whose launcher was killed."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from utils.terminal import tell


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    pid: int
    host: str
    pid_namespace: str  # containers of one host name have their own, and don't see one another's processes

    @staticmethod
    def here() -> "Place":
        namespace = Path("/proc/self/ns/pid")
        return Place(os.getpid(), socket.gethostname(), os.readlink(namespace) if namespace.is_symlink() else "")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_near(self) -> bool:
        """Whether its process can be seen from here."""
        here = Place.here()
        return (self.host, self.pid_namespace) == (here.host, here.pid_namespace)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False where that can't be seen."""
        if self.is_near:
            try:
                with suppress(PermissionError):  # of somebody else's, which is there
                    os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
        return False


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this attempt."""

    restarts: int = 0  # attempts before this one that there is something to go on from
    identity: str | None = None  # the same for all attempts of one launch; None where nothing restarts us

    @staticmethod
    def from_environment() -> "Launch":
        if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
            return Launch()
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        # Static rendezvous names no run. Its rank 0 stays on one node, under the same agent, through all restarts.
        identity = run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"
        return Launch(restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), identity=identity)


def end_with_launcher() -> Callable[[], bool]:
    """A worker whose torchrun was killed would go on beside the run that somebody starts in its place. Returns what
    tells whether that happened: some time in the last second, it is the reason of whatever else went wrong.
    """
    if Launch.from_environment().identity is None:
        return lambda: False
    launcher, rank = os.getppid(), os.environ.get("RANK", "0")

    def is_gone() -> bool:
        return os.getppid() != launcher

    def watch() -> None:
        while not is_gone():
            time.sleep(1)
        tell(f"rank {rank}: its launcher is gone; ending")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    return is_gone
