"""Tell at the start of a run what its user would otherwise find out late, and the way out."""

import time

import torch

from models.model import Model
from training.flops import FlopsOfRun
from training.plan import Plan
from training.precision import multiplies_bfloat16
from utils.ranks.world import World
from utils.text import in_words

# The time of smaller steps is not estimated: they are short on any device, and counting their
# operations would take longer than they do.
_SMALL_STEP = 2e10
_LONG_STEP_S, _LONG_RUN_S = 5.0, 3 * 86_400.0
_MEASURED_S = 0.2
# The time of a step over the time that its matrix products alone would take: softmax, norms, loss
# and optimizer add to them. A guess: one step of the published model on a busy CPU was estimated at
# 7 minutes and took 5.5.
_OVERHEAD = 1.5


def advice(plan: Plan, flops: FlopsOfRun, model: Model, first_step: int, world: World) -> list[str]:
    """Return lines for the log of rank 0. Those with a way out begin with `warning: `.

    Args:
        first_step: the next step.
    """
    config, last_step, lines = plan.config, plan.last_step, list[str]()
    if not world.is_main:
        return []
    if config.lr_warmup_steps >= last_step and config.lr:
        lines.append(
            f"warning: the warm-up (lr_warmup_steps={config.lr_warmup_steps}) is as long as the run of {last_step} "
            f"steps or longer, so that the learning rate stays below lr={config.lr:g}; set "
            f"lr_warmup_steps={last_step // 10}"
        )
    if model.dtype == torch.bfloat16 and world.device.type == "cpu" and not multiplies_bfloat16(world.device):
        lines.append(
            "warning: this CPU emulates bfloat16, which takes many times as long; set arch.forward_dtype=float32"
        )
    # Every weight meets every position, forward and twice backward.
    at_least = 6 * sum(weight.numel() for weight in model.parameters())
    at_least *= config.global_batch_size * model.positions_per_slot
    # A GPU's first row comes within seconds, and tells the time that is left.
    if at_least / world.size < _SMALL_STEP or world.device.type == "cuda" or first_step > last_step:
        return lines
    per_s = world.size * products_per_s(config.arch.hidden_size, model.dtype, world) / _OVERHEAD
    run_s = flops.of_steps(first_step, last_step) / per_s
    step, run, row = (
        in_words(max(1.0, flops.of_steps(first_step, last) / per_s))
        for last in (first_step, last_step, plan.next_row(first_step))
    )
    steps = f"{last_step - first_step + 1:,} steps of about {step}"
    if run_s > _LONG_RUN_S:
        lines.append(
            f"warning: this run needs about {run} on this device ({steps}, the first row after about {row}); try "
            "experiment=demo, which trains a small model in a minute"
        )
    elif flops.of(first_step) / per_s > _LONG_STEP_S:
        lines.append(f"{steps}: the first row comes after about {row}, the end after about {run}")
    return lines


def products_per_s(size: int, dtype: torch.dtype, world: World) -> float:
    """Measure for a moment how many operations of matrix products this rank does in a second."""
    rows = torch.ones(1024, size, dtype=dtype, device=world.device)
    weight = torch.ones(size, 4 * size, dtype=dtype, device=world.device)
    rows[:8] @ weight  # what only the first product needs
    world.wait_for_device()
    began, count, seconds = time.perf_counter(), 0, 0.0
    while not count or seconds < _MEASURED_S:
        rows @ weight
        world.wait_for_device()
        count, seconds = count + 1, time.perf_counter() - began
    return count * 2 * 1024 * size * 4 * size / seconds
