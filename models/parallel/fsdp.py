"""FSDP and HSDP: ranks keep a part of every tensor, and gather a block when it is called."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.model import Model
from models.objective import BatchT, CarryT, SettingsT
from models.parallel.dtensor import DTensorLayout
from models.parallel.layout import LayoutConfig
from models.parallel.requirements import can_sum, fill_in_degrees
from utils.config import Bool, Int
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


class ShardingConfig(LayoutConfig):
    """The options of fsdp, hsdp and fsdp_tp; config/parallel/fsdp.yaml explains them."""

    reshard_after_forward: Bool
    param_dtype: Literal["float32", "forward_dtype"]
    reduce_dtype: Literal["float32", "bfloat16"]
    cpu_offload: Bool

    def require_support(self, model: Model, world: World) -> None:
        if self.cpu_offload and world.device.type != "cuda":
            raise UserError(
                f"parallel.cpu_offload keeps what a CUDA device works with on its host, but the device is "
                f"{world.device.type}; set it to false"
            )
        if self.reduce_dtype == "bfloat16" and not can_sum(torch.bfloat16, world):
            raise UserError(
                "parallel.reduce_dtype is bfloat16, which this backend can't sum; set it to float32, or dist.backend "
                "to another"
            )


class FSDPConfig(ShardingConfig):
    """Every tensor is sharded over all ranks."""

    name: Literal["fsdp"]

    def axes(self, num_ranks: int) -> Axes:
        return Axes(shard=num_ranks)


class HSDPConfig(ShardingConfig):
    """Every tensor is sharded over `shard` ranks; `replicate` such groups hold the same."""

    name: Literal["hsdp"]
    replicate: Int | None = Field(ge=1)
    shard: Int | None = Field(ge=1)

    def axes(self, num_ranks: int) -> Axes:
        replicate, shard = fill_in_degrees(num_ranks, {"replicate": self.replicate, "shard": self.shard})
        return Axes(replicate=replicate, shard=shard)


def shard_weights(model: Model, config: ShardingConfig, world: World) -> None:
    """Shard the parameters with FSDP2, in place: by blocks, and embeddings and heads together."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        register_fsdp_forward_method,
    )

    assert world.mesh is not None
    mesh = world.mesh["replicate", "shard"] if isinstance(config, HSDPConfig) else world.mesh["shard"]
    reduce_dtype = getattr(torch, config.reduce_dtype)
    # Rotary tables and embeddings are inputs that must stay float32.
    blocks = MixedPrecisionPolicy(
        param_dtype=model.dtype if config.param_dtype == "forward_dtype" else None,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
    )
    rest = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    units: list[tuple[nn.Module, bool, MixedPrecisionPolicy]] = [
        (block, config.reshard_after_forward, blocks) for block in model.blocks()
    ]
    for module, reshards, precision in [*units, (model, True, rest)]:
        shard_unit(module, mesh, reshards=reshards, precision=precision, offload=offload)
    for name in model.forward_methods:
        register_fsdp_forward_method(model, name)


def shard_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshards: bool,
    precision: "MixedPrecisionPolicy",
    offload: "OffloadPolicy | None" = None,
) -> None:
    """Shard a module's parameters, in place, but those that are sharded already.

    Args:
        mesh: the ranks that share the parameters; of two axes, the first one holds replicas.
    """
    from torch.distributed.fsdp import OffloadPolicy, fully_shard

    # The warning is about views that are changed in place. The two Q values are views of one
    # tensor, and nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshards,
        mp_policy=precision,
        offload_policy=offload or OffloadPolicy(),
    )
    # Sum the gradients: the loss is divided by the global batch already, and a mean would be wrong
    # where ranks have unequal numbers of slots.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other; nccl's would scale by 1.0


class FSDPLayout(DTensorLayout[CarryT, BatchT, SettingsT]):
    """Shards that FSDP2 gathers block by block, of tensors that may be split (tp)."""

    model: Any  # a Model whose class FSDP2 has mixed itself into

    def __init__(self, model: Model, world: World, stacked: Mapping[str, Sequence[int]]) -> None:
        super().__init__(model, world, stacked)
        from torch.distributed.fsdp import FSDPModule

        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def _part(self, *, is_last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def values_changed(self) -> None:
        for unit in self._units:
            unit.reshard()
