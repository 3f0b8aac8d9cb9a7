"""Say what a run would take before it is started: `pretrain.py --dry-run`.

Nothing is allocated and no other rank is started. A laptop can ask about 64 GPUs.
"""

import difflib
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from models import shapes_of
from models.model import Checkpointing
from models.parallel import ParallelConfig
from models.parallel.pipeline import PipelineConfig
from models.text.config import LONGEST_RUN, TextConfig
from training.arch_of_recipe import note_on_arch
from training.config import PretrainConfig
from training.data import (
    VOCAB_MULTIPLE,
    AnySizes,
    Sizes,
    TextSizes,
    slots_of_ranks,
)
from training.flops import flops_of_parts, flops_of_text
from training.footprint import GRADIENTS, PARTS, Footprint, Footprints, ImaginedWorld
from training.kinds import kind_of_arch
from training.precision import with_forward_dtype
from training.splits import open_own
from training.trained import read_config_of_new_run
from utils.command_line import read_config, validate
from utils.composing import Origin
from utils.config_files import choices
from utils.errors import UserError
from utils.perf.recording import BACKWARD, FORWARD, NO_GRAD
from utils.ranks.world import World

# What --dry-run takes beside the keys of a run, with the default. The last three are sizes of data,
# which the data tell if they are there.
_MEMORY_GB = 80.0
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
    rate: float | None
    overrides: tuple[str, ...]

    @staticmethod
    def read(typed: list[str], num_ranks: int) -> "Question":
        """Read a command line.

        Args:
            typed: overrides, with ranks, memory_gb, tflops and sizes of data among them.
            num_ranks: how many ranks there are if the command line does not say it.

        Raises:
            UserError: A key or a value is wrong, or the sizes of the data are not known.
        """
        own = {key: value for key, _, value in (each.partition("=") for each in typed) if key in _OWN_KEYS}
        overrides = [each for each in typed if each.partition("=")[0] not in _OWN_KEYS]
        for key in (each.partition("=")[0] for each in overrides):
            if key not in PretrainConfig.model_fields and (close := difflib.get_close_matches(key, _OWN_KEYS, 1, 0.8)):
                raise UserError(f"unknown key {key!r}; did you mean {close[0]}?")
        config = validate(PretrainConfig, read_config_of_new_run("pretrain", overrides), Origin("pretrain", overrides))
        if config.resume is not None:
            raise UserError(f"resume={config.resume}: --dry-run tells of a new run; leave resume out")
        is_auto_on_gpu = config.arch.forward_dtype == "auto" and config.device != "cpu"
        dtype = {"forward_dtype": "bfloat16"} if is_auto_on_gpu else {}
        arch = with_forward_dtype(config.arch.model_copy(update=dtype), World.single())
        config = config.model_copy(update={"arch": arch})
        numbers = {key: _number(key, value) for key, value in own.items()}
        return Question(
            config,
            _sizes(config, {key: int(number) for key, number in numbers.items() if key in _SIZES}),
            int(numbers.get("ranks", num_ranks)),
            numbers.get("memory_gb", _MEMORY_GB) * 1e9,
            numbers["tflops"] * 1e12 if "tflops" in numbers else None,
            tuple(overrides),
        )

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cpu" if self.config.device == "cpu" else "cuda"

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
    is_text = config.arch.kind == "text"
    needed = ("vocab_size",) if is_text else _SIZES
    if missing := [key for key in needed if key not in typed]:
        try:
            of_data: AnySizes = kind_of_arch(config.arch).sizes.of(open_own(config, "train"))
        except UserError as error:
            example = {"seq_len": 81, "vocab_size": 32000 if is_text else 11, "num_puzzle_identifiers": 1001}
            keys = " ".join(f"{key}={example[key]}" for key in missing)
            raise UserError(
                f"--dry-run needs the sizes of the data, which can't be opened ({error}); give data_path=... of data "
                f"that are there, or the sizes themselves, such as {keys}"
            ) from error
    elif is_text:  # without seq_len, a sequence fills a row
        row = config.global_batch_size // config.rows_per_step
        of_data = TextSizes(0, row, row, tokenizer="unknown", special_tokens={})
    else:
        of_data = Sizes(**typed)
    if isinstance(of_data, Sizes):
        return replace(of_data, **typed)
    if "num_puzzle_identifiers" in typed:
        raise UserError(f"num_puzzle_identifiers={typed['num_puzzle_identifiers']}: text has no puzzles; leave it out")
    length, row = typed.get("seq_len", of_data.mean_context), config.global_batch_size // config.rows_per_step
    if length > row:
        what = f"seq_len={length:,}" if "seq_len" in typed else f"a sequence of the data, of {length:,} tokens,"
        raise UserError(
            f"{what} does not fit into a row of {row:,} tokens; raise global_batch_size, or lower rows_per_step"
        )
    vocab_size = -(-typed.get("vocab_size", of_data.vocab_size) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return replace(of_data, vocab_size=vocab_size, mean_context=length)


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
        self._footprints = Footprints(question.config, question.sizes, question.num_ranks, question.device)

    def asked(self, checkpointing: Checkpointing | None = None) -> Footprint:
        """Return what the run takes as it was asked for."""
        return self._footprints.of(checkpointing=checkpointing)

    def with_each_checkpointing(self) -> list[Variant]:
        """Return the run as it was asked for, with each activation checkpointing."""
        config = self._question.config
        return [Variant(config.parallel, each, config.grad_accumulation, self.asked(each)) for each in _CHECKPOINTINGS]

    def row(self, name: str) -> list[Variant]:
        """Return the leanest variants of a strategy, one for each activation checkpointing.

        The first of `_degrees` that works is taken.

        Raises:
            UserError: The strategy can't work with this model or these ranks.
        """
        if name == "pipeline":  # before the degrees, because none of them helps a model that is no stack
            question = self._question
            PipelineConfig.require_stack(shapes_of(question.config.arch, **question.sizes.of_model()))
        mistake: UserError | None = None
        for parallel in self._degrees(name):
            try:
                return [self._leanest(parallel, each) for each in _CHECKPOINTINGS]
            except UserError as error:
                mistake = error
        assert mistake is not None
        raise mistake

    def _degrees(self, name: str) -> Iterator[ParallelConfig]:
        """Yield the options of a strategy that are worth a try.

        The run's own strategy has those of the run. Another strategy has its defaults, and then
        other degrees, because the default degrees may not suit the model's heads or blocks.
        """
        config, num_ranks = self._question.config, self._question.num_ranks
        if name == config.parallel.name:
            yield config.parallel
            return
        key = _DEGREES.get(name)
        others = [n for n in range(num_ranks, 1, -1) if num_ranks % n == 0] if key else []
        for degree in (None, *others):
            typed = [f"parallel={name}", *([f"parallel.{key}={degree}"] if degree else [])]
            yield validate(PretrainConfig, read_config("pretrain", typed)).parallel

    def _leanest(self, parallel: ParallelConfig, checkpointing: Checkpointing) -> Variant:
        """Return the variant with the fewest microbatches that fits, else the one that needs least.

        Raises:
            UserError: The strategy can't work with this model or these ranks.
        """

        @cache
        def variant(number: int) -> Variant:
            return Variant(parallel, checkpointing, number, self._footprints.of(parallel, checkpointing, number))

        def fits(number: int) -> bool:
            return variant(number).footprint.peak <= self._question.limit

        numbers = self._microbatches(parallel)
        if fits(numbers[0]) or len(numbers) == 1:
            return variant(numbers[0])
        if not fits(numbers[-1]):
            return min(variant(numbers[0]), variant(numbers[-1]), key=lambda each: each.footprint.peak)
        low, high = 0, len(numbers) - 1  # the first does not fit, the last does
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(numbers[middle]) else (middle, high)
        return variant(numbers[high])

    def _microbatches(self, parallel: ParallelConfig) -> list[int]:
        """Return the numbers of microbatches into which the slots of each rank split."""
        config = self._question.config.model_copy(update={"parallel": parallel, "grad_accumulation": 1})
        slots = math.gcd(*slots_of_ranks(config, ImaginedWorld.of(config, self._question.num_ranks)))
        pieces = slots // parallel.microbatches if isinstance(parallel, PipelineConfig) else slots
        return [number for number in range(1, pieces + 1) if pieces % number == 0]


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
    config, sizes = question.config, question.sizes
    model = shapes_of(config.arch, **sizes.of_model())
    num_weights = sum(weight.numel() for weight in model.parameters())
    in_blocks = sum(weight.numel() for weight in model.block_weights())
    own = max(slots_of_ranks(config, ImaginedWorld.of(config, question.num_ranks)))
    _, slots = config.slots_key
    tokens = f"{config.global_batch_size:,} tokens in " if config.arch.kind == "text" else ""
    yield (
        f"arch={config.arch.name} parallel={config.parallel.name} on {_count(question.num_ranks, 'rank')}, "
        f"{tokens}{config.num_slots:,} {slots}, {own:,} on a rank"
    )
    table = model.puzzle_embedding
    rows = f"; {table.weight.numel():,} in the puzzle table" if table is not None else ""
    if isinstance(sizes, Sizes):
        yield "sizes of the data: " + ", ".join(f"{key} {value:,}" for key, value in sizes.as_dict().items())
    else:
        row = config.global_batch_size // config.rows_per_step
        of_row = " (as long as a row; seq_len=... gives another length)" if sizes.mean_context == row else ""
        yield f"sizes of the data: vocab_size {sizes.vocab_size:,}, sequences of {sizes.mean_context:,} tokens{of_row}"
    yield f"parameters: {num_weights:,}, of which {in_blocks:,} in blocks{rows}"
    yield from note_on_arch(list(question.overrides), config, sizes)
    yield from _flops(question)


def _flops(question: Question) -> Iterator[str]:
    """Yield the line on operations, at the end of a run, and if a rate was typed the time."""
    config, sizes, arch = question.config, question.sizes, question.config.arch
    if isinstance(sizes, TextSizes):
        assert isinstance(arch, TextConfig)
        of_step = flops_of_text(config, sizes, arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN))
        flops = sum(of_step.values())
        each = f"{_si(flops / config.global_batch_size)} for a token"
    else:
        one = config.model_copy(update={"global_batch_size": 1})
        of_step = flops_of_parts(one, sizes, config.puzzle_arch.depth)
        flops = sum(of_step.values()) * config.global_batch_size
        of_slot = flops / config.global_batch_size
        each = f"{_si(of_slot)} for a segment of a slot, {_si(of_slot / sizes.seq_len)} for each of its tokens"
    names = {FORWARD: "forward", BACKWARD: "backward", NO_GRAD: "without gradient"}
    total = sum(of_step.values())
    shares = ", ".join(f"{names[part]} {number / total:.0%}" for part, number in of_step.items() if number)
    yield f"FLOPs: {each} ({shares}); {_si(flops)} for a step"
    if question.rate:
        seconds, num_steps = flops / question.rate / question.num_ranks, config.max_steps or 1000
        hours = num_steps * seconds / 3600
        yield f"time: {seconds:.3g} s for a step, {hours:.3g} hours for {num_steps:,} steps without evaluations"


