"""Count the memory that a rank of a training run needs, without that memory and without the rank.

The forward and the backward pass of one microbatch run on the meta device, whose tensors have no
memory, and so does the update. What a strategy leaves to a rank of the rest is divided by the sizes
of its axes.
"""

# B = batch, N = heads, T = positions of queries, S = positions of keys, H = head size

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.model import Model
from models.parallel.ddp import DDPConfig
from models.parallel.fsdp import ShardingConfig
from models.parallel.layout import Layout
from models.parallel.pipeline import PipelineConfig
from models.parallel.tensor import take_shapes
from training.config import PretrainConfig
from training.data import AnySizes, model_on_meta, require_whole_shares, slots_of_ranks
from training.kinds import kind_of_arch
from training.state import optimizers_of
from utils.ranks.config import Axes
from utils.ranks.setup import pick_weights
from utils.ranks.world import World

WEIGHTS, GATHERED, GRADIENTS = "weights", "gathered for a call", "gradients"
MOMENTS, AVERAGE, TABLE = "optimizer's moments", "average (ema)", "puzzle table"
CARRY, ACTIVATIONS, UPDATE = "carry and batch", "activations", "more for the update"
PARTS = (WEIGHTS, GATHERED, GRADIENTS, MOMENTS, AVERAGE, TABLE, CARRY, ACTIVATIONS, UPDATE)
Bytes = dict[str, int]
"""The memory of a rank at its peak, in bytes, by the names of PARTS."""

# A step runs for at most so many tokens of text, because its loss goes through many chunks; or so
# many slots of puzzles.
_MOST_UNITS = 2**15


def imagined_world(config: PretrainConfig, num_ranks: int) -> World:
    """Return ranks that nobody started, of which only their number and their shares are known."""
    axes = config.parallel.axes(num_ranks) or Axes()
    num_shares = axes.replicate * axes.shard
    weights = pick_weights(config.dist.rank_weights, num_shares)
    world = World(size=num_ranks, device=torch.device("meta"), data_size=num_shares, share_weights=weights)
    require_whole_shares(config, world)
    return world


