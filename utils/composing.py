"""Compose a config of the YAML files of config/, files of the user and overrides. For rank 0.

The files are read as Hydra reads them: `defaults` choose other files, later files win, and what is
typed wins over all files. Values, and the place of each key, are recorded together.
"""

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from utils.config import flatten, null_of_text, page_of
from utils.config_files import (
    CONFIG_DIR,
    SELF,
    ConfigFile,
    Container,
    Entry,
    Place,
    choices,
    default_groups,
    is_group,
    is_path,
    names_file,
    sets_whole_config,
)
from utils.errors import UserError
from utils.files import file_errors
from utils.mistakes import at, nearest, unknown_key
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
    """A config, and where it comes from.

    Attributes:
        values: nested.
        places: where a file sets each key that was not typed.
        choices: the name of the chosen file of each group that has one.
        chosen: the groups that were typed, or that a chosen file sets.
        keys_of_group: the keys that the files of each group set.
        derived: the keys whose values are interpolations.
    """

    values: Container
    places: dict[str, Place] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    chosen: set[str] = field(default_factory=set)
    keys_of_group: dict[str, set[str]] = field(default_factory=dict)
    derived: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Origin:
    """Where a config comes from: config/<config_name>.yaml and overrides."""

    config_name: str
    overrides: Sequence[str] = ()

    def place_of(self, key: str) -> Place | None:
        """Return where a chosen file sets a key; None: it was typed, or no file sets it.

        The place of an element of a list, such as evaluators.0, is that of the list.
        """
        places = compose(self.config_name, self.overrides).places
        while key and key not in places and key.rpartition(".")[2].isdigit():
            key = key.rpartition(".")[0]
        return places.get(key)

    def derives(self, key: str) -> bool:
        """Return whether the value of a key follows from another key, as ${.key}."""
        return key in compose(self.config_name, self.overrides).derived

    def unknown_key(self, key: str) -> str:
        """Return the message for a key that the config does not have."""
        composed = compose(self.config_name, self.overrides)
        of_config = {group: name for group, name in composed.choices.items() if not sets_whole_config(group)}
        chosen = tuple(f"{group}={name}" for group, name in of_config.items() if name in choices(group))
        known = [*known_keys(self.config_name, chosen), *(each for each in names_in(composed.values) if each != key)]
        return unknown_key(key, known, self.place_of(key), _elsewhere(key, self.config_name))


def compose(config_name: str, overrides: Sequence[str]) -> Composed:
    """Compose config/<config_name>.yaml with overrides. The caller must not change the result.

    Raises:
        UserError: An override or a file is wrong; the message names the file and the line.
    """
    typed = tuple(in_our_words(config_name, overrides))
    if any(map(names_file, typed)):  # such a file may change between two calls
        return _resolved(_Composer(config_name, typed).composed(), config_name)
    return _composed(config_name, typed)


@cache  # a resumed run asks for the same config repeatedly
def _composed(config_name: str, typed: tuple[str, ...]) -> Composed:
    return _resolved(_merged(config_name, typed), config_name)


@cache
def _merged(config_name: str, typed: tuple[str, ...] = ()) -> Composed:
    """Return a config of files in config/ whose interpolations are not resolved."""
    return _Composer(config_name, typed).composed()


def known_keys(config_name: str, chosen: tuple[str, ...] = ()) -> list[str]:
    """Return the keys and groups of a config, also of one that lacks what must be given.

    Args:
        chosen: overrides that choose files of config/.
    """
    return [*names_in(_merged(config_name, chosen).values), *dict(default_groups(config_name))]


