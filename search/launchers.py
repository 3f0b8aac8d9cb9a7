"""Start the runs of a sweep on this machine, or as jobs of Slurm (search/slurm.py)."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from search.config import LauncherConfig
from search.jobs import Launcher, Start, shown
from search.slurm import SlurmLauncher
from utils.files import file_errors
from utils.processes import ending_with_parent
from utils.programs import ENVIRONMENT, PRETRAIN, command_words, under_torchrun
from utils.ranks.launch import without_launcher
from utils.run.lock import is_locked


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
            yield ProcessJob(process)

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
        self.poll, self.kill = process.poll, process.kill
        self._process = process

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)


def build_launcher(config: LauncherConfig) -> Launcher:
    """Return the launcher that the config names."""
    return SlurmLauncher(config) if config.name == "slurm" else ProcessLauncher(config)


def environment_of(config: LauncherConfig, place: int) -> dict[str, str]:
    """Return the environment of a run on this machine: its threads and its devices."""
    environment = without_launcher(os.environ) | ENVIRONMENT | {"OMP_NUM_THREADS": str(config.threads)}
    if config.gpus:
        mine = config.gpus[place * config.ranks : (place + 1) * config.ranks]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
    return environment


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
