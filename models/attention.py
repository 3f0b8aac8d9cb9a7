"""Multi-head attention with rotary positions. That of puzzles is full, never causal."""

# B = batch, T = positions (prefix and tokens), D = hidden size, N = heads, H = head size (D / N if
# not given)

import math

import torch
import torch.nn.functional as F
from torch import nn

from models.dropout import Dropout, attend_with_dropout
from models.layers import Linear
from utils.errors import UserError

# Whether the CPU has instructions for tiles of bfloat16. Attention was not measured on such a CPU.
_HAS_AMX = torch.cpu._is_amx_tile_supported()

Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos_TH and sin_TH, float32. The first half of a row of sin_TH has the opposite sign."""


def rotary_tables(num_positions: int, head_dim: int, theta: float) -> Rotary:
    """Return cos_TH and sin_TH of the angles position * theta^(-2i/H) (arXiv 2104.09864), float32.

    The components i and i + H/2 have the same angle.
    """
    return rotary_at(torch.arange(num_positions), head_dim, theta)


def rotary_at(positions_T: torch.Tensor, head_dim: int, theta: float) -> Rotary:
    components_H2 = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device)
    return _tables(torch.outer(positions_T.float(), theta ** -(components_H2 / head_dim)))


def _tables(angles_TH2: torch.Tensor) -> Rotary:
    cos_TH2, sin_TH2 = angles_TH2.cos(), angles_TH2.sin()
    return torch.cat([cos_TH2, cos_TH2], dim=-1), torch.cat([-sin_TH2, sin_TH2], dim=-1)


def rotary_tables_2d(
    prefix_len: int, seq_len: int, head_dim: int, theta: float, *, first: int = 1, suffix_len: int = 0
) -> Rotary:
    """Return cos_TH and sin_TH for a square grid of tokens, in float32.

    Half of the pairs (i, i + H/2) rotate by the row of a token, the other half by its column. The
    prefix and the suffix do not rotate.

    Args:
        first: the number of the first row and column. With 1, no cell has the prefix's angles.
    """
    side = math.isqrt(seq_len)
    if side * side != seq_len:
        raise UserError(f"pos_encodings is rope_2d, but a sequence of {seq_len} tokens is no square grid; take rope")
    frequencies_H4 = theta ** -(torch.arange(0, head_dim, 4, dtype=torch.float32) / head_dim)
    cells_S = torch.arange(seq_len)
    positions_S2 = torch.stack([cells_S // side, cells_S % side], dim=1).float() + first
    positions_T2 = F.pad(positions_S2, (0, 0, prefix_len, suffix_len))
    return _tables((positions_T2[:, :, None] * frequencies_H4).flatten(1))


def apply_rotary(x_BNTH: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the pairs (i, i + H/2) of each head by their angles, computed in float32."""
    cos_TH, sin_TH = rotary
    x32_BNTH = x_BNTH.float()
    partners_BNTH = x32_BNTH.roll(x_BNTH.shape[-1] // 2, dims=-1)
    return (x32_BNTH * cos_TH + partners_BNTH * sin_TH).to(x_BNTH.dtype)


def attend(
    q_BNTH: torch.Tensor,
    k_BNTH: torch.Tensor,
    v_BNTH: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(H)) v. k and v may have fewer heads than q, which are shared.

    Args:
        mask: true where a query sees a key, broadcast to (B, N, T, T); None: everywhere.
    """
    if q_BNTH.device.type == "cpu" and q_BNTH.dtype == torch.bfloat16 and not _HAS_AMX:
        # PyTorch's kernel for CPUs is faster in float32 there: the backward pass three times, and
        # the forward pass up to 1.5 times (docs/lab/log.md).
        return attend(q_BNTH.float(), k_BNTH.float(), v_BNTH.float(), mask=mask, is_causal=is_causal).bfloat16()
    shares_keys = bool(k_BNTH.shape[1] != q_BNTH.shape[1])  # of a number that torch.jit traces, too
    return F.scaled_dot_product_attention(
        q_BNTH, k_BNTH, v_BNTH, attn_mask=mask, is_causal=is_causal, enable_gqa=shares_keys
    )


class Attention(nn.Module):
    """Scaled dot-product attention without biases.

    The rows of `qkv_proj` are all heads of q, then all heads of k, then all heads of v.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int | None = None, *, heads_option: str = "num_heads"
    ) -> None:
        """Allocate the projections. Messages name the `heads_option` that gives num_heads."""
        super().__init__()
        self.num_heads, self.heads_option = num_heads, heads_option
        width = num_heads * head_dim if head_dim is not None else hidden_size
        self.qkv_proj = Linear(hidden_size, 3 * width)
        self.o_proj = Linear(width, hidden_size)

    def forward(
        self,
        x_BTD: torch.Tensor,
        rotary: Rotary | None,
        *,
        num_queries: int | None = None,
        fp8: bool = False,
        dropout: Dropout | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return y_BTD, of the first num_queries positions. Of mask and dropout, one is None."""
        qkv_BT3NH = self.qkv_proj(x_BTD, fp8=fp8).unflatten(-1, (3, self.num_heads, -1))
        qk_2BNTH, v_1BNTH = qkv_BT3NH.permute(2, 0, 3, 1, 4).split([2, 1])
        if rotary is not None:
            qk_2BNTH = apply_rotary(qk_2BNTH, rotary)  # both at once: half the operators
        q_BNTH, k_BNTH = qk_2BNTH.unbind()
        v_BNTH = v_1BNTH.squeeze(0)
        if num_queries is not None:
            q_BNTH = q_BNTH[:, :, :num_queries]
        if dropout is None:
            y_BNTH = attend(q_BNTH, k_BNTH, v_BNTH, mask=mask)
        else:
            y_BNTH = attend_with_dropout(q_BNTH, k_BNTH, v_BNTH, dropout)
        return self.o_proj(y_BNTH.transpose(1, 2).flatten(2), fp8=fp8)
