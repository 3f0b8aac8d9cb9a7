"""The curves of several runs: groups of runs that differ only in their seed, and their spread."""
# P = points of a curve, R = runs of a group

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.config import flatten
from utils.errors import UserError
from utils.run.history import METRICS_FILE, History, read_run_config
from utils.run.status import is_number

# No screen shows more points, and a run may have logged a million.
MAX_POINTS = 1500
# A person is told if a run goes on after another one of its group has ended, for more than this
# part of the range that they share.
_LONG_AFTER = 0.1
DEFAULT_METRICS = ("train/lm_loss", "train/loss", "train/exact_accuracy")
# What tells the runs of a group apart: their seeds, and where they are and report to.
_OF_ONE_RUN = {"seed", "run_name", "project_name", "checkpoint_path", "resume", "allow_changed_data", "started_in"}
_OF_ONE_RUN |= {"wandb", "tensorboard"}


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the name of each folder, with that of the folder above where names are equal."""
    whole = [folder.resolve() for folder in folders]
    num = Counter(folder.name for folder in whole)
    return [each.name if num[each.name] == 1 else f"{each.parent.name}/{each.name}" for each in whole]


@dataclass(frozen=True)
class LoggedRun:
    """What a run has logged so far, and its config as {dotted key: value}.

    Keys that were added after the run was stored have their defaults.
    """

    path: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @staticmethod
    def open(path: Path) -> "LoggedRun":
        """Read a run, which may still be training.

        Raises:
            UserError: A file of the run can't be read.
        """
        # Not at the top: this imports Hydra and PyTorch, and the table of watch.py needs neither.
        from sharing.stored_config import completed

        stored = read_run_config(path)
        if stored:
            with suppress(UserError):  # a config of another program: its keys tell its runs apart all the same
                stored = completed(stored)
        return LoggedRun(path, dict(flatten(stored)), logged_rows(path))

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]


def logged_rows(run: Path) -> list[dict[str, Any]]:
    """Return what a run has logged so far, a dict for each row.

    Raises:
        UserError: The file can't be read, or a line of it is no row.
    """
    history = History(run / METRICS_FILE)
    history.refresh()
    return history.rows


XOf = Callable[[LoggedRun], Sequence[float]]
"""Returns the place of each row of a run on the x axis, ascending."""


def x_in_steps(run: LoggedRun) -> Sequence[float]:
    return run.steps


def x_in_examples(run: LoggedRun) -> Sequence[float]:
    """Return how many slots were trained, with the global batch size of the run's last start."""
    batch_size = read_run_config(run.path).get("global_batch_size")  # as stored: a default would be a guess
    if not isinstance(batch_size, int):
        raise UserError(f"{run.path}: config.yaml has no global_batch_size; give --x steps")
    return [step * batch_size for step in run.steps]


def x_in_epochs(run: LoggedRun) -> Sequence[float]:
    """Return the passes over the training groups, parts included."""
    return _logged_x(run, "epoch")


def x_in_seconds(run: LoggedRun) -> Sequence[float]:
    """Return the seconds since the run began, which go on over resumes."""
    return _logged_x(run, "time_s")


def _logged_x(run: LoggedRun, key: str) -> Sequence[float]:
    if not all(is_number(row.get(key)) for row in run.rows):
        raise UserError(f"{run.path}: metrics.jsonl has rows without {key}; give --x steps")
    return [float(row[key]) for row in run.rows]


# ---- metrics -----------------------------------------------------------------------------------


def choose_metrics(runs: Sequence[LoggedRun], asked: Sequence[str]) -> list[str]:
    """Return the full names of the metrics to draw, in the order in which they were asked for.

    Args:
        asked: full names, or names without train/, eval/<set>/ or perf/, which mean all of these;
            empty: loss and exact accuracy in training, exact accuracy of every test set, and the
            loss of test texts.

    Raises:
        UserError: No run has logged a metric. The message has the most similar names.
    """
    logged = list(dict.fromkeys(name for run in runs for row in run.rows for name in row if "/" in name))
    short = {name: _short(name) for name in logged}
    if not asked:
        of_tests = sorted(
            name for name in logged if name.startswith("eval/") and short[name] in ("exact_accuracy", "loss")
        )
        chosen = [name for name in (*DEFAULT_METRICS, *of_tests) if name in short]
        if not chosen:
            raise UserError(f"none of the runs has logged {' or '.join(DEFAULT_METRICS)}; name one with --metric")
        return chosen
    found: list[str] = []
    for name in asked:
        places = ("train", "eval", "perf")
        matching = [full for place in places for full in logged if full.startswith(place) and short[full] == name]
        if name not in short and not matching:
            known = [*logged, *dict.fromkeys(short.values())]
            similar = difflib.get_close_matches(name, known, n=4, cutoff=0.5) or sorted(set(short.values()))[:8]
            raise UserError(f"no run has logged {name!r}; take one of {', '.join(similar)}")
        found += [name] if name in short else matching
    return list(dict.fromkeys(found))


def _short(name: str) -> str:
    """Return a metric's name without train/, eval/<set>/ or perf/."""
    first, _, rest = name.partition("/")
    return rest.partition("/")[2] or rest if first == "eval" else rest


# ---- groups ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Runs whose configs differ in nothing but the seed and names.

    Attributes:
        label: what tells the group from the others, and how many seeds it has.
        marks: the keys and values of the label, key=value.
    """

    label: str
    runs: tuple[LoggedRun, ...]
    marks: tuple[str, ...]


def groups_of(runs: Sequence[LoggedRun]) -> list[Group]:
    """Return the groups, sorted by their labels."""
    by_config: dict[str, list[LoggedRun]] = {}
    for run in runs:
        shared = {key: value for key, value in run.config.items() if key.split(".")[0] not in _OF_ONE_RUN}
        # Nobody knows what a run without a config has in common with others.
        key = json.dumps(shared, sort_keys=True, default=str) if run.config else f"run {run.path}"
        by_config.setdefault(key, []).append(run)
    members = list(by_config.values())
    marks = _marks([group[0] for group in members])
    found = [_with_number(" ".join(of_group), group) for of_group, group in zip(marks, members, strict=True)]
    labels = _told_apart(found, members)
    groups = [Group(label, tuple(runs), of_group) for label, runs, of_group in zip(labels, members, marks, strict=True)]
    return sorted(groups, key=lambda group: _sort_key(group.label))


def _sort_key(label: str) -> list[tuple[float, str]]:
    """Return a key by which run-9 comes before run-10."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", label)
    return [(float(part), "") if place % 2 else (math.inf, part) for place, part in enumerate(parts)]


def _marks(runs: list[LoggedRun]) -> list[tuple[str, ...]]:
    """Return for one run of each group what one would type to tell it from the other groups.

    If groups have different architectures, most options of these differ as well. Therefore an
    option of a config group, such as arch.H_layers, is compared only among equal choices.
    """
    if len(runs) == 1:
        return [()]
    typed = [_as_typed(run.config) for run in runs]
    keys = _in_order(key for each in typed for key in each if key.split(".")[0] not in _OF_ONE_RUN)
    # Under each key that some run would type: its values, among the runs of the same choice.
    values: dict[tuple[str, object], dict[str, Any]] = {(key, _choice(each, key)): {} for each in typed for key in each}
    pairs = [
        [(key, each.get(key, run.config.get(key))) for key in keys if (key, _choice(each, key)) in values]
        for run, each in zip(runs, typed, strict=True)
    ]
    for each, of_run in zip(typed, pairs, strict=True):
        for key, value in of_run:
            values[key, _choice(each, key)][json.dumps(value, sort_keys=True, default=str)] = value
    return [
        tuple(
            f"{key}={_apart(value, others.values())}"
            for key, value in of_run
            if len(others := values[key, _choice(each, key)]) > 1
        )
        for each, of_run in zip(typed, pairs, strict=True)
    ]


