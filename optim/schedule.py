"""The learning rate: its schedule over a run, and how it grows with the batch size."""

import math
from typing import Literal

BatchScaling = Literal["none", "sqrt", "linear"]


def lr_multiplier(step: int, total_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """Return the factor of the rates at a step. Steps count from 1, or from 0 as in URM's code.

    The factor is step / warmup_steps during the warm-up. Then it follows a half cosine from 1 to
    min_ratio at step total_steps. The cosine goes on behind total_steps, so that the rate rises
    again: HRM-Text only estimates its number of steps (arXiv 2605.20613).
    """
    if step < warmup_steps or total_steps <= warmup_steps:
        return min(1.0, step / warmup_steps)
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def batch_scale(kind: BatchScaling, global_batch_size: int, reference: int) -> float:
    """Return the factor that adapts the learning rates to another global batch size.

    linear is from arXiv 1706.02677, sqrt from arXiv 2205.10287. The factor does not apply to the
    puzzle table, where sign SGD moves each row of a batch by its rate.
    """
    ratio = global_batch_size / reference
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[kind]
