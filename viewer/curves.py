"""The data of all curves: what runs have logged, in groups that differ only in their seed."""
# P = points of a curve, R = runs of a group

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from records.history import is_number, logged_rows, read_run_config
from utils.config import flatten
from utils.errors import UserError

LOSSES = ("train/lm_loss", "train/loss")  # of puzzles and of text
# No screen shows more points, and a run may have logged a million.
MAX_POINTS = 1500
# A person is told if a run goes on after its group's mean for more than this part of its range.
_LONG_AFTER = 0.1
# What tells the runs of a group apart: their seeds, and where they are and report to.
_OF_ONE_RUN = {"seed", "run_name", "project_name", "checkpoint_path", "resume", "allow_changed_data", "started_in"}
_OF_ONE_RUN |= {"wandb", "tensorboard"}


class LoggedRun:
    """What a run, which may still be training, has logged so far.

    Attributes:
        config: {dotted key: value}. Keys that are newer than the run have their defaults.
    """

    def __init__(self, path: Path) -> None:
        # Not at the top: this imports PyTorch, and the table of watch.py does not need it.
        from sharing.stored_config import completed

        self.path, self.rows, stored = path, logged_rows(path), read_run_config(path)
        if stored:
            with suppress(UserError):  # a config of another program: its keys tell its runs apart all the same
                stored = completed(stored)
        self.config = dict(flatten(stored))

    def x(self, axis: str) -> list[float]:
        """Return the place of each row on an axis: steps, examples (slots), epochs or seconds."""
        key = {"epochs": "epoch", "seconds": "time_s"}.get(axis, "step")
        # As stored: a default would be a guess.
        factor = read_run_config(self.path).get("global_batch_size") if axis == "examples" else 1
        if not isinstance(factor, int) or not all(is_number(row.get(key)) for row in self.rows):
            raise UserError(f"{self.path}: does not tell the {axis} of all its rows; give --x steps")
        return [float(row[key]) * factor for row in self.rows]


# ---- metrics -----------------------------------------------------------------------------------


def short_name(metric: str) -> str:
    """Return a metric's name without train/, eval/<set>/ or perf/."""
    parts = metric.split("/")
    return "/".join(parts[2:] if parts[0] == "eval" else parts[1:]) or metric


def metrics_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the full names of the logged metrics, without those of single reasoning steps."""
    names = (name for row in rows for name, value in row.items() if "/" in name and is_number(value))
    return [name for name in dict.fromkeys(names) if "_at_step/" not in name]


def choose_metrics(runs: Sequence[LoggedRun], asked: Sequence[str]) -> list[str]:
    """Return the full names of the metrics to draw.

    Args:
        asked: full names, or short ones, which mean all metrics of this name; empty: loss and exact
            accuracy in training, exact accuracy of every test set, and the loss of test texts.
    """
    logged = list(dict.fromkeys(name for run in runs for row in run.rows for name in row if "/" in name))
    if not asked:
        of_tests = sorted(name for name in logged if name.startswith("eval/"))
        found = [name for name in (*LOSSES, "train/exact_accuracy") if name in logged]
        found += [name for name in of_tests if short_name(name) in ("exact_accuracy", "loss")]
        if not found:
            raise UserError("none of the runs has logged a loss or an exact accuracy; name a metric with --metric")
        return found
    for name in asked:
        if not any(name in (full, short_name(full)) for full in logged):
            similar = difflib.get_close_matches(name, map(short_name, logged), n=4, cutoff=0.5) or logged[:8]
            raise UserError(f"no run has logged {name!r}; take one of {', '.join(dict.fromkeys(similar))}")
    return list(dict.fromkeys(full for name in asked for full in logged if name in (full, short_name(full))))


# ---- groups ------------------------------------------------------------------------------------


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return for each folder the last parts of its path that tell it from the others."""
    paths = [folder.resolve().parts for folder in folders]
    names = []
    for path in paths:
        num = 1
        while num < len(path) and sum(other[-num:] == path[-num:] for other in paths) > 1:
            num += 1
        names.append("/".join(path[-num:]))
    return names


@dataclass(frozen=True)
class Group:
    """Runs whose configs differ in nothing but the seed and names.

    The label says with `marks`, key=value, what tells the group from the others.
    """

    label: str
    runs: list[LoggedRun]
    marks: list[str]


def groups_of(runs: Sequence[LoggedRun]) -> list[Group]:
    """Return the groups, sorted by their labels."""
    by_config: dict[str, list[LoggedRun]] = {}
    for run in runs:
        shared = {key: value for key, value in run.config.items() if key.partition(".")[0] not in _OF_ONE_RUN}
        # Nobody knows what a run without a config has in common with others.
        key = json.dumps(shared, sort_keys=True, default=str) if run.config else f"run {run.path}"
        by_config.setdefault(key, []).append(run)
    members = list(by_config.values())
    marks = _marks([group[0].config for group in members])
    names = names_of([group[0].path for group in members])
    groups = []
    for group, own, name in zip(members, marks, names, strict=True):
        num_seeds = len({run.config.get("seed") for run in group})
        number = f"{len(group)} {'seeds' if num_seeds == len(group) else 'runs'}" if len(group) > 1 else ""
        label = " ".join(own) + f" ({number})" * bool(number) if own else number
        if not label or marks.count(own) > 1:
            label = f"{label} {name}".lstrip()
        groups.append(Group(label, group, own))
    return sorted(groups, key=_order)


