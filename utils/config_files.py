"""The YAML files of config/, and files of the user that take a place among them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from utils.config import null_of_text
from utils.errors import UserError
from utils.files import YAML_LOADER, read_plain_yaml
from utils.text import one_line

Container = dict[str, Any]

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
_SUFFIXES = (".yaml", ".yml")
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
    entries = ConfigFile.of_config(CONFIG_DIR / f"{config_name}.yaml", "", config_name).defaults
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
    return choice.endswith(_SUFFIXES)


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
        lines: the line of each key, also of those that hold keys. Keys are dotted, as the whole
            config has them.
    """

    file: Path
    group: str
    values: Container
    lines: dict[str, int]
    defaults: list[Entry]

    @staticmethod
    @cache
    def of_config(file: Path, group: str, config_name: str) -> "ConfigFile":
        """Read a file of config/, once in a process."""
        return ConfigFile.read(file, group, config_name)

    @staticmethod
    def read(file: Path, group: str, config_name: str) -> "ConfigFile":
        """Read a file.

        Args:
            config_name: of the page that says which values are text.

        Raises:
            UserError: The file can't be read, is no YAML, or does not suit its group.
        """
        try:
            text = read_plain_yaml(file).removeprefix("\ufeff")  # which some editors put in front
            loader = _Loader(text)
            root = loader.get_single_node()
            if root is not None and not isinstance(root, yaml.MappingNode):
                raise UserError(f"{Place(file, root.start_mark.line + 1)} holds no keys; write lines such as lr: 1e-4")
            is_inside = _is_inside_group(file, group, text, root)
            reader = _Reader(loader, config_name)
            pairs = [] if root is None else root.value
            own = [pair for pair in pairs if pair[0].value != "defaults"]
            values = reader.mapping(own, [group] if is_inside else [])
            entries = [value for key, value in pairs if key.value == "defaults"]
            defaults = [entry for value in entries for entry in _defaults(loader, value, file, group)]
            if all(entry.names != [SELF] for entry in defaults):
                defaults.append(Entry(group, [SELF], False, Place(file, 1)))
            return ConfigFile(file, group, {group: values} if is_inside else values, reader.lines, defaults)
        except yaml.MarkedYAMLError as error:
            raise UserError(_malformed(error, file)) from error
        except UserError:
            raise
        except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"{file} can't be read as YAML ({one_line(error)}); correct the file") from error


def lines_of(file: Path) -> dict[str, int]:
    """Return the line of each dotted key of a YAML file."""
    loader = _Loader(file.read_text(encoding="utf-8"))
    root, reader = loader.get_single_node(), _Reader(loader, "")
    reader.mapping(root.value if isinstance(root, yaml.MappingNode) else [], [])
    return reader.lines


class _Loader(YAML_LOADER):  # type: ignore[misc,valid-type]
    """Reads scalars as OmegaConf does: 1e-4 is a number, and a date is text."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers


class _Reader:
    """Makes values of YAML nodes, and notes the line of each key."""

    def __init__(self, loader: _Loader, config_name: str) -> None:
        self._loader, self._config_name = loader, config_name
        self.lines: dict[str, int] = {}

    def mapping(self, pairs: Sequence[tuple[yaml.Node, yaml.Node]], above: Sequence[str]) -> Container:
        values: Container = {}
        for key, value in pairs:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or name in values:
                problem = "found a key that is no text" if name is None else f"found duplicate key {name}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            self.lines[".".join([*above, name])] = key.start_mark.line + 1
            values[name] = self._value(value, [*above, name])
        return values

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


def _is_inside_group(file: Path, group: str, text: str, root: yaml.MappingNode | None) -> bool:
    """Return whether the keys of a file belong below its group.

    Raises:
        UserError: The first line of the file says something else than its group has to.
    """
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    says_global = re.fullmatch(r"#\s*@package\s+_global_", first) is not None
    if not group or (sets_whole_config(group) and says_global):
        return False
    if sets_whole_config(group):
        raise UserError(f"{Place(file, 1)}: the first line has to be '{_GLOBAL}', as in config/{group}/; add it")
    has_group = root is not None and group in [key.value for key, _ in root.value]
    if says_global and not has_group:
        raise UserError(f"{Place(file, 1)}: the keys of this file belong to {group}; remove this line")
    return not says_global


def _defaults(loader: _Loader, node: yaml.Node, file: Path, group: str) -> list[Entry]:
    """Return the entries below `defaults:` of a file.

    Raises:
        UserError: An entry chooses nothing, or a group otherwise than with override.
    """
    if not isinstance(node, yaml.SequenceNode):
        place = Place(file, node.start_mark.line + 1)
        raise UserError(f"{place}: defaults is no list; write a line such as - override /arch: trm for each choice")
    entries = [(Place(file, each.start_mark.line + 1), loader.construct_object(each, deep=True)) for each in node.value]
    found = []
    for place, entry in entries:
        if isinstance(entry, str):
            head, _, name = entry.rpartition("/")
            found.append(Entry(head.lstrip("/") or group, [name], False, place))
            continue
        key, value = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
        words = str(key).split()
        is_override = words[:-1] == ["override"] and words[-1].startswith("/")
        is_of_page = not group and len(words) == 1
        names = value if isinstance(value, list) else [] if value is None else [value]
        if not (is_override or is_of_page) or not all(isinstance(name, str) for name in names):
            chosen = words[-1].lstrip("/") if words else "arch"
            raise UserError(f"{place}: here a group is chosen as - override /{chosen}: {value if words else '...'}")
        found.append(Entry(words[-1].lstrip("/"), names, is_override, place))
    return found


def _malformed(error: yaml.MarkedYAMLError, file: Path) -> str:
    """Return a message with the file and the line."""
    problem = error.problem or "malformed"
    # Of a line without a colon, the problem is noticed later.
    mark = error.context_mark if "could not find expected ':'" in problem else error.problem_mark
    place = Place(file, mark.line + 1 if mark else 1)
    return f"{place}: can't be read as YAML ({problem}); correct this line or the one before"
