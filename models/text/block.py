"""The block of the text models, and the stack of blocks that a recursion calls repeatedly."""

# N = tokens of the row, D = hidden size, A = heads of queries, G = heads of keys and values, H =
# head size

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Rotary, apply_rotary, rotary_at
from models.block import recomputed
from models.layers import InitialValues, Linear, SwiGLU, modulo_normal, rms_norm
from models.text.packing import leave_attention_out_of_graphs
from models.text.stack_config import Mask, StackShape


class Attends(Protocol):
    """Who sees whom: the sequences of a packed row, or those of a cache."""

    def attend(self, q_NAH: Tensor, k_NGH: Tensor, v_NGH: Tensor, mask: Mask) -> Tensor:
        """Return what each token sees, (N, A, H)."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times weights if it has any (arXiv 1910.07467)."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self._eps = shape.norm_eps
        self.weight = nn.Parameter(torch.empty(shape.hidden_size)) if shape.norm_has_weights else None

    def forward(self, x_ND: Tensor) -> Tensor:
        y_ND = rms_norm(x_ND, eps=self._eps)
        return y_ND if self.weight is None else y_ND * self.weight.to(y_ND.dtype)


class PackedAttention(nn.Module):
    """Attention over a row of tokens, with rotary positions and, in HRM-Text, a gate.

    The rows of the first projection are the heads of the gate if there is one, then q, k and v. The
    gate multiplies the heads' output (arXiv 2505.06708).
    """

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        gates = [shape.num_heads] if shape.is_gated else []
        self.heads = [*gates, shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.head_dim, self._mask = shape.head_dim, shape.mask
        projection = Linear(shape.hidden_size, sum(self.heads) * shape.head_dim)
        if shape.is_gated:
            self.gqkv_proj = projection
        else:
            self.qkv_proj = projection
        self.is_gated = shape.is_gated
        self.o_proj = Linear(shape.hidden_size, shape.hidden_size)

    @property
    def in_proj(self) -> Linear:
        return self.gqkv_proj if self.is_gated else self.qkv_proj

    def forward(self, x_ND: Tensor, rotary: Rotary | None, tokens: Attends) -> Tensor:
        parts = self.in_proj(x_ND).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)
        q_NAH, k_NGH, v_NGH = parts[-3:]
        if rotary is not None:
            q_NAH, k_NGH = apply_rotary(q_NAH, rotary), apply_rotary(k_NGH, rotary)
        y_NAH = tokens.attend(q_NAH, k_NGH, v_NGH, self._mask)
        if self.is_gated:
            y_NAH = parts[0].sigmoid() * y_NAH
        return self.o_proj(y_NAH.flatten(1))


class GELU(nn.Module):
    """down(gelu(up(x))), with the approximation of GPT-2 (arXiv 1606.08415)."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.up_proj = Linear(dim, width)
        self.down_proj = Linear(width, dim)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_ND), approximate="tanh"))


class TextBlock(nn.Module):
    """pre: x = x + attention(norm(x)); x = x + mlp(norm(x)).

    post: x = norm(x + attention(x)); x = norm(x + mlp(x)).
    """

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(shape), PackedAttention(shape)
        self.mlp_norm = RMSNorm(shape)
        self.mlp = (SwiGLU if shape.mlp == "swiglu" else GELU)(shape.hidden_size, shape.width)
        self._is_pre = shape.norm == "pre"

    def forward(self, x_ND: Tensor, rotary: Rotary | None, tokens: Attends) -> Tensor:
        if self._is_pre:
            x_ND = x_ND + self.attn(self.attn_norm(x_ND), rotary, tokens)
            return x_ND + self.mlp(self.mlp_norm(x_ND))
        x_ND = self.attn_norm(x_ND + self.attn(x_ND, rotary, tokens))
        return self.mlp_norm(x_ND + self.mlp(x_ND))


class Stack(nn.Module):
    """Blocks, applied to the sum of the inputs, and with pre-norm one more norm at the exit."""

    def __init__(self, shape: StackShape, layers: Sequence[TextBlock], norm: RMSNorm | None) -> None:
        super().__init__()
        self.shape, self.layers, self.norm = shape, nn.ModuleList(layers), norm

    @classmethod
    def of_shape(cls, shape: StackShape) -> "Stack":
        layers = [TextBlock(shape) for _ in range(shape.num_layers)]
        return cls(shape, layers, RMSNorm(shape) if shape.norm == "pre" else None)

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        stds = self.shape.stds
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                yield weight, torch.ones(weight.shape)
            else:
                std = {"o_proj": stds.attention_output, "down_proj": stds.mlp_output}.get(name.split(".")[-2])
                yield weight, modulo_normal(weight.shape, stds.inner if std is None else std, generator)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        leave_attention_out_of_graphs()
        super().compile(*args, **kwargs)

    def rotary(self, positions_N: Tensor) -> Rotary | None:
        """Return the cosines and sines (N, 1, H) of the positions; None if nothing is rotated."""
        if self.shape.rope_theta is None:
            return None
        cos_NH, sin_NH = rotary_at(positions_N, self.shape.head_dim, self.shape.rope_theta)
        return cos_NH[:, None], sin_NH[:, None]

    def forward(
        self, *inputs_ND: Tensor, rotary: Rotary | None, tokens: Attends, keep_inputs_only: bool = False
    ) -> Tensor:
        """Return the sum of the inputs after all blocks, (N, D).

        Args:
            keep_inputs_only: compute each block again in the backward pass.
        """
        x_ND = functools.reduce(torch.add, inputs_ND)
        for layer in self.layers:
            x_ND = (
                recomputed(layer, x_ND, rotary=rotary, tokens=tokens)
                if keep_inputs_only
                else layer(x_ND, rotary, tokens)
            )
        return x_ND if self.norm is None else self.norm(x_ND)
