"""The checks that strategies share: divisors, degrees, and dtypes that a backend can sum."""

from unittest.mock import patch

import pytest
import torch

from models.parallel.requirements import can_sum, fill_in_degrees, nearest_divisors
from tests.models.parallel.helpers import without_bf16_sums
from utils.dist.world import World


@pytest.mark.parametrize(
    ("number", "wanted", "expected"),
    [
        (24, 5, [2, 3, 4, 6]),
        (12, 5, [2, 3, 4, 6]),
        (12, 100, [3, 4, 6, 12]),
        (7, 3, [1, 7]),
        (1, 9, [1]),
        (16, 1, [1, 2, 4, 8]),
    ],
)
def test_the_nearest_divisors_are_in_order(number: int, wanted: int, expected: list[int]) -> None:
    assert nearest_divisors(number, wanted) == expected


def test_missing_degrees_are_chosen_as_equal_as_possible() -> None:
    assert fill_in_degrees(8, {"outer": None, "inner": None}) == (2, 4)
    assert fill_in_degrees(8, {"outer": 8, "inner": None}) == (8, 1)
    assert fill_in_degrees(1, {"outer": None, "inner": None}) == (1, 1)


def test_wrong_degrees_are_refused_and_possible_degrees_are_listed() -> None:
    with pytest.raises(ValueError, match=r"outer 3 x inner 2 doesn't make 4 ranks; outer x inner can be 1 x 4, 2 x 2"):
        fill_in_degrees(4, {"outer": 3, "inner": 2})


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
