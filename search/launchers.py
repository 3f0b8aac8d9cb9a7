"""Start the runs of a sweep. Each run is an ordinary command line of pretrain.py.

A launcher starts a run and returns a job. The driver of the sweep knows nothing else of either, so
that another launcher needs no change there.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from search.config import LauncherConfig
from utils.dist.launch import without_launcher
from utils.files import file_errors
from utils.processes import ending_with_parent

PRETRAIN = Path(__file__).resolve().parent.parent / "pretrain.py"


class Job(Protocol):
    """A run that has been started."""

    def poll(self) -> int | None:
        """Return the exit status, or None while the run goes on."""

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end."""

    def kill(self) -> None:
        """End the run at once."""


class Launcher(Protocol):
    """Starts runs.

    Attributes:
        at_once: how many runs may go on at the same time.
    """

    at_once: int

    def start(self, arguments: list[str], log: Path, place: int) -> Job:
        """Start pretrain.py with these arguments.

        Args:
            arguments: overrides.
            log: the file to which the run's output is appended.
            place: a number below at_once that no other run has now.
        """

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

    def start(self, arguments: list[str], log: Path, place: int) -> "ProcessJob":
        environment = without_launcher(os.environ) | self._environment()
        if self._config.gpus:
            ranks = self._config.ranks
            mine = self._config.gpus[place * ranks : (place + 1) * ranks]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
        with file_errors(), open(log, "a") as output:
            process = subprocess.Popen(
                [sys.executable, *self._words(str(PRETRAIN)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which stops its runs
                preexec_fn=ending_with_parent(signal.SIGTERM),  # the run saves a checkpoint and ends
            )
        return ProcessJob(process)

    def shown(self, arguments: list[str]) -> str:
        environment = " ".join(f"{name}={value}" for name, value in self._environment().items())
        words = ["torchrun", *self._words("pretrain.py")[2:]] if self._config.name == "torchrun" else None
        return f"{environment} {shlex.join([*(words or ['python', 'pretrain.py']), *arguments])}"

    def _environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self._config.threads)}

    def _words(self, program: str) -> list[str]:
        if self._config.name == "local":
            return [program]
        ranks = str(self._config.ranks)
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, program]


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
    return ProcessLauncher(config)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
