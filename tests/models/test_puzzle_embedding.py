"""The puzzle table returns the requested rows, whole or sharded over ranks (CPU, gloo)."""

# K = puzzle identifiers, E = size of a row, B = slots of this rank

import pytest
import torch
from torch import Tensor

from models.puzzle_embedding import PuzzleEmbedding, ShardedPuzzleEmbedding
from tests.spawn import run_ranks
from utils.ranks.world import World

DIM = 3


def _values(num_rows: int) -> Tensor:
    return torch.arange(1.0, num_rows * DIM + 1).view(num_rows, DIM) / 7


def _table(num_rows: int = 5) -> PuzzleEmbedding:
    table = PuzzleEmbedding(num_rows, DIM)
    table.weight.copy_(_values(num_rows))
    return table


def _looked_up(values_KE: Tensor, ids: list[int]) -> list[list[float]]:
    return [[float(value) for value in values_KE[puzzle]] for puzzle in ids]


# ---- whole -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_table_returns_the_rows_of_the_ids_each_with_a_gradient_of_its_own(dtype: torch.dtype) -> None:
    """Two slots with the same puzzle also have separate gradients: the optimizer sums them."""
    table = _table()
    for ids in ([2, 2, 0], []):
        rows_BE = table.rows(torch.tensor(ids, dtype=dtype))
        assert rows_BE.shape == (len(ids), DIM) and rows_BE.is_leaf
        assert rows_BE.tolist() == _looked_up(_values(5), ids)
        (rows_BE * torch.tensor([[1.0], [10.0], [100.0]])[: len(ids)]).sum().backward()
        assert rows_BE.grad is not None
        assert rows_BE.grad.tolist() == [[1.0] * DIM, [10.0] * DIM, [100.0] * DIM][: len(ids)]
    assert table.weight.grad is None and not table.weight.requires_grad


@pytest.mark.parametrize(("trainable", "with_gradient"), [(True, True), (True, False), (False, True), (False, False)])
def test_rows_require_a_gradient_only_if_it_is_used(trainable: bool, with_gradient: bool) -> None:
    table = _table()
    table.trainable = trainable
    with torch.set_grad_enabled(with_gradient):
        assert table.rows(torch.tensor([1])).requires_grad == (trainable and with_gradient)


# ---- sharded -----------------------------------------------------------------------------------


def _looks_up(world: World, rows_of_ranks: list[int], num_ids_of_ranks: list[int]) -> None:
    num_rows, first = sum(rows_of_ranks), sum(rows_of_ranks[: world.rank])
    own_KE = _values(num_rows)[first : first + rows_of_ranks[world.rank]].clone()
    table = ShardedPuzzleEmbedding(_values(num_rows), own_KE, first, world)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        ids_B = torch.randint(num_rows, (num_ids_of_ranks[world.rank],), generator=generator, dtype=torch.int32)
        rows_BE = table.rows(ids_B)
        assert rows_BE.tolist() == _looked_up(_values(num_rows), ids_B.tolist())
        assert rows_BE.is_leaf and rows_BE.requires_grad
        # Without gradient, the number of ids may be 0 and may change between calls.
        with torch.no_grad():
            num_ids = 2 * world.rank
            more_B = torch.randint(num_rows, (num_ids,), generator=generator, dtype=torch.int32)
            rows_BE = table.rows(more_B)
            assert rows_BE.shape == (num_ids, DIM) and not rows_BE.requires_grad
            assert rows_BE.tolist() == _looked_up(_values(num_rows), more_B.tolist())
    rows_BE = table.rows(ids_B)
    (rows_BE * (world.rank + 1)).sum().backward()
    assert rows_BE.grad is not None and (rows_BE.grad == world.rank + 1).all(), "the gradient of another rank was added"
    table.trainable = False
    assert not table.rows(ids_B).requires_grad


@pytest.mark.parametrize(
    ("rows_of_ranks", "num_ids_of_ranks"),
    [([4], [3]), ([3, 2], [4, 4]), ([3, 3, 1], [2, 5, 1]), ([2, 0], [1, 3])],
    ids=["one rank", "uneven rows", "uneven rows and slots", "a rank without rows"],
)
def test_a_sharded_table_gives_each_rank_its_rows(rows_of_ranks: list[int], num_ids_of_ranks: list[int]) -> None:
    run_ranks(_looks_up, len(rows_of_ranks), rows_of_ranks, num_ids_of_ranks)
