"""AdamATan2: Adam with an arctangent in place of the division (arXiv 2407.05872)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from utils.ranks.world import local_part


class AdamATan2(torch.optim.Optimizer):
    """p *= 1 - lr wd; m, v as in Adam; p -= lr / (1 - b1^t) * atan2(m, sqrt(v / (1 - b2^t)))

    t counts the steps from 1. The state of a parameter is that of torch's Adam: `step` (t),
    `exp_avg` (m) and `exp_avg_sq` (v). `step` is on the host, so that nothing waits for the device.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient. The host does not wait for the device."""
        assert closure is None, "the loss is computed once, outside"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
        times = [self.state[parameter]["step"].item() for parameter in parameters]
        # Each number is updated alone, so a rank can update its parts. An operator on a DTensor
        # would take the host ten times as long.
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        means = [local_part(self.state[parameter]["exp_avg"]) for parameter in parameters]
        squares = [local_part(self.state[parameter]["exp_avg_sq"]) for parameter in parameters]
        parameters = [local_part(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]

        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        updates = torch._foreach_div(squares, [1 - beta2**t for t in times])
        torch._foreach_sqrt_(updates)
        for parameter, mean, update, t in zip(parameters, means, updates, times, strict=True):
            torch.atan2(mean, update, out=update)  # there is no _foreach_atan2
            parameter.add_(update, alpha=-group["lr"] / (1 - beta1**t))
