"""Time training steps of runs on this machine, without their data and their optimizers.

`main` is called in a process of its own. It reads configs and sizes of data from stdin, and prints
the seconds of each step, or null, in a line of its own.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from dataset.schema import IGNORE_LABEL
from models import build_on_meta
from models.act import ActSettings, draw_seeds, empty_batch, initial_carry
from models.base import RecursiveModel
from models.parallel.layout import Layout
from models.text.config import LONGEST_RUN, TextConfig
from models.text.objective import TextBatch, TextRow, TextSettings
from models.text.packing import Packing
from training.config import PretrainConfig
from training.data import AnySizes, Sizes
from training.precision import with_forward_dtype
from training.splits import sizes_from
from training.trained import initial_weights
from utils.command_line import validate
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

# A step of fewer slots than the run has is long enough to tell the time of all of them.
_LONG_ENOUGH_S = 1.0


def seconds_of_step(config: PretrainConfig, sizes: AnySizes, num_ranks: int, world: World) -> float:
    """Return about how long the forward and the backward pass of a rank's slots take.

    A step of one slot is timed first, then steps of more slots, until they are long enough or
    whole.

    Args:
        num_ranks: how many ranks share the slots.
        world: one rank, with its device.
    """
    arch = with_forward_dtype(config.arch, world)
    config = config.model_copy(update={"arch": arch})
    model = build_on_meta(arch, **sizes.of_model())
    model.allocate(world.device)
    model.freeze("weights" if config.freeze_weights else config.freeze)
    layout: Layout = Layout(model, world)
    layout.load(initial_weights(arch, sizes, config.seed, world))
    step = (_puzzle_step if isinstance(sizes, Sizes) else _text_step)(config, sizes, layout, world)

    def timed(num_slots: int) -> float:
        begin = time.perf_counter()
        step(num_slots)
        world.wait_for_device()
        return time.perf_counter() - begin

    share = max(1, config.num_slots // num_ranks)
    most, num_slots = max(1, share // config.grad_accumulation), 1
    seconds = min(timed(1), timed(1))
    while num_slots < most and seconds < _LONG_ENOUGH_S:
        num_slots = min(most, 4 * num_slots)
        seconds = min(timed(num_slots), timed(num_slots))
    return seconds * share / num_slots


def _puzzle_step(config: PretrainConfig, sizes: AnySizes, layout: Layout, world: World) -> Callable[[int], object]:
    arch, model = config.puzzle_arch, layout.model
    assert isinstance(model, RecursiveModel) and isinstance(sizes, Sizes)

    def step(num_slots: int) -> object:
        batch = empty_batch(num_slots, sizes.seq_len, world.device)
        seeds_B = world.to_device(draw_seeds(config.seed, 1, num_slots)) if arch.is_random else None
        settings = ActSettings(arch.depth, arch.loss, IGNORE_LABEL, num_slots, min_halt_steps_B=None, seeds_B=seeds_B)
        return layout.forward_backward(initial_carry(model, batch, training=True), batch, settings)

    return step


def _text_step(config: PretrainConfig, sizes: AnySizes, layout: Layout, world: World) -> Callable[[int], object]:
    arch, num_tokens = config.arch, config.global_batch_size // config.rows_per_step
    assert isinstance(arch, TextConfig) and not isinstance(sizes, Sizes)
    length = min(num_tokens, max(2, sizes.mean_context))
    packing = Packing([(1, length - 1)] * (num_tokens // length), num_tokens, kernel=arch.attention_kernel)
    tokens_N = torch.zeros(num_tokens, dtype=torch.int32)
    positions_N = torch.arange(num_tokens, dtype=torch.int32) % length
    row = TextRow(tokens_N, tokens_N, positions_N, packing).apply(lambda tensor: tensor.to(world.device))
    settings = TextSettings(arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN), IGNORE_LABEL)

    def step(num_rows: int) -> None:
        for _ in range(num_rows):  # each row is a part of its own
            layout.forward_backward(None, TextBatch([row], num_tokens), settings)

    return step


def main() -> None:
    """Time what stdin names. The number of ranks is the argument."""
    num_ranks = int(sys.argv[1])
    for asked in json.load(sys.stdin):
        config = validate(PretrainConfig, asked["config"])
        world = connect_devices(World.single(), config.device)
        seconds = None
        with suppress(Exception):  # such as a lack of memory: the run will say what is wrong
            seconds = seconds_of_step(config, sizes_from(asked["sizes"], config.arch), num_ranks, world)
        print(json.dumps(seconds), flush=True)
