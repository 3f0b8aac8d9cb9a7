"""Strict types for config classes: a value of the wrong type is an error and never converted."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

Container = dict[str, Any]

# Without strict=True pydantic would read true as 1 and "1e-4" as a number.
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


C = TypeVar("C", bound=type[BaseModel])


@dataclass(frozen=True)
class Page:
    """What a program knows of its page, config/<name>.yaml."""

    config_class: type[BaseModel]
    bare: str | None = None  # the key that a bare path on the command line stands for
    passes_on: str | None = None  # the page of the program to which this one passes all other keys on
    # Other names of keys on a command line, {name: key}, or {key=value: override, perhaps empty}.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Takes the names above a value; returns the page and key that decide whether it is text.
    text_key: Callable[[Sequence[str]], tuple[str, str]] | None = None


# Programs that read no more than the defaults of a page do not import its config class.
PAGES: dict[str, Page] = {}


def page(name: str, **known: Any) -> Callable[[C], C]:
    """Return a decorator of the config class of config/<name>.yaml, with attributes of its Page."""

    def register(config_class: C) -> C:
        PAGES[name] = Page(config_class, **known)
        return config_class

    return register


def page_of(name: str) -> Page:
    """Return what a program knows of its page; a page without keys if the program is not loaded."""
    return PAGES.get(name) or Page(StrictModel)


def null_of_text(page_name: str, names: Sequence[str]) -> bool | None:
    """Return whether a key may be null that takes text or lists of text; None: it takes neither."""
    key = ".".join(names)
    if text_key := page_of(page_name).text_key:
        page_name, key = text_key(names)
    return _text_keys(page_of(page_name).config_class).get(key)


@cache
def _text_keys(config_class: type[BaseModel]) -> dict[str, bool]:
    keys = keys_of(config_class)
    return {key: NoneType in types for key, types in keys.items() if str in types or list[str] in types}


def keys_of(config_class: type[BaseModel], values: Any = None, prefix: str = "") -> dict[str, list[Any]]:
    """Return the dotted keys of a config class, and the types that each may have.

    Where `values` name a member of a union, only its keys are returned.
    """
    found: dict[str, list[Any]] = {}
    for name, info in config_class.model_fields.items():
        found[f"{prefix}{name}"] = [*_alternatives(info.annotation)]
        members = members_of(config_class, name)
        inner = values.get(name) if isinstance(values, dict) else None
        chosen = inner.get("name") if isinstance(inner, dict) else None
        named = [each for each in members if len(members) > 1 and name_of(each) == chosen]
        for member in named or members:
            found |= keys_of(member, inner, f"{prefix}{name}.")
    return found


def members_of(config_class: type[BaseModel], name: str) -> list[type[BaseModel]]:
    """Return the config classes that the value of a key may have."""
    types = _alternatives(config_class.model_fields[name].annotation)
    return [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]


def _alternatives(annotation: Any) -> Iterator[Any]:
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        yield from _alternatives(arguments[0])
    elif kind in (Union, UnionType):
        for each in arguments:
            yield from _alternatives(each)
    else:
        yield annotation


def name_of(config_class: type[BaseModel]) -> str:
    """Return the value of the key `name` that chooses this member of a union."""
    (name,) = get_args(config_class.model_fields["name"].annotation)
    return str(name)


def union_of(config_classes: Iterable[type[StrictModel]]) -> Any:
    """Return the union of config classes, of which the key `name`, a Literal, chooses one."""
    return Annotated[reduce(or_, config_classes), Field(discriminator="name")]


def flatten(container: Container, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its dotted key."""
    for key, value in container.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
