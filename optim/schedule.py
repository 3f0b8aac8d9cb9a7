"""The learning rate over a run: linear warm-up, then cosine."""

import math


def lr_multiplier(step: int, total_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """What the learning rates are multiplied by at step = 1, 2, ..., total_steps.

    step / warmup_steps up to the end of the warm-up, then a half cosine from 1 to min_ratio, which the last step gets
    exactly. A run that is no longer than its warm-up never gets beyond it.
    """
    if step < warmup_steps or total_steps <= warmup_steps:
        return min(1.0, step / warmup_steps)
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
