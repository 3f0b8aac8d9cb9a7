"""Say in one line what is wrong with a config: the file and the line, the key, and what to write.

The messages of Hydra, OmegaConf and pydantic have several lines and talk about internals.
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from utils import synonyms
from utils.config import flatten
from utils.config_files import (
    CONFIG_DIR,
    Place,
    choices,
    default_groups,
    is_group,
    listed_choices,
    malformed,
    names_file,
)
from utils.yaml_places import chosen_files, place_of

_MOST_SUGGESTIONS = 3
_MOST_MISSING = 3


@dataclass(frozen=True)
class Origin:
    """Where a config comes from: config/<config_name>.yaml and overrides."""

    config_name: str
    overrides: Sequence[str] = ()

    def place_of(self, key: str) -> Place | None:
        """Return where a chosen file sets a key; None: it was typed, or no file sets it."""
        return place_of(key, self.config_name, self.overrides)

    def derives(self, key: str, others: Iterable[str]) -> bool:
        """Return whether a file takes the value of a key from one of the other keys, as ${.key}."""
        place = self.place_of(key)
        if place is None:
            return False
        line = place.file.read_text(encoding="utf-8", errors="replace").splitlines()[place.line - 1]
        sources = re.findall(r"[\w.]+", " ".join(re.findall(r"\$\{.*\}", line)))
        names = {other.rpartition(".")[2] for other in others if other != key}
        return any(source.rpartition(".")[2] in names for source in sources)

    def line_with(self, pattern: str) -> Place | None:
        """Return the first line of the chosen files of all groups that matches a pattern."""
        files = chosen_files(self.config_name, self.overrides)
        places = (chosen.line_with(pattern) for chosen in files if chosen.group)
        return next(filter(None, places), None)

    def known_keys(self) -> list[str]:
        """Return the keys and groups that the config has with the typed choices of groups."""
        groups = [group for group, _ in default_groups(self.config_name)]
        chosen = [each for each in self.overrides if is_group(each.split("=")[0]) and not names_file(each)]
        ours = (each for each in chosen_files(self.config_name, self.overrides) if CONFIG_DIR in each.file.parents)
        in_files = [key for file in ours if file.group for key, _ in file.keys_with_lines()]
        for typed in (chosen, []):  # without the choices, if one of them is wrong
            with suppress(HydraException, OmegaConfBaseException, YAMLError, RecursionError, ValueError):
                return [*groups, *_keys(self.config_name, *typed), *in_files]
        return groups


@cache
def _keys(config_name: str, *overrides: str) -> list[str]:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        # Interpolations are not resolved, because keys that must be given have no value yet.
        container = OmegaConf.to_container(compose(config_name, overrides=list(overrides)))
    assert isinstance(container, dict)
    return [*_names(container)]  # type: ignore[arg-type]


def _names(container: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield each dotted key, also one whose options are empty, such as parameters of a sweep."""
    for key, value in container.items():
        if isinstance(value, dict) and value:
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


# ---- unknown keys ------------------------------------------------------------------------------


def unknown_key(key: str, origin: Origin) -> str:
    """Return a message for a key that the config does not have."""
    # A file may have the key twice: nested, as it should be, and in one line.
    flat = origin.line_with(rf"^\s*['\"]?{re.escape(key)}['\"]?\s*:") if "." in key else None
    place = flat or origin.place_of(key)
    start = f"{_at(place)}unknown key {key!r}"
    if place is not None and (slip := _slip_in_yaml(key, place)):
        return f"{start}; {slip}"
    if key in synonyms.INSTEAD:
        return f"{start}: {synonyms.INSTEAD[key]}"
    if key in Origin(origin.config_name).known_keys():
        return f"{start}: the defaults have it, but not the chosen options; leave it out"
    if others := choices_with(key):
        group, named = key.split(".")[0], " or ".join(others)
        return f"{start}: the chosen {group} doesn't have it; take {named}, or leave the key out"
    group, _, name = key.rpartition(".")
    close = suggestions(key, origin.known_keys())
    if not close and (elsewhere := _of_other_choice(name, origin)):
        return f"{start}; did you mean {elsewhere[0]} with {elsewhere[1]}?"
    if not close:
        return f"{start}; --help lists the keys"
    if place is None:
        return f"{start}; did you mean {' or '.join(close)}?"
    above, _, last = close[0].rpartition(".")
    if above != group:
        where = f"indented below a line {above}:" if above else "without indentation"
        return f"{start}; did you mean {close[0]}? Write {last}: {where}"
    named = " or ".join(each.rpartition(".")[2] for each in close if each.rpartition(".")[0] == group)
    return f"{start}; did you mean {named}?"


