"""Say what a sweep has found: a table of its trials, and the best of them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from search import study as attributes
from search.launchers import build_launcher
from search.space import Point, shown_point
from search.study import Study
from search.sweep import Sweep
from utils.errors import UserError
from utils.run.history import History


@dataclass(frozen=True)
class Best:
    """The best trial that has ended.

    Attributes:
        values: of each seed.
    """

    number: int
    value: float
    values: dict[int, float]
    point: Point

    def __str__(self) -> str:
        return f"{self.value:.4f} (trial {self.number})"


def best_of(sweep: Sweep, trials: Sequence[FrozenTrial]) -> Best | None:
    """Return the best of the trials that have a value, or None."""
    ended = [(trial.value, trial) for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
    if not ended:
        return None
    choose = max if sweep.config.direction == "maximize" else min
    value, trial = choose(ended, key=lambda pair: pair[0])
    values = {int(seed): found for seed, found in trial.user_attrs.get(attributes.SEEDS, {}).items()}
    return Best(trial.number, value, values, sweep.space.point_of(trial))


def require_best(study: Study) -> Best:
    """Return the best trial, or raise UserError if none has ended."""
    best = best_of(study.sweep, study.trials())
    if best is None:
        raise UserError(f"no trial of {study.sweep.path} has ended with a value yet; status shows them")
    return best


def status_page(study: Study) -> str:
    """Return a table of all trials, the best of them, and how many are left."""
    sweep, trials = study.sweep, study.trials()
    rows = [("trial", "state", sweep.config.metric, "step", "time", "parameters"), *(_row(sweep, t) for t in trials)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip()
        for row in rows
    ]
    states = {state: sum(trial.state == state for trial in trials) for state in TrialState}
    best = best_of(sweep, trials)
    summary = (
        f"{sweep.path}: {len(trials)} of {study.num_trials} trials; {states[TrialState.COMPLETE]} complete, "
        f"{states[TrialState.PRUNED]} pruned, {states[TrialState.FAIL]} failed, {states[TrialState.RUNNING]} begun; "
        f"best {best or 'none yet'}"
    )
    return "\n".join([*lines, "", summary])


def _row(sweep: Sweep, trial: FrozenTrial) -> tuple[str, ...]:
    noted = trial.user_attrs
    value, steps = trial.value, noted.get(attributes.STEPS, {}).values()
    if value is None and trial.intermediate_values:
        value = trial.intermediate_values[max(trial.intermediate_values)]
    step = max(steps, default=0)
    if trial.state == TrialState.RUNNING:
        for seed in sweep.config.seeds:
            history = History(sweep.run_folder(trial.number, seed) / "metrics.jsonl")
            history.refresh()
            step = max([step, *(row["step"] for row in history.rows[-1:])])
    seconds = noted.get(attributes.SECONDS)
    return (
        str(trial.number),
        {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "begun"}[trial.state.name],
        "" if value is None else f"{value:.4f}",
        str(step) if step else "",
        "" if seconds is None else tqdm.format_interval(round(seconds)),
        shown_point(sweep.space.point_of(trial))
        + (f"  ({noted[attributes.ERROR]})" if attributes.ERROR in noted else ""),
    )


def best_page(study: Study) -> str:
    """Return the best trial: its value, its folders, and the command line that trains it again."""
    sweep, best = study.sweep, require_best(study)
    seeds = sweep.config.seeds
    value = f"{best.value:.4f}"
    if len(best.values) > 1:
        each = ", ".join(f"{best.values[seed]:.4f}" for seed in seeds)
        value = f"{best.value:.4f} ± {statistics.stdev(best.values.values()):.4f} over {len(seeds)} seeds ({each})"
    launcher = build_launcher(sweep.config.launcher)
    command = launcher.shown(sweep.overrides(best.point, seeds[0]))
    lines = [f"# trial {best.number}: {sweep.config.metric} {value}"]
    lines += [f"# {sweep.run_folder(best.number, seed)}" for seed in seeds]
    return "\n".join([*lines, command])


def described(best: Best | None) -> str:
    return "none yet" if best is None else str(best)


def finished_page(study: Study, *, done: bool) -> str:
    """Return what a process prints when it leaves a sweep."""
    trials = study.trials()
    others = sum(trial.state == TrialState.RUNNING for trial in trials)
    best = best_of(study.sweep, trials)
    lines: list[Any] = []
    if not done:
        lines.append(f"{study.sweep.path} is not done; the same command goes on with it")
    elif others:
        lines.append(f"other processes still run {others} trials of {study.sweep.path}")
    if best is None:
        return "\n".join(
            [*lines, f"no trial of {study.sweep.path} has a value; python sweep.py status {study.sweep.path}"]
        )
    return "\n".join([*lines, best_page(study)])
