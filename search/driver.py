"""Run a sweep: claim trials, start their runs, follow their metrics, and store the results."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState
from tqdm import tqdm

from search import study as attributes
from search.check import check_point
from search.jobs import Job, Launcher, Start
from search.progress import Progress
from search.report import best_of, num_of
from search.space import shown_point
from search.study import Claim, Study
from search.sweep import Sweep
from utils.errors import UserError
from utils.files import file_errors
from utils.run.history import METRICS_FILE, History
from utils.run.launched import Launched
from utils.run.stop import StopSignal

_POLL_S = 0.5
# A run that was asked to stop saves a checkpoint first.
_STOPS_WITHIN_S = 120.0
_CLAIM_EVERY_S = 5.0  # how often the study is asked for more trials after it had none
_MOST_FAILURES = 2  # of one run
# So many trials in a row without a step have a common reason, such as data that are gone.
_MOST_FAILED_AT_ONCE = 3


@dataclass
class Attempt:
    """One start of a run. The next start shares nothing with it."""

    job: Job
    place: int
    log_begin: int  # where its output begins in the log
    stop_by: float | None = None  # when it is killed if it does not stop
    error: str | None = None  # why it is stopped although nobody asked for it

    def ask_to_stop(self) -> None:
        if self.stop_by is None:
            self.stop_by = time.monotonic() + _STOPS_WITHIN_S
            self.job.stop()

    def poll(self) -> int | None:
        """Return the exit status, or None while it goes on. Kill it if it stops too late."""
        if self.stop_by is not None and time.monotonic() > self.stop_by:
            self.job.kill()
            self.stop_by = math.inf
        return self.job.poll()


@dataclass(eq=False)
class SeedRun:
    """The run of one seed of a trial."""

    seed: int
    folder: Path
    arguments: list[str]
    log: Path
    history: History
    value: float | None  # of the metric, once the run has ended
    attempt: Attempt | None = None


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
    def attempts(self) -> list[Attempt]:
        return [run.attempt for run in self.runs if run.attempt is not None]

    def note(self, attribute: str, run: SeedRun, value: object) -> None:
        """Write a value of a run into the study."""
        trial = self.claim.trial
        trial.set_user_attr(attribute, {**trial.user_attrs.get(attribute, {}), str(run.seed): value})


class Driver:
    """Runs trials of a sweep until the budget is spent, or until it is asked to stop."""

    def __init__(self, sweep: Sweep, study: Study, launcher: Launcher, stop: StopSignal) -> None:
        self._sweep, self._study, self._launcher, self._stop = sweep, study, launcher, stop
        self._trials: list[RunningTrial] = []
        self._ends = time.monotonic() + 3600 * sweep.config.hours if sweep.config.hours else math.inf
        self._progress = Progress(sweep.num_trials, study.trials())
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
            runs = num_of(sum(len(trial.attempts) for trial in self._trials), "run")
            self._progress.say(f"{reason}: stopping {runs}; the same command goes on with them")
            return False
        finally:
            self._stop_runs()
            self._progress.close()

    # ---- starting ----

    def _start_runs(self) -> None:
        """Start runs while there is a place for them: first those of trials that have begun."""
        taken = {attempt.place for trial in self._trials for attempt in trial.attempts}
        places = [place for place in range(self._launcher.at_once) if place not in taken]
        starting: list[SeedRun] = []
        while len(starting) < len(places):
            self._keep()
            runs = (run for trial in self._trials for run in self._ready(trial) if run not in starting)
            if (run := next(runs, None)) is not None:
                starting.append(run)
                continue
            if time.monotonic() < self._claim_at:
                break
            if (claim := self._study.claim()) is None:
                self._claim_at = time.monotonic() + _CLAIM_EVERY_S
                break
            self._begin(claim)
        begins = [run.log.stat().st_size if run.log.is_file() else 0 for run in starting]
        starts = [
            Start([*run.arguments, "resume=auto"], run.log, place) for run, place in zip(starting, places, strict=False)
        ]
        for run, start, begin, job in zip(starting, starts, begins, self._launcher.start(starts), strict=True):
            run.attempt = Attempt(job, start.place, begin)

    def _keep(self) -> None:
        """Record the heartbeat of the trials that go on here, and show those of all processes."""
        if time.monotonic() >= self._keep_at:
            self._keep_at = time.monotonic() + attributes.HEARTBEAT_S
            self._study.keep(trial.claim for trial in self._trials)
            self._progress.show(self._study.trials(), best_of(self._sweep, self._study.trials()))

    def _ready(self, trial: RunningTrial) -> list[SeedRun]:
        """Return the runs of a trial that may start. A pruner watches the first seed alone."""
        if trial.is_ending:
            return []
        prunes = self._sweep.config.pruner.name != "none"
        runs = trial.runs[:1] if prunes and trial.runs[0].value is None else trial.runs
        waiting = (run for run in runs if run.value is None and run.attempt is None)
        return [run for run in waiting if self._launcher.may_start(run.folder, run.log)]

    def _begin(self, claim: Claim) -> None:
        """Begin or go on with a trial. It ends at once if the config refuses its point."""
        sweep, known = self._sweep, claim.trial.user_attrs
        runs = []
        for seed in sweep.config.seeds:
            folder = sweep.run_folder(claim.number, seed)
            log, history = sweep.path / "logs" / f"{folder.name}.log", History(folder / METRICS_FILE)
            value = known.get(attributes.SEEDS, {}).get(str(seed))
            runs.append(SeedRun(seed, folder, sweep.arguments(claim.number, claim.point, seed), log, history, value))
        trial = RunningTrial(claim, runs, known.get(attributes.PRUNED_AT), claim.reported)
        self._trials.append(trial)
        try:
            trial.metric = check_point(sweep, claim.point)
        except UserError as error:
            trial.error = str(error)

    # ---- following ----

    def _follow(self, trial: RunningTrial) -> None:
        """Look after the runs of a trial, and end the trial once they have all ended."""
        for run in trial.runs:
            if run.attempt is None:
                continue
            status = run.attempt.poll()  # before the rows are read: an ended run adds none
            self._read(trial, run, run.attempt)
            if status is not None:
                attempt, run.attempt = run.attempt, None
                self._run_ended(trial, run, attempt, status)
        if trial.is_ending and trial.attempts:
            for attempt in trial.attempts:
                attempt.ask_to_stop()
        elif trial.is_ending or all(run.value is not None for run in trial.runs):
            self._end(trial)

    def _read(self, trial: RunningTrial, run: SeedRun, attempt: Attempt) -> None:
        """Read what a run has logged since the last time. Report the first seed's to the pruner."""
        try:
            changed = run.history.refresh()
        except UserError as error:  # a damaged row; a resumed run drops it
            attempt.error = str(error)
            attempt.ask_to_stop()
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

    def _run_ended(self, trial: RunningTrial, run: SeedRun, attempt: Attempt, status: int) -> None:
        last = run.history.rows[-1] if run.history.rows else {}
        trial.note(attributes.STEPS, run, last.get("step", 0))
        trial.note(attributes.SECONDS, run, last.get("time_s", 0))
        if trial.is_ending:
            return
        if status == 0 and attempt.error is None and not (run.folder / "stopped").exists():
            value = self._last_value(trial, run)
            if not math.isfinite(value):  # a second start would find the same
                trial.error = f"{trial.metric} is {value}"
                return
            run.value = value
            trial.note(attributes.SEEDS, run, value)
            return
        reason, is_mistake = _reason(run.log, attempt.log_begin, status)
        reason = attempt.error or reason
        num_failures = trial.claim.trial.user_attrs.get(attributes.FAILURES, {}).get(str(run.seed), 0) + 1
        trial.note(attributes.FAILURES, run, num_failures)
        # A second start would find the same mistake.
        if num_failures < _MOST_FAILURES and not (is_mistake and not run.history.rows):
            self._progress.say(f"trial {trial.claim.number}: failed, trying it once more ({reason})")
        else:
            trial.error = reason

    def _last_value(self, trial: RunningTrial, run: SeedRun) -> float:
        """Return the last value of the metric in a run that has ended well.

        Raises:
            UserError: There is none. Then no run of the sweep would have one.
        """
        values = [row[trial.metric] for row in run.history.rows if trial.metric in row]
        if not values:
            names = sorted({name for row in run.history.rows for name in row} - {"step"})
            raise UserError(
                f"{run.folder} has ended without {trial.metric} (sweep.metric); "
                f"it logged {', '.join(names) or 'nothing'}"
            )
        return float(values[-1])

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
        trials = self._study.trials()
        seconds = sum(claim.trial.user_attrs.get(attributes.SECONDS, {}).values())
        line = f"trial {claim.number}: {what} after {tqdm.format_interval(round(seconds))}  {shown_point(claim.point)}"
        self._progress.trial_ended(line, trials, best_of(self._sweep, trials))
        if failed_at_once >= _MOST_FAILED_AT_ONCE:
            raise UserError(
                f"the last {failed_at_once} trials failed before they logged a step ({trial.error}); correct "
                "the reason, and start the sweep again with sweep.retry_failed=true"
            )

    # ---- stopping ----

    def _stop_runs(self) -> None:
        """Stop all runs, and wait for them. Their trials stay open for the next start."""
        attempts = [attempt for trial in self._trials for attempt in trial.attempts]
        for attempt in attempts:
            attempt.ask_to_stop()
        while any([attempt.poll() is None for attempt in attempts]):  # a list: each of them may be late
            time.sleep(_POLL_S / 5)
        for trial in self._trials:
            self._study.give_back(trial.claim)


def _reason(log: Path, begin: int, status: int) -> tuple[str, bool]:
    """Return why a run has ended, in one line, and whether it was a mistake and no fault.

    The reason is what the run said last, or its exit status. torchrun and Slurm change the status.
    """
    try:
        with open(log, "rb") as file:
            file.seek(begin)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:  # somebody removed it
        lines = []
    told = [line for line in lines if line.startswith(("error: ", "fault on rank "))]
    if told:
        return told[-1].removeprefix("error: ")[:500], told[-1].startswith("error: ")
    if status < 0:
        return f"killed by signal {-status}, see {log}", False
    return f"status {status}, see {log}" if status else f"stopped by somebody else, see {log}", False