def in_our_words(config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return overrides with our keys for other names of them, and with quotes around text.

    The published commands put a plus in front of new keys. Here every key is in the YAML, so the
    plus means nothing.

    Raises:
        UserError: An override says the same under both names.
    """
    aliases = page_of(config_name).aliases
    keys = [typed.lstrip("+").partition("=")[0] for typed in overrides]
    found = []
    for typed in (each.lstrip("+") for each in overrides):
        key, _, value = typed.partition("=")
        meant = aliases.get(f"{key}={value.lower()}", typed)
        if key in aliases:
            meant = f"{aliases[key]}={value}"
        if meant != typed and meant.partition("=")[0] in keys:
            raise UserError(f"{typed} means {meant}, and that is given as well; give one of them")
        are_several = "," in value and all(map(is_path, value.split(",")))
        if names_file(meant) and not are_several and value[0] not in "'\"[":  # a path may have blanks and commas
            meant = f"{key}={quoted(value)}"
        found += [in_text_quotes(config_name, meant)] * bool(meant)
    return found


def names_in(values: Container, prefix: str = "") -> Iterator[str]:
    """Yield each dotted key, also one whose options are empty, such as parameters of a sweep."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from names_in(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


class _Composer:
    """Composes one config."""

    def __init__(self, config_name: str, typed: Sequence[str]) -> None:
        self._config_name = config_name
        self._overrides = [parse_override(each) for each in typed]
        self._defaults = dict(default_groups(config_name))
        # What is chosen in a group, and where. The first choice counts: that of a user.
        self._choices: dict[str, tuple[list[str], Place | None]] = {}
        self._done: set[str] = set()  # groups whose files are in the list
        self._roots = [CONFIG_DIR]
        self._stack: list[Path] = []
        self._composed = Composed({})

    def composed(self) -> Composed:
        of_keys = [each for each in self._overrides if not self._is_choice(each)]
        files = self._expand("", self._config_name, None)
        own: Container = {}  # the options of each group, before a recipe changes them
        for file in files:
            if file.group and sets_whole_config(file.group):
                own = own or deepcopy(self._composed.values)
            self._add(file)
        own = own or deepcopy(self._composed.values)
        for override in of_keys:
            self._apply(override)
        self._drop_options_of_another_choice(own)
        self._require_names(own)
        return self._composed

    # ---- files ----

    def _is_choice(self, override: Override) -> bool:
        """Note the choice of a group. Return False if the override sets a key."""
        group, value = override.key_or_group, override.value()
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line!r} asks for several runs, and this is one; sweep.py starts several trainings. "
                "Give one value, [a,b] for a list, quotes for text, or a point in a decimal number"
            )
        if override.package is not None or (is_group(group) and group not in self._defaults):
            raise UserError(self._unknown(group if override.package is None else f"{group}@{override.package}"))
        if not is_group(group) or isinstance(value, dict):
            return False
        if override.is_delete():
            self._choices[group] = [], None
            return True
        typed = value if isinstance(value, list) else [value]
        names = [name for name in typed if isinstance(name, str)]
        if len(names) < len(typed):
            known = ", ".join(choices(group))
            raise UserError(f"{override.input_line!r} names no config of the group {group}; choose one of {known}")
        paths = [Path(os.path.expanduser(name)).absolute() for name in names if is_path(name)]
        self._roots += [path.parent.parent for path in paths if path.parent.name == group]
        self._choices[group] = names, None
        self._composed.chosen.add(group)
        return True

    def _expand(self, group: str, name: str, place: Place | None) -> list[ConfigFile]:
        """Return a file and those that its defaults choose, in an order in which later ones win.

        Entries are read from the last to the first, as Hydra does: a recipe comes last, and may
        choose what is read before it.
        """
        file = self._find(group, name, place)
        if file in self._stack:
            raise UserError(f"{at(place)}{name} refers to itself; correct these defaults")
        is_ours = CONFIG_DIR in file.parents
        config_file = (ConfigFile.of_config if is_ours else ConfigFile.read)(file, group, self._config_name)
        self._stack.append(file)
        for entry in config_file.defaults:
            if entry.is_override:
                self._choose(entry)
        expanded: list[ConfigFile] = []
        for entry in reversed(config_file.defaults):
            if entry.names == [SELF]:
                expanded = [config_file, *expanded]
            elif not entry.is_override:
                for each, where in reversed(self._entries(entry, is_root=not group)):
                    expanded = [*self._expand(entry.group, each, where), *expanded]
        self._stack.pop()
        return expanded

    def _choose(self, entry: Entry) -> None:
        if entry.group not in self._defaults or entry.group in self._done:
            raise UserError(f"{entry.place}: {self._unknown(entry.group)}")
        self._choices.setdefault(entry.group, (entry.names, entry.place))
        self._composed.chosen.add(entry.group)

    def _entries(self, entry: Entry, *, is_root: bool) -> list[tuple[str, Place | None]]:
        """Return the names that an entry of defaults stands for, and where they are chosen."""
        if not is_root:
            return [(name, entry.place) for name in entry.names]
        self._done.add(entry.group)
        names, place = self._choices.get(entry.group, (entry.names, entry.place))
        if names:
            self._composed.choices[entry.group] = names[-1]
        return [(name, place) for name in names]

    @file_errors()
    def _find(self, group: str, name: str, place: Place | None) -> Path:
        if not group:
            return CONFIG_DIR / f"{name}.yaml"
        if is_path(name) and place is None:
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
        raise UserError(f"{at(place)}there is no config '{group}/{name}'; {meant}")

    def _add(self, file: ConfigFile) -> None:
        _merge(self._composed.values, file.values)
        self._composed.places |= {key: Place(file.file, line) for key, line in file.lines.items()}
        self._composed.keys_of_group.setdefault(file.group, set()).update(file.lines)

    # ---- what is typed ----

    def _apply(self, override: Override) -> None:
        key, value = override.key_or_group, override.value()
        if not override.is_delete():
            self._set(key, value)
            return
        holder, last = self._holder(key)
        if value not in (None, holder[last]):
            raise UserError(f"{override.input_line!r}: {key} is {holder[last]!r}")
        del holder[last]

    def _set(self, key: str, value: Any) -> None:
        holder, last = self._holder(key)
        if value and isinstance(value, dict) and isinstance(holder[last], dict):
            for name, inner in value.items():  # a typed dictionary is merged
                self._set(f"{key}.{name}", inner)
            return
        holder[last] = with_switch(holder[last], deepcopy(value))
        places = self._composed.places
        for each in [each for each in places if f"{each}.".startswith(f"{key}.")]:
            del places[each]

    def _holder(self, key: str) -> tuple[Any, str | int]:
        """Return the dictionary or the list that holds a key, and its last part."""
        holder: Any = self._composed.values
        *above, last = key.split(".")
        for part in above:
            holder = _inside(holder, part)
        if _inside(holder, last) is ...:
            raise UserError(self._unknown(key))
        return holder, int(last) if isinstance(holder, list) else last

    def _unknown(self, key: str) -> str:
        values = self._composed.values
        known = [*names_in(values), *self._defaults] if values else known_keys(self._config_name)
        return unknown_key(key, known, elsewhere=_elsewhere(key, self._config_name))

    def _drop_options_of_another_choice(self, own: Container) -> None:
        """Drop what a recipe sets for its own architecture, if another one was typed.

        In experiment=x arch=y, x may set options of its architecture that y does not have.
        """
        recipes = {group for group, default in self._defaults.items() if default == "null"}
        typed = {override.key_or_group for override in self._overrides}
        for group in typed & self._choices.keys() - recipes if typed & recipes else ():
            options, names = self._composed.values.get(group), own.get(group)
            if isinstance(options, dict) and isinstance(names, dict):
                for key in options.keys() - names.keys() - {key.removeprefix(f"{group}.") for key in typed}:
                    del options[key]

    def _require_names(self, own: Container) -> None:
        """Raise UserError if the options of a group have the name of another choice.

        arch.name=trm would give a TRM all the options of the default architecture.
        """
        for group in self._composed.choices:
            options = self._composed.values.get(group)
            name = options.get("name") if isinstance(options, dict) else None
            before = own[group].get("name") if isinstance(own.get(group), dict) else None
            if before is not None and name != before and name in choices(group):
                raise UserError(
                    f"{at(self._composed.places.get(f'{group}.name'))}{group}.name={name} does not choose the options "
                    f"of {name}; write {group}={name}, or in YAML the line - override /{group}: {name} below defaults:"
                )


