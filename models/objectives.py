"""Which objective trains which kind of model."""

from models.act import ActObjective
from models.base import RecursiveModel
from models.model import Model
from models.objective import Objective


def objective_of(model: Model) -> Objective:
    assert isinstance(model, RecursiveModel)
    return ActObjective(model)
