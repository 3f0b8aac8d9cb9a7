"""Attention whose dropout is a pure function of a seed and a place in the slot.

So it is the same for every number of ranks, on every device, after a resume, and when activation
checkpointing computes a call a second time.
"""

# B = sequences, N = heads, T = positions, H = head size

import math
from typing import NamedTuple

import torch

_32_BITS = 0xFFFFFFFF
# 2^32 divided by the golden ratio: its multiples spread evenly over 32 bits.
_GOLDEN = 0x9E3779B9


class Dropout(NamedTuple):
    """How to drop attention probabilities. The seeds are 32 bits as int64, one for a sequence."""

    seeds_B: torch.Tensor
    rate: float


def derived(seeds: torch.Tensor, number: torch.Tensor | int) -> torch.Tensor:
    """Return seeds (32 bits as int64) for the parts with these numbers, which broadcast."""
    return _mixed((seeds + (number + 1) * _GOLDEN) & _32_BITS)


def _mixed(hashed: torch.Tensor) -> torch.Tensor:
    """Return a permutation of the 32-bit numbers in which every bit depends on every bit.

    The xorshifts and multipliers are from Chris Wellons' "hash-prospector", in an int64.
    """
    hashed = ((hashed ^ (hashed >> 16)) * 0x21F0AAAD) & _32_BITS
    hashed = ((hashed ^ (hashed >> 15)) * 0x735A2D97) & _32_BITS
    return hashed ^ (hashed >> 15)


def kept(dropout: Dropout, num_heads: int, num_queries: int, num_keys: int) -> torch.Tensor:
    """Return which attention probabilities stay, bool (B, N, queries, keys)."""
    device = dropout.seeds_B.device
    rows_NT = torch.arange(num_heads * num_queries, device=device).view(num_heads, num_queries)
    seeds_BNT = derived(dropout.seeds_B[:, None, None], rows_NT)
    hashed_BNTT = derived(seeds_BNT[..., None], torch.arange(num_keys, device=device))
    return hashed_BNTT >= round(dropout.rate * 2**32)


def attend_with_dropout(
    q_BNTH: torch.Tensor, k_BNTH: torch.Tensor, v_BNTH: torch.Tensor, dropout: Dropout
) -> torch.Tensor:
    """Return dropout(softmax(q k^T / sqrt(H))) v, in the dtype of the inputs.

    Probabilities that stay are divided by 1 - rate. The softmax is computed in float32.
    """
    scores_BNTT = q_BNTH @ k_BNTH.mT / math.sqrt(q_BNTH.shape[-1])
    p_BNTT = scores_BNTT.float().softmax(-1)
    kept_BNTT = kept(dropout, *p_BNTT.shape[1:])
    return (p_BNTT * kept_BNTT / (1 - dropout.rate)).to(v_BNTH.dtype) @ v_BNTH
