"""Tensors of which each rank holds a part: how to cut them, and how to put them together."""
# R = rows of a weight, C = columns of a weight, K = rows of the puzzle table, E = their size

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.model import Model
from models.objective import BatchT, CarryT, SettingsT
from models.parallel.layout import Layout
from models.puzzle_embedding import ShardedPuzzleEmbedding
from utils.ranks.world import World, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def rows_by_rank(weight_RC: Tensor, sizes: Sequence[int], degree: int) -> Tensor:
    """Return stacked rows (q, k and v of these sizes) so that equal parts have a part of each."""
    stacked = [part_RC.chunk(degree) for part_RC in weight_RC.split(list(sizes))]
    return torch.cat([part_RC for of_rank in zip(*stacked, strict=True) for part_RC in of_rank])


def rows_by_stack(weight_RC: Tensor, sizes: Sequence[int], degree: int) -> Tensor:
    """Return the rows in the order of the model as it is written: the inverse of `rows_by_rank`."""
    by_rank = [rank_RC.split([size // degree for size in sizes]) for rank_RC in weight_RC.chunk(degree)]
    return torch.cat([part_RC for of_stack in zip(*by_rank, strict=True) for part_RC in of_stack])


def own_part(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any], *, outer_first: bool = False) -> Tensor:
    """Return this rank's part of a whole tensor, as a view. The inner axis cuts first.

    Args:
        outer_first: the outer axis cuts first, as DTensor has it without FSDP.
    """
    axes = range(mesh.ndim)
    for axis in axes if outer_first else reversed(axes):
        if not placements[axis].is_replicate():
            dim, num_parts, n = placements[axis].dim, mesh.size(axis), mesh.get_local_rank(axis)
            size = -(-whole.shape[dim] // num_parts)
            first = min(n * size, whole.shape[dim])
            whole = whole.narrow(dim, first, min(size, whole.shape[dim] - first))
    return whole


def shard_table(model: Model, world: World) -> None:
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


class DTensorLayout(Layout[CarryT, BatchT, SettingsT]):
    """A model some of whose tensors may be DTensors, on any mesh. Others are equal on all ranks."""

    lockstep = True

    def __init__(self, model: Model, world: World, stacked: Mapping[str, Sequence[int]] | None = None) -> None:
        """As in the base class. `stacked` is what `split_tensors` returned."""
        super().__init__(model, world)
        self._stacked, self._tensor_degree = stacked or {}, world.ranks_per_share

    def grad_norm(self) -> Tensor:
        by_place: dict[Any, list[Tensor]] = {}
        for parameter in self._trained:
            if (grad := parameter.grad) is not None:
                place = (grad.device_mesh, grad.placements) if is_dtensor(grad) else None
                by_place.setdefault(place, []).append(local_part(grad))
        total = torch.zeros((), device=self._world.device)
        for place, grads in by_place.items():  # in the order of parameters, the same on all ranks
            square = torch.nn.utils.get_total_norm(grads).to(self._world.device).square()
            if place is not None:
                mesh, placements = place
                for axis, placement in enumerate(placements):
                    if not placement.is_replicate():
                        dist.all_reduce(square, group=mesh.get_group(axis))
            total = total + square
        return total.sqrt()

    @torch.no_grad()
    def clip_(self, largest: float, norm: Tensor) -> None:
        grads = [local_part(parameter.grad) for parameter in self._trained if parameter.grad is not None]
        if grads:
            factor = (largest / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grads_with_norm_ computes it
            torch._foreach_mul_(grads, factor.to(grads[0].device))

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return tensor
        from torch.distributed.tensor import Replicate

        sharded: DTensor = tensor.to(self._world.device)  # type: ignore[assignment]  # offloaded shards can't travel
        # Axis by axis: what was split before it was sharded is put together in the opposite order.
        whole = sharded.redistribute(placements=(Replicate(), *sharded.placements[1:])).full_tensor()
        if (sizes := self._stacked.get(name)) is not None:
            whole = rows_by_stack(whole, sizes, self._tensor_degree)
        return whole

    @torch.no_grad()
    def to_portable(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._stacked or not is_dtensor(tensor):
            return tensor
        from torch.distributed.tensor import DTensor, Shard

        # This rank keeps only a part of the whole, but another one: the rows have another order.
        whole, mesh = self._whole(name, tensor), tensor.device_mesh
        placements = [placement if placement.is_replicate() else Shard(0) for placement in tensor.placements]
        own = own_part(whole, mesh, placements, outer_first=True).to(local_part(tensor).device, copy=True)
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    @torch.no_grad()
    def from_portable(self, name: str, portable: Tensor, live: Tensor) -> None:
        if (sizes := self._stacked.get(name)) is not None and is_dtensor(live):
            if is_dtensor(portable):
                on_device: DTensor = portable.to(self._world.device)  # type: ignore[assignment]
                portable = on_device.full_tensor()
            portable = rows_by_rank(portable, sizes, self._tensor_degree)
        if is_dtensor(live) and not is_dtensor(portable):
            portable, live = own_part(portable, live.device_mesh, live.placements), live.to_local()
        live.copy_(portable)