def _resolved(composed: Composed, config_name: str) -> Composed:
    """Return a config with its interpolations resolved."""
    derived = {key for key, value in flatten(composed.values) if "${" in str(value)}

    def as_text(value: Any, names: Sequence[str]) -> Any:
        """Return a value with text for a number of an interpolation, as in run_name: ${seed}."""
        if isinstance(value, dict):
            return {key: as_text(inner, [*names, key]) for key, inner in value.items()}
        if isinstance(value, list):
            return [as_text(inner, names) for inner in value]
        is_derived = isinstance(value, int | float) and ".".join(names) in derived
        return str(value) if is_derived and null_of_text(config_name, names) is not None else value

    try:
        values = OmegaConf.to_container(OmegaConf.create(composed.values), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        if isinstance(error, MissingMandatoryValue):
            raise UserError(f"{key} is not set; give {key}=...") from error
        reason = f"{str(error).splitlines()[0]}; inside ${{}} write another key that --help lists"
        raise UserError(f"{at(composed.places.get(key))}{key}: {reason}") from error
    return replace(composed, values=as_text(values, []), derived=derived)


def _merge(values: Container, later: Container) -> None:
    """Merge values into others. A value that must be given (???) replaces none."""
    for key, value in later.items():
        before = values.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value)
        elif value != "???" or key not in values:
            values[key] = with_switch(before, deepcopy(value))


def with_switch(before: Any, value: Any) -> Any:
    """Return a value, or options with the switch `enabled` for true or false.

    Keys such as profile were switches at first, so profile=true means profile.enabled=true.
    """
    if isinstance(value, bool) and isinstance(before, dict) and "enabled" in before:
        return {**before, "enabled": value}
    return value


def _inside(holder: Any, part: str) -> Any:
    """Return what a key or an index leads to, and ... if it leads nowhere."""
    if isinstance(holder, list) and part.isdigit() and int(part) < len(holder):
        return holder[int(part)]
    return holder.get(part, ...) if isinstance(holder, dict) else ...


def _elsewhere(key: str, config_name: str) -> dict[str, list[str]]:
    """Return the choices of groups that have a key of this name: {dotted key: [group=choice]}.

    Variants of a choice, whose name is another than that of their file, are left out.
    """
    found: dict[str, list[str]] = {}
    name = key.rpartition(".")[2]
    for group, default in default_groups(config_name):
        for choice in choices(group) if default != "null" else ():
            options = _merged(config_name, (f"{group}={choice}",)).values.get(group)
            if isinstance(options, dict) and name in options and options["name"] == choice:
                found.setdefault(f"{group}.{name}", []).append(f"{group}={choice}")
    return found
