"""Attention in a packed row with PyTorch's `varlen_attn` (FlashAttention, arXiv 2307.08691)."""

# N = tokens of the row, P = tokens of all prefixes, R = tokens of all responses, A = heads of
# queries, G = heads of keys and values, H = head size

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.text.stack_config import Mask, Sequences


@dataclass(frozen=True)
class _Lengths:
    ends: Tensor  # int32, from 0 to the sum
    longest: int

    @staticmethod
    def of(lengths: list[int]) -> "_Lengths":
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return _Lengths(ends, max(lengths, default=0))

    def apply(self, change: Callable[[Tensor], Tensor]) -> "_Lengths":
        return _Lengths(change(self.ends), self.longest)


class Ragged:
    """The sequences of a row, without a batch and its padding.

    With PrefixLM the kernel runs twice: prefixes see themselves in both directions, and responses
    see their whole sequence up to themselves.
    """

    def __init__(self, sequences: Sequences, num_tokens: int) -> None:
        prefixes, responses = [p for p, _ in sequences], [r for _, r in sequences]
        lengths = [prefix + response for prefix, response in sequences]
        self._num_tokens = sum(lengths)  # without padding
        self._num_padding = num_tokens - self._num_tokens
        self._has_prefix = any(prefix > 1 for prefix in prefixes)  # a prefix of one token is causal
        self._whole, self._prefixes, self._responses = map(_Lengths.of, (lengths, prefixes, responses))
        kinds = torch.tensor([0, 1]).repeat(len(sequences))
        kind_N = kinds.repeat_interleave(torch.tensor([n for each in sequences for n in each], dtype=torch.int64))
        self._prefix_P, self._response_R = (kind_N == 0).nonzero().flatten(), (kind_N == 1).nonzero().flatten()
        self._order_N = torch.cat([self._prefix_P, self._response_R]).argsort()
        """Where a token lies in a row that holds all prefixes, and then all responses."""

    def apply(self, change: Callable[[Tensor], Tensor]) -> "Ragged":
        changed = copy.copy(self)
        changed._whole, changed._prefixes, changed._responses = (
            lengths.apply(change) for lengths in (self._whole, self._prefixes, self._responses)
        )
        changed._prefix_P, changed._response_R = change(self._prefix_P), change(self._response_R)
        changed._order_N = change(self._order_N)
        return changed

    def attend(self, q_NAH: Tensor, k_NGH: Tensor, v_NGH: Tensor, mask: Mask) -> Tensor:
        padding = q_NAH.new_zeros(self._num_padding, *q_NAH.shape[1:])
        q_NAH, k_NGH, v_NGH = (x_NAH[: self._num_tokens] for x_NAH in (q_NAH, k_NGH, v_NGH))
        if not self._num_tokens:
            return padding
        if mask == "causal" or not self._has_prefix:
            return torch.cat([_kernel(q_NAH, k_NGH, v_NGH, self._whole, self._whole, is_causal=True), padding])
        q_PAH, k_PGH, v_PGH = (x.index_select(0, self._prefix_P) for x in (q_NAH, k_NGH, v_NGH))
        y_PAH = _kernel(q_PAH, k_PGH, v_PGH, self._prefixes, self._prefixes, is_causal=False)
        if not len(self._response_R):
            return torch.cat([y_PAH, padding])
        q_RAH = q_NAH.index_select(0, self._response_R)
        y_RAH = _kernel(q_RAH, k_NGH, v_NGH, self._responses, self._whole, is_causal=True)
        return torch.cat([torch.cat([y_PAH, y_RAH]).index_select(0, self._order_N), padding])


def _kernel(q: Tensor, k: Tensor, v: Tensor, lengths_q: _Lengths, lengths_k: _Lengths, *, is_causal: bool) -> Tensor:
    """Return what queries (tokens, heads, H) see of keys, sequence by sequence.

    If causal, the last query of a sequence sees all of its keys.
    """
    from torch.nn.attention.varlen import varlen_attn  # not in all versions that this code works with

    y = varlen_attn(
        q,
        k,
        v,
        lengths_q.ends,
        lengths_k.ends,
        lengths_q.longest,
        lengths_k.longest,
        window_size=(-1, 0) if is_causal else (-1, -1),
        enable_gqa=k.shape[1] != q.shape[1],
    )
    assert isinstance(y, Tensor)
    return y
