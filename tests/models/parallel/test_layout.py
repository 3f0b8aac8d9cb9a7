"""The layout of one process: microbatches, the loss of a step, the norm and clipping."""

import pytest
import torch

from models.act import segment
from models.losses import StepLoss, act_loss
from models.parallel.layout import Layout, loss_of_slots
from tests.models.parallel.helpers import batch_at, config_of, model_of, start, train
from utils.dist.world import World


def _layout(num_parts: int = 1, freeze: str = "none") -> Layout:
    model = model_of("hrm")
    model.freeze(freeze)  # type: ignore[arg-type]
    return Layout(model, World.single(), num_microbatches=num_parts)


@pytest.mark.parametrize("num_parts", [2, 8])
def test_microbatches_make_the_same_step(num_parts: int) -> None:
    layout, parts, world = _layout(), _layout(num_parts), World.single()
    _, expected = train(layout, world, start(layout.model, world), range(2))
    _, found = train(parts, world, start(parts.model, world), range(2))
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-5, atol=0)
    assert all(torch.equal(found.carry[name], tensor) for name, tensor in expected.carry.items() if "z_" not in name)


def test_the_norm_is_of_all_gradients_and_clipping_scales_them() -> None:
    layout, world = _layout(), World.single()
    _, free = train(layout, world, start(layout.model, world), range(1))
    layout = _layout()
    _, clipped = train(layout, world, start(layout.model, world), range(1), clip=float(free.norms[0]) / 2)
    squares = [gradient.square().sum() for gradient in free.gradients[0].values()]
    torch.testing.assert_close(free.norms[0], torch.stack(squares).sum().sqrt())
    for name, gradient in free.gradients[0].items():
        torch.testing.assert_close(clipped.gradients[0][name], gradient / 2)


def test_the_loss_is_divided_by_the_global_batch_and_then_scaled() -> None:
    """The order of operations matters: recorded runs are compared to the last bit."""
    model = model_of("hrm")
    carry, outputs = segment(model, start(model, World.single()), batch_at(0), training=True)
    config, labels_BS = model.config.loss, carry.current["labels"]
    loss, sums = act_loss(
        outputs, labels_BS, halted_B=carry.halted_B, steps_B=carry.steps_B, config=config, ignore_label=3
    )
    of_slots, same_sums = loss_of_slots(outputs, carry, StepLoss(config, ignore_label=3, global_batch_size=11))
    assert torch.equal(of_slots, loss / 11) and torch.equal(same_sums, sums)
    scaled = StepLoss(config, ignore_label=3, global_batch_size=11, scale=3.0)
    assert torch.equal(loss_of_slots(outputs, carry, scaled)[0], loss / 11 * 3.0)


def test_without_trained_weights_the_norm_is_zero() -> None:
    layout, world = _layout(freeze="weights"), World.single()
    _, found = train(layout, world, start(layout.model, world), range(1), clip=0.1)
    assert found.norms[0] == 0 and not found.gradients[0]


def test_microbatches_have_to_divide_the_slots() -> None:
    config = config_of("tp")
    with pytest.raises(ValueError, match=r"grad_accumulation=3 doesn't divide the 8 slots of a rank; give 1 or 2 or 4"):
        config.require_parts(8, 3)
    config.require_parts(8, 4)
