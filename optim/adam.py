"""AdamW, and AdamATan2: Adam with an arctangent in place of the division (arXiv 2407.05872)."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from optim.replayable import Number, Replayable
from utils.ranks.world import local_part


class Adam(Replayable):
    """p *= 1 - lr wd; m, v as in Adam; then the step of a subclass.

    t counts the steps of a parameter from 1. The state of a parameter is that of torch's Adam:
    `step` (t), `exp_avg` (m) and `exp_avg_sq` (v). `step` is on the host, so that nothing waits for
    the device.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def numbers(self) -> list[float]:
        found = []
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            found.append(1 - group["lr"] * group["weight_decay"])
            for t in self._by_time(group):
                found += [1 - beta2**t, -group["lr"] / (1 - beta1**t)]
        return found

    @torch.no_grad()
    def update(self, numbers: Iterator[Number]) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            decay = next(numbers)
            for parameters in self._by_time(group).values():
                correction, rate = next(numbers), next(numbers)
                given = [parameter for parameter in parameters if parameter.grad is not None]
                if not given:
                    continue
                self._count(given)
                # Each number is updated alone, so a rank can update its parts. An operator on a
                # DTensor would take the host ten times as long.
                gradients = [local_part(parameter.grad) for parameter in given if parameter.grad is not None]
                means = [local_part(self.state[parameter]["exp_avg"]) for parameter in given]
                squares = [local_part(self.state[parameter]["exp_avg_sq"]) for parameter in given]
                own = [local_part(parameter) for parameter in given]
                torch._foreach_mul_(own, decay)
                torch._foreach_lerp_(means, gradients, 1 - beta1)
                torch._foreach_mul_(squares, beta2)
                torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
                self._step_(own, means, squares, correction, rate)

    @abstractmethod
    def _step_(
        self, parameters: list[Tensor], means: list[Tensor], squares: list[Tensor], correction: Number, rate: Number
    ) -> None:
        """Add the step, for a correction of 1 - b2^t and a rate of -lr / (1 - b1^t)."""

    def count(self) -> None:
        self._count([parameter for group in self.param_groups for parameter in group["params"]])

    def _count(self, parameters: list[Tensor]) -> None:
        torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)

    def _by_time(self, group: dict[str, Any]) -> dict[float, list[Tensor]]:
        """Return the parameters by the t of their next step, and make the state of new ones."""
        found = defaultdict[float, list[Tensor]](list)
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            found[state["step"].item() + 1].append(parameter)
        return found


class AdamW(Adam):
    """p -= lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps) (arXiv 1711.05101)."""

    def __init__(
        self, params: ParamsT, lr: float, betas: tuple[float, float], weight_decay: float, *, eps: float
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
        self._eps = eps

    def _step_(
        self, parameters: list[Tensor], means: list[Tensor], squares: list[Tensor], correction: Number, rate: Number
    ) -> None:
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_div_(divisors, correction**0.5)
        torch._foreach_add_(divisors, self._eps)
        if isinstance(rate, Tensor):
            _add_scaled_(parameters, torch._foreach_div(means, divisors), rate)
        else:
            torch._foreach_addcdiv_(parameters, means, divisors, rate)


class AdamATan2(Adam):
    """p -= lr / (1 - b1^t) * atan2(m, sqrt(v / (1 - b2^t)))."""

    def _step_(
        self, parameters: list[Tensor], means: list[Tensor], squares: list[Tensor], correction: Number, rate: Number
    ) -> None:
        updates = torch._foreach_div(squares, correction)
        torch._foreach_sqrt_(updates)
        for mean, update in zip(means, updates, strict=True):
            torch.atan2(mean, update, out=update)  # there is no _foreach_atan2
        _add_scaled_(parameters, updates, rate)


def _add_scaled_(parameters: list[Tensor], updates: tuple[Tensor, ...] | list[Tensor], rate: Number) -> None:
    """Add rate * updates to the parameters. The updates may be overwritten."""
    if isinstance(rate, Tensor):
        torch._foreach_mul_(updates, rate)
        torch._foreach_add_(parameters, updates)
    else:
        torch._foreach_add_(parameters, updates, alpha=rate)
