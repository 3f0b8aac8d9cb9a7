"""Say what a run would take before it is started: `pretrain.py --dry-run`.

Nothing is allocated and no other rank is started. A laptop can ask about 64 GPUs.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from pydantic import Field

from models.model import Checkpointing
from training.config import PretrainConfig
from training.data import AnySizes, Data, model_on_meta, num_parameters, slots_of_ranks
from training.flops import flops_of_step
from training.footprint import PARTS, Bytes, Footprints, imagined_world
from training.kinds import kind_of_arch
from training.precision import with_forward_dtype
from training.resume import Start
from training.splits import open_own
from training.trained import read_config_of_new_run
from utils.command_line import read_config, typed_values, validate
from utils.composing import compose
from utils.config import Float, Int, StrictModel
from utils.config_files import choices
from utils.errors import UserError
from utils.perf.devices import room_for
from utils.ranks.world import World

# The share of a device's memory that stays free: for the driver, for other libraries, and for the
# gaps between allocations.
FREE_SHARE = 0.1
# The share of the memory that the calculation may fill where memory ran out. Gaps in the heap of
# the host (glibc) may take more than the tensors of small microbatches: 2.9 GB in all, where 1.3
# were calculated.
_USABLE_SHARES = {"cuda": 1 - FREE_SHARE, "cpu": 0.25}
_CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
# The degree to change where the defaults of a strategy don't suit the model.
_DEGREES = {"fsdp_tp": "tensor", "pipeline": "stages"}


class OwnKeys(StrictModel):
    """What --dry-run takes beside the keys of a run. The sizes are of data that are not there."""

    ranks: Int = Field(1, ge=1, lt=10**9)
    memory_gb: Float = Field(80.0, gt=0)
    tflops: Float | None = Field(None, gt=0)
    seq_len: Int | None = Field(None, ge=1, lt=10**9)
    vocab_size: Int | None = Field(None, ge=1, lt=10**9)
    num_puzzle_identifiers: Int | None = Field(None, ge=1, lt=10**9)


# ---- what would fit ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way to lay a run out, what to type for it, and the bytes that it takes at its peak."""

    config: PretrainConfig
    typed: list[str]
    peak: int


class Variants:
    """Tries strategies, activation checkpointing and gradient accumulation for a run.

    Attributes:
        limit: the bytes of a device that a variant may take.
    """

    def __init__(self, config: PretrainConfig, sizes: AnySizes, num_ranks: int, limit: float) -> None:
        self.config, self.limit, self._num_ranks = config, limit, num_ranks
        self._footprints = Footprints(sizes, num_ranks)
        self.asked = self.bytes_with(config.arch.activation_checkpointing)

    def bytes_with(self, checkpointing: Checkpointing) -> Bytes:
        """Return what the run takes with this activation checkpointing."""
        arch = self.config.arch.model_copy(update={"activation_checkpointing": checkpointing})
        return self._footprints.of(self.config.model_copy(update={"arch": arch}))

    def row(self, name: str) -> list[Variant]:
        """Return the leanest variants of a strategy, one for each activation checkpointing.

        The run's own strategy has the options of the run. Another strategy has its defaults, or
        other degrees if these don't suit the model's heads or blocks.
        """
        options, mistakes = [[f"parallel={name}"]], list[UserError]()
        if name == self.config.parallel.name:
            options = [[]]
        elif key := _DEGREES.get(name):
            degrees = [n for n in range(self._num_ranks, 1, -1) if self._num_ranks % n == 0]
            options += [[f"parallel={name}", f"parallel.{key}={degree}"] for degree in degrees]
        for typed in options:
            try:
                return [self._leanest(typed, each) for each in _CHECKPOINTINGS]
            except UserError as error:
                mistakes.append(error)
        raise mistakes[0]

    def _leanest(self, typed: list[str], checkpointing: Checkpointing) -> Variant:
        """Return the variant with the fewest microbatches that fits, else the leanest one."""
        config, arch = self.config, self.config.arch
        parallel = validate(PretrainConfig, read_config("pretrain", typed)).parallel if typed else config.parallel
        least = 1 if typed else config.grad_accumulation
        if checkpointing != arch.activation_checkpointing:
            typed = [*typed, f"arch.activation_checkpointing={checkpointing}"]
            arch = arch.model_copy(update={"activation_checkpointing": checkpointing})
        config = config.model_copy(update={"arch": arch, "parallel": parallel, "grad_accumulation": 1})
        slots = math.gcd(*slots_of_ranks(config, imagined_world(config, self._num_ranks)))
        pieces = slots // parallel.num_microbatches(1)
        variants = []
        for number in (n for n in range(least, pieces + 1) if pieces % n == 0):
            config = config.model_copy(update={"grad_accumulation": number})
            more = [f"grad_accumulation={number}"] if number != self.config.grad_accumulation else []
            variants.append(Variant(config, [*typed, *more], sum(self._footprints.of(config).values())))
            if variants[-1].peak <= self.limit:
                return variants[-1]
        return min(variants, key=lambda variant: variant.peak)

    def smallest_change(self, variants: list[Variant]) -> Variant | None:
        """Return the variant that fits, first of the own strategy, then with few overrides."""

        def cost(variant: Variant) -> tuple[bool, int, int]:
            config = variant.config
            return config.parallel.name != self.config.parallel.name, len(variant.typed), config.grad_accumulation

        return min((each for each in variants if each.peak <= self.limit), key=cost, default=None)


