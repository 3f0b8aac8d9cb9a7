"""Run a sweep: claim trials, start their runs, follow their metrics, and store the results."""

import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState
from tqdm import tqdm

from records.folder import Launched
from records.history import METRICS_FILE, History
from search import study as attributes
from search.check import check_point
from search.launchers import ProcessJob, ProcessLauncher, Start, runs_at_once
from search.report import best_of, num_of
from search.slurm import SlurmJob, SlurmLauncher
from search.space import shown_point
from search.study import Claim, Study
from utils.errors import UserError
from utils.files import file_errors
from utils.stop import StopSignal
from utils.terminal import tell

_POLL_S = 0.5
# A run that was asked to stop saves a checkpoint first.
_STOPS_WITHIN_S = 120.0
_CLAIM_EVERY_S = 5.0  # how often the study is asked for more trials after it had none
_MOST_FAILURES = 2  # of one run
# So many trials in a row without a step have a common reason, such as data that are gone.
_MOST_FAILED_AT_ONCE = 3


@dataclass(eq=False)
class SeedRun:
    """The run of one seed of a trial. What stands below the job is of one start alone."""

    seed: int
    folder: Path
    arguments: list[str]
    log: Path
    history: History
    value: float | None  # of the metric, once the run has ended
    job: ProcessJob | SlurmJob | None = None
    place: int = 0
    log_begin: int = 0  # where the output of this start begins in the log
    stop_by: float | None = None  # when the job is killed if it does not stop
    error: str | None = None  # why the job is stopped although nobody asked for it

    def ask_to_stop(self) -> None:
        if self.stop_by is None and self.job is not None:
            self.stop_by = time.monotonic() + _STOPS_WITHIN_S
            self.job.stop()

    def poll(self) -> int | None:
        """Return the exit status, or None while the job goes on. Kill it if it stops too late."""
        assert self.job is not None
        if self.stop_by is not None and time.monotonic() > self.stop_by:
            self.job.kill()
            self.stop_by = math.inf
        return self.job.poll()


@dataclass
class RunningTrial:
    """A trial that this process runs."""

    claim: Claim
    runs: list[SeedRun]
    pruned_at: int | None
    reported: int  # the last step whose value the study knows
    metric: str = ""
    error: str | None = None  # why it ends without a value

    @property
    def is_ending(self) -> bool:
        return self.error is not None or self.pruned_at is not None

    @property
    def going(self) -> list[SeedRun]:
        return [run for run in self.runs if run.job is not None]

    def note(self, attribute: str, run: SeedRun, value: object) -> None:
        """Write a value of a run into the study."""
        trial = self.claim.trial
        trial.set_user_attr(attribute, {**trial.user_attrs.get(attribute, {}), str(run.seed): value})


class Progress:
    """Prints a line for each trial that ends. On a terminal, a bar over all trials stands below."""

    def __init__(self, study: Study) -> None:
        self._study, self._began, self._num_before = study, time.monotonic(), self._num_finished(study)
        self._is_bar = sys.stderr.isatty()
        tqdm.monitor_interval = 0  # its thread would live through the fork of each run
        bar = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"
        self._bar: tqdm[Any] = tqdm(
            total=study.sweep.num_trials, unit="trial", dynamic_ncols=True, bar_format=bar, disable=not self._is_bar
        )

    @staticmethod
    def _num_finished(study: Study) -> int:
        return sum(trial.state in attributes.FINISHED for trial in study.trials())

    def show(self, line: str = "") -> None:
        """Print a line, and move the bar to the number of trials that have ended in any process."""
        total, num_finished, left = self._study.sweep.num_trials, self._num_finished(self._study), "time left unknown"
        if num_finished > self._num_before:
            seconds_of_trial = (time.monotonic() - self._began) / (num_finished - self._num_before)
            left = f"{tqdm.format_interval(round(seconds_of_trial * max(0, total - num_finished)))} left"
        outlook = f"best {best_of(self._study.sweep, self._study.trials()) or 'none yet'}, {left}"
        if line:
            self.say(line if self._is_bar else f"{line}  [{num_finished}/{total}, {outlook}]")
        running = sum(trial.state == TrialState.RUNNING for trial in self._study.trials())
        self._bar.set_postfix_str(f"{running} running, {outlook}", refresh=False)
        self._bar.n = num_finished
        self._bar.refresh()

    def say(self, text: str) -> None:
        if self._is_bar:
            self._bar.write(text, file=sys.stderr)
        else:
            tell(text)

    def close(self) -> None:
        self._bar.close()