def _of_rank(question: Question, variants: Variants) -> Iterator[str]:
    """Yield the memory of a rank by part, a column for each kind of activation checkpointing."""
    own = question.config.arch.activation_checkpointing
    footprints = [variants.asked(each) for each in _CHECKPOINTINGS]
    accumulation = question.config.grad_accumulation
    yield f"memory of a rank in GB (10^9 bytes), with grad_accumulation={accumulation}:"
    heads = [f"{each}{' *' if each == own else ''}" for each in _CHECKPOINTINGS]
    yield _row("  arch.activation_checkpointing=", heads)
    for part in PARTS:
        values = [footprint.parts[part] for footprint in footprints]
        if any(values):
            yield _row(f"  {part}", [gb(value) for value in values])
    if any(footprint.on_host for footprint in footprints):
        yield _row("  beside it, on the host", [gb(footprint.on_host) for footprint in footprints])
    yield _row("  most at a time", [gb(footprint.peak) for footprint in footprints])
    yield _row("  which is in the", ["update" if footprint.is_update else "backward" for footprint in footprints])
    if stages := [footprint.stages for footprint in footprints if footprint.stages]:
        yield _row("  of the rank with", stages)
    if footprints[0].peak < sum(footprints[0].parts.values()) and footprints[0].parts[GRADIENTS]:
        yield "  (gradients come while activations go, so that not all is there at a time)"


