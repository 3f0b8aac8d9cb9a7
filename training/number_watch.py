"""Watch the numbers of a run: find the first step whose gradients or loss went wrong."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

from models.objective import SumsSpec
from utils.errors import UserError
from utils.ranks.world import World

# A loss is compared with the median of at most so many steps before it, and of at least so many.
_SPIKE_WINDOW, _SPIKE_LEAST = 100, 10


class BadStep(UserError):
    """A step that went wrong: its gradients are NaN or infinite, or its loss is a spike."""

    def __init__(self, step: int, what: str, last_good: str) -> None:
        super().__init__(
            f"{what}; {last_good}; go on with a lower lr or more lr_warmup_steps, or with on_nonfinite=rewind"
        )
        self.step, self.what, self.last_good = step, what, last_good

    def __reduce__(self) -> tuple[type["BadStep"], tuple[int, str, str]]:
        """Let the error reach another process, such as a program of Ray that drives a training."""
        return BadStep, (self.step, self.what, self.last_good)


class NumberWatch:
    """Watches gradients and losses without waiting for the device, until somebody asks.

    Args:
        loss_spike: how many times the median of the steps before it the loss of a step may be.
    """

    def __init__(self, spec: SumsSpec, world: World, loss_spike: float | None = None) -> None:
        self._world, self._loss_spike = world, loss_spike
        self._loss, self._loss_index = spec.losses[0], spec.names.index(spec.losses[0])
        # Steps whose loss nobody has looked at yet: this rank's share of the mean.
        self._unread: list[tuple[int, Tensor]] = []
        self._losses: deque[float] = deque(maxlen=_SPIKE_WINDOW)  # of the steps before those, over all ranks
        self._first_bad_step = torch.zeros((), dtype=torch.int32, device=world.device)

    def add(self, step: int, divisor: int, metric_sums: Tensor, grad_norm: Tensor) -> None:
        """Note a step, whose losses are divided by `divisor` over all ranks."""
        bad = (self._first_bad_step == 0) & ~grad_norm.isfinite()
        self._first_bad_step = torch.where(bad, step, self._first_bad_step)
        if self._loss_spike is not None:
            self._unread.append((step, metric_sums[self._loss_index] / divisor))

    def require_no_bad_step(self, last_good: Callable[[], str]) -> None:
        """Wait for the device, and raise BadStep on every rank if a step went wrong. Every rank."""
        self._world.await_peers()
        found = self._first_spike()
        if step := int(self._first_bad_step):
            found.append((step, f"the gradients are not finite (NaN or infinite) since step {step}"))
        if self._world.any(bool(found)):
            # The ranks agree on a step, also if the memory of one of them fails.
            step, what = min(bad for of_rank in self._world.gather_objects(found) for bad in of_rank)
            raise BadStep(step, what, last_good())

    def _first_spike(self) -> list[tuple[int, str]]:
        """Look at the steps since the last look, up to a spike of the loss. Every rank."""
        if not self._unread or self._loss_spike is None:
            return []
        steps, shares = zip(*self._unread, strict=True)
        self._unread = []
        for step, loss in zip(steps, self._world.sum_(torch.stack(shares)).tolist(), strict=True):
            if not math.isfinite(loss):  # of a float16 step that was not taken; elsewhere the gradients tell
                continue
            if len(self._losses) >= _SPIKE_LEAST and loss > self._loss_spike * (usual := median(self._losses)):
                times = f"{loss / usual:.3g} times the {usual:.4g} of the steps before it"
                return [(step, f"{self._loss} is {loss:.4g} at step {step}, {times} (loss_spike={self._loss_spike:g})")]
            self._losses.append(loss)
        return []

    def tensors(self) -> dict[str, Tensor]:
        """Return the losses that later ones are compared with, after `require_no_bad_step`."""
        return {"losses": torch.tensor(self._losses, dtype=torch.float64)} if self._losses else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if "losses" in tensors:
            self._losses.extend(tensors["losses"].tolist())
