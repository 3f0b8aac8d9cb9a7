"""Start the runs of a sweep. Each run is an ordinary command line of pretrain.py.

A launcher starts runs and returns a job for each. The driver of the sweep knows nothing else of
them, so that another launcher needs no change there. search/slurm.py has the launcher for Slurm.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from search.config import LauncherConfig
from utils.files import file_errors
from utils.processes import ending_with_parent
from utils.programs import ENVIRONMENT, PRETRAIN, command_words, under_torchrun
from utils.ranks.launch import without_launcher
from utils.run.lock import is_locked
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
    """Starts runs.

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


class ProcessLauncher:
    """Starts each run on this machine, as one process or as several under torchrun."""

    def __init__(self, config: LauncherConfig) -> None:
        self._config = config
        if config.at_once is not None:
            self.at_once = config.at_once
        elif config.gpus:
            self.at_once = max(1, len(config.gpus) // config.ranks)
        else:
            self.at_once = max(1, _num_cores() // (config.threads * config.ranks))

    def may_start(self, folder: Path, log: Path) -> bool:
        # A run whose sweep was killed may still be saving its checkpoint.
        return not is_locked(folder)

    def start(self, starts: list[Start]) -> "Iterator[ProcessJob]":
        for start in starts:
            yield self._start(start)

    def _start(self, start: Start) -> "ProcessJob":
        with file_errors(), open(start.log, "a", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, *self._words([str(PRETRAIN)]), *start.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_of(self._config, start.place),
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which stops its runs
                preexec_fn=ending_with_parent(signal.SIGTERM),  # the run saves a checkpoint and ends
            )
        return ProcessJob(process)

    def shown(self, arguments: list[str]) -> str:
        if self._config.name == "torchrun":
            return shown(self._config, ["torchrun", *self._words(under_torchrun("hrm-train"))[2:], *arguments])
        return shown(self._config, [*command_words("hrm-train"), *arguments])

    def _words(self, program: list[str]) -> list[str]:
        if self._config.name == "local":
            return program
        ranks = str(self._config.ranks)
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *program]


class ProcessJob:
    """A run in a process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()


def build_launcher(config: LauncherConfig) -> Launcher:
    """Return the launcher that the config names."""
    if config.name == "slurm":
        from search.slurm import SlurmLauncher

        return SlurmLauncher(config)
    return ProcessLauncher(config)


def environment_of(config: LauncherConfig, place: int) -> dict[str, str]:
    """Return the environment of a run on this machine: its threads and its devices."""
    environment = without_launcher(os.environ) | ENVIRONMENT | {"OMP_NUM_THREADS": str(config.threads)}
    if config.gpus:
        mine = config.gpus[place * config.ranks : (place + 1) * config.ranks]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
    return environment


def shown(config: LauncherConfig, words: list[str]) -> str:
    """Return a command line of a run, with its threads."""
    return f"OMP_NUM_THREADS={config.threads} {for_shell(words)}"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
