"""A running average of the weights, which is what TRM evaluates (arXiv 2510.04871, section 4.7)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from utils.dist.world import local_part
from utils.errors import UserError
from utils.shapes import Shapes, compare_shapes


class EMA:
    """shadow = rate * shadow + (1 - rate) * live, in float32, once for every update of the live tensors.

    It holds references to the live tensors, and its shadow's values change places with theirs, in place: a copy of the
    model to evaluate, as published, would need its memory twice, and another set of pointers leaves sharded parameters
    (FSDP2), the optimizer's state and compiled graphs with the old ones. Whoever holds something made of the live
    values, as FSDP2 may hold what it gathered for a forward, has to make it anew after either swap.

    Of DTensors each rank averages its own shard, whatever the meshes.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """The average starts at the live tensors.

        Args:
            tensors: the live ones by name, float32: the parameters and the puzzle table.
        """
        assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
        self._live = dict(tensors)
        self._shadow = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._is_swapped = False

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """To be called once after each step that was taken, and never for one that wasn't: the average would drift to
        the last weights. The host doesn't wait for the device.
        """
        assert not self._is_swapped, "the live tensors hold the average"
        shadows, lives = ([local_part(tensor) for tensor in side.values()] for side in (self._shadow, self._live))
        # Of what doesn't change (frozen weights, rows that no batch names) the average is the value, to the last bit.
        torch._foreach_lerp_(shadows, lives, 1 - rate)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the live tensors hold the average; afterwards, also after an exception, their own values again, bit
        by bit.
        """
        assert not self._is_swapped, "the average is swapped in already"
        self._is_swapped = True
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            self._is_swapped = False

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, live in self._live.items():  # one by one, so that memory for one tensor is enough
            own, shadow = local_part(live), local_part(self._shadow[name])
            aside = own.clone()
            own.copy_(shadow)
            shadow.copy_(aside)

    def tensors(self) -> dict[str, Tensor]:
        """The average by name, for a checkpoint to save or to overwrite in place; not a copy."""
        assert not self._is_swapped, "the shadow holds the live values"
        return dict(self._shadow)


def require_same_average(saved: Shapes, own: Shapes) -> None:
    """Raises UserError where a checkpoint's average is of another model than this run's.

    Args:
        saved, own: whole shapes of what `EMA.tensors` gives; of all ranks together, where each holds some of them.
    """
    if (name := compare_shapes(saved, own).first) is not None:
        there, here = saved.get(name, "absent"), own.get(name, "absent")
        raise UserError(
            f"the checkpoint's average of {name} is {there}, here it is {here}; resume with the model and the "
            "ema setting that it was saved with"
        )
