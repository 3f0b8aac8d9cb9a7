"""Start the runs of a sweep as jobs of Slurm, through submitit.

Runs that start together become one job array. Each task of a job starts one rank of its run.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from records.lock import is_locked
from search.config import LauncherConfig
from search.launchers import SeedRun, slurm_options
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.processes import ending_with_parent
from utils.programs import ENVIRONMENT, PACKAGE, PRETRAIN, ROOT
from utils.ranks.launch import without_launcher

# Between two questions about all jobs of the sweep. They burden Slurm's controller, which all users
# of the cluster share.
_ASK_EVERY_S = 10.0
_ANSWERS_WITHIN_S = 60.0
_RESULT_WITHIN_S = 5.0
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT", "UNKNOWN"),
}
# How long before the time limit a run is asked to save, and how often it may go on after that.
_WARNING_S, _MOST_TIMEOUTS = 120, 10_000


class SlurmLauncher:
    """Submits runs to Slurm, and finds the jobs again that an earlier process has submitted.

    submitit's own watcher asks `sacct`, which needs accounting. So this one asks `squeue` now and
    then for all jobs of the user.
    """

    def __init__(self, config: LauncherConfig) -> None:
        self._config = config
        self._states: dict[str, str] = {}
        self._ask_at = 0.0

    def may_start(self, run: SeedRun) -> bool:
        return not is_locked(run.folder) or self._noted(run) is not None

    def start(self, runs: list[SeedRun]) -> None:
        """Submit runs that have no job yet, together. Raise UserError if Slurm refuses them."""
        numbers = {run.log: self._noted(run) for run in runs}
        if new := [run for run in runs if numbers[run.log] is None]:
            for run, number in zip(new, self._submit(new), strict=True):
                with file_errors():
                    write_atomically(_note_of(run.log), f"{number}\n")
                numbers[run.log], self._states[number] = number, "PENDING"
        for run in runs:
            run.job = SlurmJob(str(numbers[run.log]), run.log, self)

    def _noted(self, run: SeedRun) -> str | None:
        """Return the number of the job that was submitted for a run and has not ended yet."""
        try:
            number = _note_of(run.log).read_text(encoding="utf-8").strip()
        except OSError:
            return None
        _require_slurm()
        return None if self.has_ended(number) else number

    def _submit(self, runs: list[SeedRun]) -> list[str]:
        _require_slurm()
        import submitit

        config, options, folder = self._config, slurm_options(self._config), _folder_of(runs[0].log)
        own = ("time", "nodes", "ntasks-per-node", "cpus-per-task")  # submitit has names for these
        with file_errors():
            folder.mkdir(parents=True, exist_ok=True)
        executor = submitit.SlurmExecutor(folder, max_num_timeout=_MOST_TIMEOUTS)
        executor.update_parameters(
            job_name=runs[0].log.parent.parent.name,
            **{name.replace("-", "_"): options.pop(name) for name in own},
            signal_delay_s=_WARNING_S,
            array_parallelism=len(runs),
            stderr_to_stdout=True,
            # The job finds this module wherever the sweep was started.
            setup=[
                f"export OMP_NUM_THREADS={config.threads} SRUN_CPUS_PER_TASK={config.threads}",
                *[f"export {name}={value}" for name, value in ENVIRONMENT.items()],
                *([] if PACKAGE else [f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"]),
            ],
            srun_args=["--kill-on-bad-exit=1"],
            additional_parameters=options,
        )
        # What a launcher has set for the sweep itself, its jobs would inherit.
        kept = {*without_launcher(os.environ), "SLURM_CONF"}
        hidden = {name: os.environ.pop(name) for name in [*os.environ] if name not in kept}
        try:
            with executor.batch():
                jobs = [executor.submit(Run(run.arguments, run.log)) for run in runs]
        except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
            lines = [line for line in str(error).splitlines() if "error" in line.lower()]
            reason = (lines or [str(error)])[-1].removeprefix("sbatch: ").strip()
            raise UserError(f"sbatch refuses the runs ({reason}); correct sweep.launcher.slurm") from error
        finally:
            os.environ.update(hidden)
        return [job.job_id for job in jobs]

    def has_ended(self, number: str) -> bool:
        return self.state(number).split()[0] in _ENDED

    def state(self, number: str) -> str:
        """Return Slurm's word for the state of a job. UNKNOWN if the job ended long ago.

        Without an answer, what Slurm said before still counts.

        Raises:
            UserError: Slurm has not answered yet.
        """
        if time.monotonic() >= self._ask_at:
            words = ["squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i %T"]
            try:
                answer = subprocess.run(
                    words, capture_output=True, check=True, encoding="utf-8", timeout=_ANSWERS_WITHIN_S
                ).stdout
                self._states = dict(line.split(maxsplit=1) for line in answer.splitlines())
            except subprocess.SubprocessError as error:
                if self._ask_at == 0:
                    reason = (getattr(error, "stderr", None) or str(error)).strip()
                    raise UserError(f"squeue fails ({reason}); see whether Slurm runs") from error
            self._ask_at = time.monotonic() + _ASK_EVERY_S
        return self._states.get(number, "UNKNOWN")


class SlurmJob:
    """A run in a job of Slurm."""

    def __init__(self, number: str, log: Path, launcher: SlurmLauncher) -> None:
        from submitit import SlurmJob as Submitted

        self._number, self._log, self._launcher = number, log, launcher
        self._job: Any = Submitted(_folder_of(log), number)
        self._status: int | None = None
        self._gone_at: float | None = None  # when Slurm said that the job has ended

    def poll(self) -> int | None:
        if self._status is None:
            if self._job.paths.result_pickle.exists():
                self._status = self._result()
            elif self._launcher.has_ended(self._number):
                # The result comes through the shared folder, perhaps later than the job's end.
                self._gone_at = self._gone_at or time.monotonic()
                if time.monotonic() - self._gone_at > _RESULT_WITHIN_S:
                    self._status = self._failed(f"ended as {self._launcher.state(self._number)}")
        return self._status

    def terminate(self) -> None:
        # A job that waits has nothing to save. The signal reaches only a job that runs.
        _scancel("--state=PENDING", self._number)
        _scancel("--signal=TERM", self._number)

    def kill(self) -> None:
        _scancel(self._number)

    def _result(self) -> int:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            return int(self._job.result())
        except FailedJobError as error:  # the job's traceback, and three lines on where its logs are
            *_, raised, _, _, _ = (line for line in str(error).splitlines() if line.strip(" -"))
            return self._failed(f"failed: {raised}")
        except UncompletedJobError:
            return self._failed("failed: its result is gone")

    def _failed(self, reason: str) -> int:
        """Write into the log of the run why it ended, where the sweep looks for a reason."""
        with file_errors(), open(self._log, "a", encoding="utf-8") as log:
            log.write(f"error: job {self._number} of Slurm {reason}\n")
        return 1


class Run:
    """A run of a sweep, which submitit calls in each task of the job."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._arguments, self._log = arguments, log.resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._is_stopping = False

    def __call__(self) -> int:
        """Run pretrain.py as the rank of this task, and return its exit status."""
        end_with_parent = ending_with_parent(signal.SIGTERM)

        def begin() -> None:
            # Slurm's warning reaches all processes of the job. It is meant for submitit.
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            if end_with_parent is not None:
                end_with_parent()

        signal.signal(signal.SIGTERM, self._stop)
        with open(self._log, "a", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(PRETRAIN), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=begin,
            )
        if self._is_stopping:  # the signal came before there was a process
            self._stop()
        threading.Thread(target=self._wait, daemon=True).start()
        return self._ended()

    def checkpoint(self) -> Any:
        """Stop the run, and return what the job does when it starts again.

        submitit calls this in a signal handler, before the time limit.
        """
        from submitit.helpers import DelayedSubmission

        self._stop()
        self._ended()
        return DelayedSubmission(Run(self._arguments, self._log))

    def _stop(self, *_: int | FrameType | None) -> None:
        self._is_stopping = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def _wait(self) -> None:
        assert self._process is not None
        self._status = self._process.wait()

    def _ended(self) -> int:
        # A handler interrupts this loop and runs it, too: a lock would be taken twice.
        while self._status is None:
            time.sleep(0.1)
        return self._status


def _require_slurm() -> None:
    if find_spec("submitit") is None:
        raise UserError("the launcher slurm needs submitit; pip install -r requirements-slurm.txt")
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch here; start the sweep on a machine of the cluster")


def _scancel(*words: str) -> None:
    # It fails if the job has just ended, which `poll` finds out.
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(["scancel", "--quiet", *words], capture_output=True, timeout=_ANSWERS_WITHIN_S)


def _note_of(log: Path) -> Path:
    """Return the file with the number of the job that was last submitted for a run."""
    return log.with_suffix(".job")


def _folder_of(log: Path) -> Path:
    """Return submitit's folder, with the scripts and results of the jobs."""
    return (log.parent / "slurm").resolve()
