"""The end points and the shape of the schedule, and the effect of the batch size on the rates."""

import math
from itertools import pairwise

import pytest

from optim.schedule import BatchScaling, batch_scale, lr_multiplier


@pytest.mark.parametrize(("total", "warmup", "min_ratio"), [(100, 4, 0.1), (7, 0, 0.0), (3000, 2000, 1.0), (5, 4, 0.3)])
def test_the_rate_falls_to_exactly_its_minimum_at_the_last_step(total: int, warmup: int, min_ratio: float) -> None:
    curve = [lr_multiplier(step, total, warmup, min_ratio) for step in range(1, total + 1)]
    assert curve[-1] == min_ratio
    rising, falling = curve[:warmup], curve[max(warmup - 1, 0) :]
    assert all(a < b for a, b in pairwise(rising))
    assert all(a >= b for a, b in pairwise(falling))
    assert max(curve) <= 1.0 and min(falling) >= min_ratio


def test_decay_is_a_half_cosine() -> None:
    for step, share in [(25, 0.25), (50, 0.5), (75, 0.75)]:
        expected = 0.2 + 0.8 * (1 + math.cos(math.pi * share)) / 2
        assert lr_multiplier(step, 100, 0, 0.2) == pytest.approx(expected)


def test_the_cosine_goes_on_behind_the_planned_end() -> None:
    behind = [lr_multiplier(step, 10, 4, 0.1) for step in (11, 12, 13, 16)]
    assert behind == pytest.approx([lr_multiplier(step, 10, 4, 0.1) for step in (9, 8, 7, 4)])
    assert behind[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(("total", "warmup"), [(100, 4), (10, 10), (10, 20)])
def test_warm_up_is_linear_from_the_first_step_and_a_run_that_ends_within_it_does_not_decay(
    total: int, warmup: int
) -> None:
    steps = range(1, min(total, warmup) + 1)
    assert [lr_multiplier(step, total, warmup, 0.1) for step in steps] == [step / warmup for step in steps]


@pytest.mark.parametrize(
    ("kind", "half", "same", "fourfold"), [("none", 1, 1, 1), ("sqrt", 0.5**0.5, 1, 2), ("linear", 0.5, 1, 4)]
)
def test_rates_scale_with_the_batch_size(kind: BatchScaling, half: float, same: float, fourfold: float) -> None:
    scales = [batch_scale(kind, size, 768) for size in (384, 768, 3072)]
    assert scales == pytest.approx([half, same, fourfold], rel=1e-12)