class Footprints:
    """Counts the memory of a rank for the variants of a run. What they share is counted once."""

    def __init__(self, sizes: AnySizes, num_ranks: int) -> None:
        self._sizes, self._num_ranks = sizes, num_ranks
        self._steps: dict[Any, Any] = {}

    def of(self, config: PretrainConfig) -> Bytes:
        """Return the memory of the rank that has the most slots, or the first of a pipeline.

        Args:
            config: differs from that of other calls only in parallel, grad_accumulation and
                activation_checkpointing.
        """
        parallel = config.parallel
        world, axes = imagined_world(config, self._num_ranks), parallel.axes(self._num_ranks) or Axes()
        parts = _held(config, self._sizes, world, axes)
        num_slots, num_parts = max(slots_of_ranks(config, world)), parallel.num_microbatches(config.grad_accumulation)
        most = min(num_slots, max(2, _MOST_UNITS // config.units_per_slot))
        few = max(1, most // 2)
        of_few, of_most = (self._of_step(config, axes, n) for n in (few, most))
        # Memory grows evenly with the slots. So two measurements are enough for any number.
        peak, left, given = of_most + (num_slots / num_parts - most) * (of_most - of_few) / max(1, most - few)
        if isinstance(parallel, PipelineConfig):
            step = peak * _under_way(parallel, axes.model) / axes.model
        else:
            step = peak + (num_parts - 1) * left
        parts |= {CARRY: round(num_parts * given), ACTIVATIONS: round(step)}
        # The update begins when activations and gathered weights are gone.
        parts[UPDATE] = max(0, parts[UPDATE] - parts[ACTIVATIONS] - parts[GATHERED])
        return parts

    def _of_step(self, config: PretrainConfig, axes: Axes, num_slots: int) -> Any:
        """Run the forward and the backward pass of some slots, where gradients are there before.

        Returns:
            Bytes: the most at a time; what the pass leaves; and carry and batch.
        """
        parallel = config.parallel
        degree = 1 if isinstance(parallel, PipelineConfig) else axes.model
        is_cast = isinstance(parallel, ShardingConfig) and parallel.param_dtype == "forward_dtype"
        key = config.arch.activation_checkpointing, degree, is_cast, num_slots
        if key not in self._steps:
            model = model_on_meta(config, self._sizes)
            take_shapes(model, degree)
            for block in model.blocks() if is_cast else ():
                block.to(model.dtype)
            example_step = kind_of_arch(config.arch).example_step
            carry, batch, settings = example_step(model, config, self._sizes, num_slots, torch.device("meta"))
            given = [] if carry is None else [*carry.tensors().values(), *batch.values()]
            if carry is None:
                batch.apply(given.append)
            layout: Layout = Layout(model, World.single("meta"))
            with counting([*model.parameters(), *model.buffers(), *_gradients(model), *given]) as allocations:
                result = layout.forward_backward(carry, batch, settings)
                left = allocations.live
            del result
            self._steps[key] = np.array([allocations.peak, left, num_bytes(given)])
        return self._steps[key]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _trained(model: Model) -> list[Tensor]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _gradients(model: Model) -> list[Tensor]:
    """Give every trained weight a gradient, and return the gradients."""
    for weight in _trained(model):
        weight.grad = torch.empty_like(weight)
    return [weight.grad for weight in _trained(model) if weight.grad is not None]


def _under_way(parallel: PipelineConfig, length: int) -> float:
    """Return how many microbatches the first rank of a pipeline keeps at once, to go back."""
    if parallel.schedule == "gpipe":
        return parallel.microbatches
    per_rank = parallel.num_stages(length) // length
    stages = (per_rank - 1) * length + (2 * length - 1 if per_rank > 1 else length)
    return min(parallel.microbatches, stages / per_rank)


def _held(config: PretrainConfig, sizes: AnySizes, world: World, axes: Axes) -> Bytes:
    """Return what a rank holds of the model, and what the update takes for a moment."""
    model, parallel = model_on_meta(config, sizes), config.parallel
    is_pipeline, is_sharding = isinstance(parallel, PipelineConfig), isinstance(parallel, ShardingConfig)
    # Whether the device can offload, and the backend sum bfloat16, is known where the run starts.
    unknown = {"cpu_offload": False, "reduce_dtype": "float32"} if is_sharding else {}
    parallel.model_copy(update=unknown).require_support(model, world)
    if not is_pipeline:
        take_shapes(model, axes.model)
    in_blocks = {id(weight) for weight in model.block_weights()}
    num_shards = axes.shard * axes.model if is_pipeline else axes.shard

    def own(tensors: Iterable[Tensor]) -> int:
        # The ends of a pipeline are whole.
        return sum(t.nbytes // (1 if is_pipeline and id(t) not in in_blocks else num_shards) for t in tensors)

    optimizers, gradients = optimizers_of(config, model), _gradients(model)
    moments = list(optimizers.export_state(model).values())
    with counting([*model.parameters(), *gradients, *moments]) as allocations:
        optimizers.step(1.0)
    weights, trained = own(model.parameters()), own(_trained(model))
    share = trained / max(1, num_bytes(_trained(model)))
    held = {WEIGHTS: weights, GRADIENTS: trained, MOMENTS: round(share * num_bytes(moments)), AVERAGE: weights}
    held[UPDATE] = round(share * allocations.peak)
    if isinstance(parallel, ShardingConfig) and parallel.cpu_offload:
        held = dict.fromkeys(held, 0)  # on the host
    parts = dict.fromkeys(PARTS, 0) | held
    table = num_bytes([model.puzzle_embedding.weight]) if model.puzzle_embedding is not None else 0
    parts[WEIGHTS] += num_bytes(model.buffers()) - table
    parts[TABLE] = -(-table // world.data_size) if parallel.puzzle_table == "sharded" else table
    parts[AVERAGE] = parts[AVERAGE] + parts[TABLE] if config.ema else 0
    parts[GATHERED], whole_gradients = _gathered(model, config, axes)
    parts[GRADIENTS] += whole_gradients
    return parts


def _gathered(model: Model, config: PretrainConfig, axes: Axes) -> tuple[int, int]:
    """Return the bytes of weights and of gradients that a rank has beside its own shards.

    FSDP gathers embeddings and heads for the whole step, and each block for its call, while it
    gathers the next one. It sums the gradients of a block while those of the next one come. Before
    the last microbatch it keeps the gradients of all.
    """
    parallel, in_blocks, all_trained = config.parallel, num_bytes(model.block_weights()), num_bytes(_trained(model))
    if isinstance(parallel, PipelineConfig) and parallel.shard > 1:  # blocks stay whole for all microbatches
        return in_blocks // axes.model, in_blocks // axes.model
    if isinstance(parallel, DDPConfig) and not parallel.gradient_as_bucket_view:
        return 0, all_trained
    if not isinstance(parallel, ShardingConfig):
        return 0, 0
    rest = num_bytes(model.parameters()) - in_blocks
    two_blocks = sum(sorted(num_bytes(block.parameters()) for block in model.blocks())[-2:])
    gathered = two_blocks if parallel.reshard_after_forward else in_blocks
    if parallel.param_dtype == "forward_dtype":
        gathered = gathered * model.dtype.itemsize // 4
    return rest + gathered, all_trained if config.grad_accumulation > 1 else min(rest + two_blocks, all_trained)


# ---- tensors without memory ---------------------------------------------------------------------


@contextmanager
def counting(known: Iterable[Tensor]) -> Iterator["Allocations"]:
    """Make new tensors on the meta device, and count them.

    Attention takes a fused kernel, as devices do, which keeps no scores.
    """
    own = F.scaled_dot_product_attention
    # A mode can't replace the kernel: modes are off where the backward pass computes activations
    # again.
    F.scaled_dot_product_attention = _attend  # type: ignore[assignment]
    try:
        with torch.device("meta"), Allocations(known) as allocations:
            yield allocations
    finally:
        F.scaled_dot_product_attention = own


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages that are made inside, as long as they live.

    Args:
        known: tensors that were there before and live on. They do not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._remove, storage._cdata)
        return result

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _attend(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=q_BNTH.dtype).masked_fill(~attn_mask, -torch.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended: Tensor = kernel(q_BNTH, k_BNSH, v_BNSH, 0.0, is_causal, attn_mask=bias)[0]
    return attended
