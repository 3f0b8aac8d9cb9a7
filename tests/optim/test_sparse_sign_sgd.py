"""The sparse update does not depend on how the batch is split over ranks (CPU, gloo)."""

# P = rows of the table, E = embedding size, B = global batch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optim.sparse_sign_sgd import sparse_sign_sgd_
from tests.spawn import run_ranks
from tests.utils.ranks.helpers import dist_config
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

LR, WEIGHT_DECAY = 0.5, 0.25
NUM_ROWS, DIM, BATCH = 20, 3, 16


def _problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a table, and the row and the gradient of each slot.

    Slots name only rows 0 to 9 of 20. The gradients are integers, so that every order of summation
    is exact.
    """
    generator = torch.Generator().manual_seed(0)
    table_PE = torch.randn(NUM_ROWS, DIM, generator=generator)
    ids_B = torch.randint(NUM_ROWS // 2, (BATCH,), generator=generator, dtype=torch.int32)
    grad_BE = torch.randint(-2, 3, (BATCH, DIM), generator=generator).float()
    grad_BE[ids_B == ids_B[0]] = 0.0  # which decays nevertheless
    return table_PE, ids_B, grad_BE


def _reference(table_PE: torch.Tensor, ids_B: torch.Tensor, grad_BE: torch.Tensor) -> torch.Tensor:
    for row in sorted(set(ids_B.tolist())):
        grad_E = grad_BE[ids_B == row].sum(0)
        table_PE[row] = table_PE[row] * (1 - LR * WEIGHT_DECAY) - LR * grad_E.sign()
    return table_PE


def _check_uneven_shares(world: World) -> None:
    """Slots name only the first half of the rows, so that some shards get no update."""
    if world.size > 1:
        weights = [3.0, 1.0, 2.0, 2.0][: world.size]
        world = connect_devices(world, "cpu", dist_config(timeout_s=60.0, rank_weights=weights))
    _, ids_B, grad_BE = _problem()
    mine = world.slice_of(BATCH)
    for num_rows in (NUM_ROWS, 11, 2):  # 4 ranks share 20 rows evenly and 11 unevenly; with 2 rows some ranks have none
        table_PE = _problem()[0][:num_rows].contiguous()
        ids_of_B = ids_B % num_rows
        expected_PE = _reference(table_PE.clone(), ids_of_B, grad_BE)
        sharded_PE = distribute_tensor(table_PE.clone(), init_device_mesh("cpu", (world.size,)), [Shard(0)])
        for each_PE in (table_PE, sharded_PE):
            sparse_sign_sgd_(
                each_PE,
                ids_of_B[mine],
                grad_BE[mine],
                lr=LR,
                weight_decay=WEIGHT_DECAY,
                world=world,
                num_slots=BATCH,
            )
            whole_PE = each_PE.full_tensor() if isinstance(each_PE, DTensor) else each_PE
            torch.testing.assert_close(whole_PE, expected_PE, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_update_does_not_depend_on_how_slots_and_rows_lie_over_ranks(world_size: int) -> None:
    run_ranks(_check_uneven_shares, world_size)


def _is_finite(world: World, bad_rank: int) -> tuple[bool, bool]:
    def update(grad_BE: torch.Tensor) -> bool:
        table_PE, ids_B = torch.zeros(3, 2), torch.tensor([0, world.rank])
        return bool(sparse_sign_sgd_(table_PE, ids_B, grad_BE, lr=LR, weight_decay=WEIGHT_DECAY, world=world))

    good_BE = torch.ones(2, 2)
    return update(good_BE), update(torch.full((2, 2), float("inf")) if world.rank == bad_rank else good_BE)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_every_rank_learns_that_a_gradient_is_not_finite(bad_rank: int) -> None:
    assert run_ranks(_is_finite, 2, bad_rank) == [(True, False), (True, False)]
