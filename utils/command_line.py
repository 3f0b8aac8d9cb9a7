"""Read a command line of overrides, and the config that it asks for, into plain dicts. For rank 0.

Every mistake is a UserError of one line.
"""

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError

from utils.arguments import Parser
from utils.composing import Origin, compose, in_our_words, known_keys, with_switch
from utils.config import flatten, page_of
from utils.config_files import CONFIG_DIR, Container, choices, default_groups, is_group
from utils.errors import UserError
from utils.files import file_errors
from utils.mistakes import describe, describe_missing, key_of, unknown_key
from utils.overrides import parse_override, quoted
from utils.shell import run_command
from utils.terminal import tell

C = TypeVar("C", bound=BaseModel)

_FLAGS_WITH_VALUE = ("--cfg", "-c", "--config-dir")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: Hydra overrides, and the page to print instead of running, if any.

    Attributes:
        flags: the flags of the program itself that were typed, such as --dry-run.
    """

    overrides: list[str]
    page: str | None = None
    flags: frozenset[str] = frozenset()

    @staticmethod
    def parse(argv: list[str], config_name: str, usage: str, flags: Sequence[str] = ()) -> "CommandLine":
        """Parse a command line.

        Args:
            flags: those of the program itself.

        Raises:
            UserError: A flag is unknown, or --cfg is given and the config is wrong.
        """
        if "--help" in argv or "-h" in argv:
            return CommandLine([], page=_help_page(config_name, usage))
        parser = Parser(config_name, usage)
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--cfg", "-c", choices=["job"])
        parser.add_argument("--config-dir")
        words = [word for word in argv if word not in flags]
        arguments = parser.parse_intermixed_args(_with_keys(words, config_name))
        overrides = arguments.overrides
        for name in _pages(config_name):
            aliases = page_of(name).aliases
            for key in {typed.lstrip("+").partition("=")[0] for typed in overrides} & aliases.keys():
                tell(f"{key} is {aliases[key]} here")
            overrides = in_our_words(name, overrides)
        if arguments.config_dir is not None:
            overrides = _from_folder(arguments.config_dir, overrides)
        typed = frozenset(flags) & {*argv}
        page = OmegaConf.to_yaml(read_config(config_name, overrides)) if arguments.cfg else None
        return CommandLine(overrides, page, typed)


def only_help(config_name: str, usage: str, missing: str) -> int:
    """Run a program that lacks a package: it can only show its --help.

    Args:
        missing: says what the program needs and how it is installed.

    Returns:
        The exit status: 0, or 2 if anything but --help was typed.
    """

    def show_help(argv: list[str] | None) -> str:
        typed = sys.argv[1:] if argv is None else argv
        if not {"--help", "-h"} & set(typed):
            raise UserError(missing)
        return _help_page(config_name, usage)

    return run_command(show_help, None)


# ---- the words of a command line ---------------------------------------------------------------


def _pages(config_name: str) -> list[str]:
    """Return the pages whose keys a program takes."""
    return [name for name in (config_name, page_of(config_name).passes_on) if name]


def _with_keys(words: Sequence[str], config_name: str) -> list[str]:
    """Return the words with key=value for --key=value, and with its key in front of a bare path.

    Raises:
        UserError: A word is a flag that is none, or the main key is given twice.
    """
    main = page_of(config_name).bare
    found: list[str] = []
    bare = []
    for number, word in enumerate(words):
        key = word.partition("=")[0]
        is_override = re.match(r"[+~]*[\w.@/-]+=", word) and not ("/" in key and os.path.exists(word))
        if key in _FLAGS_WITH_VALUE or (number and words[number - 1] in _FLAGS_WITH_VALUE):
            found.append(word)
        elif word.startswith("-"):
            found.append(_without_dashes(word, words[number + 1 :], config_name))
        elif main and not is_override and (word == "~" or "/" in word or os.path.exists(word)):
            bare.append(word)
            found.append(f"{main}={quoted(os.path.expanduser(word))}")
        else:
            found.append(word)
    if bare and sum(re.match(rf"\+*{main}=", each) is not None for each in found) > 1:
        raise UserError(f"{' '.join(bare)}: {main} is given twice; give it once")
    return found


def _without_dashes(word: str, after: Sequence[str], config_name: str) -> str:
    """Return --key=value as key=value."""
    if "=" in word:
        return _as_key(word)
    key = word.lstrip("-").replace("-", "_")
    known = [name for page in _pages(config_name) for name in known_keys(page)]
    if key in known:
        value = shlex.quote(after[0]) if after and "=" not in after[0] else "..."
        raise UserError(f"{word}: overrides are written key=value; write {key}={value}")
    raise UserError(f"{word}: {unknown_key(key, known)}")


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
    """Return the overrides with the path of each chosen file that lies in a folder like config/.

    Raises:
        UserError: The folder is missing, or holds none of the chosen configs.
    """
    root, found = Path(os.path.expanduser(folder)), []
    with file_errors():
        for typed in overrides:
            group, _, names = typed.lstrip("+").partition("=")
            files = [(name, root / group / f"{name}.yaml") for name in names.split(",")]  # several: for sweep.py
            here = [str(file) if file.is_file() else name for name, file in files]
            found.append(f"{group}={','.join(here)}" if is_group(group) and "/" not in names else typed)
        if found == overrides:
            raise UserError(
                f"--config-dir {folder} holds none of the configs on the command line; give a folder like config/, "
                "with experiment/, arch/ or the like"
            )
    return found


def _help_page(config_name: str, usage: str) -> str:
    """Return the page of --help: usage, groups with their choices, and the YAML with its comments.

    The YAML is shown as text, because OmegaConf would drop the comments.
    """
    lines = [
        usage.strip(),
        "",
        "Groups, chosen with group=name (config/<group>/<name>.yaml) or group=path/to/file.yaml:",
    ]
    main, groups = CONFIG_DIR / f"{config_name}.yaml", default_groups(config_name)
    for group, default in groups:
        entry = f"{', '.join(choices(group))}  (default:_{default})"  # no line may end before the default
        wrapped = textwrap.wrap(entry, 140, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)
        lines += [line.replace("(default:_", "(default: ") for line in wrapped]
    files = [main]
    for group, default in groups:
        if default != "null":
            folder = CONFIG_DIR / group
            files += [*sorted(folder.glob("_*.yaml")), folder / f"{default}.yaml"]
    for path in files:
        lines += ["", f"--- {path.relative_to(CONFIG_DIR.parent)} ---", path.read_text(encoding="utf-8").strip()]
    return "\n".join(lines)


# ---- the config --------------------------------------------------------------------------------


def read_config(config_name: str, overrides: list[str]) -> Container:
    """Compose config/<config_name>.yaml with the overrides, and resolve its interpolations.

    Raises:
        UserError: An override or the YAML is wrong; the message names the choices.
    """
    values: Container = _at_home(deepcopy(compose(config_name, overrides).values))
    return values


def _at_home(value: Any) -> Any:
    """Return a value of the config with the home directory for ~ at the beginning of a path."""
    if isinstance(value, dict):
        return {key: _at_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_at_home(inner) for inner in value]
    return os.path.expanduser(value) if isinstance(value, str) and f"{value}/".startswith("~/") else value


def typed_keys_and_groups(config_name: str, overrides: list[str]) -> set[str]:
    """Return the keys and groups in the overrides: the words before the equals signs."""
    return {parse_override(typed).key_or_group for typed in in_our_words(config_name, overrides)}


def typed_changes(config_name: str, overrides: list[str], given: Sequence[str] = ()) -> Container:
    """Return the changes that the overrides ask for, as {dotted key: value}.

    These are the typed keys, and the keys that a typed group (experiment=x) sets to another value
    than the defaults. Keys that only change by interpolation are not among them.

    Args:
        given: overrides that were not typed but belong in front of the typed ones, such as arch=trm
            in front of its option arch.L_layers=1.
    """
    parsed = [parse_override(typed) for typed in in_our_words(config_name, overrides)]
    groups = [each.input_line or "" for each in parsed if is_group(each.key_or_group)]
    defaults = dict(flatten(read_config(config_name, [*given])))
    by_groups = dict(flatten(read_config(config_name, [*given, *groups])))
    asked = dict(flatten(read_config(config_name, [*given, *overrides])))
    # A typed dictionary is merged into the config, so only its own keys count as typed.
    typed_keys = []
    for each in parsed:
        key, value = each.key_or_group, each.value()
        if isinstance(value, dict):
            typed_keys += [name for name, _ in flatten({key: value})]
        elif isinstance(value, bool) and f"{key}.enabled" in asked:
            typed_keys.append(f"{key}.enabled")
        elif not each.is_delete():
            typed_keys.append(key)
    # The values are those of all overrides together: a group may derive a value from a typed key.
    changes = {key: asked[key] for key, value in by_groups.items() if defaults.get(key, ...) != value and key in asked}
    for key, value in asked.items():
        if any(key == typed or key.startswith(f"{typed}.") for typed in typed_keys):
            changes[key] = value
    return changes


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
    whole = defaults | stored
    for key, value in stored.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            whole[key] = filled_up(value, default)
        else:
            whole[key] = with_switch(default, value)
    return whole


def differences(old: Container, new: Container) -> list[str]:
    """Return a line `key: old -> new` for each leaf that differs."""
    old_leaves, new_leaves = dict(flatten(old)), dict(flatten(new))
    keys = [*new_leaves, *(key for key in old_leaves if key not in new_leaves)]
    return [
        f"{key}: {old_leaves.get(key)} -> {new_leaves.get(key)}"
        for key in keys
        if old_leaves.get(key) != new_leaves.get(key)
    ]


def validate(config_class: type[C], container: Container, origin: Origin | None = None) -> C:
    """Build the config object.

    Args:
        config_class: the class of the whole config.
        container: its values.
        origin: where the values come from. With it, messages name the file and the line of a key.

    Raises:
        UserError: Keys or values are wrong; the message names each of them.
    """
    try:
        return config_class.model_validate(container)
    except ValidationError as error:
        by_key: dict[str, list[Any]] = {}
        for each in error.errors():
            by_key.setdefault(key_of(each["loc"], container, missing=each["type"] == "missing"), []).append(each)
        missing = [key for key, errors in by_key.items() if errors[0]["type"] == "missing"]
        messages = []
        for key, errors in by_key.items():
            if errors[0]["type"] == "extra_forbidden":
                known = [name for name, _ in flatten(container) if name != key and not name.startswith(f"{key}.")]
                messages.append(origin.unknown_key(key) if origin else unknown_key(key, known))
            elif key not in missing and not (origin and origin.derives(key) and len(by_key) > len(missing) + 1):
                messages.append(describe(key, errors, origin.place_of(key) if origin else None))
        # These come last: a key may be missing because it is misspelt.
        raise UserError("; ".join([*messages, *describe_missing(missing)])) from error
