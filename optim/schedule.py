"""The learning rate over a run, linear warm-up and then cosine, and with the size of the batch."""

import math
from typing import Literal

BatchScaling = Literal["none", "sqrt", "linear"]


def lr_multiplier(step: int, total_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """What the learning rates are multiplied by at step = 1, 2, ..., total_steps.

    step / warmup_steps up to the end of the warm-up, then a half cosine from 1 to min_ratio, which the last step gets
    exactly. A run that is no longer than its warm-up never gets beyond it.
    """
    if step < warmup_steps or total_steps <= warmup_steps:
        return min(1.0, step / warmup_steps)
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def batch_scale(kind: BatchScaling, global_batch_size: int, reference: int) -> float:
    """What the learning rates are multiplied by for a global batch of another size than the one they were found with.

    linear: by the ratio of the sizes, which keeps the way that SGD goes per example (arXiv 1706.02677). sqrt: by its
    root, which keeps the noise of optimizers that divide by the root of the second moment, as Adam does (arXiv
    2205.10287). The rate of the puzzle table is none of these: sign SGD moves a row by it wherever the batch names the
    row, however many slots there are.
    """
    ratio = global_batch_size / reference
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[kind]
