"""Start the runs of a sweep on this machine. search/slurm.py starts them as jobs of Slurm."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from records.history import METRICS_FILE, History
from records.lock import is_locked
from search.config import LauncherConfig
from utils.files import file_errors
from utils.processes import ending_with_parent
from utils.programs import ENVIRONMENT, PRETRAIN, under_torchrun
from utils.ranks.launch import without_launcher
from utils.text import for_shell

_JOBS_AT_ONCE = 8


class Job(Protocol):
    """A run that was started, such as a `subprocess.Popen`."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(eq=False)
class SeedRun:
    """The run of one seed of a trial. What stands below the job is of one start alone."""

    arguments: list[str]  # overrides of pretrain.py
    folder: Path
    log: Path  # to which its output is appended
    seed: int = 0
    value: float | None = None  # of the metric, once the run has ended
    job: Job | None = None
    place: int = 0  # a number below `runs_at_once` that no other run has now
    log_begin: int = 0  # where the output of this start begins in the log
    stop_by: float | None = None  # when the job is killed if it does not stop
    error: str | None = None  # why the job is stopped although nobody asked for it

    def __post_init__(self) -> None:
        self.history = History(self.folder / METRICS_FILE)


def runs_at_once(config: LauncherConfig) -> int:
    """Return how many runs may go on at the same time."""
    if config.at_once is not None:
        return config.at_once
    if config.name == "slurm":
        return _JOBS_AT_ONCE
    if config.gpus:
        return max(1, len(config.gpus) // config.ranks)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // (config.threads * config.ranks))


def command_line(config: LauncherConfig, arguments: list[str]) -> str:
    """Return the command line of a run as a user would type it."""
    command = "python pretrain.py"
    if config.name == "torchrun":
        command = for_shell(["torchrun", *_torchrun(config), *under_torchrun("pretrain")])
    elif config.name == "slurm":
        options = slurm_options(config).items()
        named = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options]
        command = f"srun {for_shell(named)} {command}"
    return f"OMP_NUM_THREADS={config.threads} {command} {for_shell(arguments)}"


def _torchrun(config: LauncherConfig) -> list[str]:
    return ["--standalone", "--nproc-per-node", str(config.ranks)]


def slurm_options(config: LauncherConfig) -> dict[str, str | int]:
    """Return the options of srun and sbatch for the ranks and threads of a run, and the user's."""
    options: dict[str, str | int] = {"nodes": 1}
    options |= {name.replace("_", "-"): value for name, value in (config.slurm or {}).items()}
    return options | {"ntasks-per-node": config.ranks // int(options["nodes"]), "cpus-per-task": config.threads}


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

    def may_start(self, run: SeedRun) -> bool:
        """Return whether no process trains in the folder.

        A run whose sweep was killed may still be saving its checkpoint.
        """
        return not is_locked(run.folder)

    def start(self, runs: list[SeedRun]) -> None:
        """Start pretrain.py for each of these runs, and give them their jobs."""
        is_single = self._config.name == "local"
        launcher = [] if is_single else ["-m", "torch.distributed.run", *_torchrun(self._config)]
        for run in runs:
            with file_errors(), open(run.log, "a", encoding="utf-8") as output:
                run.job = subprocess.Popen(
                    [sys.executable, *launcher, str(PRETRAIN), *run.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment_of(self._config, run.place),
                    start_new_session=True,  # Ctrl-C reaches the sweep alone, which stops its runs
                    preexec_fn=ending_with_parent(signal.SIGTERM),  # the run saves a checkpoint and ends
                )
