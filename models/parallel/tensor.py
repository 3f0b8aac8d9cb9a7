"""Tensor parallelism: ranks with the same slots split attention heads and MLPs."""

import math
from typing import Literal

import torch
from pydantic import Field, field_validator

from models.attention import Attention
from models.base import RecursiveModel
from models.layers import SwiGLU
from models.parallel.dtensor import transposed_rows
from models.parallel.fsdp import ShardingConfig
from models.parallel.layout import LayoutConfig
from models.parallel.requirements import fill_in_degrees
from utils.config import Int
from utils.dist.config import Axes
from utils.dist.world import World
from utils.errors import UserError


class TPConfig(LayoutConfig):
    """Heads and MLPs are split over all ranks. config/parallel/tp.yaml explains the keys."""

    name: Literal["tp"]

    @field_validator("puzzle_table")
    @classmethod
    def _every_rank_has_all_rows(cls, value: str) -> str:
        if value == "sharded":
            raise ValueError(
                "puzzle_table is sharded, over ranks that hold slots of their own, but all ranks of tp hold the same "
                "ones; set it to replicated, or take fsdp_tp"
            )
        return value

    def axes(self, num_ranks: int) -> Axes:
        return Axes(model=num_ranks)

    def require_support(self, model: RecursiveModel, world: World) -> None:
        """As in the base class: the ranks must divide the heads and the MLPs."""
        _require_splittable(model, world.ranks_per_share)


class FSDPTPConfig(ShardingConfig):
    """Heads and MLPs are split over `tensor` ranks; `shard` such groups shard the parts."""

    name: Literal["fsdp_tp"]
    shard: Int | None = Field(ge=1)
    tensor: Int | None = Field(ge=1)

    def axes(self, num_ranks: int) -> Axes:
        shard, tensor = fill_in_degrees(num_ranks, {"shard": self.shard, "tensor": self.tensor})
        return Axes(shard=shard, model=tensor)

    def require_support(self, model: RecursiveModel, world: World) -> None:
        """As in the base class: what tp requires, and what sharding requires."""
        _require_splittable(model, world.ranks_per_share)
        super().require_support(model, world)


def _require_splittable(model: RecursiveModel, degree: int) -> None:
    """Raise UserError if `degree` ranks can't have equal parts of every attention and MLP."""
    arch = model.config
    if arch.mlp != "swiglu" and degree > 1:
        why = "convolves its inner width" if arch.mlp == "conv_swiglu" else "normalises over its inner width"
        raise UserError(f"arch.mlp is {arch.mlp}, which {why}, and tp splits that; take arch.mlp=swiglu, or fsdp")
    if arch.fp8_no_grad and degree > 1:
        raise UserError(
            "arch.fp8_no_grad scales whole rows of the weights, and tp splits them; set it to false, or take fsdp"
        )
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


def split_tensors(model: RecursiveModel, world: World) -> None:
    """Give each rank some heads of every attention and a part of the width of every MLP, in place.

    Some matrices have projections stacked in their rows: q, k and v, or gate and up. Their rows are
    reordered first. An even split then leaves every rank the same stack of its own parts, and the
    forward pass of the modules needs no change.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
            stacked.weight.copy_(transposed_rows(stacked.weight, num_stacked, mesh.size()))
        # All ranks hold the same weights already, so nothing needs to be sent.
        parallelize_module(module, mesh, plan, src_data_rank=None)


def take_shapes(model: RecursiveModel, degree: int) -> None:
    """Give a model on the meta device the shapes that split_tensors leaves to one of some ranks.

    No ranks are needed for this. `_require_splittable` must have accepted the model.

    Args:
        degree: the number of these ranks.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.num_heads //= degree
            projections = module.qkv_proj, module.o_proj
        elif isinstance(module, SwiGLU):
            projections = module.gate_up_proj, module.down_proj
        else:
            continue
        for linear, dim in zip(projections, (0, 1), strict=True):
            own = linear.weight.narrow(dim, 0, linear.weight.shape[dim] // degree).contiguous()
            linear.weight = torch.nn.Parameter(own.detach(), requires_grad=linear.weight.requires_grad)
