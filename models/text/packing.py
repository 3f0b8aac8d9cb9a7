"""Attention within the sequences of one packed row: several sequences, and then padding.

sdpa    Sequences of similar length form a batch, padded to the longest. It runs on every device.
varlen  FlashAttention's kernel for sequences of different lengths takes the row as it is
        (models/text/varlen.py). It needs CUDA, and float16 or bfloat16.
"""

# N = tokens of the row, B = sequences of a group, L = tokens of the longest of them, A = heads of
# queries, G = heads of keys and values, H = head size

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from models.attention import attend
from models.text.stack_config import Kernel, Mask, Sequences
from models.text.varlen import Ragged

# The longest sequence of a group has at most so many times the tokens of the shortest, so that at
# most half of a group is padding.
_MOST_PADDING = 2


@dataclass(frozen=True)
class _Group:
    places_BL: Tensor  # in the row; 0 for padding
    prefix_B1: Tensor
    has_prefix: bool  # a prefix of one token is causal

    @cached_property
    def visible_B1LL(self) -> Tensor:
        """What each token sees with PrefixLM. Padding comes last, so no token sees it."""
        offsets_L = torch.arange(self.places_BL.shape[1], device=self.prefix_B1.device)
        return ((offsets_L <= offsets_L[:, None]) | (offsets_L < self.prefix_B1)[:, None, :])[:, None]


class Packing:
    """The sequences of a row, as attention and the metrics need them, on the row's device."""

    def __init__(
        self,
        sequences: Sequences,
        num_tokens: int,
        device: torch.device | str = "cpu",
        kernel: Kernel = "sdpa",
    ) -> None:
        lengths = [prefix + response for prefix, response in sequences]
        assert sum(lengths) <= num_tokens and all(prefix >= 1 for prefix, _ in sequences)
        self.num_sequences = len(sequences)
        numbers, counts = range(len(lengths) + 1), [*lengths, num_tokens - sum(lengths)]
        self.sequence_N = torch.tensor(numbers).repeat_interleave(torch.tensor(counts)).to(device)
        """The number of each token's sequence; num_sequences for padding."""
        attention = (Ragged if kernel == "varlen" else _Batches)(sequences, num_tokens)
        self._attention: Ragged | _Batches = attention.apply(lambda tensor: tensor.to(device))

    def apply(self, change: Callable[[Tensor], Tensor]) -> "Packing":
        """Return the packing with `change` of each of its tensors, such as a copy on a device."""
        changed = copy.copy(self)
        changed.sequence_N, changed._attention = change(self.sequence_N), self._attention.apply(change)
        return changed

    def attend(self, q_NAH: Tensor, k_NGH: Tensor, v_NGH: Tensor, mask: Mask) -> Tensor:
        """Return what the tokens see of their own sequences, (N, A, H). It is zero for padding."""
        return self._attention.attend(q_NAH, k_NGH, v_NGH, mask)


class _Batches:
    def __init__(self, sequences: Sequences, num_tokens: int) -> None:
        prefixes, lengths = [p for p, _ in sequences], [p + r for p, r in sequences]
        starts = [0, *itertools.accumulate(lengths)]
        self.groups = list[_Group]()
        # The rows of all groups in turn, and the number of the row that belongs to a token. Padding
        # belongs to one row more, which is zero.
        num_rows, rows_N = 0, torch.full((num_tokens,), -1)
        for members in _groups(lengths):
            length_B1, start_B1, prefix_B1 = (
                torch.tensor([of[n] for n in members])[:, None] for of in (lengths, starts, prefixes)
            )
            offsets_L = torch.arange(lengths[members[0]])
            is_token_BL = offsets_L < length_B1
            places_BL = torch.where(is_token_BL, start_B1 + offsets_L, 0)
            rows_N[places_BL[is_token_BL]] = num_rows + is_token_BL.flatten().nonzero().flatten()
            num_rows += is_token_BL.numel()
            has_prefix = any(prefixes[n] > 1 for n in members)
            self.groups.append(_Group(places_BL, prefix_B1, has_prefix))
        self._rows_N = torch.where(rows_N < 0, num_rows, rows_N)

    def apply(self, change: Callable[[Tensor], Tensor]) -> "_Batches":
        changed = copy.copy(self)
        changed.groups = [
            _Group(change(group.places_BL), change(group.prefix_B1), group.has_prefix) for group in self.groups
        ]
        changed._rows_N = change(self._rows_N)
        return changed

    def attend(self, q_NAH: Tensor, k_NGH: Tensor, v_NGH: Tensor, mask: Mask) -> Tensor:
        rows = list[Tensor]()
        for group in self.groups:
            q_BALH, k_BGLH, v_BGLH = (
                x.index_select(0, group.places_BL.flatten()).unflatten(0, group.places_BL.shape).transpose(1, 2)
                for x in (q_NAH, k_NGH, v_NGH)
            )
            if mask == "causal" or not group.has_prefix:
                y_BALH = attend(q_BALH, k_BGLH, v_BGLH, is_causal=True)
            else:
                y_BALH = attend(q_BALH, k_BGLH, v_BGLH, mask=group.visible_B1LL)
            rows.append(y_BALH.transpose(1, 2).flatten(0, 1))
        return torch.cat([*rows, q_NAH.new_zeros(1, *q_NAH.shape[1:])]).index_select(0, self._rows_N)


def leave_attention_out_of_graphs() -> None:
    """Let torch.compile leave out `Packing.attend`, whose shapes change from step to step.

    As a decorator this would import the compiler with the module, which takes seconds.
    """
    if not getattr(Packing.attend, "_torchdynamo_disable", False):
        Packing.attend = torch.compiler.disable(Packing.attend)  # type: ignore[method-assign]


def _groups(lengths: list[int]) -> Iterator[list[int]]:
    """Yield groups of sequences of similar length, by number, the longest first."""
    group = list[int]()
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if group and lengths[group[0]] > _MOST_PADDING * lengths[n]:
            yield group
            group = []
        group.append(n)
    if group:
        yield group
