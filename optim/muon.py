"""Muon: orthogonalized momentum for a network's matrices (kellerjordan.github.io/posts/muon)."""

# R = rows, C = columns of a weight

import math
from collections.abc import Iterator
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
            found += [-group["lr"] * self._factor(weight_RC) for weight_RC in group["params"]]
        return found

    @torch.no_grad()
    def update(self, numbers: Iterator[Number]) -> None:
        """As in the base class. Every rank that holds a shard."""
        for group in self.param_groups:
            decay = next(numbers)
            for weight_RC in group["params"]:
                rate = next(numbers)
                if weight_RC.grad is not None:
                    self._update(weight_RC, weight_RC.grad, group, decay, rate)

    def _factor(self, weight_RC: Tensor) -> float:
        num_rows, num_columns = weight_RC.shape
        if self._scale == "rms":  # an orthogonal matrix has a root mean square of 1 / sqrt(max(R, C))
            return _RMS_OF_ADAMW * math.sqrt(max(num_rows, num_columns))
        return math.sqrt(max(1, num_rows / num_columns))

    def _update(self, weight_RC: Tensor, grad_RC: Tensor, group: dict[str, Any], decay: Number, rate: Number) -> None:
        state = self.state[weight_RC]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight_RC)
        mean_RC = state["momentum_buffer"].lerp_(grad_RC, 1 - group["momentum"])
        update_RC = grad_RC.lerp(mean_RC, group["momentum"])
        if update_RC.is_cuda:  # cast before gathering, which then moves half as many bytes
            update_RC = update_RC.bfloat16()
        if is_dtensor(update_RC):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = update_RC.device_mesh, update_RC.placements
            whole_RC = orthogonal(update_RC.full_tensor(), group["iterations"], self._coefficients)
            # Every rank keeps its own part of the whole. Without a source rank nothing is sent.
            update_RC = distribute_tensor(whole_RC, mesh, placements, src_data_rank=None)
        else:
            update_RC = orthogonal(update_RC, group["iterations"], self._coefficients)
        weight_RC.mul_(decay)
        if isinstance(rate, Tensor):
            weight_RC.addcmul_(update_RC, rate)
        else:
            weight_RC.add_(update_RC, alpha=rate)


def orthogonal(
    matrix_RC: torch.Tensor, iterations: int = _NUM_ITERATIONS, coefficients: Coefficients = "jordan"
) -> torch.Tensor:
    """Return approximately U V^T for a matrix U S V^T, in the matrix's dtype.

    After five iterations the singular values lie between 0.6 and 1.3 (jordan) or 0.4 and 1.9 (urm).
    """
    if matrix_RC.shape[0] > matrix_RC.shape[1]:
        return orthogonal(matrix_RC.T, iterations, coefficients).T  # the Gram matrix of the shorter side is smaller
    x_RC: torch.Tensor = matrix_RC / matrix_RC.norm().clamp(min=1e-7)
    triples = _COEFFICIENTS[coefficients]
    for n in range(iterations):
        a, b, c = triples[min(n, len(triples) - 1)]
        gram_RR = x_RC @ x_RC.T
        polynomial_RR = torch.addmm(gram_RR, gram_RR, gram_RR, beta=b, alpha=c)
        x_RC = torch.addmm(x_RC, polynomial_RR, x_RC, beta=a)
    return x_RC
