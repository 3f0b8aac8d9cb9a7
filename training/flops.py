"""Count the floating-point operations of training steps, without any arithmetic.

The model runs on the meta device, whose tensors have a shape and no memory. What counts are matrix
multiplications, attention and convolutions, with two operations for each product that is added up.
Elementwise work and the optimizer are left out, as is usual.
"""

import time
from bisect import bisect_right
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from models.base import CommonConfig
from models.depth import Depth
from models.parallel.layout import Layout
from models.text.config import LONGEST_RUN, CallCounts
from models.text.model import TextModel
from models.text.packing import Packing
from records.checkpoint.format import read_state, step_folders
from records.folder import Launched
from records.history import read_run_config
from sharing.stored_config import completed
from training.config import PretrainConfig
from training.data import AnySizes, TextSizes, model_on_meta
from training.kinds import kind_of_arch
from training.splits import open_own, sizes_from
from utils.command_line import validate
from utils.errors import UserError
from utils.perf.devices import peak_tflops
from utils.ranks.world import World


def flops_until(run: Path, steps: list[int]) -> list[float]:
    """Return the cumulative FLOPs of a run after each of these steps, by its newest config."""
    config = validate(PretrainConfig, completed(read_run_config(run)))
    folders, launched = step_folders(run), Launched.read(run)
    state = read_state(folders[-1]) if folders else None
    if state is not None:
        sizes = sizes_from(state.task, config.arch, f"checkpoint {folders[-1]}")
    else:
        sizes = kind_of_arch(config.arch).sizes.of(open_own(config, "train"))
    flops = FlopsOfRun(config, sizes, launched.last_step if launched is not None else 0)
    if flops.depth_changes and launched is None:
        raise UserError(
            f"{run}: its depth changes over the run, whose planned last step is not known (no launch.json, "
            "because an older version trained it); give another --x"
        )
    sums = {0: 0}
    for before, step in pairwise(sorted({0, *steps})):
        sums[step] = sums[before] + flops.of_steps(before + 1, step)
    skipped = sorted(state.skipped_steps) if state is not None else []
    return [float(sums[step] - sum(map(flops.of, skipped[: bisect_right(skipped, step)]))) for step in steps]


class FlopsOfRun:
    """Counts the operations of the steps of a run, whose depth may follow the planned last step."""

    def __init__(self, config: PretrainConfig, sizes: AnySizes, last_step: int) -> None:
        arch, self._last_step = config.arch, last_step
        self._of_depth = cache(lambda depth: flops_of_step(config, sizes, depth))
        if isinstance(arch, CommonConfig):
            self._depth_at: Any = arch.depth_at
            self.depth_changes = bool(arch.depth_curriculum or arch.backprop_warmup_steps)
        else:
            self._depth_at = arch.grad_calls_at
            self.depth_changes = arch.grad_calls_at(1, LONGEST_RUN) != arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN)

    def of(self, step: int) -> int:
        return self._of_depth(self._depth_at(step, self._last_step))

    def of_steps(self, first: int, last: int) -> int:
        """Return the operations of the steps from first to last together."""
        if not self.depth_changes:
            return (last - first + 1) * self.of(first)
        return sum(map(self.of, range(first, last + 1)))


# In this time from its start a run does not count its operations, which takes up to a second. A run
# that is as short would spend a large share of its time on it.
UNCOUNTED_S = 10.0


class FlopsGauge:
    """Measures on rank 0 how many operations a run does in a second, over all ranks together."""

    def __init__(self, flops: FlopsOfRun, dtype: torch.dtype, step: int, world: World) -> None:
        """Prepare the count after a step. Every rank."""
        self._flops, self._step, self._is_main = flops, step, world.is_main
        self._peak_tflops = peak_tflops(world, dtype)
        self._counts_from = time.monotonic() + UNCOUNTED_S

    def row(self, step: int, skipped_steps: list[int], step_ms: float) -> dict[str, float]:
        """Return perf/model_tflops, and perf/mfu if the peak is known, since the last call."""
        before, self._step = self._step, step
        if not self._is_main or time.monotonic() < self._counts_from:
            return {}
        skipped = {each for each in skipped_steps if before < each <= step}
        flops = self._flops.of_steps(before + 1, step) - sum(map(self._flops.of, skipped))
        row = {"perf/model_tflops": flops / ((step - before) * step_ms * 1e9)}
        if self._peak_tflops is not None:
            row["perf/mfu"] = row["perf/model_tflops"] / self._peak_tflops
        return row


def flops_of_step(config: PretrainConfig, sizes: AnySizes, depth: Depth | CallCounts) -> int:
    """Return the operations of one training step with this depth, over all ranks together.

    What activation_checkpointing computes a second time is not counted: it adds nothing to the
    result. The tokens of text are taken for sequences of the dataset's mean context, so what
    attention takes is an estimate. The rest is exact. Padding counts as tokens.
    """
    arch = config.arch.model_copy(update={"activation_checkpointing": "none"})
    config = config.model_copy(update={"arch": arch})
    model, counter = model_on_meta(config, sizes), FlopCounterMode(display=False)
    if not isinstance(sizes, TextSizes):
        example_step = kind_of_arch(arch).example_step
        carry, batch, settings = example_step(model, config, sizes, config.global_batch_size, torch.device("meta"))
        layout: Layout = Layout(model, World.single("meta"))
        with torch.device("meta"), counter:
            layout.forward_backward(carry, batch, replace(settings, depth=depth))
        return counter.get_total_flops()

    num_tokens = sizes.mean_context
    packing = Packing([(1, num_tokens - 1)], num_tokens).apply(lambda tensor: tensor.to("meta"))
    tokens_N = torch.zeros(num_tokens, dtype=torch.int32, device="meta")
    with torch.device("meta"), counter:
        cast(TextModel, model).hidden(tokens_N, tokens_N, packing, cast(CallCounts, depth)).sum().backward()
    # The head three times, without what the chunks of the loss compute a second time.
    of_head = 3 * 2 * num_tokens * arch.hidden_size * sizes.vocab_size
    return (counter.get_total_flops() + of_head) * config.global_batch_size // num_tokens
