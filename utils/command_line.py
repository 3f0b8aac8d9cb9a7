"""Read the command line and the YAML with Hydra, into plain dicts. For rank 0.

Every mistake is a UserError of one line.
"""

import argparse
import difflib
import re
import reprlib
import shlex
import textwrap
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import MarkedYAMLError, YAMLError

from utils.config import flatten
from utils.config_files import (
    CONFIG_DIR,
    choices,
    from_folder,
    in_quotes,
    is_group,
    malformed,
    names_file,
    placed,
    quoted,
)
from utils.errors import UserError
from utils.secrets import secret_in
from utils.text import one_line

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
        arguments = parser.parse_intermixed_args([_without_dashes(typed) for typed in argv])
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


def _without_dashes(typed: str) -> str:
    """Return --key=value, the form in which an agent of W&B passes overrides, as key=value.

    The agent writes values as Python does. Hydra reads True and False, but None only as null.
    """
    match = re.fullmatch(r"--(?!cfg=|config-dir=|help=)([\w.]+=)(.*)", typed, re.DOTALL)
    if match is None:
        return typed
    return match[1] + ("null" if match[2] == "None" else match[2])


def read_config(config_name: str, overrides: list[str]) -> Container:
    """Compose config/<config_name>.yaml with the overrides, and resolve its interpolations.

    Raises:
        UserError: An override or the YAML is wrong; the message names the choices.
    """
    # The published commands put a plus in front of new keys. Here every key is in the YAML, so the
    # plus means nothing.
    overrides = _with_switches(config_name, [in_quotes(typed.lstrip("+")) for typed in overrides])
    for typed in overrides:
        _require_no_secret("the command line", typed)
        _require_single_value(typed, config_name, overrides)
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
        message = _in_one_line(error, config_name)
        try:
            _require_no_secret("what is wrong with the config", f"{error} {message}")
        except ValueError as secret:
            raise secret from None  # the cause would quote the secret
        raise UserError(message) from error
    for key in switches(config_name):  # a file may have the switch alone
        value = container[key] if isinstance(container[key], dict) else {"enabled": container[key]}
        if value.keys() == {"enabled"} and isinstance(value["enabled"], bool):
            container[key] = {**deepcopy(_composed(config_name, ())[key]), **value}
    for key, value in flatten(container):
        _require_no_secret(key, str(value))
    return container


def switches(config_name: str) -> list[str]:
    """Return the keys whose options begin with `enabled`, such as profile.

    They were switches at first. So `profile=true` still means `profile.enabled=true`, on a command
    line, in a file and in a stored config.
    """
    page = (CONFIG_DIR / f"{config_name}.yaml").read_text()
    return re.findall(r"^(\w+):.*\n  enabled:", page, flags=re.MULTILINE)


