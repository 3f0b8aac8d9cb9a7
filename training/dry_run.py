"""Say what a run would take before it is started: `pretrain.py --dry-run`.

Nothing is allocated and no other rank is started. A laptop can ask about 64 GPUs.
"""

import difflib
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from models.model import Checkpointing
from models.parallel import ParallelConfig
from training.config import PretrainConfig
from training.data import AnySizes, slots_of_ranks
from training.flops import flops_of_parts
from training.footprint import PARTS, Footprint, Footprints, ImaginedWorld
from training.kinds import kind_of_arch
from training.meta_model import model_on_meta, num_parameters
from training.precision import with_forward_dtype
from training.splits import open_own
from training.trained import read_config_of_new_run
from utils.command_line import read_config, validate
from utils.composing import compose
from utils.config_files import choices
from utils.errors import UserError
from utils.perf.recording import BACKWARD, FORWARD, NO_GRAD
from utils.ranks.world import World

# What --dry-run takes beside the keys of a run. The sizes are of data, which tell them if they are
# there.
_SIZES = ("seq_len", "vocab_size", "num_puzzle_identifiers")
_FRACTIONS = ("memory_gb", "tflops")
_OWN_KEYS = ("ranks", *_FRACTIONS, *_SIZES)
# The share of a device's memory that stays free: for the driver, for other libraries, and for the
# gaps between allocations.
FREE_SHARE = 0.1
_CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
# The degree to change where the defaults of a strategy don't suit the model.
_DEGREES = {"fsdp_tp": "tensor", "pipeline": "stages"}


@dataclass(frozen=True)
class Question:
    """What a dry run is asked.

    Attributes:
        config: of the run.
        sizes: of its data.
        memory: of a device, in bytes.
        rate: floating-point operations that a rank computes in a second, if they were typed.
    """

    config: PretrainConfig
    sizes: AnySizes
    num_ranks: int
    memory: float
    rate: float | None = None
    overrides: tuple[str, ...] = ()

    @staticmethod
    def read(typed: list[str], num_ranks: int) -> "Question":
        """Read a command line.

        Args:
            typed: overrides, with ranks, memory_gb, tflops and sizes of data among them.
            num_ranks: how many ranks there are if the command line does not say it.

        Raises:
            UserError: A key or a value is wrong, or the sizes of the data are not known.
        """
        words = [(each, *each.partition("=")[::2]) for each in typed]
        own = {key: _number(key, value) for _, key, value in words if key in _OWN_KEYS}
        overrides = [each for each, key, _ in words if key not in _OWN_KEYS]
        for _, key, _ in words:
            if key not in {*PretrainConfig.model_fields, *own} and (
                close := difflib.get_close_matches(key, _OWN_KEYS, 1, 0.8)
            ):
                raise UserError(f"unknown key {key!r}; did you mean {close[0]}?")
        config = validate(PretrainConfig, read_config_of_new_run(overrides), lambda: compose("pretrain", overrides))
        if config.resume is not None:
            raise UserError(f"resume={config.resume}: --dry-run tells of a new run; leave resume out")
        arch = config.arch
        if arch.forward_dtype == "auto" and config.device != "cpu":
            arch = arch.model_copy(update={"forward_dtype": "bfloat16"})
        config = config.model_copy(update={"arch": with_forward_dtype(arch, World.single())})
        return Question(
            config,
            _sizes(config, {key: int(own[key]) for key in _SIZES if key in own}),
            int(own.get("ranks", num_ranks)),
            own.get("memory_gb", 80.0) * 1e9,
            own["tflops"] * 1e12 if "tflops" in own else None,
            tuple(overrides),
        )

    @property
    def limit(self) -> float:
        return (1 - FREE_SHARE) * self.memory


def _number(key: str, typed: str) -> float:
    try:
        number = float(typed)
    except ValueError:
        number = math.nan
    if not (0 < number < 1e15 and (key in _FRACTIONS or number.is_integer())):
        kind = "a number above 0" if key in _FRACTIONS else "a whole number from 1"
        raise UserError(f"{key}={typed}: give {kind}")
    return number


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


# ---- what would fit ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way to lay the run out, and what it takes."""

    parallel: ParallelConfig
    checkpointing: Checkpointing
    grad_accumulation: int
    footprint: Footprint


