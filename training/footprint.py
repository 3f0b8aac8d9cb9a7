"""Count the memory that a rank of a training run needs, without that memory and without the rank.

One step runs on the meta device, whose tensors have a shape and no memory. Every storage that the
step makes counts for as long as it lives. What a strategy leaves to a rank follows from the axes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from dataset.schema import IGNORE_LABEL
from models import shapes_of
from models.act import ActSettings, empty_batch, initial_carry, loss_of_slots
from models.base import CommonConfig, RecursiveModel
from models.carry import Carry, Outputs
from models.model import Checkpointing, Model
from models.parallel import ParallelConfig
from models.parallel.ddp import DDPConfig
from models.parallel.fsdp import ShardingConfig
from models.parallel.layout import Layout
from models.parallel.pipeline import PipelineConfig, Stage, take_stages
from models.parallel.pipeline_puzzles import PuzzleStage
from models.parallel.pipeline_text import TextStage
from models.parallel.tensor import take_shapes
from models.text.config import LONGEST_RUN, TextConfig
from models.text.losses import chunked_cross_entropy
from models.text.model import TextModel
from models.text.objective import TextBatch, TextRow, TextSettings
from models.text.packing import Packing
from models.tokens import TokenModel
from optim.build import MuonConfig, build_optimizers
from optim.ema import EMA
from optim.muon import orthogonal
from optim.sparse_sign_sgd import sparse_sign_sgd_
from training.config import PretrainConfig
from training.data import AnySizes, Sizes, TextSizes, require_whole_shares, slots_of_ranks
from training.flops import no_seeds
from utils.perf.allocations import Allocations, SavedTensors, fused_attention
from utils.ranks.config import Axes
from utils.ranks.setup import pick_weights
from utils.ranks.world import World

T = TypeVar("T")

WEIGHTS, GATHERED, GRADIENTS = "weights", "gathered for a call", "gradients"
MOMENTS, AVERAGE, TABLE = "optimizer's moments", "average (ema)", "puzzle table"
CARRY, ACTIVATIONS, LOGITS = "carry and batch", "activations", "logits and loss"
BUFFERS, WORKING = "pipeline's buffers", "working memory"
PARTS = (WEIGHTS, GATHERED, GRADIENTS, MOMENTS, AVERAGE, TABLE, CARRY, BUFFERS, ACTIVATIONS, LOGITS, WORKING)


# A step runs for at most so many tokens of text, because its loss goes through many chunks. The
# memory of more rows is on a line with that of as many rows and of half as many.
_MOST_TOKENS = 2**15


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank, in bytes.

    Attributes:
        parts: by the names of PARTS. Activations and logits are what waits for the backward pass of
            one microbatch; in a pipeline, of all microbatches under way. Working memory is what
            operators need beside it for a moment.
        peak: the most that is there at a time. It may be less than the sum of the parts: with one
            microbatch on one rank, gradients come while activations go.
        is_update: whether that is while the weights are updated, and not in the backward pass.
        on_host: what parallel.cpu_offload keeps in the host's memory. It is in no part.
        stages: which rank of a pipeline was counted, such as "stage 1 of 8"; None without one.
    """

    parts: dict[str, int]
    peak: int
    is_update: bool
    on_host: int = 0
    stages: str | None = None


class ImaginedWorld(World):
    """Ranks that nobody started. Only their number and their shares of the slots are known."""

    @staticmethod
    def of(config: PretrainConfig, num_ranks: int) -> "ImaginedWorld":
        """Return the ranks of a run, seen from the one that has the most slots.

        Raises:
            UserError: The strategy can't lay the ranks out, or they can't share the batch.
        """
        axes = axes_of(config.parallel, num_ranks)
        num_shares = axes.replicate * axes.shard
        world = ImaginedWorld(
            size=num_ranks,
            device=torch.device("meta"),
            data_size=num_shares,
            share_weights=pick_weights(config.dist.rank_weights, num_shares),
        )
        require_whole_shares(config, world)
        return world

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_objects(self, value: T) -> list[T]:
        return [value]