def _as_typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with arch=trm_mlp for the options of that file, and without what follows."""
    from sharing.recipe import typed_options
    from utils.config_files import is_group  # not at the top, as in LoggedRun.open

    typed: dict[str, Any] = {}
    for group in (key.removesuffix(".name") for key in config if key.endswith(".name")):
        if is_group(group):
            options = {key.partition(".")[2]: value for key, value in config.items() if key.startswith(f"{group}.")}
            typed[group], others = typed_options(group, options)
            typed |= {f"{group}.{key}": value for key, value in others.items() if key != "name"}
    return typed | {key: value for key, value in config.items() if key.partition(".")[0] not in typed}


def _apart(value: object, others: Iterable[object]) -> str:
    """Return a value with four digits, or with all if one of the others has the same four."""
    from sharing.recipe import shown_value

    shown = [shown_value(other) for other in others]
    return _value(value) if len(set(shown)) < len(shown) else shown_value(value)


def _in_order(keys: Iterable[str]) -> list[str]:
    """Return each key once, those of a config group together, behind what was chosen there."""
    keys = list(dict.fromkeys(keys))
    tops = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    return sorted(keys, key=lambda key: (tops.index(key.partition(".")[0]), "." in key and not key.endswith(".name")))


def _choice(typed: Mapping[str, Any], key: str) -> object:
    """Return what was chosen in the config group of an option; None if the key is no option."""
    group, _, option = key.partition(".")
    return typed.get(group) if option else None


def _told_apart(labels: list[str], groups: Sequence[Sequence[LoggedRun]]) -> list[str]:
    """Return the labels, with the name of a run where several are equal, and then with its path."""
    for place in (lambda path: path.name, lambda path: f"in {path.parent}"):
        num = Counter(labels)
        marks = [place(group[0].path.resolve()) for group in groups]
        labels = [
            label if num[label] == 1 or label == mark else f"{label} {mark}"
            for label, mark in zip(labels, marks, strict=True)
        ]
    return labels


def _with_number(label: str, runs: Sequence[LoggedRun]) -> str:
    if len(runs) == 1:
        return label or runs[0].path.resolve().name
    seeds = {run.config.get("seed") for run in runs}
    number = f"{len(runs)} {'seeds' if len(seeds) == len(runs) else 'runs'}"
    return f"{label} ({number})" if label else number


def differences_of(runs: Sequence[LoggedRun]) -> dict[str, list[str | None]]:
    """Return for each key in which the configs differ its value in each run, as it is typed.

    None stands for a run whose config lacks the key. Seeds count, names and places do not.
    """
    keys = _in_order(key for run in runs for key in run.config)
    compared = [key for key in keys if key == "seed" or key.partition(".")[0] not in _OF_ONE_RUN]
    values = {key: [_value(run.config[key]) if key in run.config else None for run in runs] for key in compared}
    return {key: of_runs for key, of_runs in values.items() if len(set(of_runs)) > 1}


def _value(value: object) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


# ---- curves ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """The curve of one metric of one group.

    Attributes:
        x_P, mean_P, low_P, high_P: float64. Low and high are those of the lowest and the highest
            run at each point.
        num_runs: how many runs the mean is over.
        num_left_out: how many other runs never logged the metric, or ended before these did.
        cut_at: where the shortest run ends, and with it the mean over all runs, if others go on for
            long after that; otherwise None.
        is_interpolated: whether the runs have logged at different places.
    """

    label: str
    x_P: np.ndarray
    mean_P: np.ndarray
    low_P: np.ndarray
    high_P: np.ndarray
    num_runs: int = 1
    num_left_out: int = 0
    cut_at: float | None = None
    is_interpolated: bool = False


@dataclass(frozen=True)
class Panel:
    """The curves of one metric, a series for each group or test set that has it."""

    metric: str
    x_name: str
    series: tuple[Series, ...]


def panels_of(groups: Sequence[Group], metrics: Sequence[str], x_name: str, x_of: XOf) -> list[Panel]:
    """Return a panel for each metric.

    Args:
        x_name: what is on the x axis, with its unit.

    Raises:
        UserError: A run does not tell its places on the x axis.
    """
    places = {run.path: np.asarray(x_of(run), dtype=np.float64) for group in groups for run in group.runs}
    return [
        Panel(
            metric,
            x_name,
            tuple(found for group in groups if (found := _series(group, metric, places)) is not None),
        )
        for metric in metrics
    ]


def _series(group: Group, metric: str, places: Mapping[Path, np.ndarray]) -> Series | None:
    """Return the curve of a group; None if none of its runs has logged the metric.

    The runs are interpolated to a common grid: the places of all points in the range that all runs
    share. Where they have logged at the same places, the means are of what they logged. A run that
    ended before another one's first point shares no range with it, and is left out.
    """
    curves = [curve for run in group.runs if len((curve := _points(run.rows, metric, places[run.path]))[0])]
    if not curves:
        return None
    curves.sort(key=lambda curve: float(curve[0][-1]))  # the run that ended first is the first
    while (first := max(x_P[0] for x_P, _ in curves)) > (last := curves[0][0][-1]):
        del curves[0]
    grid_P = np.unique(np.concatenate([x_P for x_P, _ in curves]))
    grid_P = grid_P[(grid_P >= first) & (grid_P <= last)]
    if len(grid_P) > MAX_POINTS:
        grid_P = np.linspace(first, last, MAX_POINTS)
    values_RP = np.stack([np.interp(grid_P, x_P, y_P) for x_P, y_P in curves])
    goes_on = curves[-1][0][-1] - last > _LONG_AFTER * (last - first)
    is_interpolated = any(np.setdiff1d(grid_P, x_P).size for x_P, _ in curves)
    return Series(
        group.label,
        grid_P,
        values_RP.mean(axis=0),
        values_RP.min(axis=0),
        values_RP.max(axis=0),
        len(curves),
        len(group.runs) - len(curves),
        float(last) if goes_on else None,
        is_interpolated,
    )


def panels_of_run(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return a panel for each metric of a run: a series of training, and one for each test set."""
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    panels: dict[str, list[Series]] = {}
    for name in metrics_in(rows):
        first, _, rest = name.partition("/")
        set_name, _, of_set = rest.partition("/")
        label, metric = (f"eval {set_name}", of_set) if first == "eval" else ("train", rest)
        x_P, y_P = _points(rows, name, steps)
        panels.setdefault(name if first == "perf" else metric, []).append(Series(label, x_P, y_P, y_P, y_P))
    return [Panel(metric, "step", tuple(series)) for metric, series in panels.items()]


