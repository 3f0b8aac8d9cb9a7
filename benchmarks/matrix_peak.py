"""Measure how fast this machine multiplies the matrices of a model, and what it can do at most."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.on_request import timed
from models.base import RecursiveModel
from models.block import Block
from models.layers import Linear

# B = slots, T = positions, D = hidden size

_ROUNDS = 12
# Calls of a round on CUDA, where a single call would measure its launch and the wait as well.
_CALLS_ON_CUDA = 10


@dataclass(frozen=True)
class Product:
    """The fastest times of the three products of a matrix: forward, and two of the backward pass.

    Attributes:
        number: how many matrices of the blocks have this shape.
    """

    rows: int
    in_features: int
    out_features: int
    number: int
    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float

    @property
    def operations(self) -> float:
        """Those of one of the three products. They are equal."""
        return 2.0 * self.rows * self.in_features * self.out_features

    @property
    def ms(self) -> float:
        return self.forward_ms + self.input_gradient_ms + self.weight_gradient_ms


def measure_products(model: RecursiveModel, num_slots: int) -> list[Product]:
    """Measure the products that the blocks need, if nothing else ran.

    Args:
        num_slots: the slots of a microbatch.
    """
    device = next(model.parameters()).device
    shapes = Counter[tuple[int, int, int]]()
    for block in (module for module in model.modules() if isinstance(module, Block)):
        over_tokens = set() if block.mlp_t is None else set(block.mlp_t.modules())
        for layer in (module for module in block.modules() if isinstance(module, Linear)):
            rows = num_slots * (model.config.hidden_size if layer in over_tokens else model.num_positions)
            out_features, in_features = layer.weight.shape
            shapes[rows, in_features, out_features] += 1
    products = []
    for (rows, in_features, out_features), number in shapes.items():
        x = torch.randn(rows, in_features, device=device, dtype=model.dtype)
        weight = torch.randn(out_features, in_features, device=device, dtype=model.dtype)
        gradient = torch.randn(rows, out_features, device=device, dtype=model.dtype)
        three = (
            lambda: F.linear(x, weight),  # noqa: B023 - called at once
            lambda: gradient @ weight,  # noqa: B023
            lambda: gradient.t() @ x,  # noqa: B023
        )
        products.append(
            Product(rows, in_features, out_features, number, *(_fastest_ms(each, device) for each in three))
        )
    return products


def peak_tflops(products: list[Product]) -> float:
    """Return the operations of all products divided by their time, in TFLOP/s."""
    return sum(3 * each.number * each.operations for each in products) / sum(
        each.number * each.ms * 1e9 for each in products
    )


def square_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the TFLOP/s of a product of two square matrices, which suit any device."""
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / _fastest_ms(lambda: a @ b, device) / 1e9


def copy_gb_per_s(device: torch.device, num_bytes: int) -> float:
    """Return the GB/s of a copy within the device's memory. Reading and writing both count."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / _fastest_ms(lambda: target.copy_(source), device) / 1e6


def _fastest_ms(product: Callable[[], torch.Tensor], device: torch.device) -> float:
    num_calls = _CALLS_ON_CUDA if device.type == "cuda" else 1
    return min(timed(product, num_calls, device) for _ in range(_ROUNDS))
