"""Write the best trial of a sweep as a file of config/experiment."""

import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from search.launchers import build_launcher
from search.report import Best, measured, num_of, require_best_first
from search.study import Study
from search.sweep import Sweep
from utils.command_line import Container, read_config, with_changes
from utils.config import flatten
from utils.config_files import CONFIG_DIR, as_override, choices, default_groups
from utils.errors import UserError
from utils.files import file_errors, refuse_links, write_atomically
from utils.programs import PACKAGE

EXPERIMENTS = CONFIG_DIR / "experiment"
# Where a run is, and what belongs to one start of it. The seed is left at its default: the values
# were chosen for any seed.
_LEFT_OUT = ("seed", "run_name", "checkpoint_path", "resume", "allow_changed_data", "wandb.group")


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
    text = experiment_text(sweep, best, len(study.trials()), named)
    with file_errors():
        if file.exists() or file.is_symlink():
            raise UserError(f"{file} exists; remove it, or name another file with -o")
        file.parent.mkdir(parents=True, exist_ok=True)
        refuse_links([file])
        write_atomically(file, text)
    return f"{file}\n{build_launcher(sweep.config.launcher).shown([f'experiment={named}'])}"


def experiment_text(sweep: Sweep, best: Best, num_trials: int, named: str) -> str:
    """Return the file of a trial.

    Args:
        named: what follows experiment= on a command line.
    """
    overrides = sweep.overrides(best.point, sweep.config.seeds[0])
    groups, values = differences_from_groups(overrides)
    data = read_config("pretrain", overrides)
    paths = ", ".join(data["data_paths"] or [data["data_path"]])
    keys = ", ".join(sweep.keys) or "the seed"
    extreme = "highest" if sweep.config.direction == "maximize" else "lowest"
    header = [
        f"The best of {num_of(num_trials, 'trial')} of the sweep {sweep.name}, which searched {keys}.",
        "",
        f"Expected: about the value below. It is the {extreme} of many, so a new run tends to be a little worse.",
        f"Measured here: {measured(sweep, best)}.",
        "",
        f"The data are {paths}. Add the command that builds them, python dataset/build_...",
        "",
    ]
    lines = ["# @package _global_"]
    for line in header:
        lines += textwrap.wrap(line, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False) or ["#"]
    lines.append(f"#   {build_launcher(sweep.config.launcher).shown([f'experiment={named}'])}")
    if groups:
        lines += ["defaults:", *(f"  - override /{group}: {choice}" for group, choice in groups.items()), ""]
    if values:
        lines.append(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100).rstrip())
    return "\n".join(lines) + "\n"


def differences_from_groups(overrides: list[str]) -> tuple[dict[str, str], Container]:
    """Return the files of the groups that suit a command line best, and what else differs.

    A group may have been chosen by an override, by an experiment or by a path. So the files are
    compared with the config as a whole.

    Returns:
        {group: choice} where it is not the default, and the values that differ from those files.
    """
    wanted = read_config("pretrain", overrides)
    groups = {
        group: choice
        for group, default in default_groups("pretrain")
        if isinstance(wanted.get(group), dict) and (choice := _nearest(group, default, wanted[group])) != default
    }
    given = [f"{group}={choice}" for group, choice in groups.items()]
    base, leaves = dict(flatten(read_config("pretrain", given))), dict(flatten(wanted))
    changed = {key: value for key, value in leaves.items() if base.get(key, ...) != value}
    # A value that follows from the others by interpolation is left to follow.
    interpolated = _interpolated_names()
    sure = {key: value for key, value in changed.items() if key.split(".")[-1] not in interpolated}
    followed = dict(
        flatten(read_config("pretrain", [*given, *(f"{key}={as_override(value)}" for key, value in sure.items())]))
    )
    values: Container = {}
    for key, value in sorted(changed.items(), key=lambda pair: "." in pair[0]):  # first the keys without a group
        if key not in _LEFT_OUT and (key in sure or followed.get(key, ...) != value):
            values = with_changes(values, {key: value})
    return groups, values


def _interpolated_names() -> set[str]:
    """Return the last names of the keys whose values in config/ are interpolations."""
    texts = (file.read_text() for file in CONFIG_DIR.glob("*/*.yaml"))
    return {name for text in texts for name in re.findall(r"^\s*(\w+):\s*\$\{", text, re.MULTILINE)}


def _nearest(group: str, default: str, options: dict[str, Any]) -> str:
    """Return the file of a group with the same name and keys, and the fewest other values."""
    leaves = dict(flatten(options))
    num_other = {}
    for choice in dict.fromkeys([default, *choices(group)]):
        own = dict(flatten(read_config("pretrain", [f"{group}={choice}"])[group]))
        if own.get("name") == leaves.get("name") and own.keys() == leaves.keys():
            num_other[choice] = sum(own[key] != value for key, value in leaves.items())
    return min(num_other, key=lambda choice: num_other[choice])
