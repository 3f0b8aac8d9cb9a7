"""Where a rank runs: its process, its host and its cores."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The process of a rank, its host, and the cores on which it may run."""

    pid: int
    host: str
    pid_namespace: str  # containers may share a host name without seeing each other's processes
    cores: frozenset[int] = frozenset()  # empty if the system does not tell

    @staticmethod
    def here() -> "Place":
        namespace = Path("/proc/self/ns/pid")
        return Place(
            os.getpid(),
            socket.gethostname(),
            os.readlink(namespace) if namespace.is_symlink() else "",
            frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def shares_host_with(self, other: "Place") -> bool:
        """Return whether both processes are on one host, and see each other there."""
        return (self.host, self.pid_namespace) == (other.host, other.pid_namespace)

    @property
    def is_near(self) -> bool:
        return self.shares_host_with(Place.here())

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False if it is not visible from this one."""
        try:
            with suppress(PermissionError):  # the process exists and belongs to another user
                if self.is_near:
                    os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False