def _of_fits(question: Question, variants: Variants) -> Iterator[str]:
    """Yield what would fit, and the smallest change that makes the run fit."""
    own, names = question.config.parallel.name, choices("parallel")
    memory = f"{question.memory / 1e9:g} GB"
    yield f"what fits into {memory}, of which a tenth stays free (/4: with grad_accumulation=4; in brackets: too much)"
    yield _row("  parallel=", list(_CHECKPOINTINGS))
    fitting = [each for each in variants.with_each_checkpointing() if each.footprint.peak <= question.limit]
    for name in [own, *(name for name in names if name != own)]:
        try:
            row = variants.row(name)
        except UserError as error:
            yield from textwrap.wrap(
                f"  {name}: no; {error}", 118, subsequent_indent=" " * (len(name) + 4), break_long_words=False
            )
            continue
        fitting += [each for each in row if each.footprint.peak <= question.limit]
        head = " ".join([name, *_degree(row[0].parallel, question), *(["*"] if name == own else [])])
        yield _row(f"  {head}", [_cell(each, question.limit) for each in row])
    yield "* as asked"
    peak = variants.asked().peak
    if peak <= question.limit:
        yield f"the run fits: {gb(peak)} of {memory}"
    elif fitting:
        best = smallest_change(fitting, question)
        yield f"the run does not fit: {gb(peak)} of {memory}; it would with {' '.join(overrides_of(best, question))}"
    else:
        yield f"the run does not fit: {gb(peak)} of {memory}; take more ranks, or a smaller batch or model"
    yield "not counted: what CUDA and NCCL take for themselves, and data that data_on keeps on the device"


