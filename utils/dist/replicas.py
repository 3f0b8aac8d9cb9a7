"""Whether ranks that are to hold the same still do: a bit that flips in one rank's memory spoils a run in silence."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from utils.dist.world import World, local_part

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def require_same_replicas(tensors: Mapping[str, Tensor], step: int, world: World) -> None:
    """Compare a checksum of each tensor, of a DTensor of each part, among the ranks that hold it; the device is waited
    for once. Every rank.

    Raises RuntimeError, on every rank, that names the ranks which differ from the others.
    """
    if world.size == 1 or not tensors:
        return
    # Offloaded weights lie on the host, what isn't sharded on the device.
    sums = torch.stack([_checksum(local_part(tensor)).to(world.device) for tensor in tensors.values()]).tolist()
    own = {(name, _part(tensor)): value for (name, tensor), value in zip(tensors.items(), sums, strict=True)}
    of_ranks = world.gather_objects(own)
    for key in sorted({key for of_rank in of_ranks for key in of_rank}):
        values = {rank: of_rank[key] for rank, of_rank in enumerate(of_ranks) if key in of_rank}
        (usual, count), *others = Counter(values.values()).most_common()
        if others:
            is_tie = count == others[0][1]
            wrong = [rank for rank, value in values.items() if is_tie or value != usual]
            named = ", ".join(f"{rank} ({world.places[rank]})" for rank in wrong)
            said = f"ranks {named} differ from one another" if is_tie else f"rank {named} differs from the others"
            raise RuntimeError(
                f"{said} in {key[0]} at step {step}, though they are to hold the same: memory, a device or its driver "
                "is at fault; unlike devices may also round differently (check_replicas_every_n_steps=null)"
            )


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the bits as integers, which wraps around; int64 ()."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def _part(tensor: Tensor) -> tuple[int, ...]:
    """Which part of a DTensor lies here: the place on each axis of the mesh that it is split over."""
    if not isinstance(tensor, DTensor):
        return ()
    here = tensor.device_mesh.get_coordinate()
    assert here is not None
    return tuple(at for at, placement in zip(here, tensor.placements, strict=True) if not placement.is_replicate())
