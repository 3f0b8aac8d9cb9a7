"""Read the command line and the YAML with Hydra, into plain dicts. For rank 0.

Every mistake is a UserError of one line.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, reduce
from operator import getitem
from typing import Any, NoReturn, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from utils.config import flatten
from utils.config_files import (
    CONFIG_DIR,
    check_chosen,
    choices,
    default_groups,
    from_folder,
    in_quotes,
    is_group,
    listed_choices,
    names_file,
    placed,
    quoted,
    typed_override,
)
from utils.errors import UserError
from utils.mistakes import Origin, describe, describe_missing, in_one_line, key_of
from utils.secrets import secret_in
from utils.shell import run_command
from utils.synonyms import in_our_words
from utils.text import for_shell, one_line
from utils.typed_text import Path, in_text_quotes, lost_text
from utils.typed_words import overrides_among
from utils.yaml_places import characters_of, name_of_choice

Container = dict[str, Any]
C = TypeVar("C", bound=BaseModel)


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: Hydra overrides, and the page to print instead of running, if any."""

    overrides: list[str]
    page: str | None = None

    @staticmethod
    def parse(argv: list[str], config_name: str, usage: str) -> "CommandLine":
        """Parse a command line.

        Raises:
            UserError: A flag is unknown, or --cfg is given and the config is wrong.
        """
        parser = _Parser(add_help=False, allow_abbrev=False)
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--help", "-h", action="store_true")
        parser.add_argument("--cfg", "-c", choices=["job"])
        parser.add_argument("--config-dir")
        parser.add_argument("--multirun", "-m", action="store_true")
        asks_for_help = "--help" in argv or "-h" in argv
        arguments = parser.parse_intermixed_args(argv if asks_for_help else overrides_among(argv, config_name))
        if arguments.multirun and config_name != "sweep":  # which runs several anyway
            _require_one_run(config_name, "-m", arguments.overrides)
        if arguments.config_dir is not None and not arguments.help:
            arguments.overrides = from_folder(arguments.config_dir, arguments.overrides)
        several = config_name == "sweep"  # there a comma separates several files
        arguments.overrides = [typed if several and "," in typed else in_quotes(typed) for typed in arguments.overrides]
        if arguments.help:
            return CommandLine(arguments.overrides, page=_help_page(config_name, usage))
        if arguments.cfg:
            return CommandLine(
                arguments.overrides, page=OmegaConf.to_yaml(read_config(config_name, arguments.overrides))
            )
        return CommandLine(arguments.overrides)


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


def read_config(config_name: str, overrides: list[str]) -> Container:
    """Compose config/<config_name>.yaml with the overrides, and resolve its interpolations.

    Raises:
        UserError: An override or the YAML is wrong; the message names the choices.
    """
    # The published commands put a plus in front of new keys. Here every key is in the YAML, so the
    # plus means nothing.
    overrides = [in_text_quotes(config_name, typed.lstrip("+")) for typed in in_our_words(overrides)]
    overrides = _with_switches(config_name, [*map(in_quotes, overrides)])
    _require_no_secret([("the command line", typed) for typed in overrides])
    for typed in overrides:
        _require_single_value(typed, config_name, overrides)
    check_chosen(overrides)
    try:
        container = _compose(config_name, overrides)
        # In experiment=x arch=y the experiment may set options of its own architecture that y does
        # not have. They are dropped.
        keys, groups = typed_keys_and_groups(overrides), default_groups(config_name)
        if keys & {group for group, default in groups if default == "null"}:
            for group in keys & {group for group, default in groups if default != "null"}:
                chosen = [override for override in overrides if override.split("=")[0] == group]
                own, options = _compose(config_name, chosen)[group], container[group]
                for key in options.keys() - own.keys():
                    if f"{group}.{key}" not in keys:
                        del options[key]
    except (HydraException, OmegaConfBaseException, YAMLError, RecursionError) as error:
        message = in_one_line(error, Origin(config_name, overrides))
        try:
            _require_no_secret([("what is wrong with the config", f"{error} {message}")])
        except ValueError as secret:
            raise secret from None  # the cause would quote the secret
        raise UserError(message) from error
    for key in switches(config_name):  # a file may have the switch alone
        value = container[key] if isinstance(container[key], dict) else {"enabled": container[key]}
        if value.keys() == {"enabled"} and isinstance(value["enabled"], bool):
            container[key] = {**_compose(config_name, [])[key], **value}
    _require_no_secret([(key, str(value)) for key, value in flatten(container)])
    return {key: _at_home(value) for key, value in container.items()}


