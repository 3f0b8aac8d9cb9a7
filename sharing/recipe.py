"""Write a config as experiment=FILE takes it: the groups that suit it, and what differs."""

import re
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import Any

import yaml

from utils.command_line import read_config, with_changes
from utils.composing import compose
from utils.config import Container, flatten
from utils.config_files import CONFIG_DIR, choices, default_groups
from utils.overrides import as_override


def recipe_text(comment: Iterable[str], groups: dict[str, str], values: Container) -> str:
    """Return the text of the file: a comment, and what `differences_from_groups` returns.

    Paragraphs of the comment are wrapped unless they are indented.
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
    """Return the files of the groups that suit a config best, and the values that differ from them.

    Groups of which the default suits best are left out.
    """
    base, groups, changed = dict(flatten(read_config("pretrain", []))), dict[str, str](), Container()
    of_groups = {group: default for group, default in default_groups("pretrain") if isinstance(wanted.get(group), dict)}
    for group, default in of_groups.items():
        choice, options = typed_options(group, dict(flatten(wanted[group])))
        if choice != default:
            groups[group] = choice
        changed |= {f"{group}.{key}": value for key, value in options.items()}
    for key, value in flatten(wanted):
        if key.partition(".")[0] not in of_groups and base.get(key, ...) != value:
            changed[key] = value
    # First the keys without a group, in the order of the config.
    order = [key for key, _ in flatten(wanted)]
    values: Container = {}
    for key in sorted(changed, key=lambda key: ("." in key, order.index(key))):
        values = with_changes(values, {key: changed[key]})
    return groups, values


def typed_options(group: str, options: Container) -> tuple[str, Container]:
    """Return the file of a group that suits its options best, and the options that differ from it.

    Options that follow from others by interpolation are left out. If no file has these keys, return
    the name of the options, and all options.

    Args:
        options: {key: value}, dotted keys without the group.
    """
    differing = {
        choice: {key: value for key, value in options.items() if own[key] != value}
        for choice, own in _options_of_files(group, options.get("name")).items()
        if own.keys() == options.keys()
    }
    if not differing:
        return str(options.get("name")), options
    choice = min(differing, key=lambda choice: len(differing[choice]))
    changed, interpolated = differing[choice], _interpolated_names()
    sure = {key: value for key, value in changed.items() if key.split(".")[-1] not in interpolated}
    if len(sure) < len(changed):
        typed = [f"{group}={choice}", *(f"{group}.{key}={as_override(value)}" for key, value in sure.items())]
        followed = dict(flatten(read_config("pretrain", typed)[group]))
        changed = {key: value for key, value in changed.items() if key in sure or followed[key] != value}
    return choice, changed


@cache
def _options_of_files(group: str, name: object) -> dict[str, Container]:
    """Return the options of each file of a group with this name, those of the default first."""
    default = dict(default_groups("pretrain"))[group]
    return {
        choice: dict(flatten(read_config("pretrain", [f"{group}={choice}"])[group]))
        for choice in dict.fromkeys([default, *choices(group)])
        if compose("pretrain", [f"{group}={choice}"]).values[group].get("name") == name
    }


def shown_value(value: Any) -> str:
    """Return a value of the config for a person: as it is typed, with numbers of four digits."""
    return f"{value:.4g}" if isinstance(value, float) else as_override(value)


@cache
def _interpolated_names() -> set[str]:
    """Return the last names of the keys whose values in config/ are interpolations."""
    texts = (file.read_text(encoding="utf-8") for file in CONFIG_DIR.glob("*/*.yaml"))
    return {name for text in texts for name in re.findall(r"^\s*(\w+):\s*\$\{", text, re.MULTILINE)}