class Driver:
    """Runs trials of a sweep until the budget is spent, or until it is asked to stop."""

    def __init__(self, study: Study, stop: StopSignal, launcher: ProcessLauncher | SlurmLauncher | None = None) -> None:
        self._sweep, self._study, self._stop = study.sweep, study, stop
        config = study.sweep.config.launcher
        self._launcher = SlurmLauncher(config) if config.name == "slurm" else ProcessLauncher(config)
        self._places = range(runs_at_once(config))
        self._trials: list[RunningTrial] = []
        self._ends = time.monotonic() + 3600 * (study.sweep.config.hours or math.inf)
        self._progress = Progress(study)
        self._failed_at_once = 0  # trials in a row that failed before they logged a step
        self._claim_at = self._keep_at = 0.0  # when to turn to the study again

    def run(self) -> bool:
        """Run trials until none is left, here and in other processes.

        Returns:
            Whether the sweep is done. Otherwise the same command goes on with it.

        Raises:
            UserError: The database fails, or a run does not log the metric. Runs are stopped first.
        """
        with file_errors():
            (self._sweep.path / "logs").mkdir(exist_ok=True)
        told_elsewhere = False
        try:
            while not self._stop.requested() and time.monotonic() < self._ends:
                self._keep()
                self._start_runs()
                if not self._trials:
                    num_elsewhere = sum(each.state == TrialState.RUNNING for each in self._study.trials())
                    if num_elsewhere == 0:
                        return True
                    if not told_elsewhere:
                        self._progress.say(f"waiting for {num_of(num_elsewhere, 'trial')} of other processes")
                        told_elsewhere = True
                for trial in [*self._trials]:
                    try:
                        self._follow(trial)
                    except UpdateFinishedTrialError:  # this process slept for long, and another one has ended it
                        self._trials.remove(trial)
                time.sleep(_POLL_S)
            reason = self._stop.name or f"sweep.hours={self._sweep.config.hours}"
            runs = num_of(sum(len(trial.going) for trial in self._trials), "run")
            self._progress.say(f"{reason}: stopping {runs}; the same command goes on with them")
            return False
        finally:
            self._stop_runs()
            self._progress.close()

    # ---- starting ----

    def _start_runs(self) -> None:
        """Start runs while there is a place for them: first those of trials that have begun."""
        taken = {run.place for trial in self._trials for run in trial.going}
        places = [place for place in self._places if place not in taken]
        starting: list[SeedRun] = []
        while len(starting) < len(places):
            self._keep()
            runs = (run for trial in self._trials for run in self._ready(trial) if run not in starting)
            if (run := next(runs, None)) is not None:
                run.log_begin = run.log.stat().st_size if run.log.is_file() else 0
                starting.append(run)
                continue
            if time.monotonic() < self._claim_at:
                break
            if (claim := self._study.claim()) is None:
                self._claim_at = time.monotonic() + _CLAIM_EVERY_S
                break
            self._begin(claim)
        starts = [
            Start([*run.arguments, "resume=auto"], run.log, place) for run, place in zip(starting, places, strict=False)
        ]
        jobs: Iterable[ProcessJob | SlurmJob] = self._launcher.start(starts)
        for run, start, job in zip(starting, starts, jobs, strict=True):
            run.job, run.place, run.stop_by, run.error = job, start.place, None, None

    def _keep(self) -> None:
        """Record the heartbeat of the trials that go on here, and show those of all processes."""
        if time.monotonic() >= self._keep_at:
            self._keep_at = time.monotonic() + attributes.HEARTBEAT_S
            self._study.keep(trial.claim for trial in self._trials)
            self._progress.show()

    def _ready(self, trial: RunningTrial) -> list[SeedRun]:
        """Return the runs of a trial that may start. A pruner watches the first seed alone."""
        if trial.is_ending:
            return []
        prunes = self._sweep.config.pruner.name != "none"
        runs = trial.runs[:1] if prunes and trial.runs[0].value is None else trial.runs
        waiting = (run for run in runs if run.value is None and run.job is None)
        return [run for run in waiting if self._launcher.may_start(run.folder, run.log)]

    def _begin(self, claim: Claim) -> None:
        """Begin or go on with a trial. It ends at once if the config refuses its point."""
        sweep, known = self._sweep, claim.trial.user_attrs
        trial = RunningTrial(claim, [], known.get(attributes.PRUNED_AT), claim.reported)
        for seed in sweep.config.seeds:
            folder, arguments = sweep.run_folder(claim.number, seed), sweep.arguments(claim.number, claim.point, seed)
            log, value = sweep.path / "logs" / f"{folder.name}.log", known.get(attributes.SEEDS, {}).get(str(seed))
            trial.runs.append(SeedRun(seed, folder, arguments, log, History(folder / METRICS_FILE), value))
        self._trials.append(trial)
        try:
            trial.metric = check_point(sweep, claim.point)
        except UserError as error:
            trial.error = str(error)

    # ---- following ----

    def _follow(self, trial: RunningTrial) -> None:
        """Look after the runs of a trial, and end the trial once they have all ended."""
        for run in trial.going:
            status = run.poll()  # before the rows are read: an ended run adds none
            self._read(trial, run)
            if status is not None:
                run.job = None
                self._run_ended(trial, run, status)
        if trial.is_ending and trial.going:
            for run in trial.going:
                run.ask_to_stop()
        elif trial.is_ending or all(run.value is not None for run in trial.runs):
            self._end(trial)

    def _read(self, trial: RunningTrial, run: SeedRun) -> None:
        """Read what a run has logged since the last time. Report the first seed's to the pruner."""
        try:
            changed = run.history.refresh()
        except UserError as error:  # a damaged row; a resumed run drops it
            run.error = str(error)
            run.ask_to_stop()
            return
        if not changed or run is not trial.runs[0] or trial.is_ending:
            return
        launched = Launched.read(run.folder)
        for row in run.history.rows:
            value, step = row.get(trial.metric), row["step"]
            if step > trial.reported and isinstance(value, int | float):
                trial.reported = step
                trial.claim.trial.report(float(value), step)
                # Pruning at its last step would only take the value of a trial with one run.
                is_last = launched is not None and step >= launched.last_step and len(trial.runs) == 1
                if not is_last and trial.claim.trial.should_prune():
                    trial.pruned_at = step
                    trial.claim.trial.set_user_attr(attributes.PRUNED_AT, step)
                    return

    def _run_ended(self, trial: RunningTrial, run: SeedRun, status: int) -> None:
        """Note the value of a run, or why it failed. Raise UserError if it lacks the metric."""
        rows = run.history.rows
        last = rows[-1] if rows else {}
        trial.note(attributes.STEPS, run, last.get("step", 0))
        trial.note(attributes.SECONDS, run, last.get("time_s", 0))
        if trial.is_ending:
            return
        if status == 0 and run.error is None and not (run.folder / "stopped").exists():
            values = [row[trial.metric] for row in rows if trial.metric in row]
            if not values:  # no run of the sweep would have one
                names = ", ".join(sorted({name for row in rows for name in row} - {"step"})) or "nothing"
                raise UserError(f"{run.folder} has ended without {trial.metric} (sweep.metric); it logged {names}")
            if math.isfinite(values[-1]):
                run.value = float(values[-1])
                trial.note(attributes.SEEDS, run, run.value)
            else:  # a second start would find the same
                trial.error = f"{trial.metric} is {values[-1]}"
            return
        reason, is_mistake = _reason(run.log, run.log_begin, status)
        reason = run.error or reason
        num_failures = trial.claim.trial.user_attrs.get(attributes.FAILURES, {}).get(str(run.seed), 0) + 1
        trial.note(attributes.FAILURES, run, num_failures)
        # A second start would find the same mistake.
        if num_failures < _MOST_FAILURES and not (is_mistake and not rows):
            self._progress.say(f"trial {trial.claim.number}: failed, trying it once more ({reason})")
        else:
            trial.error = reason

    def _end(self, trial: RunningTrial) -> None:
        """Tell the study the result of a trial whose runs have all ended."""
        claim, failed_at_once = trial.claim, 0
        if trial.error is not None:
            claim.trial.set_user_attr(attributes.ERROR, trial.error)
            self._study.optuna.tell(claim.trial, state=TrialState.FAIL)
            what = f"failed ({trial.error})"
            never_trained = bool(trial.metric) and not any(run.history.rows for run in trial.runs)
            failed_at_once = self._failed_at_once + 1 if never_trained else 0
        elif trial.pruned_at is not None:
            self._study.optuna.tell(claim.trial, state=TrialState.PRUNED)
            what = f"pruned at step {trial.pruned_at}"
        else:
            values = [run.value for run in trial.runs if run.value is not None]
            mean = sum(values) / len(values)
            self._study.optuna.tell(claim.trial, mean)
            what = f"{trial.metric.rsplit('/', 1)[-1]} {mean:.4f}"
        self._failed_at_once = failed_at_once
        self._trials.remove(trial)
        seconds = sum(claim.trial.user_attrs.get(attributes.SECONDS, {}).values())
        took = tqdm.format_interval(round(seconds))
        self._progress.show(f"trial {claim.number}: {what} after {took}  {shown_point(claim.point)}")
        if failed_at_once >= _MOST_FAILED_AT_ONCE:
            raise UserError(
                f"the last {failed_at_once} trials failed before they logged a step ({trial.error}); correct "
                "the reason, and start the sweep again with sweep.retry_failed=true"
            )

    # ---- stopping ----

    def _stop_runs(self) -> None:
        """Stop all runs, and wait for them. Their trials stay open for the next start."""
        runs = [run for trial in self._trials for run in trial.going]
        for run in runs:
            run.ask_to_stop()
        while any([run.poll() is None for run in runs]):  # a list: each of them may be late
            time.sleep(_POLL_S / 5)
        for trial in self._trials:
            self._study.give_back(trial.claim)


def _reason(log: Path, begin: int, status: int) -> tuple[str, bool]:
    """Return why a run has ended, in one line, and whether it was a mistake and no fault.

    The reason is what the run said last, or its exit status. torchrun and Slurm change the status.
    """
    lines = log.read_bytes()[begin:].decode("utf-8", errors="replace").splitlines() if log.is_file() else []
    told = [line for line in lines if line.startswith(("error: ", "fault on rank "))]
    if told:
        return told[-1].removeprefix("error: ")[:500], told[-1].startswith("error: ")
    if status < 0:
        return f"killed by signal {-status}, see {log}", False
    return f"status {status}, see {log}" if status else f"stopped by somebody else, see {log}", False
