"""Read the launcher's environment, and end a worker whose launcher was killed."""

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
    """The process and the host of a rank."""

    pid: int
    host: str
    pid_namespace: str  # containers may share a host name without seeing each other's processes

    @staticmethod
    def here() -> "Place":
        namespace = Path("/proc/self/ns/pid")
        return Place(os.getpid(), socket.gethostname(), os.readlink(namespace) if namespace.is_symlink() else "")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_near(self) -> bool:
        """Whether the process is visible from this one."""
        here = Place.here()
        return (self.host, self.pid_namespace) == (here.host, here.pid_namespace)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False if it is not visible from this one."""
        if self.is_near:
            try:
                with suppress(PermissionError):  # the process exists and belongs to another user
                    os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
        return False


@dataclass(frozen=True)
class Launch:
    """The launch by torchrun that this process belongs to, and how often it began before."""

    restarts: int = 0  # on rank 0: how often training began before; elsewhere torchrun's own count
    identity: str | None = None  # the same for all attempts of a launch; None without torchrun

    @staticmethod
    def from_environment() -> "Launch":
        if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
            return Launch()
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        # Static rendezvous has no run id. Rank 0 then stays under the same torchrun process through
        # all restarts, so that this process can serve as the identity.
        identity = run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"
        return Launch(restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), identity=identity)


def end_with_launcher() -> Callable[[], bool]:
    """End this process within a second after its torchrun is gone.

    Otherwise the worker would go on beside the run that somebody starts in its place.

    Returns:
        A function that tells whether torchrun is gone. A fault during that second is most likely
        a consequence.
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
