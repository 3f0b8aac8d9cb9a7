"""One learned row for each puzzle: a buffer, because sign SGD updates only the rows of a batch."""

# K = puzzle identifiers, E = puzzle embedding size, B = slots of this rank, G = padded slots of all
# ranks

import torch
import torch.nn.functional as F
from torch import nn

from utils.ranks.world import World

PUZZLE_TABLE = "puzzle table"  # the part of a step that updates the table, for torch.profiler


class PuzzleEmbedding(nn.Module):
    """The table weight_KE, float32. A copy of a batch's rows gets the gradient."""

    weight: torch.Tensor

    def __init__(self, num_puzzle_identifiers: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(num_puzzle_identifiers, dim))
        self.trainable = True

    @torch.no_grad()
    def init_weights(self) -> None:
        self.weight.zero_()

    def rows(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows of ids_B, (B, E), as a leaf."""
        return self.weight.index_select(0, ids_B).requires_grad_(self.trainable and torch.is_grad_enabled())


class ShardedPuzzleEmbedding(PuzzleEmbedding):
    """A table that is split by rows over the ranks, for tables that are too large for one device.

    A lookup is a collective, for all ranks with gradient or for all without. With gradient, a rank
    must always ask for the same number of ids, which the ranks exchange at the first lookup only:
    no host waits for another host in training.
    """

    def __init__(self, weight_KE: torch.Tensor, own_KE: torch.Tensor, first_row: int, world: World) -> None:
        """Hold one part of weight_KE, a DTensor: the rows own_KE from `first_row` on."""
        nn.Module.__init__(self)
        self.register_buffer("weight", weight_KE)
        self.trainable = True
        self._own_KE = own_KE
        self._first_row = first_row
        self._world = world
        self._num_trained_ids: int | None = None

    def rows(self, ids_B: torch.Tensor) -> torch.Tensor:
        has_gradient = torch.is_grad_enabled()
        longest = self._num_trained_ids if has_gradient else None
        if longest is None:
            longest = max(self._world.gather_objects(len(ids_B)))
        if has_gradient:
            self._num_trained_ids = longest
        return self._look_up(ids_B, longest).requires_grad_(self.trainable and has_gradient)

    @torch.no_grad()
    def _look_up(self, ids_B: torch.Tensor, longest: int) -> torch.Tensor:
        # Each rank fills in the rows that it holds, for the ids of all ranks. The sum over the
        # ranks is exact, because all other ranks add zeros.
        ids_G = self._world.gather_rows(F.pad(ids_B, (0, longest - len(ids_B)))) - self._first_row
        is_own_G = (ids_G >= 0) & (ids_G < len(self._own_KE))
        rows_GE = self._own_KE.new_zeros(len(ids_G), self._own_KE.shape[1])
        if len(self._own_KE):
            held_GE = self._own_KE.index_select(0, torch.where(is_own_G, ids_G, 0))
            rows_GE = torch.where(is_own_G[:, None], held_GE, 0)
        first = self._world.data_rank * longest
        return self._world.sum_(rows_GE)[first : first + len(ids_B)].clone()