def axes_of(parallel: ParallelConfig, num_ranks: int) -> Axes:
    return parallel.axes(num_ranks) or Axes()


class Footprints:
    """Counts the memory of a rank for a run and its variants. What they share is counted once.

    Args:
        config: of the run. Its forward_dtype is chosen already.
        device: on whose kernels the memory of attention depends.
    """

    def __init__(
        self, config: PretrainConfig, sizes: AnySizes, num_ranks: int, device: Literal["cuda", "cpu"] = "cuda"
    ) -> None:
        self._config, self._sizes, self._num_ranks, self._device = config, sizes, num_ranks, device
        self._held: dict[tuple[str, bool], _Held] = {}
        self._steps: dict[tuple[_Case, Checkpointing], _Step] = {}

    def of(
        self,
        parallel: ParallelConfig | None = None,
        checkpointing: Checkpointing | None = None,
        grad_accumulation: int | None = None,
    ) -> Footprint:
        """Return the memory of the rank that needs the most.

        Args:
            parallel, checkpointing, grad_accumulation: in place of those of the run.

        Raises:
            UserError: The strategy can't work with this model, or the ranks can't share the batch.
        """
        config = self._variant(parallel, checkpointing, grad_accumulation)
        if isinstance(config.parallel, PipelineConfig):
            return _heaviest_of_pipeline(config, self._sizes, self._num_ranks, self._device)
        world, num_parts = ImaginedWorld.of(config, self._num_ranks), config.grad_accumulation
        key = config.parallel.model_dump_json(), num_parts > 1
        if (held := self._held.get(key)) is None:
            held = self._held[key] = _Held.of(config, self._sizes, self._num_ranks, self._device)
        # With one microbatch on one rank, gradients come while activations go. Otherwise their
        # memory is there before.
        come_late = world.data_size == num_parts == 1 and not isinstance(config.parallel, ShardingConfig)
        num_slots = max(slots_of_ranks(config, world)) // num_parts
        case = _Case(
            num_slots, num_parts > 1, world.ranks_per_share, _gathers_in_forward_dtype(config.parallel), come_late
        )
        step = self._step(config, case)
        step_peak = step.peak + (num_parts - 1) * step.more_for_a_part
        return held.footprint(step.kept, num_parts * step.given, step_peak, gradients_come=come_late)

    def _step(self, config: PretrainConfig, case: "_Case") -> "_Step":
        key = case, config.arch.activation_checkpointing
        if key not in self._steps:
            most = max(2, _MOST_TOKENS // _tokens_of(config)) if config.arch.kind == "text" else case.num_slots
            if case.num_slots > most:
                few, many = (self._step(config, replace(case, num_slots=n)) for n in (most // 2, most))
                self._steps[key] = _Step.further(few, many, (case.num_slots - most) / (most - most // 2))
            else:
                self._steps[key] = _Step.of(config, self._sizes, case, self._device)
        return self._steps[key]

    def _variant(
        self, parallel: ParallelConfig | None, checkpointing: Checkpointing | None, grad_accumulation: int | None
    ) -> PretrainConfig:
        arch = self._config.arch
        if checkpointing is not None:
            arch = arch.model_copy(update={"activation_checkpointing": checkpointing})
        changes = {
            "parallel": parallel or self._config.parallel,
            "arch": arch,
            "grad_accumulation": grad_accumulation or self._config.grad_accumulation,
        }
        return self._config.model_copy(update=changes)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


# ---- forward and backward pass ------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """What the memory of a forward and backward pass depends on, beside the options of arch."""

    num_slots: int  # of a microbatch
    has_several_parts: bool  # whether it is one of several
    tensor_degree: int
    in_forward_dtype: bool  # whether the weights of the blocks are called in forward_dtype
    gradients_come: bool  # False: their memory was there before


@dataclass(frozen=True)
class _Step:
    """The bytes of the forward and backward pass of a microbatch on one rank.

    Attributes:
        kept: what waits for the backward pass, by part.
        given: batch and carry.
        peak: the most at a time, beside weights, batch and carry.
        more_for_a_part: what the step keeps to its end of each microbatch before the last.
    """

    kept: dict[str, int]
    given: int
    peak: int
    more_for_a_part: int

    @staticmethod
    def further(few: "_Step", many: "_Step", steps: float) -> "_Step":
        """Return a step so many times further away from `many` as that is from `few`."""

        def on(first: int, second: int) -> int:
            return round(second + steps * (second - first))

        kept = {name: on(few.kept[name], number) for name, number in many.kept.items()}
        given, peak = on(few.given, many.given), on(few.peak, many.peak)
        return _Step(kept, given, peak, on(few.more_for_a_part, many.more_for_a_part))

    @staticmethod
    def of(config: PretrainConfig, sizes: AnySizes, case: _Case, device: Literal["cuda", "cpu"]) -> "_Step":
        model = shapes_of(config.arch, **sizes.of_model())
        model.freeze("weights" if config.freeze_weights else config.freeze)
        take_shapes(model, case.tensor_degree)
        if case.in_forward_dtype:
            for block in model.blocks():
                block.to(model.dtype)
        own = [*model.parameters(), *model.buffers()]
        if not case.gradients_come:
            for weight in _trained(model):
                weight.grad = torch.empty_like(weight)
                own.append(weight.grad)

        def run(num_parts: int) -> tuple[dict[str, int], int, int]:
            """Return the bytes that are kept by part, of batch and carry, and at the peak."""
            carry, batch, settings, given = _inputs(model, config, sizes, case.num_slots, num_parts)
            layout: Layout = Layout(model, World.single("meta"), num_microbatches=num_parts)
            saved, allocations = SavedTensors(ACTIVATIONS, [*own, *given]), Allocations([*own, *given])
            at_head = before_head(model, lambda: saved.begin(LOGITS))
            with torch.device("meta"), fused_attention(device), at_head, saved.counting(), allocations:
                layout.forward_backward(carry, batch, settings)
            if case.gradients_come:
                model.zero_grad()
            return saved.bytes_of_parts, num_bytes(given), allocations.peak

        kept, given, peak = run(1)
        keeps_outputs = case.has_several_parts and isinstance(model, RecursiveModel)
        more_for_a_part = run(2)[2] - peak if keeps_outputs else 0
        if isinstance(model, TextModel):
            kept[LOGITS] = _of_text_loss(model, _tokens_of(config) * case.num_slots)
        return _Step(kept, given, peak, more_for_a_part)


def _inputs(
    model: Model, config: PretrainConfig, sizes: AnySizes, num_slots: int, num_parts: int
) -> tuple[Carry | None, Any, Any, list[Tensor]]:
    """Return what a layout takes for a step, on the meta device, and the tensors of it.

    Args:
        num_slots: of each part: slots of puzzles, or rows of text.
    """
    meta, arch = torch.device("meta"), config.arch
    if isinstance(model, RecursiveModel):
        assert isinstance(arch, CommonConfig) and isinstance(sizes, Sizes)
        batch = empty_batch(num_slots * num_parts, sizes.seq_len, meta)
        carry = initial_carry(model, batch, training=True)
        settings = ActSettings(
            arch.depth,
            arch.loss,
            IGNORE_LABEL,
            config.global_batch_size,
            min_halt_steps_B=None,
            seeds_B=no_seeds(arch, num_slots * num_parts),
        )
        return carry, batch, settings, [*batch.values(), *carry.tensors().values()]
    assert isinstance(arch, TextConfig) and isinstance(sizes, TextSizes)
    row, given = _row(config, sizes, num_slots * _tokens_of(config)), list[Tensor]()

    def on_meta(tensor: Tensor) -> Tensor:
        given.append(tensor.to(meta, copy=True))
        return given[-1]

    rows = TextBatch([row.apply(on_meta) for _ in range(num_parts)], 1)
    # The calls with gradient are those of the end of a run, which are the most.
    return None, rows, TextSettings(arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN), IGNORE_LABEL), given


def _tokens_of(config: PretrainConfig) -> int:
    """Return the tokens of a row of text."""
    return config.global_batch_size // config.rows_per_step


def _row(config: PretrainConfig, sizes: TextSizes, num_tokens: int) -> TextRow:
    """Return a row that is full of sequences of the usual length, half of each an instruction."""
    length = min(sizes.mean_context, num_tokens)
    lengths = [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)
    sequences = [(max(1, each // 2), each - max(1, each // 2)) for each in lengths]
    tokens_N = torch.zeros(num_tokens, dtype=torch.int32)
    return TextRow(
        tokens_N, tokens_N, tokens_N, Packing(sequences, num_tokens, kernel=config.text_arch.attention_kernel)
    )


def _of_text_loss(model: TextModel, num_tokens: int) -> int:
    """Return the most bytes that the loss of a row takes, chunk by chunk. Freezes the model."""
    with torch.device("meta"):
        y_ND = torch.empty(num_tokens, model.config.hidden_size, dtype=model.dtype, requires_grad=True)
        labels_N = torch.zeros(num_tokens, dtype=torch.int32)
        y_ND.grad = torch.empty_like(y_ND)
        model.requires_grad_(False)
        with Allocations([y_ND, y_ND.grad, labels_N, *model.parameters()]) as allocations:
            loss, *_ = chunked_cross_entropy(
                y_ND, labels_N, model.logits, vocab_size=model.vocab_size, ignore_label=IGNORE_LABEL
            )
            loss.backward()
    return allocations.peak


@contextmanager
def before_head(model: Model, call: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever the head is about to compute logits."""
    if isinstance(model, TextModel):
        own = model.logits

        def logits(y_ND: Tensor) -> Tensor:
            call()
            return own(y_ND)

        model.logits = logits  # type: ignore[method-assign]
        yield
        del model.logits
    else:
        assert isinstance(model, RecursiveModel)
        hook = model.lm_head.register_forward_pre_hook(lambda *_: call())
        yield
        hook.remove()


# ---- the ranks of a pipeline ---------------------------------------------------------------------


def _heaviest_of_pipeline(
    config: PretrainConfig, sizes: AnySizes, num_ranks: int, device: Literal["cuda", "cpu"]
) -> Footprint:
    """Return the memory of the rank of a pipeline that needs the most.

    Beside the first and the last rank, one between them is tried: the first of those with the most
    blocks. It has less under way than the first rank, but it also receives activations.
    """
    assert isinstance(config.parallel, PipelineConfig)
    length = ImaginedWorld.of(config, num_ranks).ranks_per_share
    num_stages = config.parallel.num_stages(length)
    num_layers = len(shapes_of(config.arch, **sizes.of_model()).blocks())
    num_blocks = Counter(i * num_stages // num_layers % length for i in range(num_layers))
    between = max(range(1, length - 1), key=num_blocks.__getitem__, default=0)
    footprints = []
    for place in sorted({0, between, length - 1}):
        held = _Held.of(config, sizes, num_ranks, device, place)
        footprint = _of_place(held, config, sizes, num_ranks, place, device)
        numbers = " and ".join(str(i + 1) for i in range(place, num_stages, length))
        stages = f"stage{'s' if num_stages > length else ''} {numbers} of {num_stages}"
        footprints.append(replace(footprint, stages=stages))
    return max(footprints, key=lambda footprint: footprint.peak)


def _of_place(
    held: "_Held", config: PretrainConfig, sizes: AnySizes, num_ranks: int, place: int, device: Literal["cuda", "cpu"]
) -> Footprint:
    """Return the memory of a rank of a pipeline.

    Each stage of the rank runs one microbatch. What is alive after its forward pass counts as often
    as the schedule has microbatches under way there.
    """
    parallel, world = config.parallel, ImaginedWorld.of(config, num_ranks)
    assert isinstance(parallel, PipelineConfig)
    model, length = shapes_of(config.arch, **sizes.of_model()), world.ranks_per_share
    model.freeze("weights" if config.freeze_weights else config.freeze)
    stages = take_stages(model, _stage_class(model), parallel, length=length, place=place)
    num_slots = max(slots_of_ranks(config, world))
    num_in_microbatch = num_slots // parallel.num_microbatches(config.grad_accumulation)
    microbatch = _microbatch(model, config, sizes, num_in_microbatch)
    for weight in _trained(model):
        weight.grad = torch.empty_like(weight)
    grads = [weight.grad for weight in _trained(model) if weight.grad is not None]
    kept, working, buffers = dict.fromkeys((ACTIVATIONS, LOGITS), 0), 0, 0
    with torch.device("meta"):
        x = torch.empty(microbatch.shape, dtype=model.dtype, requires_grad=True)
        grad_of_out = torch.empty_like(x)
    for stage in stages:
        # The schedule has a buffer for each activation and each gradient that it receives. It keeps
        # all of them, and what the last stage returns, even while the weights are updated.
        returned = microbatch.returned if stage.is_last else 0
        received = x.nbytes * ((not stage.is_first) + (not stage.is_last))
        buffers += parallel.microbatches * (received + returned)
        x.grad = None
        allocations = Allocations([*model.parameters(), *model.buffers(), *microbatch.tensors, *grads, x, grad_of_out])
        with torch.device("meta"), fused_attention(device), allocations:
            # Any other stage's output is kept until the microbatch goes back.
            out = microbatch.run(stage, x)
            after_stage = allocations.live
            loss = microbatch.loss(out) if stage.is_last else None
            after_loss = allocations.live
            if loss is None:
                out.backward(grad_of_out)
            else:
                loss.backward()
        kept[ACTIVATIONS] += after_stage - returned
        kept[LOGITS] += after_loss - after_stage
        working = max(working, allocations.peak - after_loss)
        del out, loss
    under_way = _under_way(parallel, length, place) / len(stages)
    kept = {name: int(number * under_way) for name, number in kept.items()}
    step_peak = sum(kept.values()) + working
    if stages[-1].is_last:
        # The schedule joins what all microbatches returned, which copies it, when none is under
        # way any more. Puzzles need the logits of all parts of a step, text needs none.
        joined = parallel.microbatches * microbatch.returned
        of_parts = 0 if isinstance(model, TextModel) else (config.grad_accumulation - 1) * joined
        step_peak = of_parts + max(step_peak, joined)
        if isinstance(model, TextModel):
            kept[LOGITS] = _of_text_loss(model, num_in_microbatch * _tokens_of(config))
        kept[LOGITS] += of_parts
    given = microbatch.given * num_slots // num_in_microbatch
    return held.footprint({**kept, BUFFERS: buffers}, given, step_peak, gradients_come=False)


@dataclass(frozen=True)
class _Microbatch:
    """What the stages of a pipeline run, on the meta device.

    Attributes:
        tensors: of the microbatch; `given` are their bytes and those of their copies.
        shape: of what a stage hands to the next.
        run: gives the output of a stage. The first stage reads the microbatch instead of its input.
        loss: gives the loss of what the last stage returns.
        returned: the bytes of that.
    """

    tensors: list[Tensor]
    given: int
    shape: tuple[int, ...]
    run: Callable[[Any, Tensor], Any]
    loss: Callable[[Any], Tensor]
    returned: int


def _microbatch(model: Model, config: PretrainConfig, sizes: AnySizes, num_slots: int) -> _Microbatch:
    """Return a microbatch of so many slots, or rows of text."""
    carry, batch, settings, _ = _inputs(model, config, sizes, num_slots, 1)
    if isinstance(model, TextModel):
        (row,), number_1 = batch.rows, torch.zeros(1, dtype=torch.int64)
        num_tokens = len(row.inputs_N)

        def run(stage: TextStage, x_ND: Tensor) -> Tensor:
            stage.rows = [(row.positions_N, row.packing)]
            return stage(row.inputs_N if stage.is_first else x_ND, number_1)

        def loss(y_ND: Tensor) -> Tensor:
            return model.losses(y_ND, row.labels_N, IGNORE_LABEL)[0]

        tensors = [row.inputs_N, row.labels_N, row.positions_N]
        shape = num_tokens, model.config.hidden_size
        return _Microbatch(tensors, num_bytes(tensors), shape, run, loss, math.prod(shape) * model.dtype.itemsize)
    assert isinstance(model, TokenModel) and isinstance(sizes, Sizes)
    ids_B = batch["puzzle_identifiers"]
    carry = Carry({}, torch.ones_like(ids_B), torch.ones_like(ids_B).bool(), batch)

    def run_puzzles(stage: PuzzleStage, x_BTD: Tensor) -> Any:
        x = batch["inputs"] if stage.is_first else x_BTD
        return stage(x, ids_B if stage.is_first and model.puzzle_embedding is not None else None)

    def loss_of_puzzles(out: Any) -> Tensor:
        logits_BSV, q_B2 = out
        return loss_of_slots(Outputs(logits_BSV, q_B2[:, 0], q_B2[:, 1], None, None), carry, settings)[0]

    tensors = [*batch.values()]
    returned = num_slots * sizes.seq_len * sizes.vocab_size * model.dtype.itemsize
    shape_BTD = num_slots, model.num_positions, model.config.hidden_size
    # The carry takes over what is in the batch.
    return _Microbatch(tensors, 2 * num_bytes(tensors), shape_BTD, run_puzzles, loss_of_puzzles, returned)


def _stage_class(model: Model) -> type[Stage]:
    return TextStage if isinstance(model, TextModel) else PuzzleStage


def _under_way(parallel: PipelineConfig, length: int, place: int) -> int:
    """Return how many microbatches the stages of a rank together keep at once, to go back."""
    per_rank = parallel.num_stages(length) // length
    match parallel.schedule:
        case "gpipe":
            return parallel.microbatches
        case "1f1b":
            return min(parallel.microbatches, length - place)
        case "interleaved":
            in_round = parallel.microbatches // max(1, parallel.microbatches // length)
            return min(parallel.microbatches * per_rank, (per_rank - 1) * in_round + 2 * (length - 1 - place) + 1)


# ---- what is there between steps, and the update -------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """The bytes of what a rank holds of the model, and of its update.

    Attributes:
        parts: by the names of PARTS.
        own_gradients: those that are updated; parts[GRADIENTS] has those of the backward pass, too.
        update_peak: the most at a time while the weights are updated, beside the parts.
        on_host: what lies in the host's memory, and in no part.
    """

    parts: dict[str, int]
    own_gradients: int
    update_peak: int
    on_host: int

    @staticmethod
    def of(
        config: PretrainConfig, sizes: AnySizes, num_ranks: int, device: Literal["cuda", "cpu"], place: int = 0
    ) -> "_Held":
        """Count for a strategy.

        Args:
            place: of the rank in its pipeline.

        Raises:
            UserError: The strategy can't work with this model.
        """
        world, parallel = ImaginedWorld.of(config, num_ranks), config.parallel
        model, axes = shapes_of(config.arch, **sizes.of_model()), axes_of(config.parallel, num_ranks)
        # Whether the device can offload is known where the run starts.
        is_sharded = isinstance(parallel, ShardingConfig)
        (parallel.model_copy(update={"cpu_offload": False}) if is_sharded else parallel).require_support(model, world)
        model.freeze("weights" if config.freeze_weights else config.freeze)
        if isinstance(parallel, PipelineConfig):
            take_stages(model, _stage_class(model), parallel, length=world.ranks_per_share, place=place)
            of_muon = _of_gathered_matrices(model, config, axes.shard, device)
        else:
            of_muon = _of_gathered_matrices(model, config, axes.shard * axes.model, device)
            take_shapes(model, world.ranks_per_share)
        gathered, whole_gradients = _of_calls(model, config, axes.shard)
        _take_shards(model, parallel, axes)
        parts, on_host, update_peak = _of_update(model, config)
        own_gradients = parts[GRADIENTS]
        if isinstance(parallel, DDPConfig) and world.data_size > 1:  # in its buckets, and what PowerSGD left out
            copies = 1 + (not parallel.gradient_as_bucket_view)
            own_gradients *= copies
        parts |= {GATHERED: gathered, GRADIENTS: own_gradients + whole_gradients}
        return _Held(parts, own_gradients, update_peak if on_host else max(update_peak, of_muon), on_host)

    def footprint(self, kept: dict[str, int], given: int, step_peak: int, *, gradients_come: bool) -> Footprint:
        """Return the memory of a rank, with that of its forward and backward pass.

        Args:
            kept, given: as in _Step, but of the whole step.
            step_peak: the most of the forward and backward pass, beside the parts.
            gradients_come: whether the gradients are in step_peak.
        """
        parts = dict.fromkeys(PARTS, 0) | self.parts | kept | {CARRY: given}
        parts[WORKING] = max(0, step_peak - parts[ACTIVATIONS] - parts[LOGITS])
        always = sum(parts[name] for name in (WEIGHTS, MOMENTS, AVERAGE, TABLE, CARRY, BUFFERS))
        before = always + parts[GATHERED] + step_peak + (0 if gradients_come else parts[GRADIENTS])
        after = always + self.own_gradients + self.update_peak
        return Footprint(parts, max(before, after), is_update=after > before, on_host=self.on_host)


def _of_calls(model: Model, config: PretrainConfig, num_shards: int) -> tuple[int, int]:
    """Return the bytes of weights and of gradients that a rank has beside its own shards.

    FSDP gathers embeddings and heads for the whole step, and each block for its call, while it
    gathers the next one. It sums the gradients of a block while those of the next one come. Before
    the last microbatch it keeps the gradients of all. With cpu_offload, the shards of what is
    gathered or summed pass through the device.
    """
    parallel = config.parallel
    if isinstance(parallel, PipelineConfig) and parallel.shard > 1:  # blocks stay whole for all microbatches
        weights = model.block_weights()
        return num_bytes(weights), num_bytes(weight for weight in weights if weight.requires_grad)
    if not isinstance(parallel, ShardingConfig):
        return 0, 0
    in_blocks = {id(weight) for weight in model.block_weights()}
    rest = [weight for weight in model.parameters() if id(weight) not in in_blocks]
    blocks = sorted((num_bytes(block.parameters()) for block in model.blocks()), reverse=True)
    gathered = sum(blocks[:2]) if parallel.reshard_after_forward else sum(blocks)
    if parallel.param_dtype == "forward_dtype":
        gathered = gathered * model.dtype.itemsize // 4
    passing = max(num_bytes(rest), blocks[0]) // num_shards if parallel.cpu_offload else 0
    if config.grad_accumulation > 1:
        return num_bytes(rest) + gathered + passing, num_bytes(_trained(model)) + passing
    of_blocks = sum(blocks[:2]) if config.freeze == "none" else 0
    of_rest = num_bytes(weight for weight in rest if weight.requires_grad)
    return num_bytes(rest) + gathered + passing, of_rest + of_blocks + passing


def _gathers_in_forward_dtype(parallel: ParallelConfig) -> bool:
    return isinstance(parallel, ShardingConfig) and parallel.param_dtype == "forward_dtype"


def _take_shards(model: Model, parallel: ParallelConfig, axes: Axes) -> None:
    """Leave a model on the meta device the shards of one rank, in place.

    Its weights then have the shapes that are updated, and no forward pass is possible any more.
    """
    sharded: Iterable[nn.Module] = ()
    if isinstance(parallel, ShardingConfig):
        sharded = [model]
    elif isinstance(parallel, PipelineConfig):
        sharded = model.blocks()
    for whole in sharded:
        for module in whole.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(_shard(weight.detach(), axes.shard), weight.requires_grad))
    table, num_shares = model.puzzle_embedding, axes.replicate * axes.shard
    if table is not None and parallel.puzzle_table == "sharded":
        table.weight = _shard(table.weight, num_shares)


def _shard(tensor: Tensor, num_shards: int) -> Tensor:
    """Return a tensor like the first of the shards, which is the largest."""
    return torch.empty_like(tensor[: -(-len(tensor) // num_shards)])


def _of_gathered_matrices(model: Model, config: PretrainConfig, num_parts: int, device: Literal["cuda", "cpu"]) -> int:
    """Return the most bytes that Muon takes for a matrix of which each rank holds a part.

    Every rank gathers the whole matrix and orthogonalizes it.

    Args:
        model: with whole matrices.
    """
    if num_parts == 1 or not isinstance(config.optim, MuonConfig):
        return 0
    peak, dtype = 0, torch.bfloat16 if device == "cuda" else torch.float32
    in_blocks = list(model.block_weights())
    # Other strategies than FSDP leave embeddings and heads whole on every rank.
    in_parts = _trained(model) if isinstance(config.parallel, ShardingConfig) else in_blocks
    for shape in {weight.shape for weight in config.optim.takes(in_parts, in_blocks)}:
        with torch.device("meta"), Allocations([]) as allocations:
            whole = torch.empty(shape, dtype=dtype)
            orthogonal(whole, config.optim.muon_iterations, config.optim.muon_coefficients)
        peak = max(peak, allocations.peak + whole.nbytes // num_parts)
    return peak


def _of_update(model: Model, config: PretrainConfig) -> tuple[dict[str, int], int, int]:
    """Return what a rank always holds, and the most bytes beside it while the weights are updated.

    Args:
        model: with the shapes that the rank holds.

    Returns:
        The bytes by part, those on the host, and those of the update.
    """
    optimizers = build_optimizers(
        model,
        model.block_weights(),
        config.optim,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
    with torch.device("meta"):
        ema = EMA(model.trained_tensors()) if config.ema else None
    moments, average = optimizers.export_state(model).values(), ema.tensors() if ema else {}
    table = model.puzzle_embedding
    of_table = [table.weight] if table is not None else []
    for weight in _trained(model):
        weight.grad = torch.empty_like(weight)
    gradients = [weight.grad for weight in _trained(model) if weight.grad is not None]
    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    parts = {
        WEIGHTS: num_bytes(own.values()) - num_bytes(of_table),
        GRADIENTS: num_bytes(gradients),
        MOMENTS: num_bytes(moments),
        AVERAGE: num_bytes(average.values()),
        TABLE: num_bytes(of_table),
    }
    on_host = 0
    if offloads := isinstance(config.parallel, ShardingConfig) and config.parallel.cpu_offload:
        # The parameters and what belongs to them lie on the host, and the update runs there. The
        # device has the buffers, of which the puzzle table is one.
        names = {name for name, _ in model.named_parameters()}
        stays = {
            WEIGHTS: num_bytes(model.buffers()) - num_bytes(of_table),
            GRADIENTS: 0,
            MOMENTS: 0,
            AVERAGE: num_bytes(tensor for name, tensor in average.items() if name not in names),
        }
        on_host = sum(parts[name] - number for name, number in stays.items())
        parts |= stays
    with Allocations([*own.values(), *moments, *average.values(), *gradients]) as allocations:
        if table is not None and table.trainable:  # the gradients of the rows of all ranks' slots
            ids_B = torch.zeros(config.global_batch_size, dtype=torch.int32, device="meta")
            grad_BE = torch.empty(config.global_batch_size, table.weight.shape[1], device="meta")
            sparse_sign_sgd_(table.weight, ids_B, grad_BE, lr=0.0, weight_decay=0.0, world=World.single("meta"))
            del ids_B, grad_BE
        if not offloads:
            optimizers.step(1.0)
        if ema is not None:
            ema.update(config.ema_rate)
    return parts, on_host, allocations.peak
