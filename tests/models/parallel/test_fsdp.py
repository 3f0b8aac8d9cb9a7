"""FSDP computes in the requested dtype, and refuses what it can't do."""

import pytest
import torch

from tests.models.parallel.helpers import (
    by_one_process,
    close,
    config_of,
    layout_of,
    model_of,
    start,
    train,
    without_bf16_sums,
)
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.world import World


def _check_forward_dtype(world: World) -> None:
    name = "L_level.layers.0.mlp.down_proj.weight"
    expected = by_one_process("trm", forward_dtype="bfloat16").gradients[0][name]
    layout, its_world = layout_of(world, "fsdp", "trm", forward_dtype="bfloat16", param_dtype="forward_dtype")
    _, run = train(layout, its_world, start(layout.model, its_world), range(1))
    assert run.gradients[0][name].dtype == torch.float32
    close(run.gradients[0][name], expected, "fsdp in bfloat16", 2e-2)


def test_blocks_can_be_gathered_in_bfloat16() -> None:
    run_ranks(_check_forward_dtype, 2)


def test_degrees_of_hsdp_must_multiply_to_the_number_of_ranks() -> None:
    assert config_of("hsdp").axes(8) == Axes(replicate=2, shard=4)
    assert config_of("hsdp", shard=8).axes(8) == Axes(replicate=1, shard=8)
    with pytest.raises(ValueError, match=r"shard 3 doesn't make 4 ranks; replicate x shard can be 1 x 4, 2 x 2, 4 x 1"):
        config_of("hsdp", shard=3).axes(4)


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "fsdp_tp"])
def test_options_that_the_device_or_the_backend_lacks_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="the device is cpu; set it to false"):
        config_of(name, cpu_offload=True).require_support(model_of("hrm"), World.single())
    config = config_of(name, reduce_dtype="bfloat16")
    with without_bf16_sums(), pytest.raises(UserError, match="set it to float32"):
        config.require_support(model_of("hrm"), World.single())
