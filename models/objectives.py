"""Which objective trains which kind of model."""

from collections.abc import Callable
from typing import Any

from models.act import ActObjective
from models.model import Model
from models.objective import Objective
from models.text.objective import TextObjective

OBJECTIVES: dict[str, Callable[[Any], Objective[Any, Any, Any]]] = {"puzzles": ActObjective, "text": TextObjective}


def objective_of(model: Model) -> Objective[Any, Any, Any]:
    return OBJECTIVES[model.config.kind](model)