def _with_switches(config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides with profile={enabled:true} for profile=true.

    Hydra puts this into the place of a switch in a file, where profile.enabled would be unknown.
    """
    names = "|".join(switches(config_name)) or "(?!)"
    return [re.sub(rf"(?i:^(\+*)({names})=(true|false)$)", r"\1\2={enabled:\3}", typed) for typed in overrides]


def _require_no_secret(where: str, text: str) -> None:
    """Raise UserError if the text contains a secret of the environment.

    A config is written into checkpoints, to W&B and into messages. An interpolation ${oc.env:...}
    reads the environment, also in somebody else's YAML.
    """
    if name := secret_in(text):
        raise UserError(
            f"{where} holds the value of the environment variable {name}, which looks like a secret; leave it out: "
            "configs are written into checkpoints and to W&B"
        )


def _compose(config_name: str, overrides: list[str]) -> Container:
    if any(map(names_file, overrides)):  # a file may change between two calls
        with placed(overrides) as (by_name, folders):
            paths = ",".join(quoted(f"file://{folder}") for folder in folders)
            try:
                return _composed.__wrapped__(config_name, (f"hydra.searchpath=[{paths}]", *by_name))
            except HydraException as error:
                text = str(error)
                for typed, placed_as in zip(overrides, by_name, strict=True):  # name the file as it was typed
                    text = text.replace(f"'{placed_as.replace('=', '/')}'", typed)
                raise HydraException(text) from error
    return deepcopy(_composed(config_name, tuple(overrides)))


@cache  # composing takes a fifth of a second, and a resumed run asks for the same config repeatedly
def _composed(config_name: str, overrides: tuple[str, ...]) -> Container:
    # In YAML ${when:${.recurrent},6,1} is 6 if recurrent is true, else 1.
    OmegaConf.register_new_resolver("when", lambda condition, then, other: then if condition else other, replace=True)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            composed = compose(config_name, overrides=list(overrides))
        except ValueError as error:  # Hydra's answer to a defaults list that is none
            if isinstance(error, HydraException | OmegaConfBaseException):
                raise
            raise UserError(f"{one_line(error)}; correct the defaults of this file") from error
    container = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    return container  # type: ignore[return-value]


def default_groups(config_name: str) -> list[tuple[str, str]]:
    """Return the groups in the config's defaults with their choices, in order; "null": none."""
    page = (CONFIG_DIR / f"{config_name}.yaml").read_text()
    return re.findall(r"^  - (?:optional )?(\w+): ?(\w+)", page, flags=re.MULTILINE)


def typed_keys_and_groups(overrides: list[str]) -> set[str]:
    """Return the keys and groups in the overrides: the words before the equals signs."""
    return {
        o.key_or_group for o in OverridesParser.create().parse_overrides([typed.lstrip("+") for typed in overrides])
    }


def typed_changes(config_name: str, overrides: list[str], given: Sequence[str] = ()) -> Container:
    """Return the changes that the overrides ask for, as {dotted key: value}.

    These are the typed keys, and the keys that a typed group (experiment=x) sets to another value
    than the defaults. Keys that only change by interpolation are not among them.

    Args:
        given: overrides that were not typed but belong in front of the typed ones, such as arch=trm
            in front of its option arch.L_layers=1.
    """
    overrides = _with_switches(config_name, overrides)
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


def validate(config_class: type[C], container: Container) -> C:
    """Build the config object.

    Raises:
        UserError: Keys or values are wrong; the message names each of them.
    """
    try:
        return config_class.model_validate(container)
    except ValidationError as error:
        by_key: dict[str, list[Any]] = {}
        for each in error.errors():
            by_key.setdefault(_key_of(each["loc"], container, missing=each["type"] == "missing"), []).append(each)
        raise UserError("; ".join(_describe(key, errors, container) for key, errors in by_key.items())) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; overrides are written key=value, flags are --help, --cfg job and --config-dir DIR")


def _require_one_run(config_name: str, typed: str, overrides: list[str]) -> NoReturn:
    """Raise UserError for what asks for several runs. It names the command that runs them."""
    if config_name == "pretrain":
        raise UserError(
            f"{typed} asks for several runs, and this is one; python sweep.py {shlex.join(overrides)} runs them"
        )
    raise UserError(
        f"{typed} asks for several runs, but this is one; give one value, [a,b] for a list, or quotes for text"
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
            f"a value with special characters needs quotes of its own: \"{key}='{value}'\""
        ) from error
    if override.key_or_group == "hydra" or override.key_or_group.startswith(("hydra.", "hydra/")):
        raise UserError(
            f"{typed!r} is a setting of Hydra's own, which has no effect here; --help lists the keys that do"
        )
    is_sweep = config_name != "sweep" and (key == "sweep" or key.startswith("sweep."))
    if override.is_sweep_override() or is_sweep:
        _require_one_run(config_name, repr(typed), overrides)
    if is_group(key) and equals and not isinstance(override.value(), str | list | dict):
        raise UserError(f"{typed!r} names no config of the group {key}; choose one of {_choices(key)}")


def _choices(group: str) -> str:
    return ", ".join(choices(group))


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
        entry = f"{_choices(group)}  (default: {default})"
        lines += textwrap.wrap(entry, 140, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)
    files = [main]
    for group, default in groups:
        if default != "null":
            folder = CONFIG_DIR / group
            files += [*sorted(folder.glob("_*.yaml")), folder / f"{default}.yaml"]
    for path in files:
        lines += ["", f"--- {path.relative_to(CONFIG_DIR.parent)} ---", path.read_text().strip()]
    return "\n".join(lines)


def _in_one_line(error: Exception, config_name: str) -> str:
    """Return one line that names the wrong key or choice and the right ones.

    The messages of Hydra and OmegaConf have several lines and talk about internals.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, RecursionError):
        return "a file of the config refers to itself, or is nested too deeply; correct its defaults"
    if isinstance(error, MarkedYAMLError):
        return malformed(error)
    if unknown := re.search(
        r"Could not override '([^']+)'|is not in struct\s+full_key: (\S+)|Could not delete from config. '([^']+)'", text
    ):
        key = next(filter(None, unknown.groups()))
        known = [*(group for group, _ in default_groups(config_name)), *_known_keys(config_name)]
        if key in known:
            return f"unknown key {key!r}: the defaults have it, but not the chosen options; leave it out"
        if others := _choices_with(key):
            group, named = key.split(".")[0], " or ".join(others)
            return f"unknown key {key!r}: the chosen {group} doesn't have it; take {named}, or leave the key out"
        close = difflib.get_close_matches(key, known, n=3) or [name for name in known if name.endswith("." + key)]
        return f"unknown key {key!r}; " + (f"did you mean {' or '.join(close)}?" if close else "--help lists the keys")
    if choice := re.search(
        r"Could not find '([^']+)'(?:\s+Available options in '[^']*':\s*(.*?)(?:Config search path|$))?",
        text,
        re.DOTALL,
    ):
        group = choice[1].split("/")[0]
        return f"there is no config {choice[1]!r}; " + (
            f"choose one of {_choices(group)}" if choice[2] and choice[2].strip() else "--help lists the groups"
        )
    if merging := re.search(r"In (.*?): .*Cannot merge DictConfig with ListConfig", text, re.DOTALL):
        return f"{merging[1]}: a list stands where keys belong, or keys where a list belongs; compare it with --help"
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{missing[1]} is not set; give {missing[1]}=..."
    if interpolation := re.match(r"(.*nterpolation.*)\s+full_key: (\S+)", text):
        return f"{interpolation[2]}: {interpolation[1].strip()}; inside ${{}} write another key that --help lists"
    return f"{' '.join(text.split())}; --help shows the keys and their values"


def _choices_with(key: str) -> list[str]:
    """Return the choices of the key's group, as they are typed, that have the key."""
    group, _, name = key.partition(".")
    files = {choice: CONFIG_DIR / group / f"{choice}.yaml" for choice in choices(group)}
    return [
        f"{group}={choice}"
        for choice, file in files.items()
        if re.search(rf"^{re.escape(name)}:", file.read_text(), flags=re.MULTILINE)
    ]


def _known_keys(config_name: str) -> list[str]:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        # Interpolations are not resolved, because keys that must be given have no value yet.
        container = OmegaConf.to_container(compose(config_name))
    assert isinstance(container, dict)
    return [name for name, _ in flatten(container)]  # type: ignore[arg-type]


def _key_of(location: Sequence[Any], container: Any, *, missing: bool) -> str:
    """Return the key as a user types it, without pydantic's tags for the members of a union."""
    parts: list[str] = []
    for part in location:
        if (isinstance(container, dict) and part in container) or (
            isinstance(container, list) and isinstance(part, int)
        ):
            container = container[part]
        elif not (missing and part == location[-1]):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _describe(key: str, errors: list[Any], container: Container) -> str:
    """Say what is wrong with a key. A union of types says for each type what it accepts."""
    error = errors[0]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        group, _, last = key.rpartition(".")
        beside: Any = container
        for part in filter(None, group.split(".")):
            beside = beside[int(part) if isinstance(beside, list) else part]
        close = [f"{group}.{name}".lstrip(".") for name in difflib.get_close_matches(last, set(beside) - {last})]
        return f"unknown key {key!r}; " + (f"did you mean {' or '.join(close)}?" if close else "--help lists the keys")
    if error["type"] == "missing":
        return f"{key} is not set; give {key}=..."
    if error["type"] == "union_tag_invalid":
        tags, tag = error["ctx"]["expected_tags"], error["ctx"]["tag"]
        return f"{key}.name: input should be one of {tags}, but it is {tag!r}; {key}=... chooses with all its options"
    if error["type"] == "union_tag_not_found":
        return f"{key}.name is not set; give {key}=..., one of {_choices(key)}"
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    wanted = " or ".join(e["msg"][0].lower() + e["msg"][1:] for e in errors)
    return f"{key}: {wanted}, but it is {reprlib.repr(error['input'])}"
