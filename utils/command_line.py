"""Read a command line of overrides, and the config that it asks for, into plain dicts. For rank 0.

Every mistake is a UserError of one line.
"""

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError

from utils.composing import Composed, compose, in_our_words, merge
from utils.config import Container, flatten, keys_of, page_of
from utils.config_files import CONFIG_DIR, choices, default_groups, is_group
from utils.errors import UserError
from utils.files import file_errors
from utils.mistakes import describe, key_of, unknown_key
from utils.overrides import parse_override, quoted
from utils.shell import run_command

C = TypeVar("C", bound=BaseModel)

_HELP = {"--help", "-h"}


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    overrides: list[str]
    page: str | None = None  # to print instead of running
    flags: frozenset[str] = frozenset()  # of the program itself that were typed, such as --dry-run

    @staticmethod
    def parse(argv: list[str], config_name: str, usage: str, flags: Sequence[str] = ()) -> "CommandLine":
        if _HELP & {*argv}:
            return CommandLine([], page=_help_page(config_name, usage))
        overrides, bare = list[str](), list[str]()
        given: dict[str, str] = {}
        main, rest = page_of(config_name).bare, iter([word for word in argv if word not in flags])
        for word in rest:
            key, equals, value = word.partition("=")
            is_override = re.match(r"\+*[\w./-]+=", word) and not ("/" in key and os.path.exists(word))
            if key in ("--cfg", "-c", "--config-dir"):
                given["--cfg" if key == "-c" else key] = value if equals else next(rest, "")
            elif word.startswith("-"):
                overrides.append(_as_key(word) if equals else _without_value(key, next(rest, ""), config_name))
            elif main and not is_override and (word == "~" or "/" in word or os.path.exists(word)):
                bare.append(word)
                overrides.append(f"{main}={quoted(os.path.expanduser(word))}")
            else:
                overrides.append(word)
        if bare and sum(re.match(rf"\+*{main}=", each) is not None for each in overrides) > 1:
            raise UserError(f"{' '.join(bare)}: {main} is given twice; give it once")
        for name in _pages(config_name):
            overrides = in_our_words(name, overrides)
        if (folder := given.get("--config-dir")) is not None:
            overrides = _from_folder(folder, overrides)
        page = None
        if (shown := given.get("--cfg")) is not None:
            if shown != "job":
                raise UserError(f"--cfg {shown}: write --cfg job, which shows the config")
            page = OmegaConf.to_yaml(read_config(config_name, overrides))
        return CommandLine(overrides, page, frozenset(flags) & {*argv})


def only_help(config_name: str, usage: str, missing: str) -> int:
    """Run a program that lacks a package: it can only show its --help, or say what is missing."""

    def show_help(_: list[str] | None) -> str:
        if not _HELP & {*sys.argv[1:]}:
            raise UserError(missing)
        return _help_page(config_name, usage)

    return run_command(show_help, None)


def _pages(config_name: str) -> list[str]:
    """Return the pages whose keys a program takes."""
    return [name for name in (config_name, page_of(config_name).passes_on) if name]


def _without_value(word: str, after: str, config_name: str) -> str:
    """Refuse a word such as --lr, which is no override, and say what to write."""
    key, pages = word.lstrip("-").replace("-", "_"), _pages(config_name)
    classes = [page_of(name).config_class for name in pages]
    groups = [group for name in pages for group, _ in default_groups(name)]
    if key in groups or any(key in keys_of(each) for each in classes):
        value = shlex.quote(after) if after and "=" not in after else "..."
        raise UserError(f"{word}: overrides are written key=value; write {key}={value}")
    beside = [*groups, *(each for other in classes[:-1] for each in keys_of(other))]
    raise UserError(f"{word}: {unknown_key(key, classes[-1], groups=beside)}")


def _as_key(word: str) -> str:
    """Return --key=value, the form in which an agent of W&B passes overrides, as key=value.

    The agent writes values as Python does. Hydra reads True and False, but None only as null.
    """
    key, equals, value = word.lstrip("-").partition("=")
    return f"{key.replace('-', '_')}{equals}{'null' if value == 'None' else value}"


def typed_values(argv: Sequence[str], keys: Sequence[str]) -> Container:
    """Return the values of some keys on a command line, by key, before any YAML is read."""
    words = [_as_key(word) if word.startswith("-") else word.lstrip("+") for word in argv]
    typed = [parse_override(word) for word in words if word.partition("=")[0] in keys]
    return {override.key_or_group: override.value() for override in typed}


def _from_folder(folder: str, overrides: list[str]) -> list[str]:
    """Return the overrides with the path of each chosen file that lies in a folder like config/."""
    root, found = Path(os.path.expanduser(folder)), []
    with file_errors():
        for typed in overrides:
            group, _, names = typed.partition("=")
            files = [(name, root / group / f"{name}.yaml") for name in names.split(",")]  # several: for sweep.py
            here = [str(file) if file.is_file() else name for name, file in files]
            found.append(f"{group}={','.join(here)}" if is_group(group) and "/" not in names else typed)
    if found == overrides:
        raise UserError(
            f"--config-dir {folder} holds none of the configs on the command line; give a folder with subfolders "
            "like those of config/"
        )
    return found


