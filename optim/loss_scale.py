"""Scale the loss so that float16 can hold its gradients (arXiv 1710.03740)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from utils.ranks.world import World, local_part

_START, _SMALLEST = 2.0**16, 1.0
_STEPS_TO_GROW = 2000


class LossScale:
    """A power of two that multiplies the loss and divides its gradients.

    When a gradient overflows, the scale is halved and the step is skipped. After 2,000 steps in a
    row without an overflow, the scale is doubled. Ranks with different shards must agree whether to
    skip a step, the puzzle table and the average, which torch.amp.GradScaler can't do.
    """

    def __init__(self) -> None:
        self._scale = torch.tensor(_START, device="cpu")
        self._num_good_steps = torch.tensor(0, device="cpu")

    @property
    def factor(self) -> float:
        return self._scale.item()

    @torch.no_grad()
    def unscale_(self, gradients: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale in place, after they were summed over the ranks."""
        parts = [local_part(gradient) for gradient in gradients]
        if parts:
            torch._foreach_mul_(parts, 1 / self._scale.item())

    def update(self, gradients: Iterable[Tensor], world: World) -> bool:
        """Adapt the scale, and return whether the step may be taken. Every rank.

        At the smallest scale the answer is always yes. Values that are not finite then have another
        cause, and the usual check for such faults must see them.

        Args:
            gradients: the global norm, and gradients that it doesn't cover, such as puzzle rows.
        """
        world.await_peers()
        finite = all([bool(gradient.isfinite().all()) for gradient in gradients])
        if world.any(not finite):
            was_smallest = self._scale.item() <= _SMALLEST
            self._scale.div_(2).clamp_(min=_SMALLEST)
            self._num_good_steps.zero_()
            return was_smallest
        self._num_good_steps += 1
        if self._num_good_steps.item() == _STEPS_TO_GROW:
            self._scale *= 2
            self._num_good_steps.zero_()
        return True

    def tensors(self) -> dict[str, Tensor]:
        """Return the state, the same on all ranks, to be saved or overwritten in place."""
        return {"scale": self._scale, "num_good_steps": self._num_good_steps}