def _slip_in_yaml(key: str, place: Place) -> str:
    """Say what to write in a YAML file, if the key itself shows it; empty: it does not."""
    group, _, name = key.rpartition(".")
    if name == group and (is_group(name) or name == "sweep"):
        return f"the keys of this file belong to {group} already; remove this line, and unindent those below it"
    if assigned := re.fullmatch(r"([\w.]+)\s*[=:]\s*(.*)", name if ":" in name or "=" in name else key):
        return f"write {assigned[1]}: {assigned[2]}"
    line = place.file.read_text(encoding="utf-8", errors="replace").splitlines()[place.line - 1]
    written = line.partition(":")[0].strip(" \t'\"")
    if key.startswith("sweep.") and written in Origin("pretrain").known_keys():
        return f"{written} is a key of the runs; write it under parameters:, or as {written}=... in overrides:"
    *groups, name = written.split(".")
    belongs = groups and key == f"{groups[0]}.{written}"  # arch.hidden_size in a file of arch/, or below arch:
    below = "".join(f" indented below a line {each}:" for each in reversed(groups[1:] if belongs else groups))
    return f"write {name}:{below or ' without ' + groups[0]}" if groups else ""


def suggestions(key: str, known: Sequence[str]) -> list[str]:
    """Return known keys that may be meant, best first."""
    bare = key.rsplit(".")[-1]
    by_name = [each for each in synonyms.meant(key) if each in known]
    by_level = [each for each in known if each.rsplit(".")[-1] == bare and each != key]
    return [*dict.fromkeys(by_name or by_level or _close(key, known))][:_MOST_SUGGESTIONS]


def _close(key: str, known: Sequence[str]) -> list[str]:
    """Return the known keys that are spelled almost so: in the same group, else anywhere."""
    group, _, bare = key.rpartition(".")
    beside = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == group}
    for name, names in ((bare, beside), (bare, {each: each for each in known})):
        found = difflib.get_close_matches(name, names, n=_MOST_SUGGESTIONS)
        ratios = [difflib.SequenceMatcher(None, each, name).ratio() for each in found]
        if found:
            return [names[each] for each, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - 0.1]
    return []


def choices_with(key: str) -> list[str]:
    """Return the choices of the key's group, as they are typed, that have the key.

    A variant of such a choice, which names it in its defaults, is left out.
    """
    group, _, name = key.partition(".")
    texts = {choice: (CONFIG_DIR / group / f"{choice}.yaml").read_text(encoding="utf-8") for choice in choices(group)}
    found = {choice: text for choice, text in texts.items() if re.search(rf"(?m)^{re.escape(name)}:", text)}
    variants = {choice for choice, text in found.items() if found.keys() & set(re.findall(r"(?m)^  - (\w+)$", text))}
    return [f"{group}={choice}" for choice in found if choice not in variants]


def _of_other_choice(name: str, origin: Origin) -> tuple[str, str] | None:
    """Return the key of this name that another choice of a group has, and the choice."""
    for group, default in default_groups(origin.config_name):
        if default != "null" and (found := choices_with(f"{group}.{name}")):
            return f"{group}.{name}", " or ".join(found)
    return None


# ---- errors of Hydra and OmegaConf -------------------------------------------------------------


