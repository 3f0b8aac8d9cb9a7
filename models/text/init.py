"""The distribution of the initial weights of the text models."""

import torch
from torch import Tensor

# The factor that gives a normal distribution reduced modulo 3 unit standard deviation. It is that
# of the published code.
_FACTOR = 1.014762601732121


def modulo_normal(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    """Return a tensor from a normal distribution reduced modulo 3, with its sign kept.

    The numbers are drawn in float32 on the generator's device.
    """
    draw = torch.empty(shape, dtype=torch.float32, device=generator.device).normal_(generator=generator)
    return draw.fmod_(3.0).mul_(_FACTOR * std)
