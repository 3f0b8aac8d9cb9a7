"""Count the memory that tensors would take, on the meta device, whose tensors have no memory."""

# B = batch, N = heads, T = positions of queries, S = positions of keys, H = head size

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside, as long as they live.

    Tensors that share a storage count once.

    Args:
        known: tensors that were there before and live on. They do not count.

    Attributes:
        live: the bytes that are alive.
        peak: the most bytes that were alive at a time.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes = {storage_of(tensor): 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        key = storage_of(tensor)
        if key not in self._sizes:
            storage = tensor.untyped_storage()
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def storage_of(tensor: Tensor) -> int:
    """Return a number that is the same for tensors that share their memory."""
    return tensor.untyped_storage()._cdata


class SavedTensors:
    """Counts the bytes that a forward pass keeps for its backward pass, in parts.

    Tensors that share a storage count once, in the part that kept them first.

    Args:
        part: the part to which the first tensors belong.
        known: tensors whose memory counts elsewhere, such as weights.

    Attributes:
        bytes_of_parts: by the names of the parts.
    """

    def __init__(self, part: str, known: Iterable[Tensor]) -> None:
        self.bytes_of_parts = {part: 0}
        self._part, self._counted = part, {storage_of(tensor) for tensor in known}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is kept inside. What is kept stays alive until the backward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def begin(self, part: str) -> None:
        """Count what is kept from now on as another part."""
        self._part = part
        self.bytes_of_parts.setdefault(part, 0)

    def _keep(self, tensor: Tensor) -> Tensor:
        if (key := storage_of(tensor)) not in self._counted:
            self._counted.add(key)
            self.bytes_of_parts[self._part] += tensor.untyped_storage().nbytes()
        return tensor


@contextmanager
def fused_attention(device: Literal["cuda", "cpu"]) -> Iterator[None]:
    """Let attention on the meta device take the kernel that a device would take.

    By itself the meta device takes a formula that keeps all scores, as no device does. torch's
    modes can't do this: they are off where the backward pass computes activations again.
    """
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = partial(_attend, device == "cpu")
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def _attend(
    on_cpu: bool,
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    aten, bias = torch.ops.aten, None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=q_BNTH.dtype).masked_fill(~attn_mask, -torch.inf)
    if on_cpu:
        out = aten._scaled_dot_product_flash_attention_for_cpu(q_BNTH, k_BNSH, v_BNSH, 0.0, is_causal, attn_mask=bias)
    elif bias is None and q_BNTH.dtype != torch.float32:
        out = aten._scaled_dot_product_flash_attention(q_BNTH, k_BNSH, v_BNSH, 0.0, is_causal, False)
    else:
        if bias is not None:
            bias = bias.expand(*q_BNTH.shape[:3], k_BNSH.shape[2])
        if enable_gqa:  # this kernel needs a copy of the keys for each head
            shared = q_BNTH.shape[1] // k_BNSH.shape[1]
            k_BNSH, v_BNSH = (x.repeat_interleave(shared, dim=1) for x in (k_BNSH, v_BNSH))
        needs_grad = torch.is_grad_enabled()
        out = aten._scaled_dot_product_efficient_attention(q_BNTH, k_BNSH, v_BNSH, bias, needs_grad, 0.0, is_causal)
    attended: Tensor = out[0]
    return attended
