"""A scaled loss for float16, whose smallest gradients would be 0 and whose largest infinite (arXiv 1710.03740)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from utils.dist.world import World, local_part

_START, _SMALLEST = 2.0**16, 1.0
_STEPS_TO_GROW = 2000


class LossScale:
    """A power of two that the loss is multiplied by and its gradients are divided by. It is halved when a gradient
    overflows, and that step is not taken; it is doubled after 2,000 steps in a row that were.

    torch.amp.GradScaler looks for overflows in the gradients of its own process. Ranks that hold shards or parts of a
    model find different ones there and would not agree on the step; nor does it know of updates that are no
    optimizer's, the puzzle table's and the average's.

    Deciding makes the host wait for the device in every step: with float16 only.
    """

    def __init__(self) -> None:
        self._scale = torch.tensor(_START, device="cpu")
        self._num_good_steps = torch.tensor(0, device="cpu")

    @property
    def factor(self) -> float:
        """What the loss is multiplied by before its backward pass."""
        return self._scale.item()

    @torch.no_grad()
    def unscale_(self, gradients: Iterable[Tensor]) -> None:
        """Divide, in place and once the sums over ranks are made; of a DTensor its local part."""
        parts = [local_part(gradient) for gradient in gradients]
        if parts:
            torch._foreach_mul_(parts, 1 / self._scale.item())

    def update(self, gradients: Iterable[Tensor], world: World) -> bool:
        """Whether the step is to be taken: no value on any rank overflowed. Adapts the scale to it. Every rank.

        At the smallest scale the answer is always yes: what isn't finite then is no doing of the scale but a fault, and
        the usual check for these shall find it.

        Args:
            gradients: what tells: the global norm, and gradients that it doesn't cover, such as the puzzle rows'.
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
        """The state, for a checkpoint to save or to overwrite in place: two numbers, the same on all ranks."""
        return {"scale": self._scale, "num_good_steps": self._num_good_steps}
