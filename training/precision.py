"""Choose the dtype of the forward pass for arch.forward_dtype=auto."""

from typing import TypeVar

import torch

from models.model import ArchBase
from utils.ranks.world import World

A = TypeVar("A", bound=ArchBase)


def with_forward_dtype(arch: A, world: World, *, before: str | None = None) -> A:
    """Replace forward_dtype=auto by the dtype that suits the device of rank 0. Every rank.

    Args:
        before: the dtype of the checkpoint that the run goes on from, which it keeps.
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
    return torch.cpu._is_avx512_bf16_supported()  # torch 2.11, which machines with GPUs may bring along
