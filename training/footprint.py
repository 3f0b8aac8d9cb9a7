"""Count the memory that a rank of a training run needs, without that memory and without the rank.

One step runs on the meta device, whose tensors have a shape and no memory. Every storage that the
step makes counts for as long as it lives. What a strategy leaves to a rank follows from the axes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from dataset.schema import IGNORE_LABEL
from models import ARCHS, ArchConfig
from models.act import ActSettings, empty_batch, initial_carry
from models.base import RecursiveModel
from models.model import Checkpointing
from models.parallel import ParallelConfig
from models.parallel.ddp import DDPConfig
from models.parallel.fsdp import ShardingConfig
from models.parallel.layout import Layout
from models.parallel.tensor import take_shapes
from optim.build import build_optimizers
from optim.ema import EMA
from optim.sparse_sign_sgd import sparse_sign_sgd_
from training.config import PretrainConfig
from training.data import Sizes, require_whole_shares, slots_of_ranks
from utils.dist.config import Axes
from utils.dist.setup import pick_weights
from utils.dist.world import World
from utils.perf.allocations import Allocations, SavedTensors, fused_attention

T = TypeVar("T")

WEIGHTS, GATHERED, GRADIENTS = "weights", "gathered for a call", "gradients"
MOMENTS, AVERAGE, TABLE = "optimizer's moments", "average (ema)", "puzzle table"
CARRY, ACTIVATIONS, LOGITS = "carry and batch", "activations", "logits and loss"
WORKING = "working memory"
PARTS = (WEIGHTS, GATHERED, GRADIENTS, MOMENTS, AVERAGE, TABLE, CARRY, ACTIVATIONS, LOGITS, WORKING)


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank, in bytes.

    Attributes:
        parts: by the names of PARTS. Activations and logits are what waits for the backward pass of
            one microbatch. Working memory is what operators need beside it for a moment.
        peak: the most that is there at a time. It may be less than the sum of the parts: with one
            microbatch on one rank, gradients come while activations go.
        is_update: whether that is while the weights are updated, and not in the backward pass.
    """

    parts: dict[str, int]
    peak: int
    is_update: bool


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


def meta_model(arch: ArchConfig, sizes: Sizes) -> RecursiveModel:
    """Return a whole model on the meta device. No machine is too small for it."""
    with torch.device("meta"):
        return ARCHS[type(arch)](arch, **sizes.as_dict())


