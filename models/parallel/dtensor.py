"""Tensors of which each rank holds a part: how to cut them, and how to put them together."""
# R = rows of a weight, C = columns of a weight

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.base import RecursiveModel
from models.parallel.layout import Layout
from utils.dist.world import World, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# How many projections a matrix has stacked in its rows, by the end of its name.
_STACKED = {"qkv_proj.weight": 3, "gate_up_proj.weight": 2}


def transposed_rows(weight_RC: Tensor, outer: int, inner: int) -> Tensor:
    """Return rows that are (outer, inner, rest) as (inner, outer, rest).

    A second call with the two numbers exchanged is the inverse.
    """
    return weight_RC.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def own_part(whole: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Tensor:
    """Return this rank's part of a whole tensor, as a view.

    Inner axes of the mesh cut first. Where two axes cut the same dimension, that dimension was
    split before it was sharded.
    """
    for axis in reversed(range(mesh.ndim)):
        if not placements[axis].is_replicate():
            dim, num_parts, n = placements[axis].dim, mesh.size(axis), mesh.get_local_rank(axis)
            size = -(-whole.shape[dim] // num_parts)
            first = min(n * size, whole.shape[dim])
            whole = whole.narrow(dim, first, min(size, whole.shape[dim] - first))
    return whole


class DTensorLayout(Layout):
    """A model some of whose tensors may be DTensors, of which each rank holds a part.

    The DTensors may lie on any mesh. Plain tensors beside them are equal on all ranks.
    """

    def __init__(
        self, model: RecursiveModel, world: World, *, num_microbatches: int, lockstep: bool, tensor_degree: int = 1
    ) -> None:
        """As in the base class.

        Args:
            tensor_degree: how many ranks split attention heads and MLPs.
        """
        super().__init__(model, world, num_microbatches=num_microbatches)
        self.lockstep = lockstep
        self._tensor_degree = tensor_degree

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

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        weights = {}
        for name, tensor in self.model.state_dict().items():
            if name == "puzzle_embedding.weight" and is_dtensor(tensor):
                parts = self._world.gather_to_main(tensor.to_local().cpu())  # no device has room for all of its rows
                whole = torch.cat(parts) if parts is not None else tensor
            else:
                whole = self._whole(name, tensor)
            if self._world.is_main:
                weights[name] = whole.cpu() if is_dtensor(tensor) else whole
        return weights

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return all of a tensor, as one process would have it. Every rank."""
        if not is_dtensor(tensor):
            return tensor
        from torch.distributed.tensor import Replicate

        sharded: DTensor = tensor.to(self._world.device)  # type: ignore[assignment]  # offloaded shards can't travel
        # Axis by axis: what was split before it was sharded is put together in the opposite order.
        whole = sharded.redistribute(placements=(Replicate(), *sharded.placements[1:])).full_tensor()
        if (num_stacked := self._num_stacked(name)) is not None:
            whole = transposed_rows(whole, self._tensor_degree, num_stacked)
        return whole

    def _num_stacked(self, name: str) -> int | None:
        """Return how many projections are stacked in a matrix whose rows are in another order here.

        Returns None for a tensor whose rows are in the order of the model as it is written.
        """
        if self._tensor_degree == 1:
            return None
        return next((number for end, number in _STACKED.items() if name.endswith(end)), None)

    @torch.no_grad()
    def to_portable(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self._num_stacked(name) is None else self._whole(name, tensor)

    @torch.no_grad()
    def from_portable(self, name: str, portable: Tensor, live: Tensor) -> None:
        if is_dtensor(live) and not is_dtensor(portable):
            if (num_stacked := self._num_stacked(name)) is not None:
                portable = transposed_rows(portable, num_stacked, self._tensor_degree)
            portable, live = own_part(portable, live.device_mesh, live.placements), live.to_local()
        live.copy_(portable)
