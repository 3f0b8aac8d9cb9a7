"""Measure what the gauges of perf/* cost: a sampled step, a whole trace, the count of operations.

torchrun --nproc-per-node 2 -m benchmarks.gauges [--rounds 20] [OVERRIDE...]

Plain steps, sampled steps and steps under torch.profiler alternate in one run, so that other work
on the machine disturbs them alike. A step is a forward and backward pass under ddp. CPU time is
that of rank 0's process. It changes less with other work than the time on the clock.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import machine, parser_of, spread, table
from dataset.schema import IGNORE_LABEL
from models import build_puzzle_arch
from models.act import ActSettings, empty_batch, initial_carry
from models.parallel import parallelize
from training.config import PretrainConfig
from training.data import Sizes
from training.flops import flops_of_step
from training.precision import with_forward_dtype
from utils.command_line import read_config, validate
from utils.perf.ranks import RankSampler
from utils.ranks.setup import join_ranks

# The paper's depth. Blocks are narrow, so that a CPU takes short steps.
RECIPE = ["arch.hidden_size=64", "arch.num_heads=2", "global_batch_size=4", "arch.forward_dtype=auto"]
SIZES = Sizes(seq_len=81, vocab_size=11, num_puzzle_identifiers=10)
_WARMUP = 3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_intermixed_args()
    world = join_ranks()
    config = validate(PretrainConfig, read_config("pretrain", [*RECIPE, *args.overrides]))
    arch, num_slots = with_forward_dtype(config.puzzle_arch, world), config.global_batch_size
    with world.device:
        model = build_puzzle_arch(arch, **SIZES.as_dict())
    model.init_weights(torch.Generator(world.device).manual_seed(0))
    layout = parallelize(model, config.parallel, world, num_microbatches=1, compile=config.compile is True)
    batch = empty_batch(num_slots // world.size, SIZES.seq_len, world.device)
    settings = ActSettings(arch.depth, arch.loss, IGNORE_LABEL, num_slots, min_halt_steps_B=None)

    def step(inside: AbstractContextManager[object]) -> tuple[float, float]:
        """Return the ms of a step with what is entered and left around it, and the CPU's ms."""
        model.zero_grad()
        world.barrier()
        world.wait_for_device()
        began, cpu_began = time.perf_counter(), time.process_time()
        with inside:
            carry = initial_carry(model, batch, training=True)
            layout.forward_backward(carry, batch, settings)
            world.wait_for_device()
        return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu_began)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])]
    kinds: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "sampled": lambda: RankSampler(1, world).step(1),
        "torch.profiler": lambda: profile(activities=activities),
        "torch.profiler with shapes": lambda: profile(activities=activities, record_shapes=True),
    }
    for _ in range(_WARMUP):
        for kind in kinds.values():
            step(kind())
    ms: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, kind in kinds.items():
            ms[name].append(step(kind()))
    if world.is_main:
        began = time.perf_counter()
        flops = flops_of_step(config, SIZES, arch.depth)
        counted_ms = 1e3 * (time.perf_counter() - began)
        machine()
        rows = []
        for name, pairs in ms.items():
            row = [name]
            for values, plain in zip(zip(*pairs, strict=True), zip(*ms["plain"], strict=True), strict=True):
                extra = [value - before for value, before in zip(values, plain, strict=True)]
                row += [spread(each, "{:.1f}".format) for each in (values, extra)]
            rows.append(row)
        print(table(["step", "ms", "more than a plain step of its round", "ms of the CPU", "more"], rows))
        print(f"counting {flops / 1e9:.1f} GFLOP, once for each depth: {counted_ms:.0f} ms")
    world.barrier()
    world.close()


if __name__ == "__main__":
    main()
