"""Choose the dtype of the forward pass for arch.forward_dtype=auto, and check arch.fp8_no_grad."""

from typing import TypeVar

import torch

from models.base import RecursiveModel
from models.layers import FP8_MULTIPLE, Linear, fp8_product
from models.model import ArchBase, Model
from utils.errors import UserError
from utils.ranks.world import World
from utils.text import one_line

A = TypeVar("A", bound=ArchBase)


def with_forward_dtype(arch: A, world: World, *, before: str | None = None) -> A:
    """Replace forward_dtype=auto by the dtype that suits the device of rank 0. Every rank.

    Args:
        before: the dtype of the checkpoint that the run goes on from. The run keeps it, so that a
            resumed run on another machine ends with the same bits.
    """
    if arch.forward_dtype != "auto":
        return arch
    chosen = before or world.broadcast_object("bfloat16" if multiplies_bfloat16(world.device) else "float32")
    return arch.model_copy(update={"forward_dtype": chosen})


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 in hardware, which is many times as fast."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    if hasattr(torch.cpu, "get_capabilities"):
        return any(there for name, there in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
    return torch.cpu._is_avx512_bf16_supported()  # before torch 2.13


def require_fp8_products(model: Model, world: World) -> list[str]:
    """Return lines that name the products that arch.fp8_no_grad computes in FP8. Every rank."""
    if not isinstance(model, RecursiveModel) or not model.config.fp8_no_grad:
        return []
    modules = dict(named for block in model.blocks() for named in block.named_modules())
    products = {name: each for name, each in modules.items() if isinstance(each, Linear)}
    fitting = [name for name, linear in products.items() if linear.fits_fp8]
    with world.shared_errors():
        if not fitting:
            raise UserError(
                f"arch.fp8_no_grad is true, but FP8 multiplies matrices whose sides are multiples of {FP8_MULTIPLE}, "
                f"and the model has none; give arch.width_multiple={FP8_MULTIPLE}, or set arch.fp8_no_grad to false"
            )
        if (why := why_fp8_fails(world.device, model.dtype)) is not None:
            raise UserError(
                f"arch.fp8_no_grad is true, but PyTorch can't multiply in FP8 on {world.device.type} into "
                f"{model.config.forward_dtype} ({why}); take a Hopper GPU and arch.forward_dtype=bfloat16, or set "
                "arch.fp8_no_grad to false"
            )
    rest = [
        f"{name} ({each.in_features} to {each.out_features})" for name, each in products.items() if not each.fits_fp8
    ]
    others = f"; other sizes, {model.config.forward_dtype}: {', '.join(rest)}" if rest else ""
    return [f"arch.fp8_no_grad: calls without gradient multiply in FP8: {', '.join(fitting)}{others}"]


def why_fp8_fails(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this device can't multiply in FP8; None if it can.

    The function tries a product, whose kernels differ by GPU, dtype and version of PyTorch.
    """
    size = 128  # kernels may refuse much smaller matrices
    ones = torch.ones(size, size, dtype=dtype, device=device)
    try:
        product = fp8_product(ones, ones, dtype).cpu()
    except (RuntimeError, TypeError, ValueError) as error:  # it differs by device, and which dtype is refused
        return one_line(error)[:200]
    # A GPU multiplies by the scales of float32 afterwards, which leaves a last bit.
    is_right = torch.allclose(product.float(), torch.tensor(float(size)), rtol=1e-2)
    return None if is_right else "a product of ones is wrong"
