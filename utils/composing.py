"""Compose a config of the YAML files of config/, files of the user and overrides. For rank 0.

The files are read as Hydra reads them: `defaults` choose other files, later files win, and what is
typed wins over all files. Values, and the place of each key, are recorded together.
"""

import os
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from utils.config import Container, flatten, keys_of, null_of_text, page_of
from utils.config_files import (
    CONFIG_DIR,
    SELF,
    ConfigFile,
    choices,
    config_file,
    default_groups,
    is_group,
    is_path,
    names_file,
    read_config_file,
    sets_whole_config,
)
from utils.errors import UserError
from utils.files import file_errors
from utils.mistakes import nearest, unknown_key
from utils.overrides import in_text_quotes, parse_override, quoted

# In YAML ${when:${.recurrent},6,1} is 6 if recurrent is true, else 1.
OmegaConf.register_new_resolver("when", lambda condition, then, other: then if condition else other, replace=True)
# Hydra's ${now:%Y-%m-%d}. It is the same in each config that a process composes.
_STARTED = datetime.now()
OmegaConf.register_new_resolver("now", lambda form: _STARTED.strftime(form), replace=True)
# A config is written into checkpoints and to W&B, and the environment holds secrets.
OmegaConf.clear_resolver("oc.env")


@dataclass
class Composed:
    """A config, and where it comes from."""

    values: Container = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # `file:line: ` of each key that was not typed
    chosen: set[str] = field(default_factory=set)  # the groups that were typed, or that a chosen file sets
    derived: set[str] = field(default_factory=set)  # the keys whose values are interpolations

    def place_of(self, key: str) -> str:
        """Return where a file sets a key, or the list that holds it; "": no file does."""
        while key and key not in self.places and key.rpartition(".")[2].isdigit():
            key = key.rpartition(".")[0]
        return self.places.get(key, "")


def compose(config_name: str, overrides: Sequence[str]) -> Composed:
    """Compose config/<config_name>.yaml with overrides. The caller must not change the result."""
    typed = tuple(in_our_words(config_name, overrides))
    if any(map(names_file, typed)):  # a file of the user may change between two calls
        return _Composer(config_name, typed).composed
    return _cached(config_name, typed)


