"""Say what a run would take before it is started: `pretrain.py --dry-run`.

Nothing is allocated and no other rank is started. A laptop can ask about 64 GPUs.
"""

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from pydantic import Field

from models.model import Checkpointing
from models.parallel import ParallelConfig
from training.arch_of_recipe import note_on_arch
from training.config import PretrainConfig
from training.data import AnySizes, slots_of_ranks
from training.flops import flops_of_parts
from training.footprint import PARTS, Footprint, Footprints, imagined_world
from training.kinds import kind_of_arch
from training.meta_model import model_on_meta, num_parameters
from training.precision import with_forward_dtype
from training.splits import open_own
from training.trained import read_config_of_new_run
from utils.command_line import read_config, typed_values, validate
from utils.composing import Origin
from utils.config import Float, Int, StrictModel
from utils.config_files import choices
from utils.errors import UserError
from utils.perf.recording import BACKWARD, FORWARD, NO_GRAD
from utils.ranks.world import World

# The share of a device's memory that stays free: for the driver, for other libraries, and for the
# gaps between allocations.
FREE_SHARE = 0.1
_CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
# The degree to change where the defaults of a strategy don't suit the model.
_DEGREES = {"fsdp_tp": "tensor", "pipeline": "stages"}


class OwnKeys(StrictModel):
    """What --dry-run takes beside the keys of a run.

    The sizes are of data, which tell them if they are there.
    """

    ranks: Int = Field(1, ge=1, lt=10**9)
    memory_gb: Float = Field(80.0, gt=0)
    tflops: Float | None = Field(None, gt=0)
    seq_len: Int | None = Field(None, ge=1, lt=10**9)
    vocab_size: Int | None = Field(None, ge=1, lt=10**9)
    num_puzzle_identifiers: Int | None = Field(None, ge=1, lt=10**9)


# ---- what would fit ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way to lay a run out, and what it takes."""

    config: PretrainConfig
    footprint: Footprint


class Variants:
    """Tries strategies, activation checkpointing and gradient accumulation for a run.

    Attributes:
        limit: the bytes of a device that a variant may take.
    """

    def __init__(self, config: PretrainConfig, sizes: AnySizes, num_ranks: int, limit: float) -> None:
        self.config, self.limit, self._num_ranks = config, limit, num_ranks
        self._footprints = Footprints(sizes, num_ranks)

    def asked(self, checkpointing: Checkpointing | None = None) -> Footprint:
        """Return what the run takes as it was asked for."""
        arch = self.config.arch
        arch = arch.model_copy(update={"activation_checkpointing": checkpointing or arch.activation_checkpointing})
        return self._footprints.of(self.config.model_copy(update={"arch": arch}))

    def row(self, name: str) -> list[Variant]:
        """Return the leanest variants of a strategy, one for each activation checkpointing.

        The run's own strategy has the options of the run. Another strategy has its defaults, or
        other degrees if these don't suit the model's heads or blocks.

        Raises:
            UserError: The strategy can't work with this model or these ranks.
        """
        mistakes = []
        for parallel in self._options(name):
            try:
                return [self._leanest(parallel, each) for each in _CHECKPOINTINGS]
            except UserError as error:
                mistakes.append(error)
        raise mistakes[0]

    def _options(self, name: str) -> Iterator[ParallelConfig]:
        if name == self.config.parallel.name:
            yield self.config.parallel
            return
        key = _DEGREES.get(name)
        for degree in (None, *range(self._num_ranks, 1, -1)):
            if degree is None or (key and self._num_ranks % degree == 0):
                typed = [f"parallel={name}", *([f"parallel.{key}={degree}"] if degree else [])]
                yield validate(PretrainConfig, read_config("pretrain", typed)).parallel

    def _leanest(self, parallel: ParallelConfig, checkpointing: Checkpointing) -> Variant:
        """Return the variant with the fewest microbatches that fits, else the leanest one."""
        arch = self.config.arch.model_copy(update={"activation_checkpointing": checkpointing})
        config = self.config.model_copy(update={"arch": arch, "parallel": parallel, "grad_accumulation": 1})
        slots = math.gcd(*slots_of_ranks(config, imagined_world(config, self._num_ranks)))
        pieces = slots // parallel.num_microbatches(1)
        least = self.config.grad_accumulation if parallel == self.config.parallel else 1
        variants = []
        for number in (n for n in range(least, pieces + 1) if pieces % n == 0):
            config = config.model_copy(update={"grad_accumulation": number})
            variants.append(Variant(config, self._footprints.of(config)))
            if variants[-1].footprint.peak <= self.limit:
                return variants[-1]
        return min(variants, key=lambda variant: variant.footprint.peak)

    def smallest_change(self, variants: list[Variant]) -> Variant | None:
        """Return the variant that fits with few overrides, and with little more work for a step.

        With FSDP more microbatches send more. Therefore they come after activation checkpointing.
        """

        def cost(variant: Variant) -> tuple[bool, int, int, int]:
            config, place = variant.config, _CHECKPOINTINGS.index(variant.config.arch.activation_checkpointing)
            is_another = config.parallel.name != self.config.parallel.name
            return is_another, len(self.overrides(config)), config.grad_accumulation, place

        return min((each for each in variants if each.footprint.peak <= self.limit), key=cost, default=None)

    def overrides(self, new: PretrainConfig) -> list[str]:
        """Return what to type so that the run gets the config of a variant."""
        old = self.config
        of_keys = {
            "parallel": (new.parallel.name, old.parallel.name),
            "arch.activation_checkpointing": (new.arch.activation_checkpointing, old.arch.activation_checkpointing),
            "grad_accumulation": (new.grad_accumulation, old.grad_accumulation),
        }
        changed = [f"{key}={value}" for key, (value, before) in of_keys.items() if value != before]
        return changed + [f"parallel.{each}" for each in self.degree(new)]

    def degree(self, new: PretrainConfig) -> list[str]:
        """Return the degree that another strategy needs beside its defaults."""
        key = _DEGREES.get(new.parallel.name)
        value = getattr(new.parallel, key) if key and new.parallel.name != self.config.parallel.name else None
        return [] if value is None else [f"{key}={value}"]


