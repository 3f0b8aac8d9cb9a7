"""Time training steps of runs on this machine, without their data and their optimizers.

`main` is called in a process of its own. It reads configs and sizes of data from stdin, and prints
the seconds of each step, or null, in a line of its own.
"""

import json
import sys
import time
from contextlib import suppress

from models import build_on_meta
from models.parallel.layout import Layout
from training.config import PretrainConfig
from training.data import AnySizes
from training.kinds import kind_of_arch
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
    """
    arch = with_forward_dtype(config.arch, world)
    config = config.model_copy(update={"arch": arch})
    model = build_on_meta(arch, **sizes.of_model())  # which refuses what no memory of this machine holds
    model.allocate(world.device)
    model.freeze("weights" if config.freeze_weights else config.freeze)
    layout: Layout = Layout(model, world)
    layout.load(initial_weights(arch, sizes, config.seed, world))

    def timed(num_slots: int) -> float:
        step = kind_of_arch(arch).example_step(model, config, sizes, num_slots, world.device)
        begin = time.perf_counter()
        layout.forward_backward(*step)
        world.wait_for_device()
        return time.perf_counter() - begin

    share = max(1, config.num_slots // num_ranks)
    most, num_slots = max(1, share // config.grad_accumulation), 1
    seconds = min(timed(1), timed(1))
    while num_slots < most and seconds < _LONG_ENOUGH_S:
        num_slots = min(most, 4 * num_slots)
        seconds = min(timed(num_slots), timed(num_slots))
    return seconds * share / num_slots


def main() -> None:
    num_ranks = int(sys.argv[1])
    for asked in json.load(sys.stdin):
        config = validate(PretrainConfig, asked["config"])
        world = connect_devices(World.single(), config.device)
        seconds = None
        with suppress(Exception):  # such as a lack of memory: the run will say what is wrong
            seconds = seconds_of_step(config, sizes_from(asked["sizes"], config.arch), num_ranks, world)
        print(json.dumps(seconds), flush=True)
