"""Check that the kernels that a config asks for run on the devices of a run."""

import torch

from models.base import RecursiveModel
from models.layers import FP8_MULTIPLE, Linear, fp8_product
from models.model import Model
from models.text.model import TextModel
from models.text.packing import Packing
from models.text.stack_config import StackShape
from utils.errors import UserError
from utils.ranks.world import World
from utils.text import one_line


def require_kernels(model: Model, world: World) -> list[str]:
    """Check arch.fp8_no_grad or arch.attention_kernel. Return lines for the log. Every rank."""
    notes = list[str]()
    with world.shared_errors():
        if isinstance(model, RecursiveModel) and model.config.fp8_no_grad:
            notes.append(_fp8_products(model, world.device))
        elif isinstance(model, TextModel) and model.config.attention_kernel == "varlen":
            reasons = (why_varlen_fails(world.device, model.dtype, stack.shape) for stack in model.stacks().values())
            if (why := next(filter(None, reasons), None)) is not None:
                raise UserError(
                    f"arch.attention_kernel=varlen does not run on {world.device.type} in {model.config.forward_dtype} "
                    f"({why}); take a CUDA device and arch.forward_dtype=bfloat16, or arch.attention_kernel=sdpa"
                )
    return notes


def _fp8_products(model: RecursiveModel, device: torch.device) -> str:
    """Return a line that names the products that arch.fp8_no_grad computes in FP8."""
    modules = dict(named for block in model.blocks() for named in block.named_modules())
    products = {name: each for name, each in modules.items() if isinstance(each, Linear)}
    fitting = [name for name, linear in products.items() if linear.fits_fp8]
    if not fitting:
        raise UserError(
            f"arch.fp8_no_grad is true, but FP8 multiplies matrices whose sides are multiples of {FP8_MULTIPLE}, "
            f"and the model has none; give arch.width_multiple={FP8_MULTIPLE}, or set arch.fp8_no_grad to false"
        )
    if (why := why_fp8_fails(device, model.dtype)) is not None:
        raise UserError(
            f"arch.fp8_no_grad is true, but PyTorch can't multiply in FP8 on {device.type} into "
            f"{model.config.forward_dtype} ({why}); take a Hopper GPU and arch.forward_dtype=bfloat16, or set "
            "arch.fp8_no_grad to false"
        )
    rest = [
        f"{name} ({each.in_features} to {each.out_features})" for name, each in products.items() if not each.fits_fp8
    ]
    others = f"; other sizes, {model.config.forward_dtype}: {', '.join(rest)}" if rest else ""
    return f"arch.fp8_no_grad: calls without gradient multiply in FP8: {', '.join(fitting)}{others}"


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


def why_varlen_fails(device: torch.device, dtype: torch.dtype, shape: StackShape) -> str | None:
    """Return why this device can't attend with the kernel varlen; None if it can.

    The function tries both passes with a short row, because support differs by GPU, dtype, heads
    and version of PyTorch.
    """
    num_tokens, generator, found = 14, torch.Generator().manual_seed(0), list[list[torch.Tensor]]()
    q_NAH, k_NGH, v_NGH = (
        torch.randn(num_tokens, heads, shape.head_dim, generator=generator).to(device, dtype)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    try:
        for kernel in ("varlen", "sdpa"):
            q, k, v = (each.clone().requires_grad_() for each in (q_NAH, k_NGH, v_NGH))
            packing = Packing([(3, 2), (1, 4), (2, 0)], num_tokens, device, kernel=kernel)
            y = packing.attend(q, k, v, shape.mask)
            y.float().square().sum().backward()
            found.append([each.detach().float().cpu() for each in (y, q.grad, k.grad, v.grad) if each is not None])
    except (ImportError, RuntimeError, TypeError, ValueError) as error:  # it differs by what is missing
        return one_line(error)[:200]
    is_right = all(torch.allclose(ours, theirs, rtol=0.05, atol=0.05) for ours, theirs in zip(*found, strict=True))
    return None if is_right else "its results differ from those of sdpa"
