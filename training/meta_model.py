"""Make the model of a run on the meta device, to count what it takes."""

from models import shapes_of
from models.model import Model
from training.config import PretrainConfig
from training.data import AnySizes


def model_on_meta(config: PretrainConfig, sizes: AnySizes) -> Model:
    """Return the whole model of a run on the meta device, whose tensors have no memory.

    float32 takes the place of forward_dtype=auto.
    """
    arch = config.arch
    if arch.forward_dtype == "auto":
        arch = arch.model_copy(update={"forward_dtype": "float32"})
    model = shapes_of(arch, **sizes.of_model())
    model.freeze("weights" if config.freeze_weights else config.freeze)
    return model


def num_parameters(config: PretrainConfig, sizes: AnySizes) -> int:
    """Return the number of parameters of a run's whole model, without its puzzle table."""
    return sum(weight.numel() for weight in model_on_meta(config, sizes).parameters())
