"""Write a config as experiment=FILE takes it: the groups that suit it, and what differs."""

import re
import textwrap
from collections.abc import Iterable
from typing import Any

import yaml

from utils.command_line import Container, read_config, with_changes
from utils.config import flatten
from utils.config_files import CONFIG_DIR, as_override, choices, default_groups
from utils.yaml_places import name_of_choice


def recipe_text(comment: Iterable[str], groups: dict[str, str], values: Container) -> str:
    """Return the text of the file.

    Args:
        comment: paragraphs for the top of the file, which are wrapped. Indented ones stay as they
            are.
        groups, values: as `differences_from_groups` returns them.
    """
    lines = ["# @package _global_"]
    for line in comment:
        if line.startswith(" "):
            lines.append(f"# {line}")
            continue
        lines += textwrap.wrap(line, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False) or ["#"]
    if groups:
        lines += ["defaults:", *(f"  - override /{group}: {choice}" for group, choice in groups.items()), ""]
    if values:
        lines.append(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100).rstrip())
    return "\n".join(lines) + "\n"


def differences_from_groups(wanted: Container) -> tuple[dict[str, str], Container]:
    """Return the files of the groups that suit a config of pretrain.py best, and what else differs.

    A group may have been chosen by an override, by an experiment or by a path. So the files are
    compared with the config as a whole.

    Returns:
        {group: choice} where it is not the default, and the values that differ from those files.
    """
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
        if key in sure or followed.get(key, ...) != value:
            values = with_changes(values, {key: value})
    return groups, values


def _interpolated_names() -> set[str]:
    """Return the last names of the keys whose values in config/ are interpolations."""
    texts = (file.read_text(encoding="utf-8") for file in CONFIG_DIR.glob("*/*.yaml"))
    return {name for text in texts for name in re.findall(r"^\s*(\w+):\s*\$\{", text, re.MULTILINE)}


def _nearest(group: str, default: str, options: dict[str, Any]) -> str:
    """Return the file of a group with the same name and keys, and the fewest other values."""
    leaves = dict(flatten(options))
    num_other = {}
    for choice in dict.fromkeys([default, *choices(group)]):
        if name_of_choice(group, choice) != leaves.get("name"):
            continue  # composing it would take a tenth of a second for nothing
        own = dict(flatten(read_config("pretrain", [f"{group}={choice}"])[group]))
        if own.keys() == leaves.keys():
            num_other[choice] = sum(own[key] != value for key, value in leaves.items())
    return min(num_other, key=lambda choice: num_other[choice])
