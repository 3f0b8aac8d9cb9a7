"""Measure how fast this machine multiplies the matrices of a model."""

import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.on_request import wait_for
from models.base import RecursiveModel
from models.block import Block
from models.layers import Linear

# B = slots, T = positions, D = hidden size

_ROUNDS = 12


def matrix_peak_tflops(model: RecursiveModel, num_slots: int) -> float:
    """Return the TFLOP/s of the products that the blocks need, if nothing else ran.

    For each matrix of the blocks these are the product of the forward pass and the two of the
    backward pass, each with its fastest time. The whole is the operations of all divided by their
    time.

    Args:
        num_slots: the slots of a microbatch.
    """
    device = next(model.parameters()).device
    shapes = Counter[tuple[int, ...]]()
    for block in (module for module in model.modules() if isinstance(module, Block)):
        over_tokens = set() if block.mlp_t is None else set(block.mlp_t.modules())
        for layer in (module for module in block.modules() if isinstance(module, Linear)):
            rows = num_slots * (model.config.hidden_size if layer in over_tokens else model.num_positions)
            shapes[rows, *layer.weight.shape] += 1
    operations, seconds = 0.0, 0.0
    for (rows, out_features, in_features), number in shapes.items():
        x = torch.randn(rows, in_features, device=device, dtype=model.dtype)
        weight = torch.randn(out_features, in_features, device=device, dtype=model.dtype)
        gradient = torch.randn(rows, out_features, device=device, dtype=model.dtype)
        for product in (
            lambda: F.linear(x, weight),  # noqa: B023 - called at once
            lambda: gradient @ weight,  # noqa: B023
            lambda: gradient.t() @ x,  # noqa: B023
        ):
            seconds += number * _fastest_s(product, device)
            operations += number * 2.0 * rows * out_features * in_features
    return operations / seconds / 1e12


def _fastest_s(product: Callable[[], torch.Tensor], device: torch.device) -> float:
    times = []
    for _ in range(_ROUNDS):
        wait_for(device)
        began = time.perf_counter()
        product()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return min(times)
