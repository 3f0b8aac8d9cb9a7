"""Measure how fast this machine multiplies the matrices of a model, and what it can do at most."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.on_request import timed
from models.layers import Linear, LinearOfColumns, aligned
from models.model import Model

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


def measure_products(model: Model, num_units: int, width: int) -> list[Product]:
    """Measure the products that the blocks need, if nothing else ran.

    Args:
        num_units: the slots of a microbatch, or its tokens of text.
        width: the hidden size.
    """
    device = next(model.parameters()).device
    layers = [layer for block in model.blocks() for layer in block.modules()]
    shapes = Counter(
        (isinstance(layer, LinearOfColumns), *layer.weight.shape) for layer in layers if isinstance(layer, Linear)
    )
    products = []
    for (of_columns, out_features, in_features), number in shapes.items():
        rows = num_units * (width if of_columns else model.positions_per_slot)
        x, weight, gradient = (
            torch.randn(shape, device=device, dtype=model.dtype)
            for shape in ((rows, in_features), (out_features, in_features), (rows, out_features))
        )
        if of_columns:  # their columns lie together
            weight = aligned(weight)
            x, gradient = x.view(in_features, rows).mT, gradient.view(out_features, rows).mT
        three = _products(x, weight, gradient, of_columns=of_columns)
        products.append(Product(rows, in_features, out_features, number, *(fastest_ms(each, device) for each in three)))
    return products


def _products(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, *, of_columns: bool
) -> list[Callable[[], torch.Tensor]]:
    """Return the product of the forward pass and the two of the backward pass."""
    if of_columns:
        return [lambda: weight @ x.mT, lambda: weight.mT @ gradient.mT, lambda: gradient.mT @ x]
    return [lambda: F.linear(x, weight), lambda: gradient @ weight, lambda: gradient.mT @ x]


def peak_tflops(products: list[Product]) -> float:
    """Return the operations of all products divided by their time, in TFLOP/s."""
    return sum(3 * each.number * each.operations for each in products) / sum(
        each.number * each.ms * 1e9 for each in products
    )


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the TFLOP/s of a large product, and the GB/s of a large copy, read and written."""
    size, num_bytes = (8192, 2**31) if device.type == "cuda" else (512, 2**26)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    source, target = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
    return {
        "tflops": 2.0 * size**3 / fastest_ms(lambda: a @ b, device) / 1e9,
        "gb_per_s": 2.0 * num_bytes / fastest_ms(lambda: target.copy_(source), device) / 1e6,
    }


def fastest_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of the fastest of some rounds of calls, in ms for one call."""
    num_calls = _CALLS_ON_CUDA if device.type == "cuda" else 1
    return min(timed(call, num_calls, device)["step_ms"] for _ in range(_ROUNDS))
