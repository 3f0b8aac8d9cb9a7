"""Count the memory that a rank of a training run needs, without that memory and without the rank.

The forward and the backward pass of one microbatch run on the meta device, and so does the update.
What a strategy leaves to a rank of the rest is divided by the sizes of its axes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from models.model import Checkpointing, Model
from models.parallel import ParallelConfig
from models.parallel.ddp import DDPConfig
from models.parallel.fsdp import ShardingConfig
from models.parallel.layout import Layout
from models.parallel.pipeline import PipelineConfig
from models.parallel.tensor import take_shapes
from optim.build import build_optimizers
from training.allocations import Allocations
from training.config import PretrainConfig
from training.data import AnySizes, require_whole_shares, slots_of_ranks
from training.kinds import kind_of_arch
from training.meta_model import model_on_meta
from utils.ranks.config import Axes
from utils.ranks.setup import pick_weights
from utils.ranks.world import World

T = TypeVar("T")

WEIGHTS, GATHERED, GRADIENTS = "weights", "gathered for a call", "gradients"
MOMENTS, AVERAGE, TABLE = "optimizer's moments", "average (ema)", "puzzle table"
CARRY, ACTIVATIONS, UPDATE = "carry and batch", "activations", "more for the update"
PARTS = (WEIGHTS, GATHERED, GRADIENTS, MOMENTS, AVERAGE, TABLE, CARRY, ACTIVATIONS, UPDATE)

# A step runs for at most so many tokens of text, because its loss goes through many chunks; or so
# many slots of puzzles.
_MOST_UNITS = 2**15


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank, in bytes.

    Attributes:
        parts: by the names of PARTS. Activations are the most that the forward and the backward
            pass take at a time, with what operators need for a moment.
        on_host: what parallel.cpu_offload keeps in the host's memory. It is in no part.
    """

    parts: dict[str, int]
    on_host: int

    @property
    def peak(self) -> int:
        """The most that is there at a time."""
        return sum(self.parts.values())


class ImaginedWorld(World):
    """Ranks that nobody started. Only their number and their shares of the slots are known."""

    @staticmethod
    def of(config: PretrainConfig, num_ranks: int) -> "ImaginedWorld":
        """Return the ranks of a run, seen from the one that has the most slots.

        Raises:
            UserError: The strategy can't lay the ranks out, or they can't share the batch.
        """
        axes = config.parallel.axes(num_ranks) or Axes()
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


