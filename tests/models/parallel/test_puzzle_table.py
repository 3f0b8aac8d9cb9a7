"""A sharded puzzle table gives the same rows and the same updates as a whole table."""

# B = slots, K = rows of the puzzle table, E = size of a row

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from models.parallel.puzzle_table import shard_table
from optim.sparse_sign_sgd import sparse_sign_sgd_
from tests.models.parallel.helpers import BATCH, DIST, model_of
from tests.spawn import run_ranks
from utils.ranks.config import DistConfig
from utils.ranks.setup import connect_devices
from utils.ranks.world import World


def _check_table(world: World) -> None:
    world = connect_devices(
        world, "cpu", DistConfig.model_validate({**DIST.model_dump(), "rank_weights": [3.0, 1.0, 2.0, 2.0]})
    )
    for num_rows in (2, 5, 8):  # with 2 rows there are more ranks than rows
        generator = torch.Generator().manual_seed(num_rows)
        model = model_of("trm")
        assert model.puzzle_embedding is not None
        model.puzzle_embedding.weight = torch.randn(num_rows, 3, generator=generator)
        whole_KE = model.puzzle_embedding.weight.clone()
        shard_table(model, world)
        table = model.puzzle_embedding
        assert isinstance(table.weight, DTensor) and len(table.weight.to_local()) <= -(-num_rows // world.size)
        mine = world.slice_of(BATCH)
        for _ in range(4):
            ids_B = torch.randint(num_rows, (BATCH,), generator=generator, dtype=torch.int32)
            grad_BE = torch.randint(-2, 3, (BATCH, 3), generator=generator).float()
            rows_BE = table.rows(ids_B[mine])
            assert rows_BE.requires_grad and rows_BE.is_leaf
            assert torch.equal(rows_BE.detach(), whole_KE[ids_B[mine]])
            with torch.no_grad():
                number = 3 * world.rank  # rank 0 asks for no rows
                assert torch.equal(table.rows(ids_B[:number]), whole_KE[ids_B[:number]])
            options: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.25, "num_slots": BATCH}
            sparse_sign_sgd_(table.weight, ids_B[mine], grad_BE[mine], world=world, **options)
            sparse_sign_sgd_(whole_KE, ids_B, grad_BE, world=World.single(), **options)
            assert torch.equal(table.weight.full_tensor(), whole_KE)


def test_a_sharded_table_equals_the_whole_table() -> None:
    run_ranks(_check_table, 4)
