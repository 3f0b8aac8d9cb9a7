"""Muon equals its definition and torch's Muon. test_build.py tests sharded parameters."""

# R = rows, C = columns of a weight

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.muon import Muon

MOMENTUM, WEIGHT_DECAY = 0.9, 0.3
RATES = [0.05, 0.02, 0.0, 0.04]
SHAPES = [(16, 6), (6, 16), (8, 8)]
each_shape = pytest.mark.parametrize("shape", SHAPES)


def _random(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _muon(weight_RC: nn.Parameter, **options: Any) -> Muon:
    return Muon([weight_RC], lr=1.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, **options)


def _train(weight_RC: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    for step, lr in enumerate(RATES):
        weight_RC.grad = _random((weight_RC.shape[0], weight_RC.shape[1]), 100 + step)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


def _reference(weight_RC: Tensor) -> Tensor:
    num_rows, num_columns = weight_RC.shape
    weight_RC = weight_RC.double()
    mean_RC = torch.zeros_like(weight_RC)
    for step, lr in enumerate(RATES):
        gradient_RC = _random((num_rows, num_columns), 100 + step)
        mean_RC = MOMENTUM * mean_RC + (1 - MOMENTUM) * gradient_RC
        x_RC = MOMENTUM * mean_RC + (1 - MOMENTUM) * gradient_RC
        x_RC = x_RC / x_RC.square().sum().sqrt()
        for _ in range(5):
            gram_RR = x_RC @ x_RC.T
            x_RC = 3.4445 * x_RC - 4.775 * gram_RR @ x_RC + 2.0315 * gram_RR @ gram_RR @ x_RC
        weight_RC = (1 - lr * WEIGHT_DECAY) * weight_RC - lr * math.sqrt(max(1, num_rows / num_columns)) * x_RC
    return weight_RC


@each_shape
def test_the_update_equals_the_definition(shape: tuple[int, int]) -> None:
    start_RC = _random(shape, 0)
    weight_RC = nn.Parameter(start_RC.clone())
    _train(weight_RC, _muon(weight_RC))
    expected_RC = _reference(start_RC)
    assert (weight_RC.detach() - expected_RC).norm() < 1e-5 * (expected_RC - start_RC).norm()


# The polynomials of URM's code, each for one iteration. The last one goes on.
URM_POLYNOMIALS = [
    *((7.2086, -15.5131, 9.0178), (3.9623, -2.5813, 0.4542), (3.9466, -2.5765, 0.4544)),
    *((3.8991, -2.5671, 0.4566), (3.7186, -2.5308, 0.4653), (3.1390, -2.3073, 0.4733)),
    *((2.1715, -1.5246, 0.3885), (1.8648, -1.2224, 0.3577)),
]


def _urm_reference(weight_RC: Tensor, iterations: int) -> Tensor:
    """Compute the update of URM's code in double precision, by singular values instead of products.

    Its momentum is a sum and not a mean, which differs by a factor that the norm removes.
    """
    num_rows, num_columns = weight_RC.shape
    weight_RC, sum_RC = weight_RC.double(), torch.zeros(num_rows, num_columns, dtype=torch.float64)
    for step, lr in enumerate(RATES):
        gradient_RC = _random((num_rows, num_columns), 100 + step).double()
        sum_RC = MOMENTUM * sum_RC + gradient_RC
        u, lengths, vh = torch.linalg.svd(gradient_RC + MOMENTUM * sum_RC, full_matrices=False)
        lengths = lengths / lengths.square().sum().sqrt()
        for n in range(iterations):
            a, b, c = URM_POLYNOMIALS[min(n, 7)]
            lengths = a * lengths + b * lengths**3 + c * lengths**5
        scale = 0.2 * math.sqrt(max(num_rows, num_columns))
        weight_RC = (1 - lr * WEIGHT_DECAY) * weight_RC - lr * scale * (u * lengths) @ vh
    return weight_RC


@each_shape
@pytest.mark.parametrize("iterations", [1, 5, 10])
def test_the_update_of_urm_equals_its_definition(shape: tuple[int, int], iterations: int) -> None:
    start_RC = _random(shape, 0)
    weight_RC = nn.Parameter(start_RC.clone())
    optimizer = _muon(weight_RC, iterations=iterations, coefficients="urm", scale="rms")
    _train(weight_RC, optimizer)
    expected_RC = _urm_reference(start_RC, iterations)
    assert (weight_RC.detach() - expected_RC).norm() < 1e-5 * (expected_RC - start_RC).norm()


@pytest.mark.parametrize("gradient", [None, 0.0])
def test_a_weight_with_a_gradient_of_zero_decays_and_one_without_is_left_alone(gradient: float | None) -> None:
    weight_RC = nn.Parameter(torch.ones(3, 4))
    if gradient is not None:
        weight_RC.grad = torch.full((3, 4), gradient)
    _muon(weight_RC).step()
    assert torch.equal(weight_RC, torch.full((3, 4), 1.0 if gradient is None else 1 - WEIGHT_DECAY))
