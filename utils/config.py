"""Strict types for config classes: a value of the wrong type is an error and never converted."""

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

# Without strict=True pydantic would read `epochs=true` as 1 and `lr="1e-4"` as a number. YAML's
# quoting rules would then decide what runs.
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]


class StrictModel(BaseModel):
    """The base of config classes: unknown keys are errors, and values can't change afterwards.

    A number where text belongs (`run_name=42`) becomes text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, protected_namespaces=())


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
