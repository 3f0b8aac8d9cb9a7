"""Parallelism, applied to a model from outside: one line of YAML says how it lies over the ranks of a run.

ddp       every rank has the whole model and slots of its own; gradients are summed
fsdp      the same, but each rank keeps a part of every tensor only, and a block is gathered when it is called
hsdp      fsdp inside groups of ranks, ddp between them
tp        every rank has some heads and a part of each MLP, of all slots
fsdp_tp   tp inside groups of ranks, fsdp between them
pipeline  every rank has some blocks, of all slots (models/pipeline.py)
"""
# K = rows of the puzzle table, E = their size, C = columns of a weight

import math
import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from models.attention import Attention
from models.base import RecursiveModel
from models.block import Block
from models.layers import SwiGLU
from models.layout import Layout, LayoutConfig
from models.pipeline import PipelineConfig, PipelineLayout, require_pipeline
from models.puzzle_embedding import ShardedPuzzleEmbedding
from utils.config import Bool, Float, Int
from utils.dist.config import Axes
from utils.dist.world import World, local_part
from utils.errors import UserError

# ---- config ----------------------------------------------------------------------------------------------


class DDPConfig(LayoutConfig):
    """Every rank has the whole model. config/parallel/ddp.yaml explains the keys."""

    name: Literal["ddp"]
    bucket_cap_mb: Float = Field(gt=0)
    gradient_as_bucket_view: Bool
    static_graph: Bool
    find_unused_parameters: Bool
    compression: Literal["none", "fp16", "bf16", "powersgd"]
    powersgd_rank: Int = Field(ge=1)
    powersgd_start_step: Int = Field(ge=2)  # torch's bound

    def axes(self, num_ranks: int) -> Axes | None:
        return Axes(replicate=num_ranks) if num_ranks > 1 else None


class _ShardingConfig(LayoutConfig):
    """What fsdp, hsdp and fsdp_tp have in common; config/parallel/fsdp.yaml explains the keys."""

    reshard_after_forward: Bool
    param_dtype: Literal["float32", "forward_dtype"]
    reduce_dtype: Literal["float32", "bfloat16"]
    cpu_offload: Bool


class FSDPConfig(_ShardingConfig):
    """Every tensor is sharded over all ranks."""

    name: Literal["fsdp"]

    def axes(self, num_ranks: int) -> Axes:
        return Axes(shard=num_ranks)


class HSDPConfig(_ShardingConfig):
    """Every tensor is sharded over `shard` ranks, and `replicate` such groups hold the same."""

    name: Literal["hsdp"]
    replicate: Int | None = Field(ge=1)
    shard: Int | None = Field(ge=1)

    def axes(self, num_ranks: int) -> Axes:
        replicate, shard = _degrees(num_ranks, {"replicate": self.replicate, "shard": self.shard})
        return Axes(replicate=replicate, shard=shard)


def _has_all_rows(value: str) -> str:
    if value == "sharded":
        raise ValueError(
            "puzzle_table is sharded, over ranks that hold slots of their own, but all ranks of tp hold the same ones; "
            "set it to replicated, or take fsdp_tp"
        )
    return value


class TPConfig(LayoutConfig):
    """Heads and MLPs are split over all ranks. config/parallel/tp.yaml explains the keys."""

    name: Literal["tp"]

    _table = field_validator("puzzle_table")(_has_all_rows)

    def axes(self, num_ranks: int) -> Axes:
        return Axes(model=num_ranks)


class FSDPTPConfig(_ShardingConfig):
    """Heads and MLPs are split over `tensor` ranks, and the parts sharded over `shard` such groups."""

    name: Literal["fsdp_tp"]
    shard: Int | None = Field(ge=1)
    tensor: Int | None = Field(ge=1)

    def axes(self, num_ranks: int) -> Axes:
        shard, tensor = _degrees(num_ranks, {"shard": self.shard, "tensor": self.tensor})
        return Axes(shard=shard, model=tensor)