# ---- the page ------------------------------------------------------------------------------------


def dry_run(typed: list[str], num_ranks: int) -> Iterator[str]:
    """Yield the lines of the page of --dry-run, as soon as they are known."""
    own = validate(OwnKeys, {"ranks": num_ranks} | typed_values(typed, list(OwnKeys.model_fields)))
    overrides = [each for each in typed if each.partition("=")[0] not in OwnKeys.model_fields]
    config = validate(PretrainConfig, read_config_of_new_run(overrides), lambda: compose("pretrain", overrides))
    if config.resume is not None:
        raise UserError(f"resume={config.resume}: --dry-run tells of a new run; leave resume out")
    arch = config.arch
    if arch.forward_dtype == "auto" and config.device != "cpu":
        arch = arch.model_copy(update={"forward_dtype": "bfloat16"})
    config = config.model_copy(update={"arch": with_forward_dtype(arch, World.single())})
    sizes = _sizes(config, own.model_dump(exclude={"ranks", "memory_gb", "tflops"}, exclude_none=True))
    yield from _of_model(config, sizes, own)
    yield f"\nmemory of a rank in GB (10^9 bytes), with grad_accumulation={config.grad_accumulation}:"
    variants = Variants(config, sizes, own.ranks, (1 - FREE_SHARE) * own.memory_gb * 1e9)
    yield from _of_rank(variants)
    yield from _of_fits(variants, own.memory_gb)


def _sizes(config: PretrainConfig, typed: dict[str, int]) -> AnySizes:
    """Return the sizes that were typed, and for the others those of the data."""
    kind = kind_of_arch(config.arch)
    of_data: AnySizes | None = None
    if missing := [f"{key}={example}" for key, example in kind.needed_sizes.items() if key not in typed]:
        try:
            of_data = kind.sizes.of(open_own(config, "train"))
        except UserError as error:
            raise UserError(
                f"--dry-run needs the sizes of the data, which can't be opened ({error}); give data_path=... of data "
                f"that are there, or the sizes themselves, such as {' '.join(missing)}"
            ) from error
    sizes: AnySizes = kind.typed_sizes(config, typed, of_data)
    return sizes


def _of_model(config: PretrainConfig, sizes: AnySizes, own: OwnKeys) -> Iterator[str]:
    """Yield the lines on the model and on a step, and if a rate was typed the time."""
    model, kind = model_on_meta(config, sizes), kind_of_arch(config.arch)
    of_rank = max(slots_of_ranks(config, imagined_world(config, own.ranks)))
    slots = f"{config.num_slots:,} {config.slots_key[1]}"
    if config.units_per_slot > 1:
        slots = f"{config.global_batch_size:,} {kind.unit} in {slots}"
    ranks = f"{own.ranks} rank{'s' * (own.ranks != 1)}"
    yield f"arch={config.arch.name} parallel={config.parallel.name} on {ranks}, {slots}, {of_rank:,} on a rank"
    yield f"sizes of the data: {sizes}"
    in_blocks = sum(weight.numel() for weight in model.block_weights())
    rows = f"; {model.puzzle_embedding.weight.numel():,} in the puzzle table" if model.puzzle_embedding else ""
    yield f"parameters: {num_parameters(config, sizes):,}, of which {in_blocks:,} in blocks{rows}"
    flops = flops_of_step(config, sizes, kind.usual_depth(config))
    each = ", ".join(f"{_si(flops / number)} for {what}" for what, number in kind.parts_of_batch(config, sizes).items())
    yield f"FLOPs: {each}; {_si(flops)} for a step"
    if own.tflops is not None:
        seconds, num_steps = flops / own.tflops / 1e12 / own.ranks, config.max_steps or 1000
        hours = num_steps * seconds / 3600
        yield f"time: {seconds:.3g} s for a step, {hours:.3g} hours for {num_steps:,} steps without evaluations"