class Variants:
    """Tries strategies, activation checkpointing and gradient accumulation."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._footprints = Footprints(question.config, question.sizes, question.num_ranks)

    def asked(self, checkpointing: Checkpointing | None = None) -> Footprint:
        """Return what the run takes as it was asked for."""
        return self._footprints.of(checkpointing=checkpointing)

    def row(self, name: str) -> list[Variant]:
        """Return the leanest variants of a strategy, one for each activation checkpointing.

        The first of `_degrees` that works is taken.

        Raises:
            UserError: The strategy can't work with this model or these ranks.
        """
        mistake: UserError | None = None
        for parallel in self._degrees(name):
            try:
                return [self._leanest(parallel, each) for each in _CHECKPOINTINGS]
            except UserError as error:
                mistake = mistake or error
        assert mistake is not None
        raise mistake

    def _degrees(self, name: str) -> Iterator[ParallelConfig]:
        """Yield the options of a strategy that are worth a try.

        The run's own strategy has those of the run. Another strategy has its defaults, and then
        other degrees, because the default degrees may not suit the model's heads or blocks.
        """
        if name == self._question.config.parallel.name:
            yield self._question.config.parallel
            return
        num_ranks, key = self._question.num_ranks, _DEGREES.get(name)
        others = [n for n in range(num_ranks, 1, -1) if num_ranks % n == 0] if key else []
        for degree in (None, *others):
            typed = [f"parallel={name}", *([f"parallel.{key}={degree}"] if degree else [])]
            yield validate(PretrainConfig, read_config("pretrain", typed)).parallel

    def _leanest(self, parallel: ParallelConfig, checkpointing: Checkpointing) -> Variant:
        """Return the variant with the fewest microbatches that fits, else the one that needs least.

        Raises:
            UserError: The strategy can't work with this model or these ranks.
        """
        config = self._question.config.model_copy(update={"parallel": parallel, "grad_accumulation": 1})
        slots = math.gcd(*slots_of_ranks(config, ImaginedWorld.of(config, self._question.num_ranks)))
        pieces = slots // parallel.num_microbatches(1)
        least = self._question.config.grad_accumulation if parallel == self._question.config.parallel else 1
        variants = []
        for number in (n for n in range(least, pieces + 1) if pieces % n == 0):
            footprint = self._footprints.of(parallel, checkpointing, number)
            variants.append(Variant(parallel, checkpointing, number, footprint))
            if footprint.peak <= self._question.limit:
                return variants[-1]
        return min(variants, key=lambda variant: variant.footprint.peak)


def smallest_change(variants: list[Variant], question: Question) -> Variant | None:
    """Return the variant that fits with few overrides, and with little more work for a step.

    With FSDP more microbatches send more. Therefore they come after activation checkpointing.
    """

    def cost(variant: Variant) -> tuple[bool, int, int, int]:
        is_another = variant.parallel.name != question.config.parallel.name
        place = _CHECKPOINTINGS.index(variant.checkpointing)
        return is_another, len(overrides_of(variant, question)), variant.grad_accumulation, place

    return min((each for each in variants if each.footprint.peak <= question.limit), key=cost, default=None)


def overrides_of(variant: Variant, question: Question) -> list[str]:
    """Return what to type so that the run becomes the variant."""
    config = question.config
    of_keys = {
        "parallel": (variant.parallel.name, config.parallel.name),
        "arch.activation_checkpointing": (variant.checkpointing, config.arch.activation_checkpointing),
        "grad_accumulation": (variant.grad_accumulation, config.grad_accumulation),
    }
    changed = [f"{key}={new}" for key, (new, old) in of_keys.items() if new != old]
    return changed + [f"parallel.{each}" for each in _degree(variant.parallel, question)]


def _degree(parallel: ParallelConfig, question: Question) -> list[str]:
    """Return the degree that another strategy than that of the run needs beside its defaults."""
    key = _DEGREES.get(parallel.name)
    value = getattr(parallel, key) if key and parallel.name != question.config.parallel.name else None
    return [] if value is None else [f"{key}={value}"]


# ---- the page ------------------------------------------------------------------------------------


def dry_run(typed: list[str], num_ranks: int) -> Iterator[str]:
    """Yield the lines of the page of --dry-run, as soon as they are known.

    Args:
        typed: as for Question.read.

    Raises:
        UserError: As Question.read does; or the run as asked for can't be laid out.
    """
    question = Question.read(typed, num_ranks)
    variants = Variants(question)
    yield from of_model(question)
    yield ""
    yield from _of_rank(question, variants)
    yield ""
    yield from _of_fits(question, variants)


def of_model(question: Question) -> Iterator[str]:
    """Yield the lines about the model: its size, and its operations."""
    config, sizes, num_ranks = question.config, question.sizes, question.num_ranks
    model = model_on_meta(config, sizes)
    own = max(slots_of_ranks(config, ImaginedWorld.of(config, num_ranks)))
    slots = f"{config.num_slots:,} {config.slots_key[1]}"
    if config.units_per_slot > 1:
        slots = f"{config.global_batch_size:,} {kind_of_arch(config.arch).unit} in {slots}"
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    yield f"arch={config.arch.name} parallel={config.parallel.name} on {ranks}, {slots}, {own:,} on a rank"
    yield f"sizes of the data: {sizes}"
    in_blocks = sum(weight.numel() for weight in model.block_weights())
    rows = f"; {model.puzzle_embedding.weight.numel():,} in the puzzle table" if model.puzzle_embedding else ""
    yield f"parameters: {num_parameters(config, sizes):,}, of which {in_blocks:,} in blocks{rows}"
    yield from _flops(question)


def _flops(question: Question) -> Iterator[str]:
    """Yield the line on operations, at the end of a run, and if a rate was typed the time."""
    config, sizes = question.config, question.sizes
    kind = kind_of_arch(config.arch)
    of_part = flops_of_parts(config, sizes, kind.usual_depth(config))
    flops = sum(of_part.values())
    each = ", ".join(f"{_si(flops / number)} for {what}" for what, number in kind.parts_of_batch(config, sizes).items())
    names = {FORWARD: "forward", BACKWARD: "backward", NO_GRAD: "without gradient"}
    shares = ", ".join(f"{names[part]} {n / sum(of_part.values()):.0%}" for part, n in of_part.items() if n)
    yield f"FLOPs: {each} ({shares}); {_si(flops)} for a step"
    if question.rate:
        seconds, num_steps = flops / question.rate / question.num_ranks, config.max_steps or 1000
        hours = num_steps * seconds / 3600
        yield f"time: {seconds:.3g} s for a step, {hours:.3g} hours for {num_steps:,} steps without evaluations"


def _of_rank(question: Question, variants: Variants) -> Iterator[str]:
    """Yield the memory of a rank by part, a column for each kind of activation checkpointing."""
    own = question.config.arch.activation_checkpointing
    footprints = [variants.asked(each) for each in _CHECKPOINTINGS]
    yield f"memory of a rank in GB (10^9 bytes), with grad_accumulation={question.config.grad_accumulation}:"
    yield _row("  arch.activation_checkpointing=", [f"{each}{' *' * (each == own)}" for each in _CHECKPOINTINGS])
    for part in PARTS:
        if any(values := [footprint.parts[part] for footprint in footprints]):
            yield _row(f"  {part}", [gb(value) for value in values])
    if footprints[0].on_host:
        yield _row("  beside it, on the host", [gb(footprint.on_host) for footprint in footprints])
    yield _row("  most at a time", [gb(footprint.peak) for footprint in footprints])


def _of_fits(question: Question, variants: Variants) -> Iterator[str]:
    """Yield what would fit, and the smallest change that makes the run fit."""
    own, memory, tried = question.config.parallel.name, f"{question.memory / 1e9:g} GB", list[Variant]()
    yield f"what fits into {memory}, of which a tenth stays free (/4: with grad_accumulation=4; in brackets: too much)"
    yield _row("  parallel=", list(_CHECKPOINTINGS))
    for name in sorted(choices("parallel"), key=lambda name: name != own):
        try:
            row = variants.row(name)
        except UserError as error:
            yield textwrap.fill(f"  {name}: no; {error}", 118, subsequent_indent=" " * (len(name) + 4))
            continue
        tried += row
        head = " ".join([name, *_degree(row[0].parallel, question), *(["*"] if name == own else [])])
        yield _row(f"  {head}", [_cell(each, question.limit) for each in row])
    yield "* as asked"
    peak = variants.asked().peak
    if peak <= question.limit:
        yield f"the run fits: {gb(peak)} of {memory}"
    elif best := smallest_change(tried, question):
        yield f"the run does not fit: {gb(peak)} of {memory}; it would with {' '.join(overrides_of(best, question))}"
    else:
        yield f"the run does not fit: {gb(peak)} of {memory}; take more ranks, or a smaller batch or model"
    yield "not counted: what CUDA and NCCL take for themselves, and data that data_on keeps on the device"


def _cell(variant: Variant, limit: float) -> str:
    value = gb(variant.footprint.peak)
    if variant.footprint.peak > limit:
        return f"({value})"
    return value if variant.grad_accumulation == 1 else f"{value} /{variant.grad_accumulation:<3}"


def _row(head: str, cells: list[str]) -> str:
    return f"{head:<32}" + "".join(f"{cell:>14}" for cell in cells)


def gb(number: float) -> str:
    """Return bytes as GB, with three digits if they are few."""
    return f"{number / 1e9:,.{2 if number >= 1e8 else 3}f}"


def _si(number: float) -> str:
    """Return a number with three digits and a unit, such as 36.7 G."""
    power = max(0, min(5, int(math.log10(number)) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {' kMGTP'[power]}".rstrip()
