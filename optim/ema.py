"""A running average of the weights. TRM evaluates this average (arXiv 2510.04871, section 4.7)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from utils.errors import UserError
from utils.ranks.world import local_part
from utils.shapes import Shapes, compare_shapes


class EMA:
    """shadow = rate * shadow + (1 - rate) * live, after each update, in float32.

    For evaluation, the values of the shadow and of the live tensors are exchanged in place, which
    needs no second model, and keeps sharded parameters (FSDP2), the optimizer's state and compiled
    graphs. A caller that keeps anything computed from the live values, such as gathered weights,
    must compute it anew after each exchange.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
        self._live = dict(tensors)
        self._shadow = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._is_swapped = False

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Update the average after a training step that was not skipped.

        Call this while the gradients are there: the average of a parameter without a gradient stays
        as it is (HRM-Text, arXiv 2605.20613).
        """
        assert not self._is_swapped, "the live tensors hold the average"
        updated = [name for name, live in self._live.items() if live.grad is not None or not live.requires_grad]
        if not updated:
            return
        shadows, lives = ([local_part(of[name]) for name in updated] for of in (self._shadow, self._live))
        # lerp keeps values that never change, such as frozen weights, exact to the last bit.
        torch._foreach_lerp_(shadows, lives, 1 - rate)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the live tensors hold the average inside the context."""
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
        for name, live in self._live.items():  # one by one, which needs extra memory for only one tensor
            own, shadow = local_part(live), local_part(self._shadow[name])
            aside = own.clone()
            own.copy_(shadow)
            shadow.copy_(aside)

    def tensors(self) -> dict[str, Tensor]:
        """Return the average by name, to be saved or overwritten in place. No tensor is a copy."""
        assert not self._is_swapped, "the shadow holds the live values"
        return dict(self._shadow)


def require_same_average(saved: Shapes, own: Shapes) -> None:
    """Raise UserError if the whole shapes of a checkpoint's average differ from this run's."""
    if (name := compare_shapes(saved, own).first) is not None:
        there, here = saved.get(name, "absent"), own.get(name, "absent")
        raise UserError(
            f"the checkpoint's average of {name} is {there}, here it is {here}; resume with the model and the "
            "ema setting that it was saved with"
        )