class Footprints:
    """Counts the memory of a rank for a run and its variants. What they share is counted once.

    Args:
        config: of the run. Its forward_dtype is chosen already.
    """

    def __init__(self, config: PretrainConfig, sizes: AnySizes, num_ranks: int) -> None:
        self._config, self._sizes, self._num_ranks = config, sizes, num_ranks
        self._measured = cache(self._measure)

    def of(
        self,
        parallel: ParallelConfig | None = None,
        checkpointing: Checkpointing | None = None,
        grad_accumulation: int | None = None,
    ) -> Footprint:
        """Return the memory of the rank that has the most slots.

        In a pipeline it is the first rank, which has the most microbatches under way.

        Args:
            parallel, checkpointing, grad_accumulation: in place of those of the run.

        Raises:
            UserError: The strategy can't work with this model, or the ranks can't share the batch.
        """
        parallel = parallel or self._config.parallel
        changes = {"parallel": parallel, "grad_accumulation": grad_accumulation or self._config.grad_accumulation}
        config = self._config.model_copy(update=changes)
        world, axes = ImaginedWorld.of(config, self._num_ranks), parallel.axes(self._num_ranks) or Axes()
        num_slots, num_parts = max(slots_of_ranks(config, world)), parallel.num_microbatches(config.grad_accumulation)
        is_pipeline = isinstance(parallel, PipelineConfig)
        parts, update, on_host = _held(config, self._sizes, world, axes)
        peak, left, given = self._of_step(
            checkpointing or config.arch.activation_checkpointing,
            1 if is_pipeline else axes.model,
            isinstance(parallel, ShardingConfig) and parallel.param_dtype == "forward_dtype",
            num_slots,
            num_slots / num_parts,
        )
        if isinstance(parallel, PipelineConfig):
            step = peak * _under_way(parallel, axes.model) / axes.model
        else:
            step = peak + (num_parts - 1) * left
        parts |= {CARRY: round(num_parts * given), ACTIVATIONS: round(step)}
        parts[UPDATE] = max(0, update - parts[ACTIVATIONS] - parts[GATHERED])
        return Footprint({name: parts[name] for name in PARTS}, on_host)

    def _of_step(
        self, checkpointing: Checkpointing, degree: int, in_forward_dtype: bool, num_slots: int, num_wanted: float
    ) -> Any:
        """Return what `_measure` does, of a microbatch of a number of slots.

        Memory grows evenly with the slots. So two measurements are enough for any number.

        Args:
            num_slots: of a rank.
            num_wanted: of a microbatch.
        """
        most = min(num_slots, max(2, _MOST_UNITS // self._config.units_per_slot))
        few, many = (self._measured(checkpointing, degree, in_forward_dtype, n) for n in (max(1, most // 2), most))
        if most == 1:
            return many * num_wanted
        return many + (num_wanted - most) * (many - few) / (most - most // 2)

    def _measure(self, checkpointing: Checkpointing, degree: int, in_forward_dtype: bool, num_slots: int) -> Any:
        """Run the forward and the backward pass of some slots, where gradients are there before.

        Args:
            degree: how many ranks share each tensor (tp).
            in_forward_dtype: whether the weights of the blocks are called in forward_dtype.

        Returns:
            An array of three numbers of bytes: the most at a time; what the pass leaves, such as
            the next carry; and carry and batch.
        """
        arch = self._config.arch.model_copy(update={"activation_checkpointing": checkpointing})
        config = self._config.model_copy(update={"arch": arch})
        model = model_on_meta(config, self._sizes)
        take_shapes(model, degree)
        if in_forward_dtype:
            for block in model.blocks():
                block.to(model.dtype)
        example_step = kind_of_arch(arch).example_step
        carry, batch, settings = example_step(model, config, self._sizes, num_slots, torch.device("meta"))
        given = [] if carry is None else [*carry.tensors().values(), *batch.values()]
        if carry is None:
            batch.apply(given.append)
        allocations = Allocations([*model.parameters(), *model.buffers(), *_gradients(model), *given])
        layout: Layout = Layout(model, World.single("meta"))
        with allocations.counting():
            result = layout.forward_backward(carry, batch, settings)
            left = allocations.live
        del result
        return np.array([allocations.peak, left, num_bytes(given)])


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _gradients(model: nn.Module) -> list[Tensor]:
    """Give every trained weight a gradient, and return the gradients."""
    for weight in _trained(model):
        weight.grad = torch.empty_like(weight)
    return [weight.grad for weight in _trained(model) if weight.grad is not None]


def _under_way(parallel: PipelineConfig, length: int) -> float:
    """Return how many microbatches the first rank of a pipeline keeps at once, to go back."""
    if parallel.schedule == "gpipe":
        return parallel.microbatches
    per_rank = parallel.num_stages(length) // length
    return min(
        parallel.microbatches, ((per_rank - 1) * length + (2 * length - 1 if per_rank > 1 else length)) / per_rank
    )


def _held(config: PretrainConfig, sizes: AnySizes, world: World, axes: Axes) -> tuple[dict[str, int], int, int]:
    """Return what a rank holds of the model beside a step.

    Returns:
        The bytes by part, those of the update beside the parts, and those on the host.

    Raises:
        UserError: The strategy can't work with this model.
    """
    model, parallel = model_on_meta(config, sizes), config.parallel
    is_pipeline = isinstance(parallel, PipelineConfig)
    offloads = isinstance(parallel, ShardingConfig) and parallel.cpu_offload
    # Whether the device can offload is known where the run starts.
    (parallel.model_copy(update={"cpu_offload": False}) if offloads else parallel).require_support(model, world)
    if not is_pipeline:
        take_shapes(model, axes.model)
    in_blocks = {id(weight) for weight in model.block_weights()}
    num_shards = axes.shard * axes.model if is_pipeline else axes.shard

    def own(tensors: Iterable[Tensor]) -> int:
        """Return the bytes that the rank has of some weights. The ends of a pipeline are whole."""
        return sum(t.nbytes // (1 if is_pipeline and id(t) not in in_blocks else num_shards) for t in tensors)

    weights, trained, gradients = list(model.parameters()), _trained(model), _gradients(model)
    optimizers = build_optimizers(
        model,
        model.block_weights(),
        config.optim,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
    moments = list(optimizers.export_state(model).values())
    with (allocations := Allocations([*weights, *gradients, *moments])).counting():
        optimizers.step(1.0)
    share = own(trained) / max(1, num_bytes(trained))
    table = num_bytes([model.puzzle_embedding.weight]) if model.puzzle_embedding is not None else 0
    own_table = -(-table // world.data_size) if parallel.puzzle_table == "sharded" else table
    of_host = {
        WEIGHTS: own(weights),
        GRADIENTS: own(trained),
        MOMENTS: round(share * num_bytes(moments)),
        AVERAGE: own(weights) if config.ema else 0,
    }
    parts = dict.fromkeys(PARTS, 0) | ({} if offloads else of_host)
    parts[WEIGHTS] += num_bytes(model.buffers()) - table
    parts[TABLE] = own_table
    parts[AVERAGE] += own_table if config.ema else 0
    parts[GATHERED], whole_gradients = _gathered(model, config, axes)
    parts[GRADIENTS] += whole_gradients
    return parts, 0 if offloads else round(share * allocations.peak), sum(of_host.values()) if offloads else 0


def _gathered(model: Model, config: PretrainConfig, axes: Axes) -> tuple[int, int]:
    """Return the bytes of weights and of gradients that a rank has beside its own shards.

    FSDP gathers embeddings and heads for the whole step, and each block for its call, while it
    gathers the next one. It sums the gradients of a block while those of the next one come. Before
    the last microbatch it keeps the gradients of all.
    """
    parallel, in_blocks = config.parallel, num_bytes(model.block_weights())
    if isinstance(parallel, PipelineConfig) and parallel.shard > 1:  # blocks stay whole for all microbatches
        return in_blocks // axes.model, in_blocks // axes.model
    if isinstance(parallel, DDPConfig) and not parallel.gradient_as_bucket_view:
        return 0, num_bytes(_trained(model))
    if not isinstance(parallel, ShardingConfig):
        return 0, 0
    rest = num_bytes(model.parameters()) - in_blocks
    two_blocks = sum(sorted(num_bytes(block.parameters()) for block in model.blocks())[-2:])
    gathered = two_blocks if parallel.reshard_after_forward else in_blocks
    if parallel.param_dtype == "forward_dtype":
        gathered = gathered * model.dtype.itemsize // 4
    all_trained = num_bytes(_trained(model))
    return rest + gathered, all_trained if config.grad_accumulation > 1 else min(rest + two_blocks, all_trained)
