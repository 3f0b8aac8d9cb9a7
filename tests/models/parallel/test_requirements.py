"""The checks that strategies share: divisors, degrees, and dtypes that a backend can sum."""

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

import models
from models.base import RecursiveModel
from models.hrm import HRM, HRMConfig
from models.parallel import parallelize
from models.parallel.requirements import can_sum, fill_in_degrees, nearest_divisors
from tests.models.parallel.helpers import DIST, NUM_STEPS, config_of, model_of, start, train, without_bf16_sums
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.setup import connect_devices
from utils.ranks.world import World


@pytest.mark.parametrize(
    ("number", "wanted", "expected"),
    [
        (24, 5, [2, 3, 4, 6]),
        (12, 100, [3, 4, 6, 12]),
        (7, 3, [1, 7]),
    ],
)
def test_the_nearest_divisors_are_in_order(number: int, wanted: int, expected: list[int]) -> None:
    assert nearest_divisors(number, wanted) == expected


def test_missing_degrees_are_chosen_as_equal_as_possible() -> None:
    assert fill_in_degrees(8, {"outer": None, "inner": None}) == (2, 4)
    assert fill_in_degrees(8, {"outer": 8, "inner": None}) == (8, 1)
    assert fill_in_degrees(1, {"outer": None, "inner": None}) == (1, 1)


def test_a_backend_tells_which_dtypes_it_can_sum() -> None:
    assert can_sum(torch.bfloat16, World.single())
    with without_bf16_sums():
        assert can_sum(torch.float16, World.single())
        assert not can_sum(torch.bfloat16, World.single())


def test_an_error_of_the_backend_is_not_taken_for_an_answer() -> None:
    def fail(_: World, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("connection closed by peer")

    with patch.object(World, "sum_", fail), pytest.raises(RuntimeError, match="connection closed"):
        can_sum(torch.bfloat16, World.single())


# ---- weights that are never trained ------------------------------------------------------------


class SpareHRM(HRM):
    """An HRM with a network that it never calls."""

    def __init__(self, config: HRMConfig, **sizes: int) -> None:
        super().__init__(config, **sizes)
        self.spare = self._level(1)


MESSAGE = re.escape(
    "arch=hrm: no gradient reaches spare.layers.0.self_attn.qkv_proj.weight (4 such parameters), so it is never "
    "trained; arch.backprop=one_step may end before it: give more calls, or use it in forward, remove it, or freeze "
    "it with requires_grad_(False)"
)


def _spare(**changes: Any) -> RecursiveModel:
    with patch.dict(models.ARCHS, {HRMConfig: SpareHRM}):
        return model_of("hrm", **changes)


def _steps(model: RecursiveModel, strategy: str, world: World, **options: Any) -> None:
    config = config_of(strategy, **options)
    world = connect_devices(world, "cpu", DIST, axes=config.axes(world.size))
    layout = parallelize(model, config, world)
    train(layout, world, start(layout.model, world), range(NUM_STEPS))


def _check_spare(world: World) -> None:
    for strategy in ("ddp", "fsdp", "tp"):
        with pytest.raises(UserError, match=MESSAGE):
            _steps(_spare(), strategy, world)
        frozen = _spare()
        frozen.get_submodule("spare").requires_grad_(False)
        _steps(frozen, strategy, world)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_network_without_a_gradient_is_an_error_of_one_line(num_ranks: int) -> None:
    """The message of torch's DDP names no parameter. It comes a step later, and not on one rank."""
    run_ranks(_check_spare, num_ranks)
