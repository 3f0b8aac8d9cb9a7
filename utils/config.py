"""Strict types for config classes: a value of the wrong type is an error and never converted."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

# Without strict=True pydantic would read `epochs=true` as 1 and `lr="1e-4"` as a number. YAML's
# quoting rules would then decide what runs.
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]


class StrictModel(BaseModel):
    """The base of config classes: unknown keys are errors, and values can't change afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


C = TypeVar("C", bound=type[BaseModel])


@dataclass(frozen=True)
class Page:
    """What a program knows of its page, config/<name>.yaml.

    Attributes:
        config_class: holds the keys of the page.
        bare: the key that a bare path on the command line stands for.
        passes_on: the page of the program to which this one passes all other keys on.
        aliases: other names of keys on a command line, {name: key}; also {key=value: override},
            where an empty override means that it is left out.
        text_key: takes the names above a value, and returns the page and the dotted key that decide
            whether the value is text; None: the names joined, on this page.
    """

    config_class: type[BaseModel]
    bare: str | None = None
    passes_on: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    text_key: Callable[[Sequence[str]], tuple[str, str]] | None = None


# Programs that read no more than the defaults of a page do not import its config class.
PAGES: dict[str, Page] = {}


def page(name: str, **known: Any) -> Callable[[C], C]:
    """Return a decorator of the config class that holds the keys of config/<name>.yaml.

    Args:
        known: attributes of Page.
    """

    def register(config_class: C) -> C:
        PAGES[name] = Page(config_class, **known)
        return config_class

    return register


def page_of(name: str) -> Page:
    """Return what a program knows of its page; a page without keys if the program is not loaded."""
    return PAGES.get(name) or Page(StrictModel)


def null_of_text(page_name: str, names: Sequence[str]) -> bool | None:
    """Return whether a key may be null that takes text or lists of text; None: it takes neither.

    Args:
        names: the parts of the dotted key.
    """
    key = ".".join(names)
    if text_key := page_of(page_name).text_key:
        page_name, key = text_key(names)
    return _text_keys(page_of(page_name).config_class).get(key)


@cache
def _text_keys(config_class: type[BaseModel], prefix: str = "") -> dict[str, bool]:
    """Return the dotted keys that take text or lists of text, and whether each may be null."""
    found: dict[str, bool] = {}
    for name, info in config_class.model_fields.items():
        types = [*_alternatives(info.annotation)]
        if str in types:
            found[f"{prefix}{name}"] = NoneType in types
        for inner in types:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found |= _text_keys(inner, f"{prefix}{name}.")
    return found


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the types of a value, or of the elements of a list."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        yield from _alternatives(arguments[0])
    elif kind in (Union, UnionType, list):
        for each in arguments:
            yield from _alternatives(each)
    else:
        yield annotation


def name_of(config_class: type[BaseModel]) -> str:
    """Return the value of the key `name` that chooses a config class of a union."""
    (name,) = get_args(config_class.model_fields["name"].annotation)
    return str(name)


def union_of(config_classes: Iterable[type[StrictModel]]) -> Any:
    """Return the union of config classes as a type for pydantic.

    The key `name` chooses one of them. Therefore each class declares its name as a Literal.
    """
    return Annotated[reduce(or_, config_classes), Field(discriminator="name")]


def flatten(container: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its dotted key."""
    for key, value in container.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
