"""Which objective trains which kind of model."""

from models.act import ActObjective
from models.base import RecursiveModel
from models.model import Model
from models.objective import Objective
from models.text.model import TextModel
from models.text.objective import TextObjective


def objective_of(model: Model) -> Objective:
    if isinstance(model, TextModel):
        return TextObjective(model)
    assert isinstance(model, RecursiveModel)
    return ActObjective(model)
