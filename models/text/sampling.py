"""Draw the next token from logits: temperature, top_k and top_p, and draws that a seed decides."""

# B = prompts, V = vocabulary

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest tokens; None: among all.
        top_p: draw among the fewest of the likeliest tokens whose probabilities sum to at least
            this (nucleus sampling, arXiv 1904.09751); None: among all.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        assert self.temperature >= 0
        assert self.top_k is None or self.top_k >= 1
        assert self.top_p is None or 0 < self.top_p <= 1


GREEDY = Sampling(temperature=0.0)


class Draws:
    """Uniform numbers in [0, 1) from the seed, the prompt's number and the token's place alone."""

    def __init__(self, seed: int, numbers: Sequence[int]) -> None:
        self._generators = [np.random.default_rng((seed, number)) for number in numbers]

    def next(self) -> Tensor:
        return torch.tensor([generator.random() for generator in self._generators], dtype=torch.float64)


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return the probability of each token, float64 (B, V) on the CPU.

    top_k is applied before top_p. Of equal logits the token with the lower number comes first.
    """
    logits_BV = logits_BV.cpu().double()
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits_BV.argmax(-1), logits_BV.shape[-1]).double()
    # The largest logit becomes 0, so a tiny temperature gives no infinite difference of infinities.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        sorted_BV[:, sampling.top_k :] = -torch.inf
    sorted_BV = sorted_BV.softmax(-1)
    if sampling.top_p is not None:
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        sorted_BV = torch.where(before_BV < sampling.top_p, sorted_BV, 0.0)
        sorted_BV = sorted_BV / sorted_BV.sum(-1, keepdim=True)
    return torch.zeros_like(sorted_BV).scatter_(-1, order_BV, sorted_BV)


def sample(logits_BV: Tensor, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """Return a token of each prompt, int64 (B,): where the summed probabilities pass its draw.

    Raises:
        UserError: The logits of a prompt are NaN, or all infinite.
    """
    if not logits_BV.amax(-1).isfinite().all():
        raise UserError(
            "the model computes values that are not finite, so it has no next token; give arch.forward_dtype=float32, "
            "or another checkpoint"
        )
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    sums_BV = probabilities(logits_BV, sampling).cumsum(-1)
    # Rounding may leave the last sum beside 1, and a token without probability must not be drawn.
    total_B1 = sums_BV[:, -1:]
    draws_B1 = (draws_B[:, None] * total_B1).minimum(total_B1.nextafter(torch.zeros_like(total_B1)))
    return torch.searchsorted(sums_BV, draws_B1, right=True)[:, 0].to(logits_BV.device)