# ---- the page ------------------------------------------------------------------------------------


def dry_run(typed: list[str], num_ranks: int) -> Iterator[str]:
    """Yield the lines of the page of --dry-run, as soon as they are known.

    Args:
        typed: overrides of a run, with those of OwnKeys among them.
        num_ranks: how many ranks there are if the command line does not say it.

    Raises:
        UserError: A key or a value is wrong, the sizes of the data are not known, or the run as
            asked for can't be laid out.
    """
    own = validate(OwnKeys, {"ranks": num_ranks} | typed_values(typed, list(OwnKeys.model_fields)))
    overrides = [each for each in typed if each.partition("=")[0] not in OwnKeys.model_fields]
    config = validate(PretrainConfig, read_config_of_new_run(overrides), Origin("pretrain", overrides))
    if config.resume is not None:
        raise UserError(f"resume={config.resume}: --dry-run tells of a new run; leave resume out")
    arch = config.arch
    if arch.forward_dtype == "auto" and config.device != "cpu":
        arch = arch.model_copy(update={"forward_dtype": "bfloat16"})
    config = config.model_copy(update={"arch": with_forward_dtype(arch, World.single())})
    sizes = _sizes(config, own.model_dump(exclude={"ranks", "memory_gb", "tflops"}, exclude_none=True))
    yield from _of_model(config, sizes, own.ranks)
    yield from note_on_arch(overrides, config, sizes)
    yield from _of_step(config, sizes, own)
    yield ""
    variants = Variants(config, sizes, own.ranks, (1 - FREE_SHARE) * own.memory_gb * 1e9)
    yield from _of_rank(variants)
    yield ""
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


def _of_model(config: PretrainConfig, sizes: AnySizes, num_ranks: int) -> Iterator[str]:
    model = model_on_meta(config, sizes)
    own = max(slots_of_ranks(config, imagined_world(config, num_ranks)))
    slots = f"{config.num_slots:,} {config.slots_key[1]}"
    if config.units_per_slot > 1:
        slots = f"{config.global_batch_size:,} {kind_of_arch(config.arch).unit} in {slots}"
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    yield f"arch={config.arch.name} parallel={config.parallel.name} on {ranks}, {slots}, {own:,} on a rank"
    yield f"sizes of the data: {sizes}"
    in_blocks = sum(weight.numel() for weight in model.block_weights())
    rows = f"; {model.puzzle_embedding.weight.numel():,} in the puzzle table" if model.puzzle_embedding else ""
    yield f"parameters: {num_parameters(config, sizes):,}, of which {in_blocks:,} in blocks{rows}"