def in_our_words(config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return overrides with our keys for other names of them, and with quotes around text.

    The published commands put a plus in front of new keys. Here it means nothing.
    """
    aliases, words = page_of(config_name).aliases, [typed.lstrip("+") for typed in overrides]
    keys = [word.partition("=")[0] for word in words]
    found = []
    for typed in words:
        key, _, value = typed.partition("=")
        meant = f"{aliases[key]}={value}" if key in aliases else aliases.get(f"{key}={value.lower()}", typed)
        if meant != typed and meant.partition("=")[0] in keys:
            raise UserError(f"{typed} means {meant}, and that is given as well; give one of them")
        are_several = "," in value and all(map(is_path, value.split(",")))
        if names_file(meant) and not are_several and value[0] not in "'\"[":  # a path may have blanks and commas
            meant = f"{key}={quoted(value)}"
        if meant:
            found.append(in_text_quotes(config_name, meant))
    return found


class _Composer:
    """Composes one config, `composed`."""

    def __init__(self, config_name: str, typed: Sequence[str]) -> None:
        self.composed = Composed()
        self._config_name, self._values, self._places = config_name, self.composed.values, self.composed.places
        self._defaults = dict(default_groups(config_name))
        # What is chosen in a group, and where. The first choice counts: that of a user.
        self._choices: dict[str, tuple[list[str], str]] = {}
        self._done: set[str] = set()  # groups whose files are in the list
        self._roots = [CONFIG_DIR]
        self._stack: list[Path] = []
        overrides = [parse_override(each) for each in typed]
        of_keys = [each for each in overrides if not self._is_choice(each)]
        own: Container = {}  # the options of each group, before a recipe changes them
        for file in self._expand("", config_name, ""):
            if file.group and sets_whole_config(file.group):
                own = own or deepcopy(self._values)
            merge(self._values, file.values)
            self._places |= file.places
        own = own or deepcopy(self._values)
        for override in of_keys:
            self._set(override.key_or_group, override.value())
        typed_keys = {override.key_or_group for override in overrides}
        for override in of_keys:
            if isinstance(inner := override.value(), dict):
                typed_keys |= {f"{override.key_or_group}.{name}" for name in inner}
        self._settle_choices(typed_keys, own)
        self._resolve()

    # ---- files ----

    def _is_choice(self, override: Override) -> bool:
        """Note the choice of a group. Return False if the override sets a key."""
        group, value = override.key_or_group, override.value()
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line!r} asks for several runs, and this is one; sweep.py starts several trainings. "
                "Give one value, [a,b] for a list, quotes for text, or a point in a decimal number"
            )
        if not is_group(group) or isinstance(value, dict):
            return False
        if group not in self._defaults:
            raise UserError(self._unknown(group))
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
        paths = [Path(os.path.expanduser(name)).absolute() for name in names if is_path(name)]
        self._roots += [path.parent.parent for path in paths if path.parent.name == group]
        self._choices[group] = names, ""
        self.composed.chosen.add(group)
        return True

    def _expand(self, group: str, name: str, place: str) -> list[ConfigFile]:
        """Return a file and those that its defaults choose, in an order in which later ones win.

        Entries are read from the last to the first, as Hydra does: a recipe comes last, and may
        choose what is read before it.
        """
        path = self._find(group, name, place)
        if path in self._stack:
            raise UserError(f"{place}{name} refers to itself; correct these defaults")
        file = (config_file if CONFIG_DIR in path.parents else read_config_file)(path, group, self._config_name)
        self._stack.append(path)
        for entry in file.defaults:
            if entry.is_override:
                if entry.group not in self._defaults or entry.group in self._done:
                    raise UserError(f"{entry.place}{self._unknown(entry.group)}")
                self._choices.setdefault(entry.group, (entry.names, entry.place))
                self.composed.chosen.add(entry.group)
        expanded: list[ConfigFile] = []
        for entry in reversed(file.defaults):
            if entry.names == [SELF]:
                expanded = [file, *expanded]
            elif not entry.is_override:
                names, where = entry.names, entry.place
                if not group:  # of the page, whose entries are what can be chosen
                    self._done.add(entry.group)
                    names, where = self._choices.get(entry.group, (names, where))
                for each in reversed(names):
                    expanded = [*self._expand(entry.group, each, where), *expanded]
        self._stack.pop()
        return expanded

    @file_errors()
    def _find(self, group: str, name: str, place: str) -> Path:
        if is_path(name) and not place:
            file = Path(os.path.expanduser(name)).absolute()
            if file.is_file():
                return file
            known = f"write {group}={file.stem}" if file.stem in choices(group) else "correct the path"
            raise UserError(f"{group}={name} is not there, or is no regular file; {known}")
        for root in self._roots:
            if name and (file := root / group / f"{name.removesuffix('.yaml')}.yaml").is_file():
                return file
        close = nearest(name.rpartition("/")[2].lower(), choices(group))
        meant = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(choices(group))}"
        raise UserError(f"{place}there is no config '{group}/{name}'; {meant}")

    # ---- what is typed ----

    def _set(self, key: str, value: Any) -> None:
        holder: Any = self._values
        *above, last = key.split(".")
        for part in above:
            holder = holder.get(part) if isinstance(holder, dict) else None
        config_class = page_of(self._config_name).config_class
        # A user's YAML may leave out keys that the class has.
        if not isinstance(holder, dict) or (last not in holder and key not in keys_of(config_class, self._values)):
            raise UserError(self._unknown(key))
        if value and isinstance(value, dict) and isinstance(holder.get(last), dict):
            for name, inner in value.items():  # a typed dictionary is merged
                self._set(f"{key}.{name}", inner)
            return
        holder[last] = _with_switch(holder.get(last), deepcopy(value))
        for each in [each for each in self._places if f"{each}.".startswith(f"{key}.")]:
            del self._places[each]

    def _unknown(self, key: str) -> str:
        return unknown_key(key, page_of(self._config_name).config_class, self._values, groups=[*self._defaults])

    def _settle_choices(self, typed: set[str], own: Container) -> None:
        """Drop what a typed recipe sets for its own choice in a group, if another was typed."""
        recipes = {group for group, default in self._defaults.items() if default == "null"}
        for group in self._defaults:
            options, before = self._values.get(group), own.get(group)
            if not isinstance(options, dict) or not isinstance(before, dict):
                continue
            if typed & recipes and group in typed & self._choices.keys() - recipes:
                for key in options.keys() - before.keys() - {key.removeprefix(f"{group}.") for key in typed}:
                    del options[key]
            name = options.get("name")
            if "name" in before and name != before["name"] and name in choices(group):
                raise UserError(
                    f"{self.composed.place_of(f'{group}.name')}{group}.name={name} does not choose the options "
                    f"of {name}; write {group}={name}, or in YAML the line - override /{group}: {name} below defaults:"
                )

    def _resolve(self) -> None:
        written = {key: str(value) for key, value in flatten(self._values)}
        derived = {key for key, value in written.items() if "${" in value}
        # OmegaConf would need more time for all keys than the rest of composing takes. ${.name} in
        # a group needs this group alone, and another interpolation may need any key.
        near = all("." in key and re.fullmatch(r"\$\{\.\w+\}", written[key]) for key in derived)
        groups = {key.partition(".")[0] for key, value in written.items() if key in derived or "???" in value}
        part = {key: value for key, value in self._values.items() if key in groups or not near}

        def finished(value: Any, names: Sequence[str]) -> Any:
            if isinstance(value, dict):
                return {key: finished(inner, [*names, key]) for key, inner in value.items()}
            if isinstance(value, list):
                return [finished(inner, names) for inner in value]
            if isinstance(value, str):
                return os.path.expanduser(value) if f"{value}/".startswith("~/") else value
            # A number of an interpolation is text in run_name: ${seed}.
            is_derived = isinstance(value, int | float) and ".".join(names) in derived
            return str(value) if is_derived and null_of_text(self._config_name, names) is not None else value

        try:
            resolved: Any = OmegaConf.to_container(OmegaConf.create(part), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            key = str(error.full_key or "")
            if isinstance(error, MissingMandatoryValue):
                raise UserError(f"{key} is not set; give {key}=...") from error
            reason = f"{str(error).splitlines()[0]}; inside ${{}} write another key that --help lists"
            raise UserError(f"{self.composed.place_of(key)}{key}: {reason}") from error
        self.composed.values, self.composed.derived = finished(self._values | resolved, []), derived


@cache
def _cached(config_name: str, typed: tuple[str, ...]) -> Composed:
    """Compose a config once, because a resumed run asks for the same one repeatedly."""
    return _Composer(config_name, typed).composed


def merge(values: Container, later: Container) -> None:
    """Merge values into others. A value that must be given (???) replaces none."""
    for key, value in later.items():
        before = values.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merge(before, value)
        elif value != "???" or key not in values:
            values[key] = _with_switch(before, deepcopy(value))


def _with_switch(before: Any, value: Any) -> Any:
    """Return a value, or options with the switch `enabled` for true or false.

    Keys that were switches at first have become groups, so key=true means key.enabled=true.
    """
    if isinstance(value, bool) and isinstance(before, dict) and "enabled" in before:
        return {**before, "enabled": value}
    return value
