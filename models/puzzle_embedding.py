"""One learned row per puzzle: a buffer, not a parameter, since sign SGD updates the few rows that a batch touches."""

# K = puzzle identifiers, E = puzzle embedding size, B = slots of this rank, G = those of all ranks, padded

import torch
import torch.nn.functional as F
from torch import nn

from utils.dist.world import World


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


class ShardedPuzzleEmbedding(PuzzleEmbedding):
    """A table of which each share of the slots holds a run of rows, where no device has room for all of them.

    A lookup takes all ranks, each with ids of its own: as many calls on every rank, with gradient or without alike.
    With gradient a rank must ask for as many ids each time as the first time: how many there are is exchanged once, and
    no host waits for another in training. Without gradient it is exchanged at every lookup.
    """

    def __init__(self, weight_KE: torch.Tensor, own_KE: torch.Tensor, first_row: int, world: World) -> None:
        """Args: weight_KE: all rows, as a DTensor whose part here is `own_KE`, the rows from `first_row` on."""
        nn.Module.__init__(self)
        self.register_buffer("weight", weight_KE)
        self.trainable = True
        self._own_KE = own_KE
        self._first_row = first_row
        self._world = world
        self._num_trained_ids: int | None = None

    def rows(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Copy of the rows of ids_B, (B, E), as a leaf. Every rank."""
        rows_BE = self._look_up(ids_B, self._largest_number_of_ids(len(ids_B)))
        return rows_BE.requires_grad_(self.trainable and torch.is_grad_enabled())

    def _largest_number_of_ids(self, own: int) -> int:
        """Of any rank; the host may wait for the others, but not for the device."""
        if not torch.is_grad_enabled():
            return max(self._world.gather_objects(own))
        if self._num_trained_ids is None:
            self._num_trained_ids = max(self._world.gather_objects(own))
        return self._num_trained_ids

    @torch.no_grad()
    def _look_up(self, ids_B: torch.Tensor, longest: int) -> torch.Tensor:
        """Each rank fills in the rows that it holds, for all ranks; the others add zeros to them, which is exact."""
        ids_G = self._world.gather_rows(F.pad(ids_B, (0, longest - len(ids_B)))) - self._first_row
        is_own_G = (ids_G >= 0) & (ids_G < len(self._own_KE))
        rows_GE = self._own_KE.new_zeros(len(ids_G), self._own_KE.shape[1])
        if len(self._own_KE):
            held_GE = self._own_KE.index_select(0, torch.where(is_own_G, ids_G, 0))
            rows_GE = torch.where(is_own_G[:, None], held_GE, 0)
        first = self._world.data_rank * longest
        return self._world.sum_(rows_GE)[first : first + len(ids_B)].clone()
