"""A puzzle table that is sharded: ranks with slots of their own hold some rows each."""
# K = rows of the puzzle table, E = their size

import torch
from torch.distributed.device_mesh import DeviceMesh

from models.model import Model
from models.parallel.dtensor import own_part
from models.puzzle_embedding import ShardedPuzzleEmbedding
from utils.ranks.world import World


def shard_table(model: Model, world: World) -> None:
    """Leave this rank its rows of the puzzle table, on its device."""
    table = model.puzzle_embedding
    if table is None:
        return
    from torch.distributed.tensor import DTensor, Shard

    assert world.data_group is not None
    mesh = DeviceMesh.from_group(world.data_group, world.device.type)
    num_rows = len(table.weight)
    first_row = min(num_rows, world.data_rank * -(-num_rows // world.data_size))
    part_KE = own_part(table.weight, mesh, (Shard(0),))
    own_KE = torch.zeros_like(part_KE, device=world.device)  # as `Model.fill_constants` leaves a whole table
    if not part_KE.is_meta:
        own_KE.copy_(part_KE)
    weight_KE = DTensor.from_local(
        own_KE, mesh, [Shard(0)], run_check=False, shape=table.weight.shape, stride=table.weight.stride()
    )
    model.puzzle_embedding = ShardedPuzzleEmbedding(weight_KE, weight_KE.to_local(), first_row, world)
    model.puzzle_embedding.trainable = table.trainable
