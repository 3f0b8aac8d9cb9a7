"""What a training step takes and returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from models.act import ActSettings
from models.carry import Outputs
from models.text.config import CallCounts
from models.text.objective import TextBatch
from optim.replayable import Number
from training.plan import Plan
from utils.batch import Batch
from utils.ranks.world import World


@dataclass(frozen=True)
class StepSettings:
    """What the config and the number of a step decide about it."""

    objective: ActSettings | CallCounts  # what the objective of the model needs
    lr_factor: float  # factor of every optimizer's own rate: the schedule times lr_scaling
    puzzle_emb_lr: Number  # the rate itself, times the schedule
    puzzle_emb_weight_decay: float
    grad_clip: float | None
    ema_rate: float

    @staticmethod
    def at(step: int, plan: Plan, world: World) -> "StepSettings":
        config, multiplier = plan.config, plan.lr_multiplier(step)
        return StepSettings(
            objective=plan.kind.settings(config, step, plan.last_step, world),
            lr_factor=multiplier * plan.lr_scale,
            puzzle_emb_lr=config.puzzle_emb_lr * multiplier,
            puzzle_emb_weight_decay=config.puzzle_emb_weight_decay,
            grad_clip=config.grad_clip,
            ema_rate=plan.ema_rate(step),
        )

    def varying(self, device: torch.device) -> dict[str, Tensor]:
        """Return as tensors what may differ from step to step, except the optimizers' numbers."""
        of_objective = {field.name: getattr(self.objective, field.name) for field in fields(self.objective)}
        drawn = {name: value for name, value in of_objective.items() if isinstance(value, Tensor)}
        return {"puzzle_emb_lr": torch.full((), float(self.puzzle_emb_lr), device=device), **drawn}

    def with_varying(self, fixed: Mapping[str, Any]) -> "StepSettings":
        """Return settings with other values of what `varying` names."""
        drawn = {name: fixed[name] for name in fixed if name != "puzzle_emb_lr"}
        objective = replace(self.objective, **drawn)
        return replace(self, objective=objective, puzzle_emb_lr=fixed["puzzle_emb_lr"], lr_factor=1.0)


@dataclass(frozen=True)
class StepResult:
    """What one training step found out, on the device."""

    outputs: list[Outputs]  # of each microbatch, for python -m tests.parity
    sums: Tensor  # this rank's, in the order of the objective's SumsSpec
    divisor: int  # what the losses were divided by, over all ranks
    grad_norm: Tensor  # of the global batch before clipping, over all parameters; NaN if puzzle rows are not finite
    was_taken: bool  # False: float16 overflowed, and nothing was updated


TrainStep = Callable[[Batch | TextBatch, StepSettings], StepResult]
"""What takes a step on a batch. Every rank."""
