"""Check that arch.attention_kernel runs on the devices of a run."""

import torch

from models.model import Model
from models.text.model import TextModel
from models.text.packing import Packing
from models.text.stack_config import StackShape
from utils.errors import UserError
from utils.ranks.world import World
from utils.text import one_line


def require_attention_kernel(model: Model, world: World) -> None:
    """Check that arch.attention_kernel can train a model of text on these devices. Every rank."""
    if not isinstance(model, TextModel) or model.config.attention_kernel == "sdpa":
        return
    with world.shared_errors():
        reasons = (why_varlen_fails(world.device, model.dtype, stack.shape) for stack in model.stacks().values())
        if (why := next(filter(None, reasons), None)) is not None:
            raise UserError(
                f"arch.attention_kernel=varlen does not run on {world.device.type} in {model.config.forward_dtype} "
                f"({why}); take a CUDA device and arch.forward_dtype=bfloat16, or arch.attention_kernel=sdpa"
            )


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
