"""Tensor parallelism refuses sizes and layers that it can't split, and names possible sizes."""

import pytest
from pydantic import ValidationError

from tests.models.parallel.helpers import config_of, model_of
from utils.dist.config import Axes
from utils.dist.world import World
from utils.errors import UserError


def _world(num_ranks: int) -> World:
    """Return a world whose ranks all hold the same slots, for checks that call no other rank."""
    return World(size=num_ranks)


def test_degrees_must_multiply_to_the_number_of_ranks() -> None:
    assert config_of("tp").axes(3) == Axes(model=3)
    assert config_of("fsdp_tp", tensor=4).axes(8) == Axes(shard=2, model=4)
    with pytest.raises(ValueError, match=r"shard 2 x tensor 4 doesn't make 4 ranks"):
        config_of("fsdp_tp", shard=2, tensor=4).axes(4)


@pytest.mark.parametrize("name", ["tp", "fsdp_tp"])
def test_sizes_must_be_divisible_by_the_ranks(name: str) -> None:
    config_of(name).require_support(model_of("hrm"), _world(4))
    with pytest.raises(UserError) as caught:
        config_of(name).require_support(model_of("hrm"), _world(3))
    assert str(caught.value) == (
        "parallel: 3 ranks don't divide arch.num_heads 4 and the width of the MLP on 32 256; take one of 1, 2, 4 for "
        "tp, or other sizes"
    )


@pytest.mark.parametrize("name", ["tp", "fsdp_tp"])
def test_an_mlp_that_mixes_the_components_of_its_width_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"conv_swiglu, which convolves its inner width, .* take arch.mlp=swiglu"):
        config_of(name).require_support(model_of("urm"), _world(2))
    with pytest.raises(UserError, match="normalized_swiglu, which normalises"):
        config_of(name).require_support(model_of("hrm", mlp="normalized_swiglu"), _world(2))
    config_of(name).require_support(model_of("urm"), _world(1))


@pytest.mark.parametrize("name", ["tp", "fsdp_tp"])
def test_fp8_is_refused(name: str) -> None:
    model = model_of("hrm", fp8_no_grad=True)
    with pytest.raises(UserError, match=r"arch.fp8_no_grad scales whole rows .* set it to false, or take fsdp"):
        config_of(name).require_support(model, _world(2))
    config_of(name).require_support(model, _world(1))


def test_a_sharded_table_is_refused_by_tp() -> None:
    with pytest.raises(ValidationError, match="set it to replicated, or take fsdp_tp"):
        config_of("tp", puzzle_table="sharded")