def _of_step(config: PretrainConfig, sizes: AnySizes, own: OwnKeys) -> Iterator[str]:
    """Yield the line on operations, and if a rate was typed the time."""
    kind = kind_of_arch(config.arch)
    of_part = flops_of_parts(config, sizes, kind.usual_depth(config))
    flops = sum(of_part.values())
    each = ", ".join(f"{_si(flops / number)} for {what}" for what, number in kind.parts_of_batch(config, sizes).items())
    names = {FORWARD: "forward", BACKWARD: "backward", NO_GRAD: "without gradient"}
    shares = ", ".join(f"{names[part]} {n / flops:.0%}" for part, n in of_part.items() if n)
    yield f"FLOPs: {each} ({shares}); {_si(flops)} for a step"
    if own.tflops is not None:
        seconds, num_steps = flops / own.tflops / 1e12 / own.ranks, config.max_steps or 1000
        hours = num_steps * seconds / 3600
        yield f"time: {seconds:.3g} s for a step, {hours:.3g} hours for {num_steps:,} steps without evaluations"


def _of_rank(variants: Variants) -> Iterator[str]:
    """Yield the memory of a rank by part, a column for each kind of activation checkpointing."""
    config = variants.config
    footprints = [variants.asked(each) for each in _CHECKPOINTINGS]
    yield f"memory of a rank in GB (10^9 bytes), with grad_accumulation={config.grad_accumulation}:"
    asked = [f"{each}{' *' * (each == config.arch.activation_checkpointing)}" for each in _CHECKPOINTINGS]
    yield _row("  arch.activation_checkpointing=", asked)
    for part in PARTS:
        if any(values := [footprint.parts[part] for footprint in footprints]):
            yield _row(f"  {part}", [gb(value) for value in values])
    if footprints[0].on_host:
        yield _row("  beside it, on the host", [gb(footprint.on_host) for footprint in footprints])
    yield _row("  most at a time", [gb(footprint.peak) for footprint in footprints])


def _of_fits(variants: Variants, memory_gb: float) -> Iterator[str]:
    """Yield what would fit, and the smallest change that makes the run fit."""
    own, tried = variants.config.parallel.name, list[Variant]()
    yield f"what fits into {memory_gb:g} GB, of which a tenth stays free (in brackets: too much)"
    yield _row("  parallel=", list(_CHECKPOINTINGS))
    for name in sorted(choices("parallel"), key=lambda name: name != own):
        try:
            row = variants.row(name)
        except UserError as error:
            yield textwrap.fill(f"  {name}: no; {error}", 118, subsequent_indent=" " * (len(name) + 4))
            continue
        tried += row
        cells = []
        for variant in row:
            size, number = gb(variant.footprint.peak), variant.config.grad_accumulation
            fitting = size if number == 1 else f"{size} /{number:<3}"
            cells.append(fitting if variant.footprint.peak <= variants.limit else f"({size})")
        yield _row(" ".join([f"  {name}", *variants.degree(row[0].config), *["*"] * (name == own)]), cells)
    yield "* as asked; /4: with grad_accumulation=4"
    asked = f"{gb(variants.asked().peak)} of {memory_gb:g} GB"
    if variants.asked().peak <= variants.limit:
        yield f"the run fits: {asked}"
    elif best := variants.smallest_change(tried):
        yield f"the run does not fit: {asked}; it would with {' '.join(variants.overrides(best.config))}"
    else:
        yield f"the run does not fit: {asked}; take more ranks, or a smaller batch or model"
    yield "not counted: what CUDA and NCCL take for themselves, and data that data_on keeps on the device"


def _row(head: str, cells: list[str]) -> str:
    return f"{head:<32}" + "".join(f"{cell:>14}" for cell in cells)


def gb(number: float) -> str:
    """Return bytes as GB, with three digits if they are few."""
    return f"{number / 1e9:,.{2 if number >= 1e8 else 3}f}"


def _si(number: float) -> str:
    """Return a number with three digits and a unit, such as 36.7 G."""
    power = max(0, min(5, int(math.log10(number)) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {' kMGTP'[power]}".rstrip()
