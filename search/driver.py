"""Run a sweep: claim trials, start their runs, follow their metrics, and store the results."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import TrialState
from tqdm import tqdm

from search import study as attributes
from search.check import check_point
from search.launchers import Job, Launcher, Start
from search.progress import Progress
from search.report import best_of, num_of
from search.space import shown_point
from search.study import FINISHED, Claim, Study
from search.sweep import Sweep
from utils.errors import UserError
from utils.files import file_errors
from utils.run.history import METRICS_FILE, History
from utils.run.launched import Launched
from utils.run.stop import StopSignal

_POLL_S = 0.5
# A run that was asked to stop saves a checkpoint first.
_STOPS_WITHIN_S = 120.0
# How often the study is asked for more trials after it had none, and for the state of the bar.
_CLAIM_EVERY_S, _SHOW_EVERY_S = 5.0, 2.0
_MOST_FAILURES = 2  # of one run
# So many trials in a row without a step have a common reason, such as data that are gone.
_MOST_FAILED_AT_ONCE = 3


@dataclass
class SeedRun:
    """The run of one seed of a trial."""

    seed: int
    folder: Path
    arguments: list[str]
    history: History
    job: Job | None = None
    place: int | None = None
    value: float | None = None  # of the metric, once the run has ended
    log_begin: int = 0  # where the output of this start begins in the log
    stop_by: float | None = None  # when it is killed if it does not stop
    error: str | None = None  # why it is stopped although nobody asked for it
    told_lock: bool = False  # whether a line said that its folder is in use


@dataclass
class RunningTrial:
    """A trial that this process runs."""

    claim: Claim
    metric: str
    runs: list[SeedRun]
    error: str | None = None  # why it ends without a value
    pruned_at: int | None = None
    reported: int = -1  # the last step whose value the study knows

    @property
    def is_ending(self) -> bool:
        return self.error is not None or self.pruned_at is not None


class Driver:
    """Runs trials of a sweep until the budget is spent, or until it is asked to stop."""

    def __init__(self, sweep: Sweep, study: Study, launcher: Launcher, stop: StopSignal) -> None:
        self._sweep, self._study, self._launcher, self._stop = sweep, study, launcher, stop
        self._trials: list[RunningTrial] = []
        self._ends = time.monotonic() + 3600 * sweep.config.hours if sweep.config.hours else math.inf
        self._progress = Progress(sweep.num_trials, sum(each.state in FINISHED for each in study.trials()))
        self._logs = sweep.path / "logs"
        self._failed_at_once = 0  # trials in a row that failed before they logged a step
        self._claim_at = self._show_at = 0.0  # when to ask the study again

    def run(self) -> bool:
        """Run trials until none is left.

        Returns:
            Whether the sweep is done. Otherwise the same command goes on with it.

        Raises:
            UserError: The database fails, or a run does not log the metric. Runs are stopped first.
        """
        with file_errors():
            self._logs.mkdir(exist_ok=True)
        try:
            while not self._stop.requested() and time.monotonic() < self._ends:
                self._start_runs()
                if not self._trials:
                    return True
                for trial in [*self._trials]:
                    self._follow(trial)
                self._show()
                time.sleep(_POLL_S)
            reason = self._stop.name or f"sweep.hours={self._sweep.config.hours}"
            runs = num_of(len(self._jobs()), "run")
            self._progress.say(f"{reason}: stopping {runs}; the same command goes on with them")
            return False
        finally:
            self._stop_runs()
            self._progress.close()

    # ---- starting ----

    def _start_runs(self) -> None:
        """Start runs while there is a place for them: first those of trials that have begun."""
        starting: list[SeedRun] = []
        while (place := self._free_place()) is not None:
            ready = next((run for trial in self._trials for run in self._ready(trial)), None)
            if ready is not None:
                ready.place = place
                starting.append(ready)
                continue
            waits = self._trials and time.monotonic() < self._claim_at
            if waits or (claim := self._study.claim(self._stop)) is None:
                self._claim_at = max(self._claim_at, time.monotonic() + _CLAIM_EVERY_S)
                break
            self._begin(claim)
        starts = []
        for run in starting:
            log = self._log_of(run)
            run.log_begin = log.stat().st_size if log.is_file() else 0
            run.stop_by = run.error = None
            assert run.place is not None
            starts.append(Start([*run.arguments, "resume=auto"], log, run.place))
        for run, job in zip(starting, self._launcher.start(starts), strict=True):
            run.job = job

    def _log_of(self, run: SeedRun) -> Path:
        return self._logs / f"{run.folder.name}.log"

    def _free_place(self) -> int | None:
        taken = {run.place for trial in self._trials for run in trial.runs if run.place is not None}
        return next((place for place in range(self._launcher.at_once) if place not in taken), None)

    def _ready(self, trial: RunningTrial) -> list[SeedRun]:
        """Return the runs of a trial that may start. A pruner watches the first seed alone."""
        if trial.is_ending:
            return []
        prunes = self._sweep.config.pruner.name != "none"
        runs = trial.runs[:1] if prunes and trial.runs[0].value is None else trial.runs
        waiting = [run for run in runs if run.value is None and run.place is None]
        free = [run for run in waiting if self._launcher.may_start(run.folder, self._log_of(run))]
        for run in waiting:
            if run not in free and not run.told_lock:
                self._progress.say(f"{run.folder} is in use by another process; waiting for its end")
                run.told_lock = True
        return free

    def _begin(self, claim: Claim) -> None:
        """Begin or go on with a trial. It ends at once if the config refuses its point."""
        sweep, known = self._sweep, claim.attributes
        seeds = known.get(attributes.SEEDS, {})
        runs = []
        for seed in sweep.config.seeds:
            folder = sweep.run_folder(claim.number, seed)
            arguments = sweep.arguments(claim.number, claim.point, seed)
            history = History(folder / METRICS_FILE)
            runs.append(SeedRun(seed, folder, arguments, history, value=seeds.get(str(seed))))
        trial = RunningTrial(claim, "", runs, pruned_at=known.get(attributes.PRUNED_AT))
        trial.reported = claim.reported
        self._trials.append(trial)
        try:
            trial.metric = check_point(sweep, claim.point)
        except UserError as error:
            trial.error = str(error)

    # ---- following ----

    def _follow(self, trial: RunningTrial) -> None:
        """Look after the runs of a trial, and end the trial once they have all ended."""
        for index, run in enumerate(trial.runs):
            if run.job is None:
                continue
            self._kill_if_late(run)
            status = run.job.poll()  # before the rows are read: an ended run adds none
            self._read(trial, run, is_first=index == 0)
            if status is not None:
                run.job = run.place = None
                self._run_ended(trial, run, status)
        if trial.is_ending and any(run.job is not None for run in trial.runs):
            for run in trial.runs:
                self._ask_to_stop(run)
        elif trial.is_ending or all(run.value is not None for run in trial.runs):
            self._end(trial)

    def _read(self, trial: RunningTrial, run: SeedRun, *, is_first: bool) -> None:
        """Read what a run has logged since the last time. Report the first seed's to the pruner."""
        try:
            changed = run.history.refresh()
        except UserError as error:  # a damaged row; a resumed run drops it
            run.error = str(error)
            self._ask_to_stop(run)
            return
        if not (changed and is_first) or trial.is_ending:
            return
        for row in run.history.rows:
            value, step = row.get(trial.metric), row["step"]
            if step > trial.reported and isinstance(value, int | float):
                trial.reported = step
                trial.claim.trial.report(float(value), step)
                launched = Launched.read(run.folder)
                is_last = launched is not None and step >= launched.last_step and len(trial.runs) == 1
                if not is_last and trial.claim.trial.should_prune():
                    self._prune(trial, step)
                    return

    def _prune(self, trial: RunningTrial, step: int | None) -> None:
        trial.pruned_at = step
        trial.claim.trial.set_user_attr(attributes.PRUNED_AT, step)

    def _run_ended(self, trial: RunningTrial, run: SeedRun, status: int) -> None:
        self._note(trial, run)
        is_whole = status == 0 and not (run.folder / "stopped").exists()
        if trial.pruned_at is not None and is_whole and len(trial.runs) == 1:
            self._prune(trial, None)  # the run ended before it could be stopped: its value counts
        if trial.is_ending:
            return
        if is_whole and run.error is None:
            value = self._last_value(trial, run)
            if not math.isfinite(value):  # a second start would find the same
                trial.error = f"{trial.metric} is {value}"
                return
            run.value = value
            known = {str(each.seed): each.value for each in trial.runs if each.value is not None}
            trial.claim.trial.set_user_attr(attributes.SEEDS, known)
            return
        reason, is_mistake = _reason(self._log_of(run), run.log_begin, status)
        reason = run.error or reason
        failures = dict(trial.claim.trial.user_attrs.get(attributes.FAILURES, {}))
        failures[str(run.seed)] = failures.get(str(run.seed), 0) + 1
        trial.claim.trial.set_user_attr(attributes.FAILURES, failures)
        if is_mistake and not run.history.rows:  # a second start would find the same mistake
            trial.error = reason
        elif failures[str(run.seed)] < _MOST_FAILURES:
            self._progress.say(f"trial {trial.claim.number}: failed, trying it once more ({reason})")
        else:
            trial.error = reason

    def _note(self, trial: RunningTrial, run: SeedRun) -> None:
        """Write into the study how far a run has come."""
        last = run.history.rows[-1] if run.history.rows else {}
        for attribute, name in ((attributes.STEPS, "step"), (attributes.SECONDS, "time_s")):
            by_seed = {**trial.claim.trial.user_attrs.get(attribute, {}), str(run.seed): last.get(name, 0)}
            trial.claim.trial.set_user_attr(attribute, by_seed)

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
        claim, values = trial.claim, [run.value for run in trial.runs if run.value is not None]
        mean = sum(values) / len(values) if values else math.nan
        if trial.error is not None:
            claim.trial.set_user_attr(attributes.ERROR, trial.error)
            self._study.optuna.tell(claim.trial, state=TrialState.FAIL)
            what = f"failed ({trial.error})"
            never_trained = bool(trial.metric) and not any(run.history.rows for run in trial.runs)
            self._failed_at_once = self._failed_at_once + 1 if never_trained else 0
        elif trial.pruned_at is not None:
            self._study.optuna.tell(claim.trial, state=TrialState.PRUNED)
            what = f"pruned at step {trial.pruned_at}"
        else:
            self._study.optuna.tell(claim.trial, mean)
            what = f"{trial.metric.rsplit('/', 1)[-1]} {mean:.4f}"
            self._failed_at_once = 0
        self._trials.remove(trial)
        trials = self._study.trials()
        finished = sum(each.state in FINISHED for each in trials)
        seconds = sum(claim.trial.user_attrs.get(attributes.SECONDS, {}).values())
        line = f"trial {claim.number}: {what} after {tqdm.format_interval(round(seconds))}  {shown_point(claim.point)}"
        self._progress.trial_ended(line, finished, best_of(self._sweep, trials))
        if self._failed_at_once >= _MOST_FAILED_AT_ONCE:
            raise UserError(
                f"the last {self._failed_at_once} trials failed before they logged a step ({trial.error}); correct "
                "the reason, and start the sweep again with sweep.retry_failed=true"
            )

    def _show(self) -> None:
        if time.monotonic() < self._show_at:
            return
        self._show_at = time.monotonic() + _SHOW_EVERY_S
        trials = self._study.trials()
        running = sum(each.state == TrialState.RUNNING for each in trials)
        self._progress.show(len(trials) - running, running, best_of(self._sweep, trials))

    # ---- stopping ----

    def _jobs(self) -> list[SeedRun]:
        return [run for trial in self._trials for run in trial.runs if run.job is not None]

    def _ask_to_stop(self, run: SeedRun) -> None:
        if run.job is not None and run.stop_by is None:
            run.stop_by = time.monotonic() + _STOPS_WITHIN_S
            run.job.stop()

    def _kill_if_late(self, run: SeedRun) -> None:
        if run.job is not None and run.stop_by is not None and time.monotonic() > run.stop_by:
            run.job.kill()

    def _stop_runs(self) -> None:
        """Stop all runs, and wait for them. Their trials stay open for the next start."""
        for run in self._jobs():
            self._ask_to_stop(run)
        while any(run.job is not None and run.job.poll() is None for run in self._jobs()):
            for run in self._jobs():
                self._kill_if_late(run)
            time.sleep(_POLL_S / 5)


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
