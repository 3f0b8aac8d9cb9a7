"""Muon: momentum, made orthogonal, for the matrices inside a network (kellerjordan.github.io/posts/muon)."""

# R = rows, C = columns of a weight

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import ParamsT

# Of the quintic iteration: chosen for a steep slope at 0, at the price that singular values end near 1, not at it.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ITERATIONS = 5


class Muon(torch.optim.Muon):
    """m = b m + (1 - b) g; u = b m + (1 - b) g; p = p (1 - lr wd) - lr sqrt(max(1, R / C)) orthogonal(u)

    torch.optim.Muon with adjust_lr_fn="original" but for two things. Of sharded parameters (FSDP2) torch iterates on
    the shards, with some 14 collectives per matrix and partial sums in bfloat16, after which an update was 4 % off that
    of one rank: here the matrix to be made orthogonal is gathered, one collective for each axis that shards it, and
    every rank makes all of it so; momentum and weights stay sharded. And only a CUDA device iterates in bfloat16: a CPU
    that emulates it takes eight times as long as in float32. A matrix of stacked projections (q, k and v) is one. Its
    rows may be stored in another order (tensor parallelism): made orthogonal, they are the same in that order.

    The state of a parameter is its `momentum_buffer` (m).
    """

    def __init__(
        self, params: ParamsT, lr: float, momentum: float, weight_decay: float, iterations: int = _NUM_ITERATIONS
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, ns_steps=iterations, adjust_lr_fn="original"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update from the gradients in `.grad`; no device synchronisation. Every rank that holds a shard."""
        assert closure is None, "the loss is computed once, outside"
        for group in self.param_groups:
            for weight_RC in group["params"]:
                if weight_RC.grad is not None:
                    self._update(weight_RC, weight_RC.grad, group)

    def _update(self, weight_RC: torch.Tensor, grad_RC: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight_RC]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight_RC)
        mean_RC = state["momentum_buffer"].lerp_(grad_RC, 1 - group["momentum"])
        update_RC = grad_RC.lerp(mean_RC, group["momentum"])
        if update_RC.is_cuda:  # before the gathering, which then moves half as much
            update_RC = update_RC.bfloat16()
        update_RC = _orthogonal_of_shards(update_RC, group["ns_steps"])
        num_rows, num_columns = weight_RC.shape
        weight_RC.mul_(1 - group["lr"] * group["weight_decay"])
        weight_RC.add_(update_RC, alpha=-group["lr"] * math.sqrt(max(1, num_rows / num_columns)))


def _orthogonal_of_shards(matrix_RC: torch.Tensor, iterations: int) -> torch.Tensor:
    """`orthogonal`, sharded as the matrix is."""
    if not isinstance(matrix_RC, DTensor):
        return orthogonal(matrix_RC, iterations)
    whole_RC = orthogonal(matrix_RC.full_tensor(), iterations)
    # Every rank has all of it, and only keeps its own part: without a source rank nothing is sent.
    return distribute_tensor(whole_RC, matrix_RC.device_mesh, matrix_RC.placements, src_data_rank=None)


def orthogonal(matrix_RC: torch.Tensor, iterations: int = _NUM_ITERATIONS) -> torch.Tensor:
    """About U V^T of U S V^T (singular values 0.5 to 1.2, but those near 0 stay below), in the matrix's dtype."""
    if matrix_RC.shape[0] > matrix_RC.shape[1]:
        return orthogonal(matrix_RC.T, iterations).T  # products of the shorter side with itself are the smaller ones
    x_RC: torch.Tensor = matrix_RC / matrix_RC.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram_RR = x_RC @ x_RC.T
        polynomial_RR = torch.addmm(gram_RR, gram_RR, gram_RR, beta=_B, alpha=_C)
        x_RC = torch.addmm(x_RC, polynomial_RR, x_RC, beta=_A)
    return x_RC
