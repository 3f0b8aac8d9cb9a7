"""One learned row per puzzle: a buffer, not a parameter, since sign SGD updates the few rows that a batch touches."""

# K = puzzle identifiers, E = puzzle embedding size, B = batch

import torch
from torch import nn


class PuzzleEmbedding(nn.Module):
    """Table weight_KE, float32. Its gradient would be nearly all zeros, so the rows of a batch are leaves instead."""

    weight: torch.Tensor

    def __init__(self, num_puzzle_identifiers: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(num_puzzle_identifiers, dim))
        self.trainable = True

    @torch.no_grad()
    def init_weights(self) -> None:
        """All rows zero: puzzles start as the same task."""
        self.weight.zero_()

    def rows(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Copy of the rows of ids_B, (B, E). A leaf: after backward its `.grad` is there, unless nobody wants it."""
        return self.weight.index_select(0, ids_B).requires_grad_(self.trainable and torch.is_grad_enabled())
