"""Say what a sweep has found: a table of its trials, and the best of them."""

import math
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from search import study as attributes
from search.launchers import build_launcher
from search.space import Point
from search.study import Study
from search.sweep import Sweep
from sharing.recipe import shown_value
from utils.errors import UserError
from utils.overrides import as_override
from utils.programs import command_words
from utils.run.history import METRICS_FILE, History, read_run_config
from utils.text import for_shell


@dataclass(frozen=True)
class Best:
    """A trial that has ended with a value, and is among the best.

    Attributes:
        values: of each seed.
    """

    number: int
    value: float
    values: dict[int, float]
    point: Point

    def __str__(self) -> str:
        return f"{self.value:.4f} (trial {self.number})"


def best_first(sweep: Sweep, trials: Sequence[FrozenTrial]) -> list[Best]:
    """Return the trials that have a value, the best first. Of equals, the earlier comes first."""
    found = []
    for trial in trials:
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            values = {int(seed): value for seed, value in trial.user_attrs.get(attributes.SEEDS, {}).items()}
            found.append(Best(trial.number, trial.value, values, sweep.space.point_of(trial)))
    sign = -1 if sweep.config.direction == "maximize" else 1
    return sorted(found, key=lambda best: (sign * best.value, best.number))


def num_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 trial or 2 trials."""
    return f"{number} {noun}{'s' * (number != 1)}"


def best_of(sweep: Sweep, trials: Sequence[FrozenTrial]) -> Best | None:
    """Return the best of the trials that have a value, or None."""
    return next(iter(best_first(sweep, trials)), None)


def require_best_first(study: Study) -> list[Best]:
    """Return the trials that have a value, the best first. Raise UserError if none has ended."""
    found = best_first(study.sweep, study.trials())
    if not found:
        raise UserError(f"no trial of {study.sweep.path} has ended with a value yet; status shows them")
    return found


def status_page(study: Study) -> str:
    """Return a table of all trials, with a line that counts them and names the best.

    The complete trials come first, with the best at the top. Those that run now come last, next to
    where a terminal shows the end of the page.
    """
    sweep, trials = study.sweep, study.trials()
    best = best_of(sweep, trials)
    found = {key for trial in trials for key in sweep.space.point_of(trial)}
    keys = [key for key in sweep.keys if key in found]
    sign, order = -1 if sweep.config.direction == "maximize" else 1, [*_STATES]

    def place(trial: FrozenTrial) -> tuple[int, float, int]:
        value = _value_of(trial)
        if value is None or math.isnan(value):  # comparing with NaN would leave any order
            value = sign * math.inf
        return order.index(trial.state), sign * value, trial.number

    rows = [_row(sweep, trial, keys, best) for trial in sorted(trials, key=place)]
    lines = _table(["", "trial", "state", sweep.config.metric, "step", "time", *keys], rows)
    states = {state: sum(trial.state == state for trial in trials) for state in TrialState}
    summary = (
        f"{sweep.path}: {len(trials)} of {num_of(sweep.num_trials, 'trial')}; {states[TrialState.COMPLETE]} complete, "
        f"{states[TrialState.PRUNED]} pruned, {states[TrialState.FAIL]} failed, {states[TrialState.RUNNING]} begun; "
        f"best {best or 'none yet'}"
    )
    return "\n".join([*lines, "", summary])


_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "begun",
}


def _value_of(trial: FrozenTrial) -> float | None:
    """Return the value of a trial, or the last one that it has reported."""
    if trial.value is None and trial.intermediate_values:
        return trial.intermediate_values[max(trial.intermediate_values)]
    return trial.value


def _row(sweep: Sweep, trial: FrozenTrial, keys: list[str], best: Best | None) -> list[str]:
    """Return the cells of a trial. A failed one has its error behind the last column."""
    noted, point = trial.user_attrs, sweep.space.point_of(trial)
    value, steps = _value_of(trial), noted.get(attributes.STEPS, {}).values()
    step = max(steps, default=0)
    if trial.state == TrialState.RUNNING:
        for seed in sweep.config.seeds:
            history = History(sweep.run_folder(trial.number, seed) / METRICS_FILE)
            with suppress(UserError):  # a damaged row, which the run drops when it resumes
                history.refresh()
            step = max([step, *(row["step"] for row in history.rows[-1:])])
    seconds = sum(noted.get(attributes.SECONDS, {}).values())
    return [
        "*" if best is not None and trial.number == best.number else "",
        str(trial.number),
        _STATES[trial.state],
        "" if value is None else f"{value:.4f}",
        str(step) if step else "",
        "" if not seconds else tqdm.format_interval(round(seconds)),
        *(shown_value(point[key]) if key in point else "" for key in keys),
        *([noted[attributes.ERROR]] if attributes.ERROR in noted else []),
    ]


def _table(names: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table. What stands behind the last column is not padded."""
    widths = [max(len(row[column]) for row in [names, *rows]) for column in range(len(names))]
    return ["  ".join([*map(str.ljust, row, widths), *row[len(widths) :]]).rstrip() for row in [names, *rows]]


def best_page(study: Study) -> str:
    """Return the best trial: its value, its folders, and the command line that trains it again."""
    sweep, best = study.sweep, require_best_first(study)[0]
    seeds = sweep.config.seeds
    launcher = build_launcher(sweep.config.launcher)
    overrides = sweep.overrides(best.point, seeds[0])
    started_in = read_run_config(sweep.run_folder(best.number, seeds[0])).get("started_in")
    if started_in not in (None, os.getcwd()):  # the data may have a relative path
        overrides.append(f"started_in={as_override(started_in)}")
    lines = [f"# trial {best.number}: {measured(sweep, best)}"]
    lines += [f"# {sweep.run_folder(best.number, seed)}" for seed in seeds]
    return "\n".join([*lines, launcher.shown(overrides)])


def measured(sweep: Sweep, best: Best) -> str:
    """Return the metric and its value, with the spread over seeds and the value of each."""
    values = [best.values[seed] for seed in sweep.config.seeds if seed in best.values]
    value = f"{sweep.config.metric} {best.value:.4f}"
    if len(values) < 2:
        return value
    each = ", ".join(f"{one:.4f}" for one in values)
    return f"{value} ± {statistics.stdev(values):.4f} over {len(values)} seeds ({each})"


def finished_page(study: Study, *, done: bool) -> str:
    """Return what a process prints when it leaves a sweep."""
    lines = [] if done else [f"{study.sweep.path} is not done; the same command goes on with it"]
    if best_of(study.sweep, study.trials()) is None:
        command = for_shell([*command_words("hrm-sweep"), "status", str(study.sweep.path)])
        return "\n".join([*lines, f"no trial of {study.sweep.path} has a value; {command}"])
    return "\n".join([*lines, best_page(study)])
