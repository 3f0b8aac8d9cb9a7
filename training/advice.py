"""Tell at the start of a run what its user would otherwise find out late, and the way out."""

import time

import torch

from models.model import Model
from training.config import PretrainConfig
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
    """Return lines for the log. Those with a way out begin with `warning: `.

    Args:
        first_step: the next step.

    Returns:
        No lines on ranks other than 0.
    """
    if not world.is_main:
        return []
    lines = [_on_warmup(plan.config, plan.last_step), _on_dtype(model.dtype, world.device)]
    # Every weight meets every position, forward and twice backward.
    at_least = 6 * sum(weight.numel() for weight in model.parameters()) * plan.positions_per_step(model)
    is_small = at_least / world.size < _SMALL_STEP
    # A GPU's first row comes within seconds, and tells the time that is left.
    if not is_small and world.device.type != "cuda":
        per_s = world.size * products_per_s(plan.config.arch.hidden_size, model.dtype, world) / _OVERHEAD
        lines.append(_on_time(plan, flops, first_step, per_s))
    return [line for line in lines if line]


def _on_warmup(config: PretrainConfig, last_step: int) -> str:
    if config.lr_warmup_steps < max(last_step, 1) or config.lr == 0:
        return ""
    return (
        f"warning: the warm-up (lr_warmup_steps={config.lr_warmup_steps}) is as long as the run of {last_step} steps "
        f"or longer, so that the learning rate stays below lr={config.lr:g}; set lr_warmup_steps={last_step // 10}"
    )


def _on_dtype(dtype: torch.dtype, device: torch.device) -> str:
    if dtype != torch.bfloat16 or device.type != "cpu" or multiplies_bfloat16(device):
        return ""
    return "warning: this CPU emulates bfloat16, which takes many times as long; set arch.forward_dtype=float32"


def _on_time(plan: Plan, flops: FlopsOfRun, first_step: int, per_s: float) -> str:
    """Return how long the steps will take.

    Args:
        per_s: the operations in a second, over all ranks together.
    """
    if first_step > plan.last_step:  # only an interrupted evaluation is left
        return ""
    step_s = flops.of(first_step) / per_s
    run_s = flops.of_steps(first_step, plan.last_step) / per_s
    row_s = flops.of_steps(first_step, plan.next_row(first_step)) / per_s
    steps = f"{plan.last_step - first_step + 1:,} steps of about {_about(step_s)}"
    if run_s > _LONG_RUN_S:
        return (
            f"warning: this run needs about {_about(run_s)} on this device ({steps}, the first row after about "
            f"{_about(row_s)}); try experiment=demo, which trains a small model in a minute"
        )
    if step_s > _LONG_STEP_S:
        return f"{steps}: the first row comes after about {_about(row_s)}, the end after about {_about(run_s)}"
    return ""


def _about(seconds: float) -> str:
    return in_words(max(1.0, seconds))


def products_per_s(size: int, dtype: torch.dtype, world: World) -> float:
    """Measure for a moment how many operations of matrix products this rank does in a second.

    Args:
        size: the hidden size of the model whose products are meant.
        dtype: that of the forward pass.
    """
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
