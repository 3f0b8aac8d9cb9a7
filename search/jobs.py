"""What the driver of a sweep knows of runs: how to start them, and a job for each."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from search.config import LauncherConfig
from utils.text import for_shell


class Job(Protocol):
    """A run that has been started."""

    def poll(self) -> int | None:
        """Return the exit status, or None while the run goes on."""

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end."""

    def kill(self) -> None:
        """End the run at once."""


@dataclass(frozen=True)
class Start:
    """A run that is to be started.

    Attributes:
        arguments: overrides of pretrain.py.
        log: the file to which the run's output is appended.
        place: a number below at_once that no other run has now.
    """

    arguments: list[str]
    log: Path
    place: int


class Launcher(Protocol):
    """Starts runs. Each is an ordinary command line of pretrain.py.

    Attributes:
        at_once: how many runs may go on at the same time.
    """

    at_once: int

    def may_start(self, folder: Path, log: Path) -> bool:
        """Return whether a run may be started in this folder now.

        It may not while a process that this launcher can't follow holds the folder's lock.
        """

    def start(self, starts: list[Start]) -> Iterable[Job]:
        """Start pretrain.py for each of these runs, and yield their jobs in the same order."""

    def shown(self, arguments: list[str]) -> str:
        """Return the command line as a user would type it."""


def shown(config: LauncherConfig, words: list[str]) -> str:
    """Return a command line of a run, with its threads."""
    return f"OMP_NUM_THREADS={config.threads} {for_shell(words)}"
