"""Count the floating-point operations of training steps, without any arithmetic.

The model runs on the meta device, whose tensors have a shape and no memory. What counts are matrix
multiplications, attention and convolutions, with two operations for each product that is added up.
Elementwise work and the optimizer are left out, as is usual.
"""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from models import ArchConfig
from models.base import CommonConfig
from models.depth import Depth
from models.parallel.layout import Layout
from models.text.config import LONGEST_RUN, CallCounts
from models.text.model import TextModel
from models.text.packing import Packing
from sharing.stored_config import completed
from training.config import PretrainConfig
from training.data import AnySizes, Sizes, TextSizes
from training.kinds import kind_of_arch
from training.meta_model import model_on_meta
from training.splits import open_own, sizes_from
from utils.checkpoint.format import RunState, read_state, step_folders
from utils.command_line import validate
from utils.errors import UserError
from utils.perf.devices import peak_tflops
from utils.perf.recording import BACKWARD, FORWARD, NO_GRAD
from utils.ranks.world import World
from utils.run.history import read_run_config
from utils.run.launched import Launched


def flops_until(run: Path, steps: list[int]) -> list[float]:
    """Return the cumulative FLOPs after each of these steps.

    The count follows the config with which the run was started last. Steps that a rewind left out
    do not count.

    Args:
        steps: ascending numbers of steps, from 0.

    Raises:
        UserError: The config, the sizes of the data or the planned last step are not there to read.
    """
    config = validate(PretrainConfig, completed(read_run_config(run)))
    state, launched = _newest_state(run, config.arch), Launched.read(run)
    flops = FlopsOfRun(config, sizes_of_run(run, config), launched.last_step if launched is not None else 0)
    if flops.depth_changes and launched is None:
        raise UserError(
            f"{run}: its depth changes over the run, whose planned last step is not known (no launch.json, "
            "because an older version trained it); give another --x"
        )
    sums = {0: 0}
    for before, step in pairwise(sorted({0, *steps})):
        sums[step] = sums[before] + flops.of_steps(before + 1, step)
    skipped = sorted({step for step in state.skipped_steps if step > 0}) if state is not None else []
    return [float(sums[step] - sum(map(flops.of, skipped[: bisect_right(skipped, step)]))) for step in steps]


class FlopsOfRun:
    """Counts the operations of the steps of a run. Each depth is counted once.

    Args:
        last_step: the planned last step of the run, on which schedules of the depth depend.
    """

    def __init__(self, config: PretrainConfig, sizes: AnySizes, last_step: int) -> None:
        arch, self._last_step = config.arch, last_step
        self._of_depth = cache(lambda depth: flops_of_step(config, sizes, depth))
        self._ends_of_stages: list[float] = []
        if isinstance(arch, CommonConfig):
            self.depth_changes = bool(arch.depth_curriculum or arch.backprop_warmup_steps)
            self._ends_of_stages = [stage.until for stage in arch.depth_curriculum]
            self._depth_at: Callable[[int], Depth | CallCounts] = lambda step: (
                arch.depth_at(step, last_step) if self.depth_changes else arch.depth
            )
        else:
            self.depth_changes = arch.grad_calls_at(1, LONGEST_RUN) != arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN)
            self._depth_at = lambda step: arch.grad_calls_at(step, last_step)

    def of(self, step: int) -> int:
        return self._of_depth(self._depth_at(step))

    def of_steps(self, first: int, last: int) -> int:
        """Return the operations of the steps from first to last together."""
        planned = range(1, self._last_step + 1)
        ends = {bisect_right(planned, until, key=lambda step: step / self._last_step) for until in self._ends_of_stages}
        cuts = sorted({first - 1, last, *(end for end in ends if first <= end < last)})
        return sum(self._of_stage(before + 1, end) for before, end in pairwise(cuts))

    def _of_stage(self, first: int, last: int) -> int:
        """Return the operations of the steps from first to last, which are of one stage.

        Only the warm-up of the calls with gradient changes the depth there, in one direction. So
        all steps between two of the same depth have this depth.
        """
        if self.of(first) == self.of(last):
            return (last - first + 1) * self.of(first)
        middle = (first + last) // 2
        return self._of_stage(first, middle) + self._of_stage(middle + 1, last)


# In this time from its start a run does not count its operations, which takes up to a second. A run
# that is as short would spend a large share of its time on it.
UNCOUNTED_S = 10.0


class FlopsGauge:
    """Measures how many useful operations a run does in a second, over all ranks together.

    Only what flops_of_step counts is useful. Rank 0 counts; rows of other ranks are empty.
    """

    def __init__(self, flops: FlopsOfRun, dtype: torch.dtype, step: int, world: World) -> None:
        """Prepare the count. Every rank.

        Args:
            flops: counts the steps of the run.
            dtype: that of the forward pass, in which the devices' peak speed counts, also where
                arch.fp8_no_grad computes products in FP8.
            step: the last step that was done before.
        """
        self._flops, self._is_main = flops, world.is_main
        self._step, self._peak_tflops = step, peak_tflops(world, dtype)
        self._counts_from = time.monotonic() + UNCOUNTED_S

    def row(self, step: int, skipped_steps: list[int], step_ms: float) -> dict[str, float]:
        """Return perf/model_tflops, and perf/mfu if the peak is known, since the last call.

        The row is empty in the first seconds (UNCOUNTED_S). The first call after them, and each
        call after a change of the depth, takes as long as a step has operators: up to a second for
        a deep recursion.

        Args:
            step: the last step that was done.
            step_ms: the mean time of the steps since the last call.
        """
        if not self._is_main:
            return {}
        if time.monotonic() < self._counts_from:
            self._step = step
            return {}
        seconds = (step - self._step) * step_ms / 1e3
        skipped = {each for each in skipped_steps if self._step < each <= step}
        flops = self._flops.of_steps(self._step + 1, step) - sum(map(self._flops.of, skipped))
        self._step = step
        row = {"perf/model_tflops": flops / seconds / 1e12}
        if self._peak_tflops is not None:
            row["perf/mfu"] = row["perf/model_tflops"] / self._peak_tflops
        return row


