"""Say what a sweep has found: a table of its trials, the best of them, and its experiment."""

import math
import os
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from dataset.tasks.base import count
from records.history import logged_rows, read_run_config
from search import study as attributes
from search.launchers import command_line
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


def best_first(sweep: Sweep, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that have a value, the best first. Of equals, the earlier comes first."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return sorted(complete, key=lambda trial: (-sweep.sign * trial.values[0], trial.number))


def shown_best(sweep: Sweep, trials: Sequence[FrozenTrial]) -> str:
    """Return the best value and its trial for a person."""
    found = best_first(sweep, trials)
    return f"{found[0].value:.4f} (trial {found[0].number})" if found else "none yet"


def require_best_first(study: Study) -> list[FrozenTrial]:
    """Return the trials that have a value, the best first. Raise UserError if none has ended."""
    found = best_first(study.sweep, study.trials())
    if not found:
        raise UserError(f"no trial of {study.sweep.path} has ended with a value yet; status shows them")
    return found


def status_page(study: Study) -> str:
    """Return a table of all trials, with a line that counts them and names the best.

    The best one stands at the top. Those that run now come last, where a terminal shows them.
    """
    sweep, trials, order = study.sweep, study.trials(), [*_STATES]
    points = {trial.number: sweep.space.point_of(trial.params) for trial in trials}
    keys = [key for key in sweep.keys if any(key in point for point in points.values())]
    best = next((trial.number for trial in best_first(sweep, trials)), None)
    # A pruned trial has the last value that it reported.
    values = {
        trial.number: trial.intermediate_values[max(trial.intermediate_values)]
        if trial.value is None and trial.intermediate_values
        else trial.value
        for trial in trials
    }

    def place(trial: FrozenTrial) -> tuple[int, float, int]:
        value = values[trial.number]
        if value is None or math.isnan(value):  # comparing with NaN would leave any order
            value = -sweep.sign * math.inf
        return order.index(trial.state), -sweep.sign * value, trial.number

    table = [["", "trial", "state", sweep.config.metric, "step", "time", *keys]]
    for trial in sorted(trials, key=place):
        value, step, point = values[trial.number], _last_step(sweep, trial), points[trial.number]
        seconds = sum(trial.user_attrs.get(attributes.SECONDS, {}).values())
        row = [
            "*" if trial.number == best else "",
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
    begun = f"{len(trials)} of {count(sweep.num_trials, 'trial')}"
    return "\n".join([*lines, "", f"{sweep.path}: {begun}; {counts}; best {shown_best(sweep, trials)}"])


def _last_step(sweep: Sweep, trial: FrozenTrial) -> int:
    steps = [0, *trial.intermediate_values, *trial.user_attrs.get(attributes.STEPS, {}).values()]
    if trial.state == TrialState.RUNNING:
        for seed in sweep.config.seeds:
            with suppress(UserError):  # a damaged row
                steps += [row["step"] for row in logged_rows(sweep.run_folder(trial.number, seed))[-1:]]
    return max(steps)


def best_page(study: Study) -> str:
    """Return the best trial: its value, its folders, and the command line that trains it again."""
    sweep, best = study.sweep, require_best_first(study)[0]
    seeds = sweep.config.seeds
    lines = [f"# trial {best.number}: {_measured(sweep, best)}"]
    lines += [f"# {sweep.run_folder(best.number, seed)}" for seed in seeds]
    overrides = sweep.overrides(sweep.space.point_of(best.params), seeds[0])
    started_in = read_run_config(sweep.run_folder(best.number, seeds[0])).get("started_in")
    if started_in not in (None, os.getcwd()):  # the data may have a relative path
        overrides.append(f"started_in={as_override(started_in)}")
    return "\n".join([*lines, command_line(sweep.config.launcher, overrides)])


def _measured(sweep: Sweep, best: FrozenTrial) -> str:
    """Return the metric and its value, with the spread over seeds and the value of each."""
    by_seed = best.user_attrs.get(attributes.SEEDS, {})
    values = [by_seed[str(seed)] for seed in sweep.config.seeds if str(seed) in by_seed]
    value = f"{sweep.config.metric} {best.value:.4f}"
    if len(values) < 2:
        return value
    each = ", ".join(f"{one:.4f}" for one in values)
    return f"{value} ± {statistics.stdev(values):.4f} over {len(values)} seeds ({each})"


def write_experiment(study: Study, file: Path | None) -> str:
    """Write the best trial as an experiment, and return the path and the command that trains it.

    Args:
        file: None: config/experiment/<name of the sweep>_best.yaml.
    """
    sweep, best = study.sweep, require_best_first(study)[0]
    folder = Path("config/experiment") if PACKAGE else EXPERIMENTS  # a package must not write into itself
    file = file or folder / f"{re.sub(r'[^A-Za-z0-9-]+', '_', sweep.name).strip('_')}_best.yaml"
    if file.suffix not in (".yaml", ".yml") or file.name.startswith("_"):
        raise UserError(f"{file} can't be chosen as experiment=...; give a name like my_best.yaml")
    # Hydra finds a name only with .yaml, and a path with either.
    named = file.stem if file.absolute().parent == EXPERIMENTS and file.suffix == ".yaml" else str(file)
    command = command_line(sweep.config.launcher, [f"experiment={as_override(named)}"])
    config = read_config("pretrain", sweep.overrides(sweep.space.point_of(best.params), sweep.config.seeds[0]))
    defaults = dict(flatten(read_config("pretrain", [])))
    comment = [
        f"The best of {count(len(study.trials()), 'trial')} of the sweep {sweep.name}, which searched "
        f"{', '.join(sweep.keys) or 'the seed'}.",
        f"Measured here: {_measured(sweep, best)}. A new run tends to be a little worse than the best of many.",
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