def _of_rank(variants: Variants) -> Iterator[str]:
    config, columns = variants.config, [variants.bytes_with(each) for each in _CHECKPOINTINGS]
    asked = [f"{each}{' *' * (each == config.arch.activation_checkpointing)}" for each in _CHECKPOINTINGS]
    yield _row("  arch.activation_checkpointing=", asked)
    for part in PARTS:
        if any(values := [column[part] for column in columns]):
            yield _row(f"  {part}", map(_gb, values))
    yield _row("  most at a time", [_gb(sum(column.values())) for column in columns])


def _of_fits(variants: Variants, memory_gb: float) -> Iterator[str]:
    own, tried = variants.config.parallel.name, list[Variant]()
    yield f"\nwhat fits into {memory_gb:g} GB, of which a tenth stays free (in brackets: too much)"
    yield _row("  parallel=", _CHECKPOINTINGS)
    for name in sorted(choices("parallel"), key=lambda name: name != own):
        try:
            row = variants.row(name)
        except UserError as error:
            yield textwrap.fill(f"  {name}: no; {error}", 118, subsequent_indent=" " * (len(name) + 4))
            continue
        tried += row
        cells = []
        for variant in row:
            size, number = _gb(variant.peak), variant.config.grad_accumulation
            fitting = size if number == 1 else f"{size} /{number:<3}"
            cells.append(fitting if variant.peak <= variants.limit else f"({size})")
        degree = [each.removeprefix("parallel.") for each in row[0].typed if each.startswith("parallel.")]
        yield _row(" ".join([f"  {name}", *degree, *["*"] * (name == own)]), cells)
    yield "* as asked; /4: with grad_accumulation=4"
    peak = sum(variants.asked.values())
    change = "take more ranks, or a smaller batch or model"
    if best := variants.smallest_change(tried):
        change = f"it would with {' '.join(best.typed)}"
    fits = "fits" if peak <= variants.limit else "does not fit"
    yield f"the run {fits}: {_gb(peak)} of {memory_gb:g} GB" + ("" if fits == "fits" else f"; {change}")
    yield "not counted: what CUDA and NCCL take for themselves, and data that data_on keeps on the device"


def smaller_step(start: Start, data: Data, world: World) -> str:
    """Return the overrides with which a step of training fits where memory ran out."""
    config = start.config
    limit = _USABLE_SHARES["cuda" if world.device.type == "cuda" else "cpu"] * room_for(world)
    variants = Variants(config, data.sizes, world.size, limit)
    asked = sum(variants.asked.values())
    if asked <= limit:  # something that is not counted did not fit beside it
        variants.limit = asked / 2
    possible = variants.row(config.parallel.name)
    if best := variants.smallest_change(possible):
        return f"it should fit with {' '.join(best.typed)}: {_gb(best.peak)} GB instead of {_gb(asked)} by calculation"
    least = min(variant.peak for variant in possible)
    return (
        f"no grad_accumulation and no activation_checkpointing is enough ({_gb(least)} GB by calculation); take more "
        f"ranks with parallel=fsdp, or a smaller model, such as arch.hidden_size={config.arch.hidden_size // 2}"
    )


def _row(head: str, cells: Iterable[str]) -> str:
    return f"{head:<32}" + "".join(f"{cell:>14}" for cell in cells)


def _gb(number: float) -> str:
    return f"{number / 1e9:,.{2 if number >= 1e8 else 3}f}"


def _si(number: float) -> str:
    power = max(0, min(5, int(math.log10(number)) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {' kMGTP'[power]}".rstrip()
