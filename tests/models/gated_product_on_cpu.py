"""Compare models/gated_product.py with float64: TRITON_INTERPRET=1 python -m THIS_MODULE.

Triton decides at its import whether it interprets, so that this needs a process of its own.
"""

from typing import Any

import torch

from models.gated_product import _CONFIGS, _kernel, gated_product
from models.layers import NormalizedSwiGLU, SwiGLU
from models.parallel.layout import Layout
from tests.models.helpers import small_model
from training import swiglu_kernel
from utils.ranks.world import World

SIZES = [(130, 82, 72, True), (37, 64, 160, False), (200, 97, 150, True)]  # M, K, W, over_first
LAST_BITS = {torch.float32: 1e-6, torch.float16: 1e-3}  # the interpreter has no product in bfloat16


def check_product(dtype: torch.dtype, num_rows: int, inner: int, width: int, over_first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x_KM = torch.randn(inner, num_rows, generator=generator).to(dtype)
    weight = (torch.randn(2 * width, inner, generator=generator) / inner**0.5).to(dtype)
    x = x_KM if over_first else x_KM.mT.contiguous()
    y, mean_square = gated_product(x, weight, over_first=over_first, with_squares=True)
    assert mean_square is not None and y.is_contiguous()
    gate, up = (weight.double() @ x_KM.double()).chunk(2)
    expected = [torch.nn.functional.silu(gate) * up, (gate * up).square().mean(0, keepdim=True)]
    for found, right in zip((y, mean_square), expected, strict=True):
        error = ((found if over_first else found.mT) - right).norm() / right.norm()
        assert error < LAST_BITS[dtype], f"{dtype}, {(num_rows, inner, width)}: {error}"


@torch.no_grad()
def check_layer(layer_class: type[SwiGLU], *, over_first: bool) -> None:
    layer = layer_class(24, 40, over_first=over_first)
    for weight in layer.parameters():
        weight.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(24, 33) if over_first else torch.randn(3, 11, 24)
    plain = layer(x)
    layer.gated_product = gated_product
    torch.testing.assert_close(layer(x), plain, rtol=1e-4, atol=1e-3)
    with torch.enable_grad():
        assert layer(x).requires_grad, "the kernel has no backward pass"


def check_own_check() -> None:
    """The check at the start of a run finds the kernel right, with the model's own weights."""
    for mlp in ("swiglu", "normalized_swiglu"):
        layout = Layout[Any, Any, Any](small_model("trm_mlp", forward_dtype="float16", mlp=mlp), World.single())
        assert swiglu_kernel._error(layout) < torch.finfo(torch.float16).eps


if __name__ == "__main__":
    for config in _CONFIGS:
        _kernel.configs = [config]  # to choose among several takes a GPU
        for dtype in LAST_BITS:
            for sizes in SIZES:
                check_product(dtype, *sizes)
    for layer_class in (SwiGLU, NormalizedSwiGLU):
        for over_first in (False, True):
            check_layer(layer_class, over_first=over_first)
    check_own_check()
