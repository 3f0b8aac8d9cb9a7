"""Which objective trains which kind of model."""

from typing import Any

from models.act import ActObjective
from models.base import RecursiveModel
from models.model import Model
from models.objective import Objective
from models.text.model import TextModel
from models.text.objective import TextObjective


def objective_of(model: Model) -> Objective[Any, Any, Any]:
    if isinstance(model, TextModel):
        return TextObjective(model)
    assert isinstance(model, RecursiveModel)
    return ActObjective(model)
