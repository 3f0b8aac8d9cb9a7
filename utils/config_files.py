"""The YAML files of config/, and files of the user that take a place among them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from utils.config import Container, null_of_text
from utils.errors import UserError
from utils.files import YAML_LOADER, read_plain_yaml
from utils.text import one_line

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
# The first line of files that set keys of the whole config.
_GLOBAL = "# @package _global_"
SELF = "_self_"  # the place of a file's own keys among its defaults


@dataclass(frozen=True)
class Place:
    """A line of a YAML file."""

    file: Path
    line: int

    def __str__(self) -> str:
        shown = self.file.relative_to(Path.cwd()) if self.file.is_relative_to(Path.cwd()) else self.file
        return f"{shown}:{self.line}"


# ---- what config/ holds ------------------------------------------------------------------------


def is_group(name: str) -> bool:
    """Return whether config/ has such a group."""
    return re.fullmatch(r"\w+", name) is not None and (CONFIG_DIR / name).is_dir()


def choices(group: str) -> list[str]:
    """Return the names in a group. Files that start with an underscore are parts of other files."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("[!_]*.yaml"))


def default_groups(config_name: str) -> list[tuple[str, str]]:
    """Return the groups in the config's defaults with their choices, in order; "null": none."""
    entries = config_file(CONFIG_DIR / f"{config_name}.yaml", "", config_name).defaults
    return [(entry.group, entry.names[0] if entry.names else "null") for entry in entries if entry.names != [SELF]]


@cache
def sets_whole_config(group: str) -> bool:
    """Return whether the files of a group set keys of the whole config; "": config/<name>.yaml."""
    files = (CONFIG_DIR / group).glob("[!_]*.yaml")
    return not group or any(file.read_text(encoding="utf-8").startswith(_GLOBAL) for file in files)


def names_file(override: str) -> bool:
    """Return whether an override chooses a file by its path, as experiment=path/to/my.yaml does."""
    group, _, value = override.lstrip("+").partition("=")
    return is_group(group) and is_path(value.strip("'\""))


def is_path(choice: str) -> bool:
    """Return whether the choice of a group is the path of a file."""
    return choice.endswith((".yaml", ".yml"))


# ---- a file ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """An entry of the defaults of a file: files of a group, or SELF."""

    group: str
    names: list[str]
    is_override: bool
    place: Place


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a YAML file.

    Attributes:
        group: the group under which it was chosen, such as arch; empty for the file of all keys.
        values: as the whole config has them, so those of a file of arch are below arch.
        places: of each key, also of those that hold keys. Keys are dotted.
    """

    file: Path
    group: str
    values: Container
    places: dict[str, Place]
    defaults: list[Entry]


def read_config_file(file: Path, group: str, config_name: str) -> ConfigFile:
    """Read a file.

    Args:
        config_name: of the page that says which values are text.

    Raises:
        UserError: The file can't be read, is no YAML, or does not suit its group.
    """
    try:
        text = read_plain_yaml(file).removeprefix("\ufeff")  # which some editors put in front
        reader = _Reader(text, file, config_name)
        pairs = reader.root
        is_global = re.match(rf"\s*{_GLOBAL}", text) is not None and group in [key.value for key, _ in pairs]
        is_inside = not sets_whole_config(group) and not is_global
        values = reader.mapping([pair for pair in pairs if pair[0].value != "defaults"], [group] if is_inside else [])
        defaults = [entry for key, value in pairs if key.value == "defaults" for entry in reader.defaults(value, group)]
        if all(entry.names != [SELF] for entry in defaults):
            defaults.append(Entry(group, [SELF], False, Place(file, 1)))
        return ConfigFile(file, group, {group: values} if is_inside else values, reader.places, defaults)
    except yaml.MarkedYAMLError as error:
        problem = error.problem or "malformed"
        # Of a line without a colon, the problem is noticed later.
        mark = error.context_mark if "could not find expected ':'" in problem else error.problem_mark
        place = Place(file, mark.line + 1 if mark else 1)
        message = f"{place}: can't be read as YAML ({problem}); correct this line or the one before"
        raise UserError(message) from error
    except UserError:
        raise
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file} can't be read as YAML ({one_line(error)}); correct the file") from error


config_file = cache(read_config_file)
"""Reads a file of config/, once in a process."""


def places_in(file: Path) -> dict[str, Place]:
    """Return the place of each dotted key of a YAML file, which was read before."""
    reader = _Reader(file.read_text(encoding="utf-8"), file, "")
    reader.mapping(reader.root, [])
    return reader.places


class _Loader(YAML_LOADER):  # type: ignore[misc,valid-type]
    """Reads scalars as OmegaConf does: 1e-4 is a number, and a date is text."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers


class _Reader:
    """Makes values of YAML nodes, and notes the place of each key."""

    def __init__(self, text: str, file: Path, config_name: str) -> None:
        self._loader, self._file, self._config_name = _Loader(text), file, config_name
        self.places: dict[str, Place] = {}
        root = self._loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError(f"{self._place(root)} holds no keys; write lines such as lr: 1e-4")
        self.root: list[tuple[yaml.Node, yaml.Node]] = [] if root is None else root.value

    def mapping(self, pairs: Sequence[tuple[yaml.Node, yaml.Node]], above: Sequence[str]) -> Container:
        values: Container = {}
        for key, value in pairs:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or name in values:
                problem = "found a key that is no text" if name is None else f"found duplicate key {name}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            self.places[".".join([*above, name])] = self._place(key)
            values[name] = self._value(value, [*above, name])
        return values

    def defaults(self, node: yaml.Node, group: str) -> list[Entry]:
        """Return the entries below `defaults:` of a file."""
        found = []
        for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            place, entry = self._place(each), self._loader.construct_object(each, deep=True)
            if isinstance(entry, str):
                head, _, name = entry.rpartition("/")
                found.append(Entry(head.lstrip("/") or group, [name], False, place))
                continue
            key, value = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
            words = str(key).split()
            is_override = words[:-1] == ["override"] and words[-1].startswith("/")
            names = value if isinstance(value, list) else [] if value is None else [value]
            is_of_page = not group and len(words) == 1
            if not (is_override or is_of_page) or not all(isinstance(name, str) for name in names):
                chosen = words[-1].lstrip("/") if words else "arch"
                raise UserError(f"{place}: here a group is chosen as - override /{chosen}: {value if words else '...'}")
            found.append(Entry(words[-1].lstrip("/"), names, is_override, place))
        return found

    def _value(self, node: yaml.Node, names: Sequence[str]) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self.mapping(node.value, names)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self._value(each, names) for each in node.value]
        value = self._loader.construct_object(node, deep=True)  # refuses tags of other types
        may_be_null = null_of_text(self._config_name, names)
        if may_be_null is None or (value is None and (may_be_null or not node.value)):
            return value
        return node.value  # text keeps its characters: 1.10, 2026_11_27, on

    def _place(self, node: yaml.Node) -> Place:
        return Place(self._file, node.start_mark.line + 1)
