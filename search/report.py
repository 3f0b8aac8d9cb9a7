"""Say what a sweep has found: a table of its trials, the best of them, and its experiment."""

import math
import os
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from records.history import METRICS_FILE, History, read_run_config
from search import study as attributes
from search.launchers import command_line
from search.space import Point
from search.study import Study
from search.sweep import Sweep
from sharing.recipe import differences_from_groups, recipe_text, shown_value
from utils.command_line import read_config, with_changes
from utils.config import flatten
from utils.config_files import CONFIG_DIR
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.overrides import as_override
from utils.programs import PACKAGE
from utils.text import for_shell

EXPERIMENTS = CONFIG_DIR / "experiment"
# Where a run is, and what belongs to one start of it. The seed is left at its default: the values
# were chosen for any seed.
_LEFT_OUT = ("seed", "run_name", "checkpoint_path", "resume", "allow_changed_data", "wandb.group")
_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "begun",
}


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


def num_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 trial or 2 trials."""
    return f"{number} {noun}{'s' * (number != 1)}"


def best_first(sweep: Sweep, trials: Sequence[FrozenTrial]) -> list[Best]:
    """Return the trials that have a value, the best first. Of equals, the earlier comes first."""
    found = []
    for trial in trials:
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            values = {int(seed): value for seed, value in trial.user_attrs.get(attributes.SEEDS, {}).items()}
            found.append(Best(trial.number, trial.value, values, sweep.space.point_of(trial)))
    sign = -1 if sweep.config.direction == "maximize" else 1
    return sorted(found, key=lambda best: (sign * best.value, best.number))


def best_of(sweep: Sweep, trials: Sequence[FrozenTrial]) -> Best | None:
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
    best, points = best_of(sweep, trials), {trial.number: sweep.space.point_of(trial) for trial in trials}
    keys = [key for key in sweep.keys if any(key in point for point in points.values())]
    sign, order = -1 if sweep.config.direction == "maximize" else 1, [*_STATES]

    def last_value(trial: FrozenTrial) -> float | None:
        if trial.value is None and trial.intermediate_values:
            return trial.intermediate_values[max(trial.intermediate_values)]
        return trial.value

    def place(trial: FrozenTrial) -> tuple[int, float, int]:
        value = last_value(trial)
        if value is None or math.isnan(value):  # comparing with NaN would leave any order
            value = sign * math.inf
        return order.index(trial.state), sign * value, trial.number

    table = [["", "trial", "state", sweep.config.metric, "step", "time", *keys]]
    for trial in sorted(trials, key=place):
        value, step, point = last_value(trial), _last_step(sweep, trial), points[trial.number]
        seconds = sum(trial.user_attrs.get(attributes.SECONDS, {}).values())
        row = [
            "*" if best is not None and trial.number == best.number else "",
            str(trial.number),
            _STATES[trial.state],
            "" if value is None else f"{value:.4f}",
            str(step) if step else "",
            tqdm.format_interval(round(seconds)) if seconds else "",
            *(shown_value(point[key]) if key in point else "" for key in keys),
        ]
        table.append([*row, *([trial.user_attrs[attributes.ERROR]] if attributes.ERROR in trial.user_attrs else [])])
    # A failed trial has its error behind the last column, where nothing is padded.
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join([*map(str.ljust, row, widths), *row[len(widths) :]]).rstrip() for row in table]
    counts = ", ".join(f"{sum(trial.state == state for trial in trials)} {name}" for state, name in _STATES.items())
    summary = f"{sweep.path}: {len(trials)} of {num_of(sweep.num_trials, 'trial')}; {counts}; best {best or 'none yet'}"
    return "\n".join([*lines, "", summary])


def _last_step(sweep: Sweep, trial: FrozenTrial) -> int:
    steps = [0, *trial.user_attrs.get(attributes.STEPS, {}).values()]
    if trial.state == TrialState.RUNNING:
        for seed in sweep.config.seeds:
            history = History(sweep.run_folder(trial.number, seed) / METRICS_FILE)
            with suppress(UserError):  # a damaged row, which the run drops when it resumes
                history.refresh()
            steps += [row["step"] for row in history.rows[-1:]]
    return max(steps)


def best_page(study: Study) -> str:
    """Return the best trial: its value, its folders, and the command line that trains it again."""
    sweep, best = study.sweep, require_best_first(study)[0]
    seeds = sweep.config.seeds
    overrides = sweep.overrides(best.point, seeds[0])
    started_in = read_run_config(sweep.run_folder(best.number, seeds[0])).get("started_in")
    if started_in not in (None, os.getcwd()):  # the data may have a relative path
        overrides.append(f"started_in={as_override(started_in)}")
    lines = [f"# trial {best.number}: {_measured(sweep, best)}"]
    lines += [f"# {sweep.run_folder(best.number, seed)}" for seed in seeds]
    return "\n".join([*lines, command_line(sweep.config.launcher, overrides)])


def _measured(sweep: Sweep, best: Best) -> str:
    """Return the metric and its value, with the spread over seeds and the value of each."""
    values = [best.values[seed] for seed in sweep.config.seeds if seed in best.values]
    value = f"{sweep.config.metric} {best.value:.4f}"
    if len(values) < 2:
        return value
    each = ", ".join(f"{one:.4f}" for one in values)
    return f"{value} ± {statistics.stdev(values):.4f} over {len(values)} seeds ({each})"


def finished_page(study: Study, *, done: bool) -> str:
    """Return what a process prints when it leaves a sweep."""
    path = study.sweep.path
    lines = [] if done else [f"{path} is not done; the same command goes on with it"]
    if best_of(study.sweep, study.trials()) is None:
        return "\n".join([*lines, f"no trial of {path} has a value; python sweep.py status {for_shell([str(path)])}"])
    return "\n".join([*lines, best_page(study)])


def write_experiment(study: Study, file: Path | None) -> str:
    """Write the best trial as an experiment.

    Args:
        file: None: config/experiment/<name of the sweep>_best.yaml.

    Returns:
        The path of the file, and the command that trains it.

    Raises:
        UserError: No trial has a value yet, or the file exists or can't be written.
    """
    sweep, best = study.sweep, require_best_first(study)[0]
    folder = Path("config/experiment") if PACKAGE else EXPERIMENTS  # a package must not write into itself
    file = file or folder / f"{re.sub(r'[^A-Za-z0-9-]+', '_', sweep.name).strip('_')}_best.yaml"
    if file.suffix not in (".yaml", ".yml") or file.name.startswith("_"):
        raise UserError(f"{file} can't be chosen as experiment=...; give a name like my_best.yaml")
    # Hydra finds a name only with .yaml, and a path with either.
    named = file.stem if file.absolute().parent == EXPERIMENTS and file.suffix == ".yaml" else str(file)
    command = command_line(sweep.config.launcher, [f"experiment={as_override(named)}"])
    config = read_config("pretrain", sweep.overrides(best.point, sweep.config.seeds[0]))
    defaults = dict(flatten(read_config("pretrain", [])))
    extreme = "highest" if sweep.config.direction == "maximize" else "lowest"
    comment = [
        f"The best of {num_of(len(study.trials()), 'trial')} of the sweep {sweep.name}, which searched "
        f"{', '.join(sweep.keys) or 'the seed'}.",
        "",
        f"Expected: about the value below. It is the {extreme} of many, so a new run tends to be a little worse.",
        f"Measured here: {_measured(sweep, best)}.",
        "",
        f"The data are {', '.join(config['data_paths'] or [config['data_path']])}. Add the command that builds them, "
        "python dataset/build_...",
        "",
        f"  {command}",
    ]
    differences = differences_from_groups(with_changes(config, {key: defaults[key] for key in _LEFT_OUT}))
    with file_errors():
        if file.exists() or file.is_symlink():
            raise UserError(f"{file} exists; remove it, or name another file with -o")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, recipe_text(comment, *differences))
    return f"{file}\n{command}"