def metrics_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the full names of the logged metrics, without those of single reasoning steps."""
    names = (name for row in rows for name, value in row.items() if "/" in name and is_number(value))
    return [name for name in dict.fromkeys(names) if "_at_step/" not in name]


def _points(rows: Sequence[Mapping[str, Any]], metric: str, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x_P and y_P of a metric, at most MAX_POINTS: each the mean of its neighbours.

    Values that are not finite leave a point out.
    """
    pairs = [(x, float(row[metric])) for x, row in zip(places, rows, strict=True) if is_number(row.get(metric))]
    x_P, y_P = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    kept_P = np.isfinite(x_P) & np.isfinite(y_P)
    x_P, y_P = x_P[kept_P], y_P[kept_P]
    if len(x_P) > MAX_POINTS:
        begins = np.linspace(0, len(x_P), MAX_POINTS, endpoint=False).astype(np.int64)
        counts = np.diff(np.append(begins, len(x_P)))
        x_P, y_P = np.add.reduceat(x_P, begins) / counts, np.add.reduceat(y_P, begins) / counts
    return x_P, y_P


def for_page(*over: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return the curves of a page, from panels over each of its x axes: see page.html."""

    def series_of(series: Series) -> dict[str, Any]:
        places = [int(x) if x.is_integer() else x for x in series.x_P.tolist()]
        found = {"name": series.label, "x": places, "values": series.mean_P.tolist()}
        band = {"low": series.low_P.tolist(), "high": series.high_P.tolist()}
        return found | (band if series.num_runs > 1 else {})

    return [
        {"metric": panels[0].metric, "over": {panel.x_name: [*map(series_of, panel.series)] for panel in panels}}
        for panels in zip(*over, strict=True)
    ]
