"""The scale of float16 keeps its definition, and all ranks leave out a step that overflows."""

# B = examples, D = features

from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optim.loss_scale import LossScale
from pretrain import train_step
from tests.spawn import run_ranks
from utils.ranks.world import World

WORLD = World.single()
FINE, OVERFLOWN = torch.ones(3), torch.tensor([1.0, float("inf"), 0.0])


def test_the_scale_equals_its_definition() -> None:
    """Compare the scale with a plain count, with overflows before and after the scale has grown."""
    scale, expected, in_a_row = LossScale(), 2.0**16, 0
    for step in range(5200):
        if step == 3000:  # resume from a checkpoint
            saved, scale = scale.tensors(), LossScale()
            for name, tensor in saved.items():
                scale.tensors()[name].copy_(tensor)
        overflows = step in (10, 11, 2010, 2011, 4500)
        if overflows:
            expected, in_a_row = expected / 2, 0
        elif (in_a_row := in_a_row + 1) == 2000:
            expected, in_a_row = expected * 2, 0
        assert scale.update([FINE, OVERFLOWN if overflows else FINE], WORLD) != overflows
        assert scale.tensors()["scale"] == expected, step
    assert expected == 2**12  # five overflows and one growth: 1,998 good steps in a row are too few, 2,000 are enough


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_at_the_smallest_scale_a_step_is_taken_though_it_is_not_finite(value: float) -> None:
    """NumberWatch then reports the gradients, which no scale can help."""
    scale = LossScale()
    answers = [scale.update([torch.tensor(value)], WORLD) for _ in range(18)]
    assert answers == [False] * 16 + [True] * 2
    assert scale.tensors()["scale"] == 1


def test_puzzle_rows_that_overflow_leave_the_step_out() -> None:
    rows_BE = torch.zeros(3, requires_grad=True)
    rows_BE.grad = OVERFLOWN
    state = Mock(loss_scale=LossScale())
    state.layout.forward_backward.return_value = None, [Mock(puzzle_rows_BE=rows_BE)], Mock()
    state.layout.model.parameters.return_value = []
    state.layout.grad_norm.return_value = torch.tensor(1.0)
    assert not train_step(state, Mock(), Mock(), WORLD).was_taken
    state.optimizers.step.assert_not_called()


def _check_rank(world: World) -> None:
    scale = LossScale()
    assert not scale.update([OVERFLOWN if world.rank == 1 else FINE], world), (
        "an overflow on one rank must end the step on all ranks"
    )
    assert scale.update([FINE], world)
    assert scale.tensors()["scale"] == scale.factor == 2**15

    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(10.0) * 2**15
    sharded, plain = distribute_tensor(whole, mesh, [Shard(0)]), whole.clone()
    scale.unscale_([sharded, plain])
    assert isinstance(sharded, DTensor)
    assert torch.equal(sharded.full_tensor(), torch.arange(10.0)) and torch.equal(plain, torch.arange(10.0))


def test_ranks_agree_on_the_step() -> None:
    run_ranks(_check_rank, 2)
