"""What the plots of a sweep show, as numbers: importances, axes of parameters, and curves.

Optuna (5.0.0) draws a figure for the names in its study, and a key with several conditions has
several names there. Its slices leave a trial out of the panels of the parameters that the trial
lacks, and put all panels into one row. Here each key of the config is one axis, and a trial without
the key has a place of its own there.
"""
# T = complete trials, P = points of a curve

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.config import Entry, Value
from search.report import Best, best_first, logged_rows
from search.space import shown_point
from search.study import Study
from search.sweep import Sweep
from sharing.recipe import shown_value
from utils.run.status import is_number
from viewer.curves import Group, LoggedRun, Panel, panels_of, x_in_steps

# More values than this are shown on a line of numbers instead of one place for each.
_MOST_PLACES = 8
# PED-ANOVA compares the best trials with all. Its authors advise at least 5 in the first group.
_LEAST_IN_TOP, _TOP_SHARE, _LEAST_TRIALS = 5, 0.1, 10
# A loss tells more about the course of a run than a few evaluations.
_LOSS = "train/lm_loss"


@dataclass(frozen=True)
class Importances:
    """How much each parameter decides whether a trial is among the best.

    Attributes:
        shares: by the name in the study, the largest first. Their sum is 1.
        num_best: how many trials are among the best. Trials with equal values count alike.
    """

    shares: dict[str, float]
    num_best: int
    num_complete: int
    num_pruned: int


@dataclass(frozen=True)
class Axis:
    """A key of the config, and the place of each trial on its axis.

    Attributes:
        place_T: float64. Numbers of a logarithmic axis have the places of their logarithms.
            Trials that lack the key stand at the tick "not set".
        ticks: labelled places, from the lowest to the highest.
        is_list: whether the places are those of a list, where trials with equal values meet.
    """

    key: str
    place_T: np.ndarray
    ticks: list[tuple[float, str]]
    is_list: bool

    @property
    def ends(self) -> tuple[float, float]:
        """Two places between which all trials and ticks lie."""
        places = [*self.place_T.tolist(), *(place for place, _ in self.ticks)]
        low, high = min(places), max(places)
        return (low, high) if low < high else (low - 0.5, high + 0.5)


@dataclass(frozen=True)
class Figures:
    """Everything that is drawn of a sweep.

    Attributes:
        metric: its name in metrics.jsonl.
        num_trials: how many have begun.
        complete: the trials that have a value, the best first.
        axes: of the keys, with places for the complete trials in this order.
        value_axis: of the metric.
        panels: the curves of all trials that have logged something, the best in front.
        states: of the trials, by the labels of their curves.
    """

    sweep: Sweep
    metric: str
    num_trials: int
    complete: list[Best]
    axes: list[Axis]
    value_axis: Axis
    importances: Importances | None
    panels: list[Panel]
    states: dict[str, TrialState]


def figures_of(study: Study) -> Figures:
    """Read the study and the metrics of its runs."""
    sweep, trials = study.sweep, study.trials()
    complete = best_first(sweep, trials)
    front = [best.number for best in complete[:1]]
    # The curves of later trials cover those of earlier ones.
    ordered = sorted(trials, key=lambda trial: (trial.number in front, trial.state == TrialState.COMPLETE))
    groups = [Group(_name(sweep, trial), _runs(sweep, trial), ()) for trial in ordered]
    metric = _full_name(sweep.config.metric, [row for group in groups for run in group.runs for row in run.rows])
    panels = panels_of(groups, [*dict.fromkeys((metric, _LOSS))], "training step", x_in_steps)
    return Figures(
        sweep=sweep,
        metric=metric,
        num_trials=len(trials),
        complete=complete,
        axes=[
            _axis(key, [best.point.get(key, ...) for best in complete], sweep.config.parameters.get(key, []))
            for key in sweep.keys
            if any(key in best.point for best in complete)
        ],
        value_axis=_axis_of_numbers(sweep.config.metric, [best.value for best in complete], is_log=False),
        importances=importances_of(sweep, trials),
        panels=[panel for panel in panels if panel.series],
        states={group.label: trial.state for group, trial in zip(groups, ordered, strict=True)},
    )


# ---- importance --------------------------------------------------------------------------------


