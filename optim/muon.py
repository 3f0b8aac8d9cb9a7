"""Muon: orthogonalized momentum for a network's matrices (kellerjordan.github.io/posts/muon)."""

# N = matrices of one shape, R = rows, C = columns of a weight

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from optim.replayable import Number, Replayable
from utils.ranks.world import is_dtensor

Coefficients = Literal["jordan", "urm"]
Scale = Literal["spectral", "rms"]

# Coefficients (a, b, c) of the quintic a x + b x^3 + c x^5, for each iteration. The last ones count
# for all further iterations. They give a steep slope at 0; in return, singular values end near 1
# and not exactly at 1 (`orthogonal` says how near). Those of urm bring small singular values up
# within fewer iterations, and end at 1 after eight.
_COEFFICIENTS: dict[Coefficients, tuple[tuple[float, float, float], ...]] = {
    "jordan": ((3.4445, -4.7750, 2.0315),),
    "urm": (
        (7.2086, -15.5131, 9.0178),
        (3.9623, -2.5813, 0.4542),
        (3.9466, -2.5765, 0.4544),
        (3.8991, -2.5671, 0.4566),
        (3.7186, -2.5308, 0.4653),
        (3.1390, -2.3073, 0.4733),
        (2.1715, -1.5246, 0.3885),
        (1.8648, -1.2224, 0.3577),
    ),
}
_NUM_ITERATIONS = 5
# The root mean square of an update of AdamW, as Moonlight measured it (arXiv 2502.16982).
_RMS_OF_ADAMW = 0.2
# Matrices of one shape are iterated at once, up to so many numbers. Larger ones keep a device busy
# alone, and a rank that holds shards has no room for all of them.
_MOST_ON_CUDA, _MOST_ELSEWHERE = 2**22, 2**18


class Muon(Replayable):
    """Momentum, orthogonalized.

    m = b m + (1 - b) g; u = b m + (1 - b) g
    p = p (1 - lr wd) - lr s orthogonal(u)
    s = sqrt(max(1, R / C)), or 0.2 sqrt(max(R, C)) with scale="rms"
    This is torch.optim.Muon with adjust_lr_fn="original" (or "match_rms_adamw" for scale="rms"),
    with two differences. With coefficients="urm" and scale="rms" it is the Muon of URM's code
    (arXiv 2512.14693).

    - Sharded parameters (FSDP2): torch iterates on the shards, with partial sums in bfloat16, which
      changed updates by 4 %. Here each rank gathers and orthogonalizes the whole matrix.
    - Dtype: only a CUDA device iterates in bfloat16, which a CPU emulates slowly.

    The state of a parameter is its `momentum_buffer` (m).

    Args:
        scale: the size of an update for a learning rate of 1. spectral: its spectral norm is near
            1 for a matrix that is not taller than wide (see `orthogonal`). rms: the root mean
            square of its entries is about 0.2, like that of AdamW's (arXiv 2502.16982).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float,
        weight_decay: float,
        iterations: int = _NUM_ITERATIONS,
        coefficients: Coefficients = "jordan",
        scale: Scale = "spectral",
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "iterations": iterations}
        super().__init__(params, defaults)
        self._coefficients: Coefficients = coefficients
        self._scale: Scale = scale

    def numbers(self) -> list[float]:
        found = []
        for group in self.param_groups:
            found.append(1 - group["lr"] * group["weight_decay"])
            found += [-group["lr"] * self._factor(*shape) for shape in _by_shape(group["params"])]
        return found

    def _factor(self, num_rows: int, num_columns: int) -> float:
        if self._scale == "rms":  # an orthogonal matrix has a root mean square of 1 / sqrt(max(R, C))
            return _RMS_OF_ADAMW * math.sqrt(max(num_rows, num_columns))
        return math.sqrt(max(1, num_rows / num_columns))

    @torch.no_grad()
    def update(self, numbers: Iterator[Number]) -> None:
        """As in the base class. Every rank that holds a shard."""
        for group in self.param_groups:
            decay = next(numbers)
            for (num_rows, num_columns), weights in _by_shape(group["params"]).items():
                most = _MOST_ON_CUDA if weights[0].is_cuda else _MOST_ELSEWHERE
                rate, at_once = next(numbers), max(1, most // (num_rows * num_columns))
                given = [weight_RC for weight_RC in weights if weight_RC.grad is not None]
                for first in range(0, len(given), at_once):
                    self._update(given[first : first + at_once], group, decay, rate)

    def _update(self, weights: list[Tensor], group: dict[str, Any], decay: Number, rate: Number) -> None:
        gradients = [weight_RC.grad for weight_RC in weights if weight_RC.grad is not None]
        means = [self._momentum(weight_RC) for weight_RC in weights]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        updates = list(torch._foreach_lerp(gradients, means, group["momentum"]))
        if updates[0].is_cuda:  # cast before gathering, which then moves half as many bytes
            updates = [update_RC.bfloat16() for update_RC in updates]
        whole_NRC = torch.stack([update.full_tensor() if is_dtensor(update) else update for update in updates])
        found = list(orthogonal(whole_NRC, group["iterations"], self._coefficients))
        if is_dtensor(updates[0]):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = updates[0].device_mesh, updates[0].placements
            # Every rank keeps its own part of the whole. Without a source rank nothing is sent.
            found = [distribute_tensor(each, mesh, placements, src_data_rank=None) for each in found]
        torch._foreach_mul_(weights, decay)
        for weight_RC, update_RC in zip(weights, found, strict=True):
            if isinstance(rate, Tensor):
                weight_RC.addcmul_(update_RC, rate)
            else:
                weight_RC.add_(update_RC, alpha=rate)

    def _momentum(self, weight_RC: Tensor) -> Tensor:
        state = self.state[weight_RC]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight_RC)
        mean_RC: Tensor = state["momentum_buffer"]
        return mean_RC


def _by_shape(weights: Iterable[Tensor]) -> dict[tuple[int, int], list[Tensor]]:
    found = defaultdict[tuple[int, int], list[Tensor]](list)
    for weight_RC in weights:
        num_rows, num_columns = weight_RC.shape
        found[num_rows, num_columns].append(weight_RC)
    return found


def orthogonal(
    matrices_NRC: torch.Tensor, iterations: int = _NUM_ITERATIONS, coefficients: Coefficients = "jordan"
) -> torch.Tensor:
    """Return approximately U V^T for each matrix U S V^T, in the matrices' dtype.

    After five iterations the singular values lie between 0.6 and 1.3 (jordan) or 0.4 and 1.9 (urm).
    """
    if matrices_NRC.shape[-2] > matrices_NRC.shape[-1]:  # the Gram matrix of the shorter side is smaller
        return orthogonal(matrices_NRC.mT, iterations, coefficients).mT
    x_NRC: torch.Tensor = matrices_NRC / matrices_NRC.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    triples = _COEFFICIENTS[coefficients]
    for n in range(iterations):
        a, b, c = triples[min(n, len(triples) - 1)]
        gram_NRR = x_NRC @ x_NRC.mT
        polynomial_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, polynomial_NRR, x_NRC, beta=a)
    return x_NRC
