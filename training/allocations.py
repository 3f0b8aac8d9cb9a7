"""Count the memory that tensors would take, on the meta device, whose tensors have no memory."""

# B = batch, N = heads, T = positions of queries, S = positions of keys, H = head size

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside, as long as they live.

    Tensors that share a storage count once. Attention takes a fused kernel, as devices do. By
    itself the meta device takes a formula that keeps all scores.

    Args:
        known: tensors that were there before and live on. They do not count.

    Attributes:
        live: the bytes that are alive.
        peak: the most bytes that were alive at a time.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes = {_storage_of(tensor): 0 for tensor in known}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Make new tensors on the meta device, and count them."""
        own = F.scaled_dot_product_attention
        # A mode can't replace the kernel: modes are off where the backward pass computes
        # activations again.
        F.scaled_dot_product_attention = _attend  # type: ignore[assignment]
        try:
            with torch.device("meta"), self:
                yield
        finally:
            F.scaled_dot_product_attention = own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := _storage_of(tensor)) not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._remove, key)
        return result

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _attend(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=q_BNTH.dtype).masked_fill(~attn_mask, -torch.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended: Tensor = kernel(q_BNTH, k_BNSH, v_BNSH, 0.0, is_causal, attn_mask=bias)[0]
    return attended
