"""Check that replicas are equal: a flipped bit in one rank's memory would spoil a run silently."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from utils.ranks.world import World, is_dtensor, local_part

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def require_same_replicas(tensors: Mapping[str, Tensor], step: int, world: World, switched_off_by: str) -> None:
    """Raise RuntimeError, which names the ranks, where copies of a tensor differ. Every rank.

    The parts of a DTensor are compared one by one. `switched_off_by` is for the message.
    """
    if world.size == 1 or not tensors:
        return
    # Moved to one device, because offloaded weights lie on the host and all others on the device.
    parts = [local_part(tensor).contiguous() for tensor in tensors.values()]
    bits = [part.view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64).to(world.device) for part in parts]
    sums = torch.stack(bits).tolist()
    own = {(name, _part(tensor)): value for (name, tensor), value in zip(tensors.items(), sums, strict=True)}
    of_ranks = world.gather_objects(own)
    for key in sorted({key for of_rank in of_ranks for key in of_rank}):
        values = {rank: of_rank[key] for rank, of_rank in enumerate(of_ranks) if key in of_rank}
        (usual, count), *others = Counter(values.values()).most_common()
        if others:
            is_tie = count == others[0][1]  # then nobody knows which rank is wrong
            wrong = ", ".join(
                f"rank {rank} ({world.places[rank]})" for rank, value in values.items() if is_tie or value != usual
            )
            verb = "differ from one another" if is_tie else "differs from the others"
            raise RuntimeError(
                f"{wrong} {verb} in {key[0]} at step {step}; memory, a device or its driver is at fault; unlike "
                f"devices may also round differently ({switched_off_by})"
            )


def _part(tensor: Tensor) -> tuple[int, ...]:
    """Return the part of a DTensor that this rank holds: its place on each axis that splits it."""
    if not is_dtensor(tensor):
        return ()
    here = tensor.device_mesh.get_coordinate()
    assert here is not None
    return tuple(at for at, placement in zip(here, tensor.placements, strict=True) if not placement.is_replicate())
