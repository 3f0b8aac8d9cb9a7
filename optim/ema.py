"""A running average of the weights, which is what TRM evaluates (arXiv 2510.04871, section 4.7)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class EMA:
    """shadow = rate * shadow + (1 - rate) * live, in float32, once for every update of the live tensors.

    It holds references to the live tensors, and its shadow's values change places with theirs, in place: a copy of the
    model to evaluate, as published, would need its memory twice, and another set of pointers leaves sharded parameters
    (FSDP2), the optimizer's state and compiled graphs with the old ones. A root that FSDP2 shards must be told
    `reshard_after_forward=True`: by default it keeps what it gathered for a forward until the next backward, so that
    the first step after an evaluation would compute with the average.
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
        shadows = list(self._shadow.values())
        # Of what doesn't change (frozen weights, rows that no batch names) the average is the value, to the last bit.
        torch._foreach_lerp_(shadows, list(self._live.values()), 1 - rate)

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
            aside = live.clone()
            live.copy_(self._shadow[name])
            self._shadow[name].copy_(aside)

    def tensors(self) -> dict[str, Tensor]:
        """The average by name, for a checkpoint; not a copy."""
        assert not self._is_swapped, "the shadow holds the live values"
        return dict(self._shadow)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up a checkpoint's average. Raises ValueError, with nothing changed, where it is of another model."""
        assert not self._is_swapped, "the shadow holds the live values"
        for name in sorted({*tensors, *self._shadow}):
            there, here = (tuple(side[name].shape) if name in side else "absent" for side in (tensors, self._shadow))
            if there != here:
                raise ValueError(
                    f"the checkpoint's average of {name} is {there}, here it is {here}; resume with the model and the "
                    "ema setting that it was saved with"
                )
        for name, tensor in tensors.items():
            self._shadow[name].copy_(tensor)
