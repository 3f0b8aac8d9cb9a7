"""Find the file and the line in which a key of the config is set."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from utils.config_files import CONFIG_DIR, Place, default_groups, is_group, sets_whole_config


@dataclass(frozen=True)
class ChosenFile:
    """A YAML file that takes part in a config.

    Attributes:
        group: the group under which it was chosen, such as arch; empty for the file of all keys.
    """

    file: Path
    group: str

    @property
    def prefix(self) -> str:
        """What stands in front of the file's keys, such as `arch.`."""
        return "" if sets_whole_config(self.group) else f"{self.group}."

    def keys_with_lines(self) -> Iterator[tuple[str, int]]:
        """Yield each key, also of groups, as the whole config has it, with its line.

        A file that can't be read yields none.
        """
        root = self._root()
        if isinstance(root, yaml.MappingNode):
            yield from _keys(root, self.prefix)
        elif isinstance(root, yaml.ScalarNode):  # lr:1e-4, which lacks a blank
            yield f"{self.prefix}{root.value}", root.start_mark.line + 1

    def _root(self) -> yaml.Node | None:
        try:
            return yaml.compose(self.file.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
        except (OSError, UnicodeError, yaml.YAMLError, RecursionError):
            return None

    def characters_at(self, path: Sequence[str | int]) -> str | None:
        """Return a value as it is written in the file.

        Args:
            path: keys of the whole config, and indices of lists.

        Returns:
            None: The file does not set the value, or it is empty.
        """
        above = [self.group] if self.prefix else []
        if above != [*path[: len(above)]]:
            return None
        node = self._root()
        for part in path[len(above) :]:
            node = _inside(node, part)
        return (node.value or None) if isinstance(node, yaml.ScalarNode) else None

    def line_with(self, pattern: str) -> Place | None:
        """Return the first line that matches a pattern."""
        for number, line in enumerate(self.file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if re.search(pattern, line):
                return Place(self.file, number)
        return None

    def values(self) -> dict[Any, Any]:
        """Return what the file itself holds: nothing if it can't be read."""
        try:
            values = yaml.safe_load(self.file.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeError, yaml.YAMLError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    def chosen_by_defaults(self) -> Iterator[tuple[str, str]]:
        """Yield the groups and the names of the files that this file's defaults choose."""
        defaults = self.values().get("defaults")
        for entry in defaults if isinstance(defaults, list) else ():
            if isinstance(entry, str) and entry != "_self_":
                yield self.group, entry
            for key, name in entry.items() if isinstance(entry, dict) else ():
                yield str(key).split()[-1].lstrip("/").split("@")[0], str(name)


def _keys(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _keys(value, f"{name}.")


def _inside(node: yaml.Node | None, part: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
        return node.value[part] if part < len(node.value) else None
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    return None


def name_of_choice(group: str, choice: str) -> str | None:
    """Return the name in a file of a group or in the files it builds on, or None without one."""
    file = ChosenFile(CONFIG_DIR / group / f"{choice}.yaml", group)
    if isinstance(name := file.values().get("name"), str):
        return name
    bases = (base for base_group, base in file.chosen_by_defaults() if base_group == group)
    return next((name for base in bases if (name := name_of_choice(group, base))), None)


def chosen_files(config_name: str, overrides: Sequence[str]) -> list[ChosenFile]:
    """Return the files that make up a config, in an order in which later ones win."""
    choices: list[tuple[str, str]] = []
    for typed in overrides:
        try:
            override = OverridesParser.create().parse_override(typed.lstrip("+"))
            value: Any = override.value()
        except (HydraException, ValueError):
            continue
        if is_group(override.key_or_group) and isinstance(value, str | list):
            names = value if isinstance(value, list) else [value]
            choices += [(override.key_or_group, str(name)) for name in names]
    roots = [Path(os.path.expanduser(name)).absolute().parent.parent for _, name in choices] + [CONFIG_DIR]
    typed_groups = {group for group, _ in choices}
    # Files that set keys of the whole config come last, as in the defaults of pretrain.yaml.
    choices = [each for each in default_groups(config_name) if each[0] not in typed_groups] + choices
    choices.sort(key=lambda each: sets_whole_config(each[0]))
    found = [ChosenFile(CONFIG_DIR / f"{config_name}.yaml", "")]
    for group, name in choices:
        _add(found, group, name, roots)
    return found


def _add(found: list[ChosenFile], group: str, name: str, roots: Sequence[Path]) -> None:
    """Add a file, after the files that its defaults choose."""
    by_path = Path(os.path.expanduser(name)).absolute()
    files = [by_path] if by_path.suffix in (".yaml", ".yml") else [root / group / f"{name}.yaml" for root in roots]
    file = next((file for file in files if file.is_file()), None)
    if file is None or any(each.file == file for each in found):
        return
    chosen = ChosenFile(file, group)
    found.append(chosen)  # before its defaults, which may refer to it again
    for other_group, other in chosen.chosen_by_defaults():
        _add(found, other_group, other, roots)
    found.append(found.pop(found.index(chosen)))


def place_of(key: str, config_name: str, overrides: Sequence[str]) -> Place | None:
    """Return where a chosen file sets a key; None: it was typed, or no file sets it.

    The place of an element of a list, such as evaluators.0, is that of the list.
    """
    key = re.sub(r"\.\d+(\..*)?$", "", key)
    if _is_typed(key, overrides):
        return None
    for chosen in reversed(chosen_files(config_name, overrides)):
        for name, line in chosen.keys_with_lines():
            if name == key:
                return Place(chosen.file, line)
    return None


def characters_of(path: Sequence[str | int], config_name: str, overrides: Sequence[str]) -> str | None:
    """Return a value as the last of the chosen files that sets it has it; None: it was typed.

    Args:
        path: keys of the whole config, and indices of lists.
    """
    if _is_typed(".".join(part for part in path if isinstance(part, str)), overrides):
        return None
    written = (chosen.characters_at(path) for chosen in reversed(chosen_files(config_name, overrides)))
    return next((characters for characters in written if characters is not None), None)


def _is_typed(key: str, overrides: Sequence[str]) -> bool:
    typed = {each.lstrip("+~").split("=")[0] for each in overrides}
    return any(key == each or key.startswith(f"{each}.") for each in typed if not is_group(each))
