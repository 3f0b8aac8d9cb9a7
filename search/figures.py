"""What the plots of a sweep show, as numbers: importances, axes of parameters, and curves.

Optuna's own figures leave out every trial that lacks a conditional parameter, and put all slices
into one row. Here each key of the config is one axis, also if it has several conditions, and a
trial without a value there has a place of its own.
"""
# T = trials, P = points of a curve

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.report import best_of
from search.space import shown_value
from search.study import Study
from search.sweep import Sweep
from utils.run.history import METRICS_FILE, History
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
    """

    shares: dict[str, float]
    num_best: int
    num_complete: int
    num_pruned: int


@dataclass(frozen=True)
class Axis:
    """A key of the config, and the place of each trial on its axis.

    Attributes:
        place_T: float64, NaN for a trial that lacks the key.
        ticks: the labelled places of a list of values; None: the places are numbers.
    """

    key: str
    place_T: np.ndarray
    ticks: tuple[str, ...] | None
    is_log: bool

    @property
    def unit_T(self) -> np.ndarray:
        """The places between 0 and 1. NaN stays NaN."""
        return self._to_unit(self.place_T)

    def unit_ticks(self) -> list[tuple[float, str]]:
        """Return labelled places between 0 and 1: those of a list, or five of numbers."""
        if self.ticks is not None:
            places = np.arange(len(self.ticks), dtype=np.float64)
            return list(zip(self._to_unit(places).tolist(), self.ticks, strict=True))
        low, high = self._ends()
        if low == high:
            return [(0.5, _shown_number(low))]
        values = (np.geomspace if self.is_log else np.linspace)(low, high, 5)
        return [(index / 4, _shown_number(value)) for index, value in enumerate(values)]

    def _ends(self) -> tuple[float, float]:
        if self.ticks is not None:
            return 0.0, len(self.ticks) - 1.0
        return float(np.nanmin(self.place_T)), float(np.nanmax(self.place_T))

    def _to_unit(self, places: np.ndarray) -> np.ndarray:
        low, high = self._ends()
        if low == high:
            return np.where(np.isnan(places), np.nan, 0.5)
        if self.is_log:
            return np.asarray(np.log(places / low) / math.log(high / low))
        return np.asarray((places - low) / (high - low))


@dataclass(frozen=True)
class Curve:
    """A metric of one trial over its steps: the mean over the seeds, and the range of them.

    Attributes:
        kind: best, complete, or other (pruned, failed or not finished).
    """

    number: int
    kind: str
    num_seeds: int
    step_P: np.ndarray
    mean_P: np.ndarray
    low_P: np.ndarray
    high_P: np.ndarray


@dataclass(frozen=True)
class Figures:
    """Everything that is drawn of a sweep.

    Attributes:
        value_T: the value of each complete trial.
        number_T: its number.
        curves: by metric.
    """

    sweep: Sweep
    metric: str
    num_trials: int
    value_T: np.ndarray
    number_T: list[int]
    best: int | None
    axes: list[Axis]
    importances: Importances | None
    curves: dict[str, list[Curve]]

    @property
    def maximizes(self) -> bool:
        return self.sweep.config.direction == "maximize"


def figures_of(study: Study) -> Figures:
    """Read the study and the metrics of its runs."""
    sweep, trials = study.sweep, study.trials()
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
    best = best_of(sweep, trials)
    groups = [Group(str(trial.number), _runs(sweep, trial)) for trial in trials]
    metric = full_name(sweep.config.metric, [row for group in groups for run in group.runs for row in run.rows])
    number = None if best is None else best.number
    panels = panels_of(groups, [*dict.fromkeys((metric, _LOSS))], "training step", x_in_steps)
    drawn = {panel.metric: _curves(trials, groups, panel, number) for panel in panels}
    return Figures(
        sweep=sweep,
        metric=metric,
        num_trials=len(trials),
        value_T=np.array([trial.value for trial in complete], dtype=np.float64),
        number_T=[trial.number for trial in complete],
        best=number,
        axes=_axes(sweep, complete),
        importances=importances_of(sweep, trials),
        curves={name: curves for name, curves in drawn.items() if curves},
    )


# ---- importance --------------------------------------------------------------------------------


def importances_of(sweep: Sweep, trials: Sequence[FrozenTrial]) -> Importances | None:
    """Return the importances by PED-ANOVA; None if there are too few trials or parameters.

    PED-ANOVA asks where the best trials lie in contrast to all others. It needs no value of the
    others, so a pruned trial counts among them, and it knows conditional parameters. fANOVA does
    neither.
    """
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED]
    used = [*complete, *pruned]
    varied = {name for trial in used for name in trial.params if len({repr(t.params.get(name)) for t in used}) > 1}
    share = max(_TOP_SHARE, _LEAST_IN_TOP / max(1, len(used)))
    if len(complete) < max(_LEAST_TRIALS, 2 * _LEAST_IN_TOP) or len(varied) < 2:
        return None
    sign = -1.0 if sweep.config.direction == "maximize" else 1.0
    losses = [sign * (trial.value or 0.0) for trial in complete]
    losses += [max(losses) + 1.0] * len(pruned)
    study = optuna.create_study(direction="minimize")
    study.add_trials(
        [
            create_trial(params=trial.params, distributions=trial.distributions, value=loss)
            for trial, loss in zip(used, losses, strict=True)
        ]
    )
    shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=share))
    shares = dict(sorted(shares.items(), key=lambda pair: -pair[1]))
    return Importances(shares, math.ceil(share * len(used)), len(complete), len(pruned))


# ---- parameters --------------------------------------------------------------------------------


def _axes(sweep: Sweep, complete: Sequence[FrozenTrial]) -> list[Axis]:
    """Return an axis for each key with a value in one of the trials, in the order of the sweep."""
    points = [sweep.space.point_of(trial) for trial in complete]
    logarithmic = {
        parameter.key
        for parameter in sweep.space.parameters
        if isinstance(parameter.distribution(), FloatDistribution) and parameter.entry.log_range is not None
    }
    found = dict.fromkeys(key for point in points for key in point)
    axes = []
    for key in found:
        values = [point[key] for point in points if key in point]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        places: Sequence[float]
        if len(numbers) == len(values) and len(set(numbers)) > _MOST_PLACES:
            ticks, places = None, [_number(point.get(key)) for point in points]
        else:
            entries = [each.entry for each in sweep.space.parameters if each.key == key]
            listed = [*sorted(numbers), *(value for entry in entries for value in entry.listed() or []), *values]
            labels = {repr(value): shown_value(value) for value in listed if value in values}
            order = {each: place for place, each in enumerate(labels)}
            ticks = tuple(labels.values())
            places = [float(order[repr(point[key])]) if key in point else math.nan for point in points]
        axes.append(Axis(key, np.array(places, dtype=np.float64), ticks, ticks is None and key in logarithmic))
    return axes


def _shown_number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


# ---- curves ------------------------------------------------------------------------------------


def full_name(metric: str, rows: Sequence[Mapping[str, object]]) -> str:
    """Return the name under which the runs have logged a metric: of the first test set."""
    if "/" in metric:
        return metric
    names = dict.fromkeys(name for row in rows for name in row)
    return next((name for name in names if name.startswith("eval/") and name.split("/", 2)[-1] == metric), metric)


def _runs(sweep: Sweep, trial: FrozenTrial) -> tuple[LoggedRun, ...]:
    """Return the run of each seed of a trial that has logged something."""
    found = []
    for seed in sweep.config.seeds:
        folder = sweep.run_folder(trial.number, seed)
        history = History(folder / METRICS_FILE)
        history.refresh()
        if history.rows:
            found.append(LoggedRun(folder, {}, history.rows))
    return tuple(found)


def _curves(trials: Sequence[FrozenTrial], groups: Sequence[Group], panel: Panel, best: int | None) -> list[Curve]:
    """Return the curve of each trial that has logged the metric of a panel, the best one last."""
    states = {group.label: trial for group, trial in zip(groups, trials, strict=True)}
    curves = []
    for series in panel.series:
        trial = states[series.label]
        kind = "best" if trial.number == best else "complete" if trial.state == TrialState.COMPLETE else "other"
        curves.append(
            Curve(trial.number, kind, series.num_runs, series.x_P, series.mean_P, series.low_P, series.high_P)
        )
    return sorted(curves, key=lambda curve: ("other", "complete", "best").index(curve.kind))
