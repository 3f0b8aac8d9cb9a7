"""The layout of one process: microbatches, loss, gradient norm and clipping."""

import pytest
import torch

from models.act import ActSettings, initial_carry, loss_of_slots, segment
from models.losses import METRICS
from models.parallel.layout import Layout
from tests.models.helpers import ARCH_NAMES
from tests.models.parallel.helpers import BATCH, Found, batch_at, model_of, start, train
from utils.ranks.world import World


@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_step_equals_its_slots_computed_one_by_one(arch: str, num_parts: int) -> None:
    model, reference = model_of(arch), model_of(arch)
    layout: Layout = Layout(model, World.single())
    layout.num_microbatches = num_parts
    depth = model_of(arch, H_cycles=1, L_cycles=1).config.depth  # less than the depth of the model's config
    carry = initial_carry(model, batch_at(0))
    carries = [
        initial_carry(reference, {name: of[b : b + 1] for name, of in batch_at(0).items()}) for b in range(BATCH)
    ]
    for step in range(2):
        batch, minimum_B = batch_at(step), (torch.arange(BATCH, dtype=torch.int32) + step) % 4
        settings = ActSettings(depth, BATCH, minimum_B)
        new_carry, outputs, sums = layout.forward_backward(carry, batch, settings)
        assert new_carry is not None
        carry = new_carry
        expected_sums, expected_rows = torch.zeros(len(METRICS), dtype=torch.float64), []
        for b in range(BATCH):
            slot = {name: tensor[b : b + 1] for name, tensor in batch.items()}
            carries[b], said = segment(reference, carries[b], slot, settings.of_slots(slice(b, b + 1)))
            of_slot, slot_sums = loss_of_slots(said, carries[b], settings, model.config.loss)
            of_slot.backward()
            expected_sums += slot_sums
            assert said.puzzle_rows_BE is not None and said.puzzle_rows_BE.grad is not None
            expected_rows.append(said.puzzle_rows_BE.grad)
        torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-4)
        rows = [part.puzzle_rows_BE.grad for part in outputs if part.puzzle_rows_BE is not None]
        assert len(outputs) == len(rows) == num_parts
        torch.testing.assert_close(torch.cat(rows), torch.cat(expected_rows), rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
        for name, tensor in carry.tensors().items():
            expected = torch.cat([each.tensors()[name] for each in carries])
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-4, msg=f"{name} of the carry, step {step}")
    for name, weight in model.named_parameters():
        expected_grad = reference.get_parameter(name).grad
        assert weight.grad is not None and expected_grad is not None, name
        error = float((weight.grad - expected_grad).abs().max())
        assert error < 1e-4 * float(expected_grad.abs().max()) + 1e-7, f"the gradient of {name} differs by {error}"


def test_outputs_and_carry_hold_no_graph() -> None:
    """Only the puzzle rows have a gradient. A graph that stayed alive would take memory."""
    model = model_of("hrm")
    layout: Layout = Layout(model, World.single())
    layout.num_microbatches = 2
    carry, outputs, sums = layout.forward_backward(
        start(layout.model, World.single()),
        batch_at(0),
        ActSettings(model.config.depth, BATCH),
    )
    assert carry is not None
    for part in outputs:
        assert part.puzzle_rows_BE is not None and part.puzzle_rows_BE.is_leaf and part.puzzle_rows_BE.grad is not None
        assert not any(tensor.requires_grad for tensor in (part.logits_BSV, part.q_halt_B, part.q_continue_B))
    assert not any(tensor.requires_grad for tensor in carry.tensors().values()) and not sums.requires_grad


def test_the_norm_is_of_all_gradients_and_clipping_scales_them() -> None:
    world = World.single()

    def trained(clip: float | None = None) -> Found:
        layout: Layout = Layout(model_of("hrm"), world)
        return train(layout, world, start(layout.model, world), range(1), clip=clip)[1]

    free = trained()
    clipped = trained(float(free.norms[0]) / 2)
    squares = [gradient.square().sum() for gradient in free.gradients[0].values()]
    torch.testing.assert_close(free.norms[0], torch.stack(squares).sum().sqrt())
    for name, gradient in free.gradients[0].items():
        torch.testing.assert_close(clipped.gradients[0][name], gradient / 2)