def _cell(variant: Variant, limit: float) -> str:
    value = gb(variant.footprint.peak)
    if variant.footprint.peak > limit:
        return f"({value})"
    return value if variant.grad_accumulation == 1 else f"{value} /{variant.grad_accumulation:<3}"


def _degree(parallel: ParallelConfig, question: Question) -> list[str]:
    """Return the degree that another strategy than that of the run needs beside its defaults."""
    key = _DEGREES.get(parallel.name)
    value = getattr(parallel, key) if key and parallel.name != question.config.parallel.name else None
    return [] if value is None else [f"{key}={value}"]


def smallest_change(fitting: list[Variant], question: Question) -> Variant:
    """Return the variant with few overrides, and with little more work for a step.

    With FSDP more microbatches send more. Therefore they come after activation checkpointing.
    """

    def cost(variant: Variant) -> tuple[bool, int, int, int]:
        is_another = variant.parallel.name != question.config.parallel.name
        place = _CHECKPOINTINGS.index(variant.checkpointing)
        return is_another, len(overrides_of(variant, question)), variant.grad_accumulation, place

    return min(fitting, key=cost)


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


def _row(head: str, cells: list[str]) -> str:
    return f"{head:<32}" + "".join(f"{cell:>14}" for cell in cells)


def gb(number: float) -> str:
    """Return bytes as GB, with three digits if they are few."""
    return f"{number / 1e9:,.{2 if number >= 1e8 else 3}f}"


def _si(number: float) -> str:
    """Return a number with three digits and a unit, such as 36.7 G."""
    power = max(0, min(5, int(math.log10(number)) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {' kMGTP'[power]}".rstrip()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