def importances_of(sweep: Sweep, trials: Sequence[FrozenTrial]) -> Importances | None:
    """Return the importances by PED-ANOVA; None if the trials or the parameters do not suffice.

    PED-ANOVA asks where the best trials lie in contrast to all others. It needs no value of the
    others, so a pruned trial counts among them, and it knows conditional parameters. fANOVA does
    neither.
    """
    sign = -1.0 if sweep.config.direction == "maximize" else 1.0
    loss = {best.number: sign * best.value for best in best_first(sweep, trials)}
    pruned = {trial.number for trial in trials if trial.state == TrialState.PRUNED}
    used = [trial for trial in trials if trial.number in loss or trial.number in pruned]
    names = {name for trial in used for name in trial.params}
    varied = [name for name in names if len({repr(trial.params.get(name)) for trial in used}) > 1]
    if len(loss) < _LEAST_TRIALS or len(varied) < 2:
        return None
    num_complete, worst = len(loss), max(loss.values()) + 1.0
    loss |= dict.fromkeys(pruned, worst)
    num_best = min(max(_LEAST_IN_TOP, math.ceil(_TOP_SHARE * len(used))), num_complete // 2)
    cutoff = sorted(loss.values())[num_best - 1]
    num_equal_or_better = sum(value <= cutoff for value in loss.values())
    if num_equal_or_better == len(used):
        return None
    study = optuna.create_study(direction="minimize")
    study.add_trials([create_trial(params=t.params, distributions=t.distributions, value=loss[t.number]) for t in used])
    # Optuna rounds the number of the best up, and warns of values that one trial alone has.
    evaluator = PedAnovaImportanceEvaluator(target_quantile=(num_best - 0.5) / len(used))
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        shares = get_param_importances(study, evaluator=evaluator)
    return Importances(shares, num_equal_or_better, num_complete, len(pruned))


# ---- parameters --------------------------------------------------------------------------------


def _axis(key: str, values: Sequence[Value | EllipsisType], entries: Sequence[Entry]) -> Axis:
    """Return the axis of a key: a line for a range or for many numbers, otherwise a list.

    Args:
        values: of each trial; an ellipsis for a trial that lacks the key.
        entries: what the sweep says of the key; nothing if the sweep is a list of points.
    """
    numbers = sorted({value for value in values if is_number(value)})
    if len(numbers) > _MOST_PLACES or (numbers and any(entry.listed() is None for entry in entries)):
        # Points do not tell from which kind of range they were drawn.
        is_wide = not entries and 0 < numbers[0] < numbers[-1] / 10
        is_log = numbers[-1] > 0 and (is_wide or any(entry.log_range is not None for entry in entries))
        return _axis_of_numbers(key, values, is_log=is_log)
    listed = [..., *numbers, *(value for entry in entries for value in entry.listed() or []), *values]
    seen = set(map(repr, values))
    labels = {repr(value): _label(value) for value in listed if repr(value) in seen}
    places = {name: float(place) for place, name in enumerate(labels)}
    place_T = np.array([places[repr(value)] for value in values])
    return Axis(key, place_T, [*zip(places.values(), labels.values(), strict=True)], is_list=True)


def _axis_of_numbers(key: str, values: Sequence[Value | EllipsisType], *, is_log: bool) -> Axis:
    """Return a line of numbers. Below it stand other values, and numbers without a logarithm."""
    numbers = [float(value) if is_number(value) and (value > 0 or not is_log) else None for value in values]
    found = [number for number in numbers if number is not None]
    if not found:
        return Axis(key, np.zeros(0), [], is_list=False)
    scale = math.log10 if is_log else float
    low, high = scale(min(found)), scale(max(found))
    pairs = [*zip(values, numbers, strict=True)]
    others = dict.fromkeys(_label(value) for value, number in pairs if number is None)
    below = {label: low - 0.15 * (high - low or 1.0) * place for place, label in enumerate(others, start=1)}
    place_T = np.array([below[_label(value)] if number is None else scale(number) for value, number in pairs])
    ticks = [(place, label) for label, place in reversed(below.items())]
    ticks += [(scale(tick), f"{tick:g}") for tick in round_ticks(min(found), max(found), is_log=is_log)]
    return Axis(key, place_T, ticks, is_list=False)


def round_ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Return a few round numbers between the ends."""
    if low == high:
        return [low]
    if is_log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
            ticks = [tick for power in powers for digit in digits if low <= (tick := float(f"{digit}e{power}")) <= high]
            if len(ticks) > 2:
                return ticks[:: math.ceil(len(ticks) / 4)]
    power = math.floor(math.log10((high - low) / 2))
    digit = next(digit for digit in (1, 2, 5) if (high - low) / 10.0**power / digit <= 5)
    first, last = (end / 10.0**power / digit for end in (low, high))
    places = range(math.ceil(first - 1e-6), math.floor(last + 1e-6) + 1)  # 0.6 / 0.1 is below 6
    return [float(f"{place * digit}e{power}") for place in places]


def _label(value: Value | EllipsisType) -> str:
    """Return the label of a value, with its end alone if it is long: paths differ at their ends."""
    label = "not set" if isinstance(value, EllipsisType) else shown_value(value)
    return label if len(label) <= 16 else f"…{label[-15:]}"


# ---- curves ------------------------------------------------------------------------------------


def _full_name(metric: str, rows: Iterable[Mapping[str, object]]) -> str:
    """Return the name under which the runs have logged a metric: that of their first test set.

    `search.check` knows it as well, but asks the test data, which may be gone by now.
    """
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("eval/"))
    return next((name for name in names if "/" not in metric and name.split("/", 2)[-1] == metric), metric)


def _name(sweep: Sweep, trial: FrozenTrial) -> str:
    point = shown_point(sweep.space.point_of(trial))
    return f"trial {trial.number}: {point}" if point else f"trial {trial.number}"


def _runs(sweep: Sweep, trial: FrozenTrial) -> tuple[LoggedRun, ...]:
    """Return the run of each seed of a trial that has logged something."""
    rows = {sweep.run_folder(trial.number, seed): logged_rows(sweep, trial.number, seed) for seed in sweep.config.seeds}
    return tuple(LoggedRun(folder, {}, rows[folder]) for folder in rows if rows[folder])