def flops_of_step(config: PretrainConfig, sizes: AnySizes, depth: Depth | CallCounts) -> int:
    """Return the operations of one training step with this depth, over all ranks together.

    A step of puzzles is one segment of every slot of the global batch with its backward pass and,
    where q_continue has a target, one more segment without gradient. What activation_checkpointing
    computes a second time is not counted: it saves memory, and adds nothing to the result.
    """
    return sum(flops_of_parts(config, sizes, depth).values())


def flops_of_parts(config: PretrainConfig, sizes: AnySizes, depth: Depth | CallCounts) -> dict[str, int]:
    """Return what flops_of_step counts, by its part: FORWARD, NO_GRAD, BACKWARD."""
    return _COUNTS[config.arch.kind](config, sizes, depth)


def _flops_of_text(config: PretrainConfig, sizes: TextSizes, grad_calls: CallCounts) -> dict[str, int]:
    """Count a training step of text.

    The tokens are taken for sequences of the dataset's mean context, so what attention takes is an
    estimate. The rest is exact. Padding counts as tokens.
    """
    num_tokens = sizes.mean_context
    model = cast(TextModel, model_on_meta(_without_checkpointing(config), sizes))
    packing = Packing([(1, num_tokens - 1)], num_tokens).apply(lambda tensor: tensor.to("meta"))
    tokens_N = torch.zeros(num_tokens, dtype=torch.int32, device="meta")
    with torch.device("meta"), _Counter() as counter:
        model.hidden(tokens_N, tokens_N, packing, grad_calls).sum().backward()
    # The head, without what the chunks of the loss compute a second time.
    of_head = 2 * num_tokens * model.config.hidden_size * sizes.vocab_size
    counter.of_part[FORWARD] += of_head
    counter.of_part[BACKWARD] += 2 * of_head
    return {part: flops * config.global_batch_size // num_tokens for part, flops in counter.of_part.items()}


def _without_checkpointing(config: PretrainConfig) -> PretrainConfig:
    arch = config.arch.model_copy(update={"activation_checkpointing": "none"})
    return config.model_copy(update={"arch": arch})


def _flops_of_puzzles(config: PretrainConfig, sizes: Sizes, depth: Depth) -> dict[str, int]:
    world, model = World.single("meta"), model_on_meta(_without_checkpointing(config), sizes)
    example_step = kind_of_arch(config.arch).example_step
    carry, batch, settings = example_step(model, config, sizes, config.global_batch_size, world.device)
    layout: Layout = Layout(model, world)
    with torch.device("meta"), _Counter() as counter:
        layout.forward_backward(carry, batch, replace(settings, depth=depth))
    return dict(counter.of_part)


_COUNTS: dict[str, Callable[..., dict[str, int]]] = {"puzzles": _flops_of_puzzles, "text": _flops_of_text}


class _Counter(TorchDispatchMode):
    """Adds up the operations of everything that runs inside, by torch's own formulas.

    torch's FlopCounterMode has the same formulas. It also follows the modules, with hooks that fail
    on a view that was made without gradient, such as the transposed positions of mlp_t.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_part = Counter({FORWARD: 0, NO_GRAD: 0, BACKWARD: 0})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.of_part[_part()] += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def _part() -> str:
    """Return the part of a step that is running."""
    if torch._C._current_autograd_node() is not None:
        return BACKWARD
    return FORWARD if torch.is_grad_enabled() else NO_GRAD


def sizes_of_run(run: Path, config: PretrainConfig) -> AnySizes:
    """Return the sizes of a run's data as its newest checkpoint tells them, or the data themselves.

    Raises:
        UserError: Both are gone.
    """
    if (state := _newest_state(run, config.arch)) is not None:
        return sizes_from(state.task, config.arch)
    try:
        found: AnySizes = kind_of_arch(config.arch).sizes.of(open_own(config, "train"))
        return found
    except UserError as error:
        raise UserError(
            f"{run}: the sizes of its model are not known, because it has no checkpoint and its data are gone "
            f"({error}); restore one of them, or give another --x"
        ) from error


def _newest_state(run: Path, arch: ArchConfig) -> RunState | None:
    """Return the state of the newest checkpoint that is whole, if there is one."""
    for folder in reversed(step_folders(run)):
        with suppress(UserError, TypeError):  # damaged: an older one serves as well
            state = read_state(folder)
            sizes_from(state.task, arch)
            return state
    return None
