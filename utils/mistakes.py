"""Say in one line what is wrong with a config: the file and line, the key, and what to write."""

import difflib
import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from utils.config import keys_of, members_of, name_of
from utils.config_files import choices, is_group

_MOST_SUGGESTIONS = 3
_LEAST_RATIO = 0.75  # of a name that is close to another; a wrong guess is worse than none

# Names that other programs have for our keys: {our key: their names}; and what to say about names
# that stand for none of our keys. The module that knows the keys fills them.
OTHER_NAMES: dict[str, str] = {}
INSTEAD: dict[str, str] = {}


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Return the name that is spelled almost so, if there is one."""
    return difflib.get_close_matches(name, names, n=1, cutoff=_LEAST_RATIO)


def unknown_key(
    key: str, config_class: type[BaseModel], values: Any = None, place: str = "", groups: Sequence[str] = ()
) -> str:
    """Return a message for a key that a config with these values and groups does not have."""
    start, known = f"{place}unknown key {key!r}", [*keys_of(config_class, values), *groups]
    group, _, last = key.rpartition(".")
    top = key.partition(".")[0]
    for name in (key, last, "" if any(each.startswith(f"{top}.") for each in known) else top):
        if name in INSTEAD:
            return f"{start}: {INSTEAD[name]}"
    if key in known:  # one line of YAML with dots
        return f"{start}; write {last}: indented below a line {group}:"
    elsewhere: dict[str, list[str]] = {}
    for choice in config_class.model_fields:
        members = members_of(config_class, choice)
        if chosen := sorted(name_of(each) for each in members if len(members) > 1 and last in each.model_fields):
            elsewhere[f"{choice}.{last}"] = [f"{choice}={name}" for name in chosen]
    if key in elsewhere:
        named = " or ".join(elsewhere[key])
        return f"{start}: the chosen {group} doesn't have it; take {named}, or leave the key out"
    # First names of other programs, perhaps in a group of theirs (trainer.max_epochs), then keys of
    # this name, then similar names in the group.
    close = [ours for ours, theirs in OTHER_NAMES.items() if ours in known and {key, last} & {*theirs.split()}]
    close = close or [each for each in known if each.rpartition(".")[2] == last]
    beside = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == group}
    close = close or [beside[each] for each in nearest(last, [*beside])] or nearest(last, known)
    if close:
        return f"{start}; did you mean {' or '.join(close[:_MOST_SUGGESTIONS])}?"
    for meant, with_choices in elsewhere.items():
        return f"{start}; did you mean {meant} with {' or '.join(with_choices)}?"
    return f"{start}; --help lists the keys"


def key_of(location: Sequence[Any], container: Any, *, missing: bool) -> str:
    """Return the key as a user types it, without pydantic's tags for the members of a union."""
    parts: list[str] = []
    for part in location:
        is_index = isinstance(container, list) and isinstance(part, int)
        if is_index or (isinstance(container, dict) and part in container):
            container = container[part]
        elif not (missing and part == location[-1]):
            continue
        parts.append(str(part))
    return ".".join(parts)


def describe(key: str, errors: Sequence[Any]) -> str:
    """Say what is wrong with the value of a key. A union of types says for each what it accepts."""
    error = errors[0]
    given, kind = error["input"], error["type"]
    if kind == "union_tag_invalid":
        tags, tag = error["ctx"]["expected_tags"], error["ctx"]["tag"]
        return f"{key}.name: input should be one of {tags}, but it is {tag!r}; {key}=... chooses it"
    if kind == "union_tag_not_found":
        return f"{key}.name is not set; give {key}=..., one of {', '.join(choices(key))}"
    if kind == "value_error":
        message: str = error["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    wanted = " or ".join(each["msg"][0].lower() + each["msg"][1:] for each in errors)
    instead = ""
    if is_group(key) and given in choices(key):
        instead = f"; below defaults: write - override /{key}: {given}"
    elif kind == "list_type" and isinstance(given, str):
        instead = f"; write {key}=[{given}]"
    return f"{key}: {wanted}, but it is {reprlib.repr(given)}{instead}"
