"""Tensor parallelism: ranks with the same slots split attention heads and MLPs."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import nn

from models.attention import Attention
from models.base import CommonConfig
from models.layers import ConvSwiGLU, NormalizedSwiGLU, SwiGLU
from models.model import Model
from models.parallel.dtensor import rows_by_rank
from models.parallel.fsdp import ShardingConfig
from models.parallel.layout import LayoutConfig
from models.parallel.requirements import fill_in_degrees
from models.text.block import GELU, PackedAttention
from models.tokens import TokenConfig
from utils.config import Int
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.world import World


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

    def require_support(self, model: Model, world: World) -> None:
        _require_splittable(model, world.ranks_per_share)


class FSDPTPConfig(ShardingConfig):
    """Heads and MLPs are split over `tensor` ranks; `shard` such groups shard the parts."""

    name: Literal["fsdp_tp"]
    shard: Int | None = Field(ge=1)
    tensor: Int | None = Field(ge=1)

    def axes(self, num_ranks: int) -> Axes:
        shard, tensor = fill_in_degrees(num_ranks, {"shard": self.shard, "tensor": self.tensor})
        return Axes(shard=shard, model=tensor)

    def require_support(self, model: Model, world: World) -> None:
        _require_splittable(model, world.ranks_per_share)
        super().require_support(model, world)


@dataclass(frozen=True)
class _Split:
    """How ranks split a module: the rows of one projection, and the columns of another.

    Attributes:
        sizes: the rows of each part that is stacked in the first projection, such as q, k and v.
        counts: what the ranks must divide, by the words for a message.
    """

    stacked: str
    output: str
    sizes: tuple[int, ...]
    counts: dict[str, int]

    @staticmethod
    def of(module: nn.Module) -> "_Split | None":
        """Return how ranks split a module; None for a module that is not split as a whole."""
        match module:
            case Attention():
                rows = module.qkv_proj.out_features // 3
                return _Split("qkv_proj", "o_proj", (rows,) * 3, {f"arch.{module.heads_option}": module.num_heads})
            case PackedAttention():
                counts = {"arch.num_heads": max(module.heads), "arch.num_kv_heads": min(module.heads)}
                sizes = tuple(heads * module.head_dim for heads in module.heads)
                return _Split("gqkv_proj" if module.is_gated else "qkv_proj", "o_proj", sizes, counts)
            case SwiGLU():
                width, dim = module.down_proj.in_features, module.gate_up_proj.in_features
                return _Split("gate_up_proj", "down_proj", (width,) * 2, {f"the width of the MLP on {dim}": width})
            case GELU():
                width, dim = module.down_proj.in_features, module.up_proj.in_features
                return _Split("up_proj", "down_proj", (width,), {f"the width of the MLP on {dim}": width})
        return None


def _divide_heads(module: nn.Module, degree: int) -> None:
    if isinstance(module, Attention):
        module.num_heads //= degree
    elif isinstance(module, PackedAttention):
        module.heads = [heads // degree for heads in module.heads]


def _require_splittable(model: Model, degree: int) -> None:
    """Raise UserError if `degree` ranks can't have equal parts of every attention and MLP."""
    arch, counts = model.config, dict[str, int]()
    for module in model.modules():
        if degree > 1 and isinstance(arch, TokenConfig) and isinstance(module, ConvSwiGLU | NormalizedSwiGLU):
            why = "convolves" if isinstance(module, ConvSwiGLU) else "normalises over"
            raise UserError(
                f"arch.mlp is {arch.mlp}, which {why} its inner width, and tp splits that; take arch.mlp=swiglu, or "
                "fsdp"
            )
        if (split := _Split.of(module)) is not None:
            counts |= split.counts
    if degree > 1 and isinstance(arch, CommonConfig) and arch.is_random:
        raise UserError(
            "arch.dropout drops attention probabilities by the number of their head, and tp gives each rank other "
            "heads; set it to 0, or take ddp or fsdp"
        )
    if degree > 1 and isinstance(arch, CommonConfig) and arch.fp8_no_grad:
        raise UserError(
            "arch.fp8_no_grad scales whole rows of the weights, and tp splits them; set it to false, or take fsdp"
        )
    if degree > 1 and not counts:
        raise UserError(
            f"arch={arch.name} has nothing that tp splits, no attention and no MLP of its own; take ddp or fsdp"
        )
    if counts.get("arch.num_kv_heads") == counts.get("arch.num_heads"):
        counts.pop("arch.num_kv_heads", None)  # few architectures have that option
    if uneven := [f"{name} {count}" for name, count in counts.items() if count % degree]:
        common = math.gcd(*counts.values())
        fitting = [str(n) for n in range(1, min(common, 64) + 1) if common % n == 0]
        raise UserError(
            f"parallel: {degree} ranks don't divide {' and '.join(uneven)}; take one of {', '.join(fitting)} for tp "
            "(with fsdp_tp: parallel.tensor), or other sizes"
        )


def split_tensors(model: Model, world: World) -> dict[str, tuple[int, ...]]:
    """Give each rank some heads of every attention and a part of the width of every MLP, in place.

    Rows that are stacked (q, k and v, or gate and up) are reordered first. An even split then
    leaves every rank the same stack of its own parts. Return the sizes of these parts by name.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert world.mesh is not None
    mesh, stacked = world.mesh["model"], dict[str, tuple[int, ...]]()
    for name, module in model.named_modules():
        split = _Split.of(module)
        if split is None:
            continue
        weight = module.get_parameter(f"{split.stacked}.weight")
        with torch.no_grad():
            weight.copy_(rows_by_rank(weight, split.sizes, mesh.size()))
        stacked[f"{name}.{split.stacked}.weight"] = split.sizes
        _divide_heads(module, mesh.size())
        # All ranks hold the same weights already, so nothing needs to be sent.
        plan = {split.stacked: ColwiseParallel(), split.output: RowwiseParallel()}
        parallelize_module(module, mesh, plan, src_data_rank=None)
    return stacked


def take_shapes(model: Model, degree: int) -> None:
    """Give a model on the meta device the shapes that split_tensors leaves to one of some ranks."""
    for module in model.modules():
        split = _Split.of(module)
        if split is None:
            continue
        _divide_heads(module, degree)
        for dim, name in enumerate((split.stacked, split.output)):
            linear = module.get_submodule(name)
            weight = linear.get_parameter("weight")
            own = weight.narrow(dim, 0, weight.shape[dim] // degree).contiguous()
            linear.register_parameter("weight", nn.Parameter(own.detach(), requires_grad=weight.requires_grad))
