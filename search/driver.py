"""Run a sweep: claim trials, start their runs, follow their metrics, and store the results."""

import math
import sys
import time
from contextlib import suppress
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState
from tqdm import tqdm

from dataset.tasks.base import count
from records.folder import Launched
from records.metrics.row_file import keep_rows
from search import study as attributes
from search.check import check_point
from search.launchers import ProcessLauncher, SeedRun, runs_at_once
from search.report import shown_best
from search.slurm import SlurmLauncher
from search.space import shown_point
from search.study import RunningTrial, Study
from utils.errors import UserError
from utils.files import file_errors
from utils.stop import StopSignal

_POLL_S = 0.5
# A run that was asked to stop saves a checkpoint first.
_STOPS_WITHIN_S = 120.0
_CLAIM_EVERY_S = 5.0  # how often the study is asked for more trials after it had none
_MOST_FAILURES = 2  # of one run
# So many trials in a row without a step have a common reason, such as data that are gone.
_MOST_FAILED_AT_ONCE = 3


class Driver:
    """Runs trials of a sweep until the budget is spent, or until it is asked to stop.

    It prints a line for each trial that ends. On a terminal, a bar over all trials stands below.
    """

    def __init__(self, study: Study, stop: StopSignal) -> None:
        self._sweep, self._study, self._stop = study.sweep, study, stop
        config = study.sweep.config.launcher
        self._launcher = SlurmLauncher(config) if config.name == "slurm" else ProcessLauncher(config)
        self._num_places = runs_at_once(config)
        self._trials: list[RunningTrial] = []
        self._began, self._num_before = time.monotonic(), self._num_in(*attributes.FINISHED)
        self._ends = self._began + 3600 * (study.sweep.config.hours or math.inf)
        tqdm.monitor_interval = 0  # its thread would live through the fork of each run
        bar, num_trials = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}", study.sweep.num_trials
        self._bar: tqdm[Any] = tqdm(total=num_trials, dynamic_ncols=True, bar_format=bar, disable=None)
        self._failed_at_once = 0  # trials in a row that failed before they logged a step
        self._claim_at = self._keep_at = 0.0  # when to turn to the study again

    def run(self) -> bool:
        """Run trials until none is left, here and in other processes.

        Return whether the sweep is done. Otherwise the same command goes on with it.
        """
        with file_errors():
            (self._sweep.path / "logs").mkdir(exist_ok=True)
        told_elsewhere = False
        try:
            while not self._stop.requested() and time.monotonic() < self._ends:
                self._start_runs()
                if not self._trials:
                    if (num_elsewhere := self._num_in(TrialState.RUNNING)) == 0:
                        return True
                    if not told_elsewhere:
                        self._say(f"waiting for {count(num_elsewhere, 'trial')} of other processes")
                        told_elsewhere = True
                for trial in [*self._trials]:
                    try:
                        self._follow(trial)
                    except UpdateFinishedTrialError:  # this process slept for long, and another one has ended it
                        self._trials.remove(trial)
                time.sleep(_POLL_S)
            reason = self._stop.name or f"sweep.hours={self._sweep.config.hours}"
            runs = count(sum(len(trial.going) for trial in self._trials), "run")
            self._say(f"{reason}: stopping {runs}; the same command goes on with them")
            return False
        finally:
            self._stop_runs()
            self._bar.close()

    # ---- starting ----

    def _start_runs(self) -> None:
        """Start runs while there is a place for them: first those of trials that have begun."""
        taken = {run.place for trial in self._trials for run in trial.going}
        places = [place for place in range(self._num_places) if place not in taken]
        starting: list[SeedRun] = []
        self._keep()
        while len(starting) < len(places):
            ready = (run for trial in self._trials for run in self._ready(trial) if run not in starting)
            if (run := next(ready, None)) is not None:
                run.place = places[len(starting)]
                run.log_begin = run.log.stat().st_size if run.log.is_file() else 0
                run.stop_by = run.error = None
                starting.append(run)
            elif time.monotonic() < self._claim_at:
                break
            elif (trial := self._study.claim()) is not None:
                self._begin(trial)
                self._keep()  # many points may be refused in turn
            else:
                self._claim_at = time.monotonic() + _CLAIM_EVERY_S
        self._launcher.start(starting)

    def _keep(self) -> None:
        """Record the heartbeat of the trials that go on here, and show those of all processes."""
        if time.monotonic() >= self._keep_at:
            self._keep_at = time.monotonic() + attributes.HEARTBEAT_S
            self._study.keep(self._trials)
            self.show()

    def _ready(self, trial: RunningTrial) -> list[SeedRun]:
        """Return the runs of a trial that may start. A pruner watches the first seed alone."""
        if trial.is_ending:
            return []
        prunes = self._sweep.config.pruner.name != "none"
        runs = trial.runs[:1] if prunes and trial.runs[0].value is None else trial.runs
        waiting = (run for run in runs if run.value is None and run.job is None)
        return [run for run in waiting if self._launcher.may_start(run)]

    def _begin(self, trial: RunningTrial) -> None:
        """Begin or go on with a trial. It ends at once if the config refuses its point."""
        sweep, known, number = self._sweep, trial.optuna.user_attrs, trial.optuna.number
        trial.pruned_at = known.get(attributes.PRUNED_AT)
        for seed in sweep.config.seeds:
            folder = sweep.run_folder(number, seed)
            arguments, log = sweep.arguments(number, trial.point, seed), sweep.path / "logs" / f"{folder.name}.log"
            value = known.get(attributes.SEEDS, {}).get(str(seed))
            trial.runs.append(SeedRun([*arguments, "resume=auto"], folder, log, seed, value))
        self._trials.append(trial)
        try:
            trial.metric = check_point(sweep, trial.point)
        except UserError as error:
            trial.error = str(error)

    # ---- following ----

    def _follow(self, trial: RunningTrial) -> None:
        """Look after the runs of a trial, and end the trial once they have all ended."""
        for run in trial.going:
            status = _poll(run)  # before the rows are read: an ended run adds none
            try:
                if run.history.refresh() and run is trial.runs[0] and not trial.is_ending:
                    self._report(trial, run)
            except UserError as error:  # a damaged row
                run.error = str(error)
                _ask_to_stop(run)
            if status is not None:
                run.job = None
                self._run_ended(trial, run, status)
        if trial.is_ending and trial.going:
            for run in trial.going:
                _ask_to_stop(run)
        elif trial.is_ending or all(run.value is not None for run in trial.runs):
            self._end(trial)

    def _report(self, trial: RunningTrial, run: SeedRun) -> None:
        """Report to the pruner what the first seed has logged since the last time."""
        launched = Launched.read(run.folder)
        for row in run.history.rows:
            value, step = row.get(trial.metric), row["step"]
            if step > trial.reported and isinstance(value, int | float):
                trial.reported = step
                trial.optuna.report(float(value), step)
                # Pruning at its last step would only take the value of a trial with one run.
                is_last = launched is not None and step >= launched.last_step and len(trial.runs) == 1
                if not is_last and trial.optuna.should_prune():
                    trial.pruned_at = step
                    trial.optuna.set_user_attr(attributes.PRUNED_AT, step)
                    return

    def _run_ended(self, trial: RunningTrial, run: SeedRun, status: int) -> None:
        """Note the value of a run, or why it failed. Raise UserError if it lacks the metric."""
        rows = run.history.rows
        last = rows[-1] if rows else {}
        trial.note(attributes.STEPS, run, last.get("step", 0))
        trial.note(attributes.SECONDS, run, last.get("time_s", 0))
        if trial.is_ending:
            return
        if run.error is not None:  # the next start finds only whole rows
            with suppress(OSError):
                keep_rows(run.history.file, sys.maxsize)
        elif status == 0 and not (run.folder / "stopped").exists():
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
        reason, is_mistake = (run.error, False) if run.error else _reason(run, status)
        num_failures = trial.optuna.user_attrs.get(attributes.FAILURES, {}).get(str(run.seed), 0) + 1
        trial.note(attributes.FAILURES, run, num_failures)
        # A second start would find the same mistake.
        if num_failures < _MOST_FAILURES and not (is_mistake and not rows):
            self._say(f"trial {trial.optuna.number}: failed, trying it once more ({reason})")
        else:
            trial.error = reason

    def _end(self, trial: RunningTrial) -> None:
        """Tell the study the result of a trial whose runs have all ended."""
        study = self._study.optuna
        if trial.error is not None:
            trial.optuna.set_user_attr(attributes.ERROR, trial.error)
            study.tell(trial.optuna, state=TrialState.FAIL)
            what = f"failed ({trial.error})"
        elif trial.pruned_at is not None:
            study.tell(trial.optuna, state=TrialState.PRUNED)
            what = f"pruned at step {trial.pruned_at}"
        else:
            values = [run.value for run in trial.runs if run.value is not None]
            mean = sum(values) / len(values)
            study.tell(trial.optuna, mean)
            what = f"{trial.metric.rsplit('/', 1)[-1]} {mean:.4f}"
        never_trained = trial.error and trial.metric and not any(run.history.rows for run in trial.runs)
        self._failed_at_once = self._failed_at_once + 1 if never_trained else 0
        self._trials.remove(trial)
        took = tqdm.format_interval(round(sum(trial.optuna.user_attrs.get(attributes.SECONDS, {}).values())))
        self.show(f"trial {trial.optuna.number}: {what} after {took}  {shown_point(trial.point)}")
        if self._failed_at_once >= _MOST_FAILED_AT_ONCE:
            raise UserError(
                f"the last {self._failed_at_once} trials failed before they logged a step ({trial.error}); correct "
                "the reason, and start the sweep again with sweep.retry_failed=true"
            )

    # ---- telling ----

    def _num_in(self, *states: TrialState) -> int:
        return sum(trial.state in states for trial in self._study.trials())

    def show(self, line: str = "") -> None:
        """Print a line, and move the bar to the number of trials that have ended in any process."""
        total, num_finished, left = self._sweep.num_trials, self._num_in(*attributes.FINISHED), "time left unknown"
        if num_finished > self._num_before:
            seconds_of_trial = (time.monotonic() - self._began) / (num_finished - self._num_before)
            left = f"{tqdm.format_interval(round(seconds_of_trial * max(0, total - num_finished)))} left"
        outlook = f"best {shown_best(self._sweep, self._study.trials())}, {left}"
        if line:
            self._say(f"{line}  [{num_finished}/{total}, {outlook}]" if self._bar.disable else line)
        self._bar.set_postfix_str(f"{self._num_in(TrialState.RUNNING)} running, {outlook}", refresh=False)
        self._bar.n = num_finished
        self._bar.refresh()

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the sweep goes on when its terminal is gone
            self._bar.write(text, file=sys.stderr)

    # ---- stopping ----

    def _stop_runs(self) -> None:
        """Stop all runs, and wait for them. Their trials stay open for the next start."""
        runs = [run for trial in self._trials for run in trial.going]
        for run in runs:
            _ask_to_stop(run)
        while any([_poll(run) is None for run in runs]):  # a list: each of them may be late
            time.sleep(_POLL_S / 5)
        for trial in self._trials:
            self._study.give_back(trial)


def _ask_to_stop(run: SeedRun) -> None:
    if run.stop_by is None and run.job is not None:
        run.stop_by = time.monotonic() + _STOPS_WITHIN_S
        run.job.terminate()


def _poll(run: SeedRun) -> int | None:
    """Return the exit status, or None while the job goes on. Kill it if it stops too late."""
    assert run.job is not None
    if run.stop_by is not None and time.monotonic() > run.stop_by:
        run.job.kill()
        run.stop_by = math.inf
    return run.job.poll()


def _reason(run: SeedRun, status: int) -> tuple[str, bool]:
    """Return why a run has ended, in one line, and whether it was a mistake and no fault.

    The reason is what the run said last, or its exit status. torchrun and Slurm change the status.
    """
    log = run.log
    lines = log.read_bytes()[run.log_begin :].decode("utf-8", errors="replace").splitlines() if log.is_file() else []
    told = [line for line in lines if line.startswith(("error: ", "fault on rank "))]
    if told:
        return told[-1].removeprefix("error: ")[:500], told[-1].startswith("error: ")
    what = f"killed by signal {-status}" if status < 0 else f"status {status}" if status else "stopped by somebody else"
    return f"{what}, see {log}", False
