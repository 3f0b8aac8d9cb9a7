"""Say in one line what is wrong with a config: the file and line, the key, and what to write."""

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from types import MappingProxyType
from typing import Any

from utils.config_files import Place, choices, is_group

_MOST_SUGGESTIONS = 3
_MOST_MISSING = 3
_LEAST_RATIO = 0.75  # of a name that is close to another; a wrong guess is worse than none

# Names that other programs have for our keys: {our key: their names}; and what to say about names
# that stand for none of our keys. The module that knows the keys fills them.
OTHER_NAMES: dict[str, str] = {}
INSTEAD: dict[str, str] = {}
# Groups under which other programs keep such keys, as in trainer.max_epochs.
_GROUPS = ("trainer.", "training.", "train.", "model.", "data.", "optimizer.", "optim.", "arch.", "args.", "config.")


def at(place: Place | None) -> str:
    """Return the beginning of a message about a line of a file."""
    return "" if place is None else f"{place}: "


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Return the names that are spelled almost so, best first."""
    found = difflib.get_close_matches(name, names, n=_MOST_SUGGESTIONS, cutoff=_LEAST_RATIO)
    ratios = [difflib.SequenceMatcher(None, each, name).ratio() for each in found]
    return [each for each, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - 0.1]


# ---- unknown keys ------------------------------------------------------------------------------


def unknown_key(
    key: str,
    known: Sequence[str],
    place: Place | None = None,
    elsewhere: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return a message for a key that the config does not have.

    Args:
        known: the keys and groups that it has.
        elsewhere: the choices of groups with which it has a key of the same name, by key.
    """
    start = f"{at(place)}unknown key {key!r}"
    bare = next((key.removeprefix(group) for group in _GROUPS if key.startswith(group)), key)
    above = key.partition(".")[0]
    for name in (key, bare, *([] if any(each.startswith(f"{above}.") for each in known) else [above])):
        if name in INSTEAD:
            return f"{start}: {INSTEAD[name]}"
    if key in known:  # one line of YAML with dots
        above, _, last = key.rpartition(".")
        return f"{start}; write {last}: indented below a line {above}:"
    if key in elsewhere:
        named = " or ".join(elsewhere[key])
        return f"{start}: the chosen {key.partition('.')[0]} doesn't have it; take {named}, or leave the key out"
    if close := _suggestions(key, bare, known):
        return f"{start}; did you mean {' or '.join(close)}?"
    for meant, with_choices in elsewhere.items():
        return f"{start}; did you mean {meant} with {' or '.join(with_choices)}?"
    return f"{start}; --help lists the keys"


def _suggestions(key: str, bare: str, known: Sequence[str]) -> list[str]:
    """Return known keys that may be meant, best first: in the same group, else anywhere."""
    names = {key, bare}
    by_name = [ours for ours, theirs in OTHER_NAMES.items() if ours in known and names & set(theirs.split())]
    group, _, last = key.rpartition(".")
    by_level = [each for each in known if each.rpartition(".")[2] == last]
    beside = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == group}
    close = [beside[each] for each in nearest(last, [*beside])] or nearest(last, known)
    return [*dict.fromkeys(by_name or by_level or close)][:_MOST_SUGGESTIONS]


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


def describe(key: str, errors: list[Any], place: Place | None) -> str:
    """Say what is wrong with the value of a key. A union of types says for each what it accepts."""
    error = errors[0]
    message, given, kind = error["msg"].removeprefix("Value error, "), error["input"], error["type"]
    if kind == "union_tag_invalid":
        tags, tag = error["ctx"]["expected_tags"], error["ctx"]["tag"]
        return f"{at(place)}{key}.name: input should be one of {tags}, but it is {tag!r}; {key}=... chooses it"
    if kind == "union_tag_not_found":
        return f"{at(place)}{key}.name is not set; give {key}=..., one of {', '.join(choices(key))}"
    if kind == "value_error":
        return f"{at(place)}{key}: {message}" if key else message
    wanted = " or ".join(each["msg"][0].lower() + each["msg"][1:] for each in errors)
    if kind == "string_type" and isinstance(given, int | float | date):  # YAML or Hydra has read the text
        return f"{at(place)}{key}: text that looks like {reprlib.repr(given)} needs quotes; put it in quotes"
    return f"{at(place)}{key}: {wanted}, but it is {reprlib.repr(given)}{_correction(key, kind, given, place)}"


def _correction(key: str, kind: str, given: Any, place: Place | None) -> str:
    """Return what to write instead of a text; empty if the text does not show it."""
    if not isinstance(given, str) or not given.isprintable():
        return ""
    if kind == "list_type":
        return f"; write {key}: [{given}]" if place is not None else f"; write {key}=[{given.strip('[]')}]"
    if is_group(key) and given in choices(key):
        return f"; below defaults: write - override /{key}: {given}"
    number = given.strip("'\" ,;")
    with suppress(ValueError):
        float(number)
        return f"; write {number}" + (" without quotes" if number == given else "")
    return ""