ParallelConfig = Annotated[
    DDPConfig | FSDPConfig | HSDPConfig | TPConfig | FSDPTPConfig | PipelineConfig, Field(discriminator="name")
]


def _degrees(num_ranks: int, given: dict[str, int | None]) -> tuple[int, int]:
    """Two degrees whose product is the number of ranks: those not given are filled in, as square as can be.

    Raises ValueError, naming the pairs that fit.
    """
    fitting = [(n, num_ranks // n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    matching = [
        pair for pair in fitting if all(want in (None, n) for want, n in zip(given.values(), pair, strict=True))
    ]
    if not matching:
        asked = " x ".join(f"{name} {want}" for name, want in given.items() if want is not None)
        raise ValueError(
            f"parallel: {asked} doesn't make {num_ranks} ranks; {' x '.join(given)} can be "
            f"{', '.join(f'{outer} x {inner}' for outer, inner in fitting)} (null is filled in), "
            "or start another number of ranks"
        )
    return min(matching, key=lambda pair: (abs(pair[0] - pair[1]), pair))


# ---- the strategies, in one function ---------------------------------------------------------------------


def parallelize(
    model: RecursiveModel, config: ParallelConfig, world: World, *, num_microbatches: int = 1, compile: bool = False
) -> Layout:
    """Lay the model out over the ranks of `world`, whose axes are the config's. Every rank.

    The order matters: the table is sharded while it is on the host, tensors are split before what is split is sharded,
    and what watches parameters (FSDP's and DDP's hooks, then the caller's optimizers) follows, since each step before
    puts other ones in their place. Compiling comes last: DDP makes a step of its own with another number of slots.

    Args:
        model: on the host, with initial weights that are final and equal on all ranks, and frozen where it shall be.
        num_microbatches: in how many parts a rank takes its slots.
        compile: torch.compile the stacks of blocks.

    Raises UserError as `require_strategy` does.
    """
    require_strategy(model, config, world)
    if isinstance(config, PipelineConfig):
        return PipelineLayout(model, config, world, num_microbatches=num_microbatches, compile=compile)
    tensor_degree = world.num_copies
    sharded_table = config.puzzle_table == "sharded" and world.data_size > 1 and model.puzzle_embedding is not None
    if sharded_table:
        _shard_table(model, world)  # before the device is asked to hold all of it
    model.to(world.device)
    if tensor_degree > 1:
        _split_tensors(model, world)
    layout: Layout
    if isinstance(config, _ShardingConfig):
        _shard(model, config, world)
        layout = FSDPLayout(model, world, num_microbatches=num_microbatches)
    elif isinstance(config, DDPConfig):
        layout = DDPLayout(model, config, world, num_microbatches=num_microbatches, sharded_table=sharded_table)
    else:
        layout = SplitLayout(model, world, num_microbatches=num_microbatches, lockstep=True)
    if compile:
        model.compile_levels()
    return layout


def require_strategy(model: RecursiveModel, config: ParallelConfig, world: World) -> None:
    """Raises UserError, which says what would fit, for what a strategy can't do with this model, device or backend.

    Every rank, and each finds the same.
    """
    if isinstance(config, PipelineConfig):
        require_pipeline(config, model, world.size)
    if isinstance(config, TPConfig | FSDPTPConfig):
        _require_splittable(model, world.num_copies)
    if isinstance(config, _ShardingConfig):
        if config.cpu_offload and world.device.type != "cuda":
            raise UserError(
                f"parallel.cpu_offload keeps what a CUDA device works with on its host, but the device is "
                f"{world.device.type}; set it to false"
            )
        if config.reduce_dtype == "bfloat16" and not _can_sum(torch.bfloat16, world):
            raise UserError(
                "parallel.reduce_dtype is bfloat16, which this backend can't sum; set it to float32, or dist.backend "
                "to another"
            )
    if isinstance(config, DDPConfig):
        if config.static_graph and (model.config.depth_curriculum or model.config.backprop_warmup_steps):
            raise UserError(
                "parallel.static_graph promises the same graph at every step, but arch.depth_curriculum and "
                "arch.backprop_warmup_steps change it; set static_graph to false"
            )
        if config.compression == "powersgd" and model.config.forward_dtype == "float16":
            raise UserError(
                "parallel.compression=powersgd keeps what it leaves out for the next step, and with "
                "arch.forward_dtype=float16 steps have scales of their own and some are skipped; take "
                "parallel.compression=fp16 or none, or arch.forward_dtype=bfloat16"
            )
        if config.compression in _DTYPES and not _can_sum(_DTYPES[config.compression], world):
            able = [name for name, dtype in _DTYPES.items() if _can_sum(dtype, world)]
            raise UserError(
                f"parallel.compression is {config.compression}, which this backend can't sum; "
                f"take one of {', '.join(['none', *able, 'powersgd'])}, or set dist.backend to another"
            )


# What gradients are rounded to by compression.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _can_sum(dtype: torch.dtype, world: World) -> bool:
    """Asked rather than known: it differs by backend, device and version (gloo has learnt bfloat16). Every rank."""
    try:
        world.sum_(torch.zeros(1, dtype=dtype, device=world.device))
    except RuntimeError as error:
        if "type" not in str(error).lower():  # "Invalid scalar type" and the like; anything else is a fault
            raise
        return False
    return True


def _require_splittable(model: RecursiveModel, degree: int) -> None:
    arch = model.config
    if arch.mlp != "swiglu" and degree > 1:
        why = "convolves its inner width" if arch.mlp == "conv_swiglu" else "normalises over its inner width"
        raise UserError(f"arch.mlp is {arch.mlp}, which {why}, and tp splits that; take arch.mlp=swiglu, or fsdp")
    sizes = {}
    for module in model.modules():
        if isinstance(module, Attention):
            sizes["arch.num_heads"] = module.num_heads
        elif isinstance(module, SwiGLU):
            sizes[f"the width of the MLP on {module.gate_up_proj.in_features}"] = module.down_proj.in_features
    if uneven := [f"{name} {size}" for name, size in sizes.items() if size % degree]:
        common = math.gcd(*sizes.values())
        fitting = [str(n) for n in range(1, min(common, 64) + 1) if common % n == 0]
        raise UserError(
            f"parallel: {degree} ranks don't divide {' and '.join(uneven)}; take one of {', '.join(fitting)} for tp, "
            "or other sizes"
        )


def _shard_table(model: RecursiveModel, world: World) -> None:
    """Leave this rank its share of the puzzle table's rows, on its device."""
    table = model.puzzle_embedding
    if table is None:
        return
    assert world.data_group is not None
    mesh = DeviceMesh.from_group(world.data_group, world.device.type)
    num_rows = len(table.weight)
    first_row = min(num_rows, world.data_rank * -(-num_rows // world.data_size))
    own_KE = _own_part(table.weight, mesh, (Shard(0),)).to(world.device, copy=True)
    weight_KE = DTensor.from_local(
        own_KE, mesh, [Shard(0)], run_check=False, shape=table.weight.shape, stride=table.weight.stride()
    )
    model.puzzle_embedding = ShardedPuzzleEmbedding(weight_KE, weight_KE.to_local(), first_row, world)
    model.puzzle_embedding.trainable = table.trainable


def _split_tensors(model: RecursiveModel, world: World) -> None:
    """Give each rank some heads of every attention and a part of every MLP's width.

    What is stacked in the rows of one matrix (q, k and v; gate and up) is reordered first, so that an even split leaves
    every rank the same stack of its own parts and the modules' forward holds for them as it is.
    """
    assert world.mesh is not None
    mesh = world.mesh["model"]
    for module in model.modules():
        if isinstance(module, Attention):
            stacked, plan = module.qkv_proj, {"qkv_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
            num_stacked = 3
            module.num_heads //= mesh.size()
        elif isinstance(module, SwiGLU):
            stacked, plan = module.gate_up_proj, {"gate_up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            num_stacked = 2
        else:
            continue
        with torch.no_grad():
            stacked.weight.copy_(_transposed_rows(stacked.weight, num_stacked, mesh.size()))
        # All ranks hold the same already, so nothing needs to be sent.
        parallelize_module(module, mesh, plan, src_data_rank=None)


def _shard(model: RecursiveModel, config: _ShardingConfig, world: World) -> None:
    """FSDP2: each block a unit that is gathered as a whole, and the rest (embeddings and heads) another."""
    assert world.mesh is not None
    mesh = world.mesh["replicate", "shard"] if isinstance(config, HSDPConfig) else world.mesh["shard"]
    reduce_dtype = getattr(torch, config.reduce_dtype)
    # Rotary tables and embeddings are float32 inputs, to be kept so.
    blocks = MixedPrecisionPolicy(
        param_dtype=model.dtype if config.param_dtype == "forward_dtype" else None,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
    )
    rest = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    units: list[tuple[nn.Module, bool, MixedPrecisionPolicy]] = [
        (module, config.reshard_after_forward, blocks) for module in model.modules() if isinstance(module, Block)
    ]
    # The two Q values are views of one tensor, and nothing works on them in place, which the warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module, reshards, precision in [*units, (model, True, rest)]:
        sharded = fully_shard(
            module, mesh=mesh, reshard_after_forward=reshards, mp_policy=precision, offload_policy=offload
        )
        # A sum: the loss is divided by the global batch already, and unequal shares have no mean.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other; nccl's would scale by 1.0


# ---- layouts ---------------------------------------------------------------------------------------------

# How many projections a matrix has stacked in its rows, by the end of its name.
_STACKED = {"qkv_proj.weight": 3, "gate_up_proj.weight": 2}


def _transposed_rows(weight_RC: Tensor, outer: int, inner: int) -> Tensor:
    """Rows that are (outer, inner, rest) as (inner, outer, rest); with the numbers exchanged, the inverse."""
    return weight_RC.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _own_part(whole: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Tensor:
    """This rank's part of a whole tensor, a view.

    Inner axes of the mesh cut first: where two of them cut the same dimension, it was split before it was sharded.
    """
    for axis in reversed(range(mesh.ndim)):
        if not placements[axis].is_replicate():
            dim, num_parts, n = placements[axis].dim, mesh.size(axis), mesh.get_local_rank(axis)
            size = -(-whole.shape[dim] // num_parts)
            first = min(n * size, whole.shape[dim])
            whole = whole.narrow(dim, first, min(size, whole.shape[dim] - first))
    return whole


class SplitLayout(Layout):
    """Tensors of which each rank may hold a part: DTensors, on any mesh, beside plain ones, equal on all ranks."""

    def __init__(self, model: RecursiveModel, world: World, *, num_microbatches: int, lockstep: bool) -> None:
        super().__init__(model, world, num_microbatches=num_microbatches)
        self.lockstep = lockstep
        self._tensor_degree = world.num_copies

    def grad_norm(self) -> Tensor:
        by_place: dict[Any, list[Tensor]] = {}
        for parameter in self._trained:
            if (grad := parameter.grad) is not None:
                place = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
                by_place.setdefault(place, []).append(local_part(grad))
        total = torch.zeros((), device=self._world.device)
        for place, grads in by_place.items():  # in the order of parameters, the same on all ranks
            square = torch.nn.utils.get_total_norm(grads).to(self._world.device).square()
            if place is not None:
                mesh, placements = place
                for axis, placement in enumerate(placements):
                    if not placement.is_replicate():
                        dist.all_reduce(square, group=mesh.get_group(axis))
            total = total + square
        return total.sqrt()

    @torch.no_grad()
    def clip_(self, largest: float, norm: Tensor) -> None:
        grads = [local_part(parameter.grad) for parameter in self._trained if parameter.grad is not None]
        if grads:
            share = (largest / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grads_with_norm_ has it
            torch._foreach_mul_(grads, share.to(grads[0].device))

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        weights = {}
        for name, tensor in self.model.state_dict().items():
            if name == "puzzle_embedding.weight" and isinstance(tensor, DTensor):
                shares = self._world.gather_to_main(tensor.to_local().cpu())  # no device has room for all of its rows
                whole = torch.cat(shares) if shares is not None else tensor
            else:
                whole = self._whole(name, tensor)
            if self._world.is_main:
                weights[name] = whole.cpu() if isinstance(tensor, DTensor) else whole
        return weights

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        sharded: DTensor = tensor.to(self._world.device)  # type: ignore[assignment]  # offloaded shards can't travel
        # Axis by axis: what was split before it was sharded is put together in the opposite order.
        whole = sharded.redistribute(placements=(Replicate(), *sharded.placements[1:])).full_tensor()
        if (num_stacked := self._num_stacked(name)) is not None:
            whole = _transposed_rows(whole, self._tensor_degree, num_stacked)
        return whole

    def _num_stacked(self, name: str) -> int | None:
        """How many parts of the tensor stand in another order here than in the model as it is written."""
        if self._tensor_degree == 1:
            return None
        return next((number for end, number in _STACKED.items() if name.endswith(end)), None)

    @torch.no_grad()
    def to_portable(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self._num_stacked(name) is None else self._whole(name, tensor)

    @torch.no_grad()
    def from_portable(self, name: str, portable: Tensor, live: Tensor) -> None:
        if isinstance(live, DTensor) and not isinstance(portable, DTensor):
            if (num_stacked := self._num_stacked(name)) is not None:
                portable = _transposed_rows(portable, num_stacked, self._tensor_degree)
            portable, live = _own_part(portable, live.device_mesh, live.placements), live.to_local()
        live.copy_(portable)


class FSDPLayout(SplitLayout):
    """Shards that FSDP2 gathers block by block, on top of what tensor parallelism has split."""

    model: Any  # a RecursiveModel whose class FSDP2 has mixed itself into

    def __init__(self, model: RecursiveModel, world: World, *, num_microbatches: int) -> None:
        super().__init__(model, world, num_microbatches=num_microbatches, lockstep=True)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def _part(self, *, is_last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def values_changed(self) -> None:
        for unit in self._units:
            unit.reshard()


def _sum_of_bucket(layout: "weakref.ref[DDPLayout]", bucket: GradBucket) -> torch.futures.Future[Tensor]:
    alive = layout()
    assert alive is not None
    return alive._sum(bucket)


class DDPLayout(SplitLayout):
    """The whole model on every rank; the sum of gradients travels while the backward pass still runs."""

    def __init__(
        self, model: RecursiveModel, config: DDPConfig, world: World, *, num_microbatches: int, sharded_table: bool
    ) -> None:
        super().__init__(model, world, num_microbatches=num_microbatches, lockstep=sharded_table)
        self._config = config
        self._ddp: DistributedDataParallel | None = None
        self._powersgd: PowerSGDState | None = None
        if world.data_size == 1 or not self._trained:
            return
        with warnings.catch_warnings():
            # What torch 2.13 offers in place of broadcast_buffers still sends the buffers once.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self._ddp = DistributedDataParallel(
                model,
                process_group=world.data_group,
                broadcast_buffers=False,  # the puzzle table is one, and may be sharded
                init_sync=False,
                bucket_cap_mb=config.bucket_cap_mb,
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                find_unused_parameters=config.find_unused_parameters,
            )
        self._called = self._ddp
        self._settle_buckets()
        if config.compression == "powersgd":
            self._powersgd = PowerSGDState(
                world.data_group,
                matrix_approximation_rank=config.powersgd_rank,
                start_powerSGD_iter=config.powersgd_start_step,
            )
        # Weakly: DDP holds what it is given where Python's collector doesn't see it, and this object holds DDP.
        self._ddp.register_comm_hook(weakref.ref(self), _sum_of_bucket)

    def _settle_buckets(self) -> None:
        """One step whose gradients are dropped. After its first backward pass DDP makes its buckets anew, in the order
        in which gradients came; sums would then have another order in the first step of a resumed run than they had in
        that step of the run that it goes on with.
        """
        assert self._ddp is not None
        model, device = self.model, self._world.device
        ids_1 = torch.zeros(1, dtype=torch.int32, device=device)
        state = model.reset(model.initial_state(1, device), ids_1 == 0)
        inputs_1S = ids_1.expand(1, model.num_positions - model.prefix_len)
        rows_1E = None
        if model.puzzle_embedding is not None:
            rows_1E = torch.zeros(1, model.puzzle_embedding.weight.shape[1], device=device)
        _, logits_1SV, q_halt_1, q_continue_1 = self._ddp(state, inputs_1S, rows_1E, model.config.depth)
        (logits_1SV.float().sum() + q_halt_1.sum() + q_continue_1.sum()).backward()
        model.zero_grad()

    def _sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook: the sum of a bucket over the ranks, compressed as asked for. torch's own hooks give means."""
        group = self._world.data_group
        assert group is not None
        if self._config.compression == "none":
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])
        if self._powersgd is not None:
            mean = powerSGD_hook(self._powersgd, bucket)
            if dist.get_backend(group) != "nccl":
                # Its second and third collective are asked for by callbacks, which gloo runs in threads as the one
                # before ends: with two buckets under way, ranks would ask in different orders and wait for ever.
                mean.wait()
        elif self._config.compression == "fp16":
            mean = fp16_compress_hook(group, bucket)
        else:
            mean = bf16_compress_hook(group, bucket)
        return mean.then(lambda future: future.value().mul_(self._world.data_size))

    def _part(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()

    def compression_state(self) -> dict[str, Tensor]:
        state = self._powersgd
        if state is None:
            return {}
        tensors = {"powersgd.step": torch.tensor(state.iter), "powersgd.settings": self._powersgd_settings()}
        for name, by_bucket in self._powersgd_tensors(state).items():
            tensors |= {f"powersgd.{name}.{bucket}": tensor for bucket, tensor in by_bucket.items()}
        return tensors

    def load_compression_state(self, tensors: dict[str, Tensor]) -> None:
        state = self._powersgd
        if state is None or not tensors:  # compression that ended, or begins here
            return
        if not torch.equal(tensors["powersgd.settings"].cpu(), self._powersgd_settings()):
            raise ValueError(
                "the checkpoint's PowerSGD state is of other buckets; resume with the parallel.bucket_cap_mb, "
                "parallel.powersgd_rank and frozen weights that it was saved with, or with another compression"
            )
        state.iter = int(tensors["powersgd.step"])
        for name, by_bucket in self._powersgd_tensors(state).items():
            prefix = f"powersgd.{name}."
            for key, tensor in tensors.items():
                if key.startswith(prefix):
                    by_bucket[int(key.removeprefix(prefix))] = tensor.to(self._world.device, copy=True)

    def _powersgd_tensors(self, state: PowerSGDState) -> dict[str, dict[int, Tensor]]:
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}

    def _powersgd_settings(self) -> Tensor:
        """What the sizes of its tensors follow from."""
        num_weights = sum(parameter.numel() for parameter in self._trained)
        return torch.tensor([num_weights, round(self._config.bucket_cap_mb * 1024), self._config.powersgd_rank])
