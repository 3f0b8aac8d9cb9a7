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
SELF = "_self_"  # the place of a file's own keys among its defaults


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
    return not group or any(file.read_text(encoding="utf-8").startswith("# @package _global_") for file in files)


def names_file(override: str) -> bool:
    """Return whether an override chooses a file by its path, as group=path/to/my.yaml does."""
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
    place: str


class ConfigFile:
    """The contents of a YAML file.

    Args:
        group: the group under which it was chosen; empty for a file of all keys.
        config_name: of the page that says which values are text.

    Attributes:
        values: as the whole config has them, so those of a file of a group are below its name.
        places: `file:line: ` of each dotted key, also of those that hold keys.
        defaults: the other files that it chooses.
    """

    def __init__(self, file: Path, group: str, config_name: str) -> None:
        self.group, self.places, self._config_name = group, dict[str, str](), config_name
        self._shown = _shown(file)
        text = read_plain_yaml(file).removeprefix("\ufeff")  # which some editors put in front
        self._loader = _Loader(text)
        root = self._loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError(f"{self._place(root)}the file holds no keys; write lines such as key: value")
        pairs = [] if root is None else root.value
        # A file of a group may say, as Hydra's do, that its keys are those of the whole config.
        is_global = re.match(r"\s*# @package _global_", text) and group in [key.value for key, _ in pairs]
        above = [] if is_global or sets_whole_config(group) else [group]
        values = self._mapping([pair for pair in pairs if pair[0].value != "defaults"], above)
        self.values: Container = {group: values} if above else values
        self.defaults = [entry for key, value in pairs if key.value == "defaults" for entry in self._entries(value)]
        if all(entry.names != [SELF] for entry in self.defaults):
            self.defaults.append(Entry(group, [SELF], False, f"{self._shown}:1: "))

    def _mapping(self, pairs: Sequence[tuple[yaml.Node, yaml.Node]], above: Sequence[str]) -> Container:
        values: Container = {}
        for key, value in pairs:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or name in values:
                problem = "found a key that is no text" if name is None else f"found duplicate key {name}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            self.places[".".join([*above, name])] = self._place(key)
            values[name] = self._value(value, [*above, name])
        return values

    def _value(self, node: yaml.Node, names: Sequence[str]) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node.value, names)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self._value(each, names) for each in node.value]
        value = self._loader.construct_object(node, deep=True)  # refuses tags of other types
        may_be_null = null_of_text(self._config_name, names)
        if may_be_null is None or (value is None and (may_be_null or not node.value)):
            return value
        return node.value  # text keeps its characters: 1.10, 2026_11_27, on

    def _entries(self, node: yaml.Node) -> list[Entry]:
        """Return the entries below `defaults:`."""
        found = []
        for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            place, entry = self._place(each), self._loader.construct_object(each, deep=True)
            if isinstance(entry, str):
                head, _, name = entry.rpartition("/")
                found.append(Entry(head.lstrip("/") or self.group, [name], False, place))
                continue
            key, value = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
            names = value if isinstance(value, list) else [] if value is None else [value]
            override = re.fullmatch(r"override\s+/(\w+)", str(key))
            is_of_page = not self.group and re.fullmatch(r"\w+", str(key))
            if not (override or is_of_page) or not all(isinstance(name, str) for name in names):
                raise UserError(f"{place}here a group is chosen as - override /group: name, not as {entry!r}")
            found.append(Entry(override[1] if override else str(key), names, override is not None, place))
        return found

    def _place(self, node: yaml.Node) -> str:
        return f"{self._shown}:{node.start_mark.line + 1}: "


def read_config_file(file: Path, group: str, config_name: str) -> ConfigFile:
    """Read a file, or raise UserError: it can't be read, is no YAML, or does not suit its group."""
    try:
        return ConfigFile(file, group, config_name)
    except yaml.MarkedYAMLError as error:
        problem = error.problem or "malformed"
        # Of a line without a colon, the problem is noticed later.
        mark = error.context_mark if "could not find expected ':'" in problem else error.problem_mark
        place = f"{_shown(file)}:{mark.line + 1 if mark else 1}: "
        raise UserError(f"{place}can't be read as YAML ({problem}); correct this line or the one before") from error
    except UserError:
        raise
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file} can't be read as YAML ({one_line(error)}); correct the file") from error


def _shown(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


config_file = cache(read_config_file)
"""Reads a file of config/, once in a process."""


class _Loader(YAML_LOADER):  # type: ignore[misc,valid-type]
    """Reads scalars as OmegaConf does: 1e-4 is a number, and a date is text."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers
