"""Parallelism, applied to a model from outside: YAML says how the model lies over the ranks.

ddp       every rank has the whole model and slots of its own; gradients are summed    ddp.py
fsdp      the same, but each rank keeps only a part of every tensor                    fsdp.py
hsdp      fsdp inside groups of ranks, ddp between the groups                          fsdp.py
tp        every rank has some heads and a part of each MLP, of all slots               tensor.py
fsdp_tp   tp inside groups of ranks, fsdp between the groups                           tensor.py
pipeline  every rank has some blocks; ddp, fsdp or hsdp between pipelines              pipeline.py
"""

from collections.abc import Callable
from typing import Annotated, assert_never

import torch
from pydantic import Field

from models.model import Model
from models.parallel.ddp import DDPConfig, DDPLayout
from models.parallel.dtensor import DTensorLayout, shard_table
from models.parallel.fsdp import FSDPConfig, FSDPLayout, HSDPConfig, ShardingConfig, shard_weights
from models.parallel.layout import Compiled, Layout
from models.parallel.pipeline import PipelineConfig
from models.parallel.pipeline_puzzles import PuzzlePipelineLayout
from models.parallel.pipeline_text import TextPipelineLayout
from models.parallel.tensor import FSDPTPConfig, TPConfig, split_tensors
from utils.ranks.world import World

ParallelConfig = Annotated[
    DDPConfig | FSDPConfig | HSDPConfig | TPConfig | FSDPTPConfig | PipelineConfig, Field(discriminator="name")
]

PIPELINES: dict[str, Callable[..., Layout]] = {"puzzles": PuzzlePipelineLayout, "text": TextPipelineLayout}


def parallelize(
    model: Model, config: ParallelConfig, world: World, *, num_microbatches: int = 1, compile: Compiled = False
) -> Layout:
    """Lay the model out over the ranks of `world`, whose axes are the config's. Every rank.

    The order matters:

    1. The puzzle table is sharded before anything is on a device, since none may have room for it.
    2. Tensors are split (tp) before the parts are sharded (fsdp).
    3. A model of the meta device gets memory when it is in parts: no rank has room for the whole.
    4. DDP registers hooks on parameters, which the steps above replace.
    5. Blocks are compiled last, because DDP makes a step of its own with another number of slots.

    Args:
        model: on the meta device: `Layout.load` gives it its values later. Or on the host with
            values that are equal on all ranks.
        num_microbatches: in how many parts a rank takes its slots.
    """
    config.require_support(model, world)
    layout = _laid_out(model, config, world)
    layout.num_microbatches = num_microbatches
    if compile:
        layout.compile(compile)
    return layout


def _laid_out(model: Model, config: ParallelConfig, world: World) -> Layout:
    if isinstance(config, PipelineConfig):
        return PIPELINES[model.config.kind](model, config, world)
    sharded_table = config.puzzle_table == "sharded" and world.data_size > 1 and model.puzzle_embedding is not None
    if sharded_table:
        shard_table(model, world)
    stacked = split_tensors(model, world) if world.ranks_per_share > 1 else {}
    offloads = isinstance(config, ShardingConfig) and config.cpu_offload
    if isinstance(config, ShardingConfig):
        shard_weights(model, config, world)
    model.allocate(world.device, parameters_on=torch.device("cpu") if offloads else None)
    if isinstance(config, ShardingConfig):
        return FSDPLayout(model, world, stacked)
    if isinstance(config, DDPConfig):
        return DDPLayout(model, config, world, sharded_table=sharded_table)
    if isinstance(config, TPConfig):
        return DTensorLayout(model, world, stacked)
    assert_never(config)  # without a branch of its own a strategy would train without summing gradients