class Footprints:
    """Counts the memory of a rank for a run and its variants. What they share is counted once.

    Args:
        config: of the run. Its forward_dtype is chosen already.
        device: on whose kernels the memory of attention depends.
    """

    def __init__(
        self, config: PretrainConfig, sizes: Sizes, num_ranks: int, device: Literal["cuda", "cpu"] = "cuda"
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
        world, num_parts = ImaginedWorld.of(config, self._num_ranks), config.grad_accumulation
        key = config.parallel.model_dump_json(), num_parts > 1
        if (held := self._held.get(key)) is None:
            held = self._held[key] = _Held.of(config, self._sizes, self._num_ranks)
        # With one microbatch on one rank, gradients come while activations go. Otherwise their
        # memory is there before.
        come_late = world.data_size == num_parts == 1 and not isinstance(config.parallel, ShardingConfig)
        num_slots = max(slots_of_ranks(config, world)) // num_parts
        case = _Case(
            num_slots, num_parts > 1, world.ranks_per_share, _gathers_in_forward_dtype(config.parallel), come_late
        )
        step_key = case, config.arch.activation_checkpointing
        if (step := self._steps.get(step_key)) is None:
            step = self._steps[step_key] = _Step.of(config, self._sizes, case, self._device)
        step_peak = step.peak + (num_parts - 1) * step.more_for_a_part
        parts = dict.fromkeys(PARTS, 0) | held.parts | step.kept | {CARRY: num_parts * step.given}
        parts[WORKING] = max(0, step_peak - parts[ACTIVATIONS] - parts[LOGITS])
        always = sum(parts[name] for name in (WEIGHTS, MOMENTS, AVERAGE, TABLE, CARRY))
        before = always + parts[GATHERED] + step_peak + (0 if come_late else parts[GRADIENTS])
        after = always + held.own_gradients + held.update_peak
        return Footprint(parts, max(before, after), is_update=after > before)

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
    def of(config: PretrainConfig, sizes: Sizes, case: _Case, device: Literal["cuda", "cpu"]) -> "_Step":
        arch, model = config.arch, meta_model(config.arch, sizes)
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
            batch = empty_batch(case.num_slots * num_parts, sizes.seq_len, torch.device("meta"))
            carry = initial_carry(model, batch)
            given = [*batch.values(), *carry.tensors().values()]
            settings = ActSettings(arch.depth, arch.loss, IGNORE_LABEL, config.global_batch_size, min_halt_steps_B=None)
            layout = Layout(model, World.single("meta"), num_microbatches=num_parts)
            saved, allocations = SavedTensors(ACTIVATIONS, [*own, *given]), Allocations([*own, *given])
            hook = model.lm_head.register_forward_pre_hook(lambda *_: saved.begin(LOGITS))
            with torch.device("meta"), fused_attention(device), saved.counting(), allocations:
                layout.forward_backward(carry, batch, settings)
            hook.remove()
            if case.gradients_come:
                model.zero_grad()
            return saved.bytes_of_parts, num_bytes(given), allocations.peak

        kept, given, peak = run(1)
        return _Step(kept, given, peak, run(2)[2] - peak if case.has_several_parts else 0)


# ---- what is there between steps, and the update -------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """The bytes of what a rank holds of the model, and of its update.

    Attributes:
        parts: by the names of PARTS.
        own_gradients: those that are updated; parts[GRADIENTS] has those of the backward pass, too.
        update_peak: the most at a time while the weights are updated, beside the parts.
    """

    parts: dict[str, int]
    own_gradients: int
    update_peak: int

    @staticmethod
    def of(config: PretrainConfig, sizes: Sizes, num_ranks: int) -> "_Held":
        """Count for a strategy.

        Raises:
            UserError: It can't work with this model.
        """
        world, parallel = ImaginedWorld.of(config, num_ranks), config.parallel
        model = meta_model(config.arch, sizes)
        # Whether the device can offload is known where the run starts.
        is_sharded = isinstance(parallel, ShardingConfig)
        (parallel.model_copy(update={"cpu_offload": False}) if is_sharded else parallel).require_support(model, world)
        model.freeze("weights" if config.freeze_weights else config.freeze)
        take_shapes(model, world.ranks_per_share)
        gathered, whole_gradients = _of_calls(model, config)
        _take_shards(model, parallel, axes_of(parallel, num_ranks))
        parts, update_peak = _of_update(model, config)
        own_gradients = parts[GRADIENTS]
        if isinstance(parallel, DDPConfig) and world.data_size > 1:  # in its buckets, and what PowerSGD left out
            copies = 1 + (not parallel.gradient_as_bucket_view) + (parallel.compression == "powersgd")
            own_gradients *= copies
        parts |= {GATHERED: gathered, GRADIENTS: own_gradients + whole_gradients}
        return _Held(parts, own_gradients, update_peak)


def _of_calls(model: RecursiveModel, config: PretrainConfig) -> tuple[int, int]:
    """Return the bytes of weights and of gradients that a rank has beside its own shards.

    FSDP gathers embeddings and heads for the whole step, and each block for its call, while it
    gathers the next one. It sums the gradients of a block while those of the next one come. Before
    the last microbatch it keeps the gradients of all.
    """
    parallel = config.parallel
    if not isinstance(parallel, ShardingConfig):
        return 0, 0
    in_blocks = {id(weight) for weight in model.block_weights()}
    rest = [weight for weight in model.parameters() if id(weight) not in in_blocks]
    blocks = sorted((num_bytes(block.parameters()) for block in model.blocks()), reverse=True)
    gathered = sum(blocks[:2]) if parallel.reshard_after_forward else sum(blocks)
    if parallel.param_dtype == "forward_dtype":
        gathered = gathered * model.dtype.itemsize // 4
    if config.grad_accumulation > 1:
        return num_bytes(rest) + gathered, num_bytes(_trained(model))
    of_blocks = sum(blocks[:2]) if config.freeze == "none" else 0
    return num_bytes(rest) + gathered, num_bytes(weight for weight in rest if weight.requires_grad) + of_blocks


def _gathers_in_forward_dtype(parallel: ParallelConfig) -> bool:
    return isinstance(parallel, ShardingConfig) and parallel.param_dtype == "forward_dtype"


def _take_shards(model: RecursiveModel, parallel: ParallelConfig, axes: Axes) -> None:
    """Leave a model on the meta device the shards of one rank, in place.

    Its weights then have the shapes that are updated, and no forward pass is possible any more.
    """
    if isinstance(parallel, ShardingConfig):
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(_shard(weight.detach(), axes.shard), weight.requires_grad))
    table, num_shares = model.puzzle_embedding, axes.replicate * axes.shard
    if table is not None and parallel.puzzle_table == "sharded":
        table.weight = _shard(table.weight, num_shares)


def _shard(tensor: Tensor, num_shards: int) -> Tensor:
    """Return a tensor like the first of the shards, which is the largest."""
    return torch.empty_like(tensor[: -(-len(tensor) // num_shards)])


def _of_update(model: RecursiveModel, config: PretrainConfig) -> tuple[dict[str, int], int]:
    """Return what a rank always holds, and the most bytes beside it while the weights are updated.

    Args:
        model: with the shapes that the rank holds.
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
    moments, average = optimizers.export_state(model).values(), ema.tensors().values() if ema else []
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
        AVERAGE: num_bytes(average),
        TABLE: num_bytes(of_table),
    }
    with Allocations([*own.values(), *moments, *average, *gradients]) as allocations:
        if table is not None and table.trainable:  # the gradients of the rows of all ranks' slots
            ids_B = torch.zeros(config.global_batch_size, dtype=torch.int32, device="meta")
            grad_BE = torch.empty(config.global_batch_size, table.weight.shape[1], device="meta")
            sparse_sign_sgd_(table.weight, ids_B, grad_BE, lr=0.0, weight_decay=0.0, world=World.single("meta"))
            del ids_B, grad_BE
        optimizers.step(1.0)
        if ema is not None:
            ema.update(config.ema_rate)
    return parts, allocations.peak
