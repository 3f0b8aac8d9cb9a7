"""Say what fits where memory ran out: the smallest change of a step or of an evaluation."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from models import ArchConfig, shapes_of
from models.act import empty_batch
from models.base import CommonConfig, RecursiveModel
from models.inference import Slots
from training.allocations import Allocations
from training.data import AnySizes, Data, Sizes
from training.dry_run import FREE_SHARE, Question, Variants, gb, overrides_of, smallest_change
from training.resume import Start
from utils.out_of_memory import half
from utils.perf.devices import room_for
from utils.ranks.world import World

# The share of the memory that the calculation may fill. Gaps in the heap of the host (glibc) may
# take more than the tensors of small microbatches: 2.9 GB in all, where 1.3 were calculated.
_USABLE_SHARES = {"cuda": 1 - FREE_SHARE, "cpu": 0.25}


def smaller_step(start: Start, data: Data, world: World) -> str:
    """Return the overrides with which a step of training fits, by the calculation of --dry-run.

    The strategy stays, and so does what the run learns.
    """
    question = Question(start.config, data.sizes, world.size, _limit(world) / (1 - FREE_SHARE))
    asked = Variants(question).asked().peak
    if asked <= question.limit:  # something that is not counted did not fit beside it
        question = replace(question, memory=asked / 2 / (1 - FREE_SHARE))
    possible = Variants(question).row(start.config.parallel.name)
    if best := smallest_change(possible, question):
        return _fits(" ".join(overrides_of(best, question)), best.footprint.peak, asked)
    least = min(variant.footprint.peak for variant in possible)
    return (
        f"no grad_accumulation and no activation_checkpointing is enough ({gb(least)} GB by calculation); take more "
        f"ranks with parallel=fsdp, or a smaller model, such as arch.hidden_size={start.config.arch.hidden_size // 2}"
    )


def smaller_evaluation(
    key: str,
    batch_size: int,
    arch: ArchConfig,
    sizes: AnySizes,
    *,
    num_examples: int,
    num_held: int,
    world: World,
) -> str:
    """Return the batch size with which an evaluation fits, by calculation.

    Args:
        key: of the batch size.
        batch_size: over all ranks together.
        num_examples: of the largest set.
        num_held: the bytes that this rank holds beside the evaluation.
    """
    if not isinstance(arch, CommonConfig) or not isinstance(sizes, Sizes):  # nobody counts those of text
        return half(key, batch_size)
    batch_size = min(batch_size, num_examples)
    asked = num_held + _evaluation(arch, sizes, batch_size, world)
    for smaller in _halves(batch_size, world.data_size):
        needed = num_held + _evaluation(arch, sizes, smaller, world)
        if needed <= _limit(world):
            return _fits(f"{key}={smaller}", needed, asked)
    return half(key, 1)


def _limit(world: World) -> float:
    return _USABLE_SHARES["cuda" if world.device.type == "cuda" else "cpu"] * room_for(world)


def _halves(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


def _evaluation(arch: CommonConfig, sizes: Sizes, batch_size: int, world: World) -> int:
    """Return the bytes that the slots of a rank take at most while they compute a segment."""
    num_slots, model = -(-batch_size // world.data_size), shapes_of(arch, **sizes.of_model())
    assert isinstance(model, RecursiveModel)
    batch = empty_batch(num_slots, sizes.seq_len, torch.device("meta"))
    with (allocations := Allocations([*model.parameters(), *model.buffers()])).counting():
        Slots(model, iter([(np.arange(num_slots), batch)]), num_steps=2).advance()
    return allocations.peak


def _fits(overrides: str, needed: float, asked: float) -> str:
    return f"it should fit with {overrides}: {gb(needed)} GB instead of {gb(asked)} by calculation, and the same result"