def _help_page(config_name: str, usage: str) -> str:
    """Return the page of --help: usage, choices, and the YAML with its comments."""
    title = "Groups, chosen with group=name (config/<group>/<name>.yaml) or group=path/to/file.yaml:"
    lines, files = [usage.strip(), "", title], [CONFIG_DIR / f"{config_name}.yaml"]
    for group, default in default_groups(config_name):
        entry = f"{', '.join(choices(group))}  (default:_{default})"  # no line may end before the default
        wrapped = textwrap.wrap(entry, 140, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)
        lines += [line.replace("(default:_", "(default: ") for line in wrapped]
        if default != "null":
            folder = CONFIG_DIR / group
            files += [*sorted(folder.glob("_*.yaml")), folder / f"{default}.yaml"]
    for path in files:
        lines += ["", f"--- {path.relative_to(CONFIG_DIR.parent)} ---", path.read_text(encoding="utf-8").strip()]
    return "\n".join(lines)


# ---- the config --------------------------------------------------------------------------------


def read_config(config_name: str, overrides: list[str]) -> Container:
    """Return a copy of the values of `compose`."""
    return deepcopy(compose(config_name, overrides).values)


def typed_keys_and_groups(config_name: str, overrides: list[str]) -> set[str]:
    """Return the keys and groups in the overrides: the words before the equals signs."""
    return {parse_override(typed).key_or_group for typed in in_our_words(config_name, overrides)}


def typed_changes(config_name: str, overrides: list[str], given: Sequence[str] = ()) -> Container:
    """Return the typed keys, and those that a typed group changes, as {dotted key: value}.

    Keys that only change by interpolation are not among them. `given` are choices that were not
    typed, but whose options the typed ones may be.
    """
    parsed = [parse_override(typed) for typed in in_our_words(config_name, overrides)]
    groups = [each.input_line or "" for each in parsed if is_group(each.key_or_group)]
    defaults, by_groups, asked = (
        dict(flatten(read_config(config_name, [*given, *typed]))) for typed in ([], groups, overrides)
    )
    typed_keys = list[str]()
    for each in parsed:
        key, value = each.key_or_group, each.value()
        if isinstance(value, bool) and f"{key}.enabled" in asked:
            value = {"enabled": value}
        # A typed dictionary is merged into the config, so only its own keys count as typed.
        typed_keys += [name for name, _ in flatten({key: value})]
    # The values are those of all overrides together: a group may derive a value from a typed key.
    return {
        key: value
        for key, value in asked.items()
        if any(f"{key}.".startswith(f"{typed}.") for typed in typed_keys)
        or (key in by_groups and defaults.get(key, ...) != by_groups[key])
    }


def with_changes(container: Container, changes: Container) -> Container:
    """Return a copy of a nested container with dotted keys set, without interpolation."""
    changed = deepcopy(container)
    for key, value in changes.items():
        *groups, last = key.split(".")
        inner = changed
        for group in groups:
            if not isinstance(inner.get(group), dict):
                inner[group] = {}
            inner = inner[group]
        inner[last] = value
    return changed


def filled_up(stored: Container, defaults: Container) -> Container:
    """Return a stored config with the defaults of the keys that it lacks, in inner groups, too."""
    whole = deepcopy(defaults)
    merge(whole, stored)
    return whole


def differences(old: Container, new: Container) -> list[str]:
    """Return a line `key: old -> new` for each leaf that differs."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [key for key in after | before if before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys]


def validate(config_class: type[C], container: Container, origin: Callable[[], Composed] | None = None) -> C:
    """Build the config object, or raise UserError, which names each wrong key or value.

    `origin` composes the config again after a mistake, so that messages name file and line.
    """
    try:
        return config_class.model_validate(container)
    except ValidationError as error:
        by_key: dict[str, list[Any]] = {}
        for each in error.errors():
            by_key.setdefault(key_of(each["loc"], container, missing=each["type"] == "missing"), []).append(each)
        missing = [key for key, errors in by_key.items() if errors[0]["type"] == "missing"]
        messages, composed = list[str](), origin() if origin else Composed()
        for key in [key for key in by_key if key not in missing]:
            place = composed.place_of(key)
            if by_key[key][0]["type"] == "extra_forbidden":
                messages.append(unknown_key(key, config_class, container, place))
            elif key not in composed.derived or len(by_key) == len(missing) + 1:
                messages.append(place + describe(key, by_key[key]))
        if missing:  # last, because a key may be missing because it is misspelt
            more = f" ({len(missing)} keys are missing in all)" if len(missing) > 1 else ""
            messages.append(f"{missing[0]} is not set; give {missing[0]}=...{more}")
        raise UserError("; ".join(messages)) from error
