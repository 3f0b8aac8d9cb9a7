"""Strict types for config classes: a value of the wrong type is an error and never converted."""

from collections.abc import Iterator
from typing import Annotated, Any

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


def flatten(container: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its dotted key."""
    for key, value in container.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