def in_one_line(error: Exception, origin: Origin) -> str:
    """Return one line that names the wrong key or choice and the right ones."""
    text = str(error) or type(error).__name__
    if isinstance(error, RecursionError):
        return "a file of the config refers to itself, or is nested too deeply; correct its defaults"
    if isinstance(error, MarkedYAMLError):
        return malformed(error)
    if relative := re.search(r"'(?:experiment|debug)/(\w+)(?:/([^']*)|@\w+)'", text):
        group, name = relative[1], relative[2] or "..."
        place = origin.line_with(rf"^\s*-\s*(override\s+)?{group}\s*:")
        if place is not None:
            return f"{place}: here a group is chosen as - override /{group}: {name}"
    if unknown := re.search(
        r"Could not override '([^']+)'|is not in struct\s+full_key: (\S+)|Could not delete from config. '([^']+)'", text
    ):
        key = next(filter(None, unknown.groups()))
        place = origin.line_with(rf"^\s*-\s*override\s+/?{re.escape(key)}\s*:")
        return f"{_at(place)}{unknown_key(key, origin)}"
    if choice := re.search(
        r"Could not find '([^']+)'(?:\s+Available options in '[^']*':\s*(.*?)(?:Config search path|$))?",
        text,
        re.DOTALL,
    ):
        group, _, name = choice[1].partition("/")
        place = origin.line_with(rf"^\s*-\s*(override\s+)?/{group}\s*:\s*{re.escape(name)}\b")
        if not (choice[2] and choice[2].strip()):
            return f"{_at(place)}there is no config {choice[1]!r}; --help lists the groups"
        close = difflib.get_close_matches(name.rpartition("/")[2].lower(), choices(group), n=1)
        meant = f"did you mean {close[0]}?" if close else f"choose one of {listed_choices(group)}"
        return f"{_at(place)}there is no config {choice[1]!r}; {meant}"
    if merging := re.search(r"In (.*?): .*Cannot merge DictConfig with ListConfig", text, re.DOTALL):
        return f"{merging[1]}: a list stands where keys belong, or keys where a list belongs; compare it with --help"
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{missing[1]} is not set; give {missing[1]}=..."
    if interpolation := re.match(r"(.*nterpolation.*)\s+full_key: (\S+)", text):
        reason = f"{interpolation[1].strip()}; inside ${{}} write another key that --help lists"
        return f"{_at(origin.place_of(interpolation[2]))}{interpolation[2]}: {reason}"
    return f"{' '.join(text.split())}; --help shows the keys and their values"


def _at(place: Place | None) -> str:
    return "" if place is None else f"{place}: "


# ---- errors of pydantic ------------------------------------------------------------------------


def key_of(location: Sequence[Any], container: Any, *, missing: bool) -> str:
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


def describe_missing(keys: Sequence[str]) -> list[str]:
    """Say which keys are not set. A file without its defaults may lack them all."""
    if len(keys) <= _MOST_MISSING:
        return [f"{key} is not set; give {key}=..." for key in keys]
    first = ", ".join(keys[:_MOST_MISSING])
    return [f"{first} and {len(keys) - _MOST_MISSING} more keys are not set; give them"]


def describe(key: str, errors: list[Any], container: dict[str, Any], origin: Origin | None) -> str:
    """Say what is wrong with a key. A union of types says for each type what it accepts."""
    error = errors[0]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        if origin is not None:
            return unknown_key(key, origin)
        known = [name for name, _ in flatten(container) if name != key and not name.startswith(f"{key}.")]
        close = suggestions(key, known)
        return f"unknown key {key!r}; " + (f"did you mean {' or '.join(close)}?" if close else "--help lists the keys")
    place = origin.place_of(key) if origin is not None else None
    if error["type"] == "union_tag_invalid":
        tags, tag = error["ctx"]["expected_tags"], error["ctx"]["tag"]
        choosing = f"{key}=... chooses with all its options"
        return f"{_at(place)}{key}.name: input should be one of {tags}, but it is {tag!r}; {choosing}"
    if error["type"] == "union_tag_not_found" and origin is not None and origin.place_of(f"{key}.{key}") is not None:
        return unknown_key(f"{key}.{key}", origin)
    if error["type"] == "union_tag_not_found":
        return f"{_at(place)}{key}.name is not set; give {key}=..., one of {listed_choices(key)}"
    if error["type"] == "value_error":
        return f"{_at(place)}{key}: {message}" if key else message
    given = error["input"]
    if place is not None and error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        if given is None:
            return f"{place}: {key} is empty; indent its keys below it, or leave it out"
        if is_group(key) and given in choices(key):
            return f"{place}: {key}: {given} belongs under defaults:, as the line - override /{key}: {given}"
    wanted = " or ".join(e["msg"][0].lower() + e["msg"][1:] for e in errors)
    if error["type"] == "list_type" and isinstance(given, str) and given.isprintable():
        written = f"{key}: [{given}]" if place is not None else f"{key}=[{given.strip('[]')}]"
        return f"{_at(place)}{key}: {wanted}, but it is {reprlib.repr(given)}; write {written}"
    if error["type"] == "string_type" and isinstance(given, int | float | date):  # YAML or Hydra has read the text
        return f"{_at(place)}{key}: text that looks like {reprlib.repr(given)} needs quotes; put it in quotes"
    return f"{_at(place)}{key}: {wanted}, but it is {reprlib.repr(given)}{_correction(given)}"


def _correction(given: Any) -> str:
    """Return what to write for a text that is nearly a number; empty for any other value."""
    if isinstance(given, str):
        number = given.strip("'\" ,;")
        with suppress(ValueError):
            float(number)
            return f"; write {number}" + (" without quotes" if number == given else "")
    return ""
