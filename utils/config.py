"""The strict pieces that every config class is made of: what YAML can't express exactly is an error, never a guess."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Strict, because pydantic would otherwise read `epochs=true` as 1 and `lr="1e-4"` as a number, and YAML's quoting
# rules would decide what runs.
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]


class StrictModel(BaseModel):
    """A config class: unknown keys are errors, values don't change after validation. Numbers given for text
    (`run_name=42`) are text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, protected_namespaces=())