def _order(group: Group) -> list[tuple[float, str]]:
    """Return a key by which run-9 comes before run-10."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", group.label)
    return [(float(part), "") if place % 2 else (math.inf, part) for place, part in enumerate(parts)]


def _marks(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return for each config what one would type to get this one and not another.

    An option of a config group, such as arch.H_layers, is compared only among equal choices.
    """
    from sharing.recipe import shown_value

    typed = [_as_typed(config) for config in configs]
    marks: list[list[str]] = [[] for _ in configs]
    for key in _in_order(typed):
        group, _, option = key.partition(".")
        values = [shown_value(own.get(key, config.get(key))) for own, config in zip(typed, configs, strict=True)]
        for own, value, own_marks in zip(typed, values, marks, strict=True):
            alike = [n for n, each in enumerate(typed) if not option or each.get(group) == own.get(group)]
            if any(key in typed[n] for n in alike) and any(values[n] != value for n in alike):
                own_marks.append(f"{key}={value}")
    return marks


def _as_typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with arch=trm_mlp for the options of that file, and without what follows."""
    from sharing.recipe import typed_options
    from utils.config_files import is_group

    typed: dict[str, Any] = {}
    for group in (key.removesuffix(".name") for key in config if key.endswith(".name")):
        if is_group(group):
            options = {key.partition(".")[2]: value for key, value in config.items() if key.startswith(f"{group}.")}
            typed[group], others = typed_options(group, options)
            typed |= {f"{group}.{key}": value for key, value in others.items() if key != "name"}
    rest = {key: value for key, value in config.items() if key.partition(".")[0] not in {*typed, *_OF_ONE_RUN}}
    return typed | rest


def _in_order(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return each key once, those of a config group together."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    groups = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    return sorted(keys, key=lambda key: groups.index(key.partition(".")[0]))


def differences_of(runs: Sequence[LoggedRun]) -> dict[str, list[str | None]]:
    """Return for each key in which the configs differ its value in each run; None if it has none.

    Seeds and the run that a run has gone on from count, names and places do not.
    """
    from sharing.recipe import shown_value

    found: dict[str, list[str | None]] = {}
    for key in _in_order(run.config for run in runs):
        if len({repr(run.config.get(key, ...)) for run in runs}) > 1 and (
            key in ("seed", "resume") or key.partition(".")[0] not in _OF_ONE_RUN
        ):
            found[key] = [shown_value(run.config[key]) if key in run.config else None for run in runs]
    return found


# ---- curves ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """The curve of one metric of one group, or of one set of a run.

    Attributes:
        x, values: float64 (P,). The values are means over the runs of the group.
        low, high: those of the lowest and the highest run at each point; None for a single run.
        note: which part of the runs is not shown.
    """

    name: str
    x: np.ndarray
    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """The curves of one metric, a series for each group or test set that has it."""

    metric: str
    x_name: str
    series: list[Series]


def panels_of(
    groups: Sequence[Group], metrics: Sequence[str], x_name: str, places: Mapping[Path, Sequence[float]]
) -> list[Panel]:
    """Return a panel for each metric. `places` has the x of each row of a run, ascending."""
    panels = []
    for metric in metrics:
        series = (_series(group, metric, x_name, places) for group in groups)
        panels.append(Panel(metric, x_name, [each for each in series if each is not None]))
    return panels


def _series(group: Group, metric: str, x_name: str, places: Mapping[Path, Sequence[float]]) -> Series | None:
    """Return the curve of a group; None if none of its runs has logged the metric.

    The runs are interpolated to the places of all points in the range that all runs share. A run
    that ended before another one's first point shares no range with it, and is left out.
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
    note, num = "", len(group.runs)
    if len(curves) < num:
        left_out = f"{num - len(curves)} of {num} runs never logged {metric}, or ended before the others did"
        note = f"{group.label}: {left_out}, and are left out of its mean"
    elif curves[-1][0][-1] - last > _LONG_AFTER * (last - first):
        note = f"{group.label}: the mean ends at {last:,.0f} {x_name}, where the shortest run ends"
    low_P, high_P = (values_RP.min(axis=0), values_RP.max(axis=0)) if len(curves) > 1 else (None, None)
    return Series(group.label, grid_P, values_RP.mean(axis=0), low_P, high_P, note)


def panels_of_run(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return a panel for each metric of a run: a series of training, and one for each test set."""
    steps = [row["step"] for row in rows]
    panels: dict[str, Panel] = {}
    for name in metrics_in(rows):
        first, set_name, *_ = name.split("/")
        series = Series(f"eval {set_name}" if first == "eval" else "train", *_points(rows, name, steps))
        metric = name if first == "perf" else short_name(name)
        panels.setdefault(metric, Panel(metric, "step", [])).series.append(series)
    return list(panels.values())


def _points(rows: Sequence[Mapping[str, Any]], metric: str, places: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return x_P and y_P of a metric: finite values, or means of neighbours if they are many."""
    pairs = [(x, float(row[metric])) for x, row in zip(places, rows, strict=True) if is_number(row.get(metric))]
    points_P2 = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    points_P2 = points_P2[np.isfinite(points_P2).all(axis=1)]
    if len(points_P2) > MAX_POINTS:
        points_P2 = np.array([part.mean(axis=0) for part in np.array_split(points_P2, MAX_POINTS)])
    return points_P2[:, 0], points_P2[:, 1]


def for_page(*over: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return the curves of a page, from panels over each of its x axes: see page.html."""
    return [
        {"metric": same[0].metric, "over": {panel.x_name: [*map(vars, panel.series)] for panel in same}}
        for same in zip(*over, strict=True)
    ]
