"""Start the runs of a sweep on this machine. search/slurm.py starts them as jobs of Slurm."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from records.lock import is_locked
from search.config import LauncherConfig
from utils.files import file_errors
from utils.processes import ending_with_parent
from utils.programs import ENVIRONMENT, PRETRAIN, under_torchrun
from utils.ranks.launch import without_launcher
from utils.text import for_shell

_JOBS_AT_ONCE = 8


class Start(NamedTuple):
    """A run that is to be started.

    Attributes:
        arguments: overrides of pretrain.py.
        log: the file to which the run's output is appended.
        place: a number below `runs_at_once` that no other run has now.
    """

    arguments: list[str]
    log: Path
    place: int


def runs_at_once(config: LauncherConfig) -> int:
    """Return how many runs may go on at the same time."""
    if config.at_once is not None:
        return config.at_once
    if config.name == "slurm":
        return _JOBS_AT_ONCE
    return max(1, len(config.gpus) // config.ranks if config.gpus else num_cores() // (config.threads * config.ranks))


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line(config: LauncherConfig, arguments: list[str]) -> str:
    """Return the command line of a run as a user would type it."""
    words = ["python", "pretrain.py"]
    if config.name == "torchrun":
        words = ["torchrun", *_torchrun(config), *under_torchrun("pretrain")]
    elif config.name == "slurm":
        options: dict[str, object] = {"ntasks": config.ranks} if config.ranks > 1 else {}
        options |= {"cpus-per-task": config.threads, **(config.slurm or {})}
        named = {name.replace("_", "-"): value for name, value in options.items()}
        words = [
            "srun",
            *(f"--{name}" if value is True else f"--{name}={value}" for name, value in named.items()),
            *words,
        ]
    return f"OMP_NUM_THREADS={config.threads} {for_shell([*words, *arguments])}"


def _torchrun(config: LauncherConfig) -> list[str]:
    return ["--standalone", "--nproc-per-node", str(config.ranks)]


def environment_of(config: LauncherConfig, place: int) -> dict[str, str]:
    """Return the environment of a run on this machine: its threads and its devices."""
    environment = without_launcher(os.environ) | ENVIRONMENT | {"OMP_NUM_THREADS": str(config.threads)}
    if config.gpus:
        mine = config.gpus[place * config.ranks : (place + 1) * config.ranks]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
    return environment


class ProcessLauncher:
    """Starts each run on this machine, as one process or as several under torchrun."""

    def __init__(self, config: LauncherConfig) -> None:
        self._config = config

    def may_start(self, folder: Path, log: Path) -> bool:
        """Return whether no other process trains in this folder.

        A run whose sweep was killed may still be saving its checkpoint.
        """
        return not is_locked(folder)

    def start(self, starts: list[Start]) -> "Iterator[ProcessJob]":
        """Start pretrain.py for each of these runs, and yield their jobs in the same order."""
        is_single = self._config.name == "local"
        launcher = [] if is_single else ["-m", "torch.distributed.run", *_torchrun(self._config)]
        for start in starts:
            with file_errors(), open(start.log, "a", encoding="utf-8") as output:
                process = subprocess.Popen(
                    [sys.executable, *launcher, str(PRETRAIN), *start.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment_of(self._config, start.place),
                    start_new_session=True,  # Ctrl-C reaches the sweep alone, which stops its runs
                    preexec_fn=ending_with_parent(signal.SIGTERM),  # the run saves a checkpoint and ends
                )
            yield ProcessJob(process)


class ProcessJob:
    """A run in a process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.poll, self.kill = process.poll, process.kill
        self._process = process

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end."""
        self._process.send_signal(signal.SIGTERM)
