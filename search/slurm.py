"""Start the runs of a sweep as jobs of Slurm.

Runs that start together become one job array. Each task of a job starts one rank of its run.
"""

import os
import shlex
import shutil
import subprocess
import time
from contextlib import suppress

from records.lock import is_locked
from search.config import LauncherConfig
from search.launchers import SeedRun, slurm_options
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.programs import started
from utils.ranks.launch import without_launcher

# Between two questions about all jobs of the sweep. They burden Slurm's controller, which all users
# of the cluster share.
_ASK_EVERY_S = 10.0
_ANSWERS_WITHIN_S = 60.0
_STATUS_WITHIN_S = 5.0
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT", "UNKNOWN"),
}
# Slurm's warning before the time limit reaches this script alone. The ranks save a checkpoint, and
# the job goes back into the queue, as with launch/slurm.sbatch.
_SCRIPT = """#!/bin/bash
export OMP_NUM_THREADS={threads} SRUN_CPUS_PER_TASK={threads}
case $SLURM_ARRAY_TASK_ID in
{runs}
esac
rm -f "$run/stopped"
trap 'warned=1; kill -USR1 $child' USR1
srun --kill-on-bad-exit=1 {program} "${{overrides[@]}}" >> "$log.log" 2>&1 &
child=$!
wait $child
status=$?
if [[ $warned ]]; then
    wait $child  # the warning has ended the first one
    status=$?
    [[ ! -e $run/stopped ]] || exec scontrol requeue "$SLURM_JOB_ID"
fi
echo $status > "$log.status"
"""


class SlurmLauncher:
    """Submits runs to Slurm, and finds the jobs again that an earlier process has submitted.

    `sacct` needs accounting. So `squeue` is asked now and then for all jobs of the user.
    """

    def __init__(self, config: LauncherConfig) -> None:
        if shutil.which("sbatch") is None:
            raise UserError("there is no sbatch here; start the sweep on a machine of the cluster")
        self._config = config
        self._states: dict[str, str] = {}
        self._ask_at = 0.0

    def may_start(self, run: SeedRun) -> bool:
        return not is_locked(run.folder) or self._noted(run) is not None

    def start(self, runs: list[SeedRun]) -> None:
        """Submit runs that have no job yet, together. Raise UserError if Slurm refuses them."""
        if new := [run for run in runs if self._noted(run) is None]:
            with file_errors():
                array = self._submit(new)
                for index, run in enumerate(new):
                    write_atomically(run.log.with_suffix(".job"), f"{array}_{index}\n")
                    self._states[f"{array}_{index}"] = "PENDING"
        for run in runs:
            run.job = SlurmJob(run, self)

    def _noted(self, run: SeedRun) -> str | None:
        """Return the number of the job that was submitted for a run and has not ended yet."""
        note = run.log.with_suffix(".job")
        if not note.exists() or run.log.with_suffix(".status").exists():
            return None
        number = note.read_text(encoding="utf-8").strip()
        return None if self.has_ended(number) else number

    def _submit(self, runs: list[SeedRun]) -> str:
        """Submit an array of jobs, and return its number."""
        logs, cases = runs[0].log.parent, list[str]()
        for index, run in enumerate(runs):
            log, folder = run.log.with_suffix("").resolve(), run.folder.resolve()
            run.log.with_suffix(".status").unlink(missing_ok=True)
            values = f"log={shlex.quote(str(log))} run={shlex.quote(str(folder))}"
            cases.append(f"{index}) {values} overrides=({shlex.join(run.arguments)}) ;;")
        (logs / "slurm").mkdir(parents=True, exist_ok=True)
        script = logs / f"slurm/{time.time_ns()}.sbatch"
        program, threads = shlex.join(started("pretrain")), self._config.threads
        write_atomically(script, _SCRIPT.format(threads=threads, runs="\n".join(cases), program=program))
        words = ["sbatch", "--parsable", f"--array=0-{len(runs) - 1}", f"--job-name={logs.parent.name}"]
        words += [f"--output={logs}/slurm/%A_%a.out", "--open-mode=append", "--requeue", "--signal=B:USR1@120"]
        # What a launcher has set for the sweep itself, its jobs would inherit.
        environment = without_launcher(os.environ)
        if conf := os.environ.get("SLURM_CONF"):
            environment["SLURM_CONF"] = conf
        submitted = subprocess.run(
            [*words, *slurm_options(self._config), str(script)], env=environment, capture_output=True, text=True
        )
        if submitted.returncode != 0:
            lines = [line for line in submitted.stderr.splitlines() if "error" in line.lower()] or [submitted.stderr]
            reason = lines[-1].removeprefix("sbatch: ").strip()
            raise UserError(f"sbatch refuses the runs ({reason}); correct sweep.launcher.slurm")
        return submitted.stdout.strip().partition(";")[0]

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
                answer = subprocess.run(words, capture_output=True, check=True, text=True, timeout=_ANSWERS_WITHIN_S)
                self._states = dict(line.split(maxsplit=1) for line in answer.stdout.splitlines())
            except subprocess.SubprocessError as error:
                if self._ask_at == 0:
                    reason = (getattr(error, "stderr", None) or str(error)).strip()
                    raise UserError(f"squeue fails ({reason}); see whether Slurm runs") from error
            self._ask_at = time.monotonic() + _ASK_EVERY_S
        return self._states.get(number, "UNKNOWN")


class SlurmJob:
    """A run in a job of Slurm, which has written its number and at its end the exit status."""

    def __init__(self, run: SeedRun, launcher: SlurmLauncher) -> None:
        self._log, self._launcher = run.log, launcher
        self._number = run.log.with_suffix(".job").read_text(encoding="utf-8").strip()
        self._status: int | None = None
        self._gone_at: float | None = None  # when Slurm said that the job has ended

    def poll(self) -> int | None:
        if self._status is None:
            with suppress(OSError, ValueError):
                self._status = int(self._log.with_suffix(".status").read_text(encoding="utf-8"))
        if self._status is None and self._launcher.has_ended(self._number):
            # The status comes through the shared folder, perhaps later than the job's end.
            self._gone_at = self._gone_at or time.monotonic()
            if time.monotonic() - self._gone_at > _STATUS_WITHIN_S:
                self._status = 1
                with file_errors(), open(self._log, "a", encoding="utf-8") as log:
                    log.write(f"error: job {self._number} of Slurm ended as {self._launcher.state(self._number)}\n")
        return self._status

    def terminate(self) -> None:
        # A job that waits has nothing to save. The signal reaches only a job that runs.
        self._scancel("--state=PENDING")
        self._scancel("--signal=TERM")

    def kill(self) -> None:
        self._scancel()

    def _scancel(self, *options: str) -> None:
        # It fails if the job has just ended, which `poll` finds out.
        with suppress(subprocess.TimeoutExpired):
            words = ["scancel", "--quiet", *options, self._number]
            subprocess.run(words, capture_output=True, timeout=_ANSWERS_WITHIN_S)