def _at_home(value: Any) -> Any:
    """Return a value of the config with the home directory for ~ at the beginning of a path."""
    if isinstance(value, dict):
        return {key: _at_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_at_home(inner) for inner in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def switches(config_name: str) -> list[str]:
    """Return the keys whose options begin with `enabled`, such as profile.

    They were switches at first. So `profile=true` still means `profile.enabled=true`, on a command
    line, in a file and in a stored config.
    """
    page = (CONFIG_DIR / f"{config_name}.yaml").read_text(encoding="utf-8")
    return re.findall(r"^(\w+):.*\n  enabled:", page, flags=re.MULTILINE)


def _with_switches(config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides with profile={enabled:true} for profile=true.

    Hydra puts this into the place of a switch in a file, where profile.enabled would be unknown.
    """
    names = "|".join(switches(config_name)) or "(?!)"
    return [re.sub(rf"(?i:^(\+*)({names})=(true|false)$)", r"\1\2={enabled:\3}", typed) for typed in overrides]


def _require_no_secret(texts: Sequence[tuple[str, str]]) -> None:
    """Raise UserError if a text contains a secret of the environment.

    A config is written into checkpoints, to W&B and into messages. An interpolation ${oc.env:...}
    reads the environment, also in somebody else's YAML.

    Args:
        texts: Where each text stands, and the text.
    """
    if not secret_in("\n".join(text for _, text in texts)):  # one search of the environment is enough for most
        return
    for where, text in texts:
        if name := secret_in(text):
            raise UserError(
                f"{where} holds the value of the environment variable {name}, which looks like a secret; "
                "leave it out: configs are written into checkpoints and to W&B"
            )


def _compose(config_name: str, overrides: list[str]) -> Container:
    if any(map(names_file, overrides)):  # a file may change between two calls
        with placed(overrides) as (by_name, folders):
            paths = ",".join(quoted(f"file://{folder}") for folder in folders)
            try:
                by_name = [f"hydra.searchpath=[{paths}]", *by_name]
                container, chosen = _composed.__wrapped__(config_name, tuple(by_name), tuple(overrides))
            except HydraException as error:
                text = str(error)
                for typed, placed_as in zip(overrides, by_name[1:], strict=True):  # name the file as it was typed
                    text = text.replace(f"'{placed_as.replace('=', '/')}'", typed)
                raise HydraException(text) from error
    else:
        container, chosen = deepcopy(_composed(config_name, tuple(overrides), tuple(overrides)))
    for group, choice in chosen.items():
        if group in container and choice in choices(group):
            _require_name_of_choice(group, choice, container[group], Origin(config_name, overrides))
    return container


@cache  # composing takes a fifth of a second, and a resumed run asks for the same config repeatedly
def _composed(config_name: str, overrides: tuple[str, ...], typed: tuple[str, ...]) -> tuple[Container, dict[str, str]]:
    """Return a config, and the choice of each group.

    Args:
        overrides: as Hydra takes them, which finds a file by a name and not by its path.
        typed: the same as they were typed.
    """
    # In YAML ${when:${.recurrent},6,1} is 6 if recurrent is true, else 1.
    OmegaConf.register_new_resolver("when", lambda condition, then, other: then if condition else other, replace=True)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            composed = compose(config_name, overrides=list(overrides), return_hydra_config=True)
        except ValueError as error:  # Hydra raises it if defaults: holds no list
            if isinstance(error, HydraException | OmegaConfBaseException):
                raise
            raise UserError(f"{one_line(error)}; correct the defaults of this file") from error
    own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    container = _with_text(own, config_name, typed)
    return container, dict(composed.hydra.runtime.choices)


def _with_text(composed: DictConfig, config_name: str, typed: Sequence[str]) -> Container:
    """Return a config with its interpolations resolved, and with text as the files write it."""

    def holder(values: Any, path: Path) -> Any:
        return reduce(getitem, path[:-1], values)

    lost = [*lost_text(config_name, OmegaConf.to_container(composed))]
    for path in lost:
        if (characters := characters_of(path, config_name, typed)) is not None:
            holder(composed, path)[path[-1]] = characters
    container = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    for path in [*lost_text(config_name, container)]:
        inner = holder(container, path)
        if path not in lost and isinstance(inner[path[-1]], int | float):  # run_name: ${seed}
            inner[path[-1]] = str(inner[path[-1]])
    return container  # type: ignore[return-value]


def _require_name_of_choice(group: str, choice: str, options: Any, origin: Origin) -> None:
    """Raise UserError if the options of a group have the name of another choice.

    arch.name=trm would give a TRM all the options of the default architecture.
    """
    name = options.get("name") if isinstance(options, dict) else None
    if name_of_choice(group, choice) in (None, name):
        return
    if others := [each for each in choices(group) if name_of_choice(group, each) == name]:
        wanted = name if name in others else others[0]
        place = origin.place_of(f"{group}.name")
        at = f"{place}: " if place else ""
        raise UserError(
            f"{at}{group}.name={name} does not choose the options of {name}, and those of {choice} would stay; write "
            f"{group}={wanted}, or in YAML the line - override /{group}: {wanted} below defaults:"
        )


def typed_keys_and_groups(overrides: list[str]) -> set[str]:
    """Return the keys and groups in the overrides: the words before the equals signs."""
    plain = [typed.lstrip("+") for typed in in_our_words(overrides)]
    return {o.key_or_group for o in OverridesParser.create().parse_overrides(plain)}


def typed_changes(config_name: str, overrides: list[str], given: Sequence[str] = ()) -> Container:
    """Return the changes that the overrides ask for, as {dotted key: value}.

    These are the typed keys, and the keys that a typed group (experiment=x) sets to another value
    than the defaults. Keys that only change by interpolation are not among them.

    Args:
        given: overrides that were not typed but belong in front of the typed ones, such as arch=trm
            in front of its option arch.L_layers=1.
    """
    overrides = _with_switches(config_name, in_our_words(overrides))
    parsed = OverridesParser.create().parse_overrides([typed.lstrip("+") for typed in overrides])
    groups = [o.input_line or "" for o in parsed if is_group(o.key_or_group)]
    # A typed dictionary is merged into the config, so only its own keys count as typed.
    typed = {o.key_or_group: o.value() for o in parsed if not o.is_delete()}
    typed_keys = [
        key
        for name, value in typed.items()
        for key in ([key for key, _ in flatten({name: value})] if isinstance(value, dict) else [name])
    ]
    defaults = dict(flatten(read_config(config_name, [*given])))
    by_groups = dict(flatten(read_config(config_name, [*given, *groups])))
    asked = dict(flatten(read_config(config_name, [*given, *overrides])))
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
    both = {
        key: filled_up(value, defaults[key])
        for key, value in stored.items()
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
    }
    switched = {  # see switches
        key: {**defaults[key], "enabled": value}
        for key, value in stored.items()
        if isinstance(value, bool) and isinstance(defaults.get(key), dict) and "enabled" in defaults[key]
    }
    return defaults | stored | both | switched


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
        wrong = {key: errors for key, errors in by_key.items() if key not in missing}
        messages = [
            describe(key, errors, container, origin)
            for key, errors in wrong.items()
            if origin is None or not origin.derives(key, wrong)
        ]
        # These come last: a key may be missing because it is misspelt.
        raise UserError("; ".join([*messages, *describe_missing(missing)])) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; overrides are written key=value, flags are --help, --cfg job and --config-dir DIR")


def _require_one_run(config_name: str, typed: str, overrides: list[str]) -> NoReturn:
    """Raise UserError for a flag or an override that asks for several runs.

    The message names the command that starts several runs.
    """
    decimal = re.fullmatch(r"'(\S+=-?\d+),(\d+(e-?\d+)?)'", typed)
    number = f"; for a decimal number write {decimal[1]}.{decimal[2]}" if decimal else ""
    if config_name == "pretrain":
        raise UserError(
            f"{typed} asks for several runs, and this is one; python sweep.py {for_shell(overrides)} runs them{number}"
        )
    raise UserError(
        f"{typed} asks for several runs, but this is one; give one value, [a,b] for a list, or quotes for text{number}"
    )


def _require_single_value(typed: str, config_name: str, overrides: list[str]) -> None:
    """Raise UserError if this is not an override, or an override with several values.

    Unlike Hydra's messages, these quote the override.
    """
    key, equals, value = typed.partition("=")
    if not re.fullmatch(r"~?[\w.@/-]+", key) or not (equals or typed.startswith("~")):
        raise UserError(f"{typed!r} is no override; write key=value, and see --help for the keys")
    try:
        override = OverridesParser.create().parse_override(typed)
    except (HydraException, ValueError) as error:  # ValueError: a number of thousands of digits
        raise UserError(
            f"{typed!r} can't be read ({' '.join(str(error).split())}); "
            f"a value with special characters needs quotes of its own: {typed_override(key, value)}"
        ) from error
    if override.key_or_group == "hydra" or override.key_or_group.startswith(("hydra.", "hydra/")):
        raise UserError(
            f"{typed!r} is a setting of Hydra's own, which has no effect here; --help lists the keys that do"
        )
    is_sweep = config_name != "sweep" and (key == "sweep" or key.startswith("sweep."))
    if override.is_sweep_override() or is_sweep:
        _require_one_run(config_name, repr(typed), overrides)
    if is_group(key) and equals and not isinstance(override.value(), str | list | dict):
        raise UserError(f"{typed!r} names no config of the group {key}; choose one of {listed_choices(key)}")


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
