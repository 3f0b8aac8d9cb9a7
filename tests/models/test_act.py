"""Segments: which slots are replaced, which slots halt, the target of q_continue, exploration."""

# B = slots

from typing import Any

import pytest
import torch
from torch import Tensor

from models.act import draw_min_halt_steps, initial_carry, segment, wants_to_halt
from models.carry import Carry, Outputs
from models.tokens import TokenModel
from tests.models.helpers import in_training, random_batch, seed_with, small_model
from utils.batch import Batch

BATCH = 4


def _with_q(q_halt: float, q_continue: float, **changes: Any) -> TokenModel:
    model = small_model(**changes)
    with torch.no_grad():
        model.q_head.weight.zero_()
        assert model.q_head.bias is not None
        model.q_head.bias.copy_(torch.tensor([q_halt, q_continue]))
    return model


def _going_on(model: TokenModel, batch: Batch, halted: list[bool], steps: list[int]) -> Carry:
    """Return a carry in the middle of a run. One segment of `batch` has made its state."""
    current = {name: tensor.clone() for name, tensor in batch.items()}
    carry, _ = segment(model, initial_carry(model, batch), batch)
    return Carry(carry.state, torch.tensor(steps, dtype=torch.int32), torch.tensor(halted), current)


def test_only_halted_slots_take_their_draw() -> None:
    model, old, new = small_model(), random_batch(BATCH, seed=1), random_batch(BATCH, seed=2)
    halted = [True, False, True, False]
    carry = _going_on(model, old, halted, [4, 2, 1, 1])
    after, outputs = segment(model, carry, new, in_training(model))
    assert after.steps_B.tolist() == [1, 3, 1, 2]
    for slot, was_halted in enumerate(halted):
        for name in old:
            expected = (new if was_halted else old)[name][slot]
            assert torch.equal(after.current[name][slot], expected), f"{name} of slot {slot}"
    # A replaced slot computes the same as in a fresh run. A slot that goes on computes the same as
    # without replaced neighbours.
    _, fresh_outputs = segment(model, initial_carry(model, new), new, in_training(model))
    _, continued_outputs = segment(model, _going_on(model, old, [False] * BATCH, [4, 2, 1, 1]), new, in_training(model))
    for slot, was_halted in enumerate(halted):
        logits = (fresh_outputs if was_halted else continued_outputs).logits_BSV[slot]
        torch.testing.assert_close(outputs.logits_BSV[slot], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("q_halt", "q_continue", "changes", "halts"),
    [
        (1.0, 0.0, {}, True),
        (0.0, 1.0, {}, False),
        (1.0, 1.0, {}, False),
        # Without q_continue the sign of q_halt decides.
        (0.1, 9.0, {"no_ACT_continue": True}, True),
        (0.0, -9.0, {"no_ACT_continue": True}, False),
        (-0.1, -9.0, {"no_ACT_continue": True}, False),
        (0.0, 1.0, {"halt_max_steps": 1}, True),
    ],
)
def test_q_values_halt_in_training_and_the_last_step_in_evaluation(
    q_halt: float, q_continue: float, changes: dict[str, Any], halts: bool
) -> None:
    model, batch = _with_q(q_halt, q_continue, **changes), random_batch(BATCH)
    carry, outputs = segment(model, initial_carry(model, batch), batch, in_training(model))
    assert carry.halted_B.tolist() == [halts] * BATCH
    assert (outputs.target_q_continue_B is None) == bool(changes)
    if "halt_max_steps" not in changes:
        assert wants_to_halt(model, outputs.q_halt_B, outputs.q_continue_B).tolist() == [halts] * BATCH
    carry, last_step = initial_carry(model, batch), model.config.halt_max_steps
    for step in range(1, last_step + 1):
        carry, outputs = segment(model, carry, batch)
        assert carry.halted_B.tolist() == [step == last_step] * BATCH, f"step {step}"
        assert outputs.target_q_continue_B is None


def test_exploration_delays_halting_until_its_minimum_or_the_last_step() -> None:
    model, batch = _with_q(1, 0), random_batch(BATCH)
    carry = _going_on(model, batch, [False] * BATCH, [0, 1, 1, 3])
    minimum_B = torch.tensor([0, 2, 3, 4], dtype=torch.int32)
    carry, _ = segment(model, carry, batch, in_training(model, min_halt_steps_B=minimum_B))
    assert carry.steps_B.tolist() == [1, 2, 2, 4]
    assert carry.halted_B.tolist() == [True, True, False, True]
    reluctant = _with_q(0, 1)
    carry = _going_on(reluctant, batch, [False] * BATCH, [3, 3, 2, 2])
    carry, _ = segment(reluctant, carry, batch, in_training(reluctant, min_halt_steps_B=torch.zeros_like(minimum_B)))
    assert carry.halted_B.tolist() == [True, True, False, False]


def test_the_target_of_q_continue_is_the_value_after_one_more_segment() -> None:
    batch = random_batch(BATCH)

    def two_segments(seed: int) -> tuple[Outputs, Tensor, Tensor]:
        model = small_model(seed=seed)
        carry = _going_on(model, batch, [False] * BATCH, [3, 1, 3, 2])
        after, outputs = segment(model, carry, batch, in_training(model))
        going_on = Carry(after.state, after.steps_B, torch.zeros(BATCH, dtype=torch.bool), after.current)
        _, following = segment(model, going_on, batch)
        return outputs, following.q_halt_B.detach(), following.q_continue_B.detach()

    def tells_rules_apart(seed: int) -> bool:
        _, halt_B, continue_B = two_segments(seed)
        return bool((continue_B > halt_B)[[0, 2]].any())

    seed = seed_with(tells_rules_apart, "slots at their last step with q_continue > q_halt")
    outputs, next_halt_B, next_continue_B = two_segments(seed)
    expected_B = torch.sigmoid(torch.maximum(next_halt_B, next_continue_B))
    expected_B[[0, 2]] = torch.sigmoid(next_halt_B[[0, 2]])  # slots 0 and 2 have reached halt_max_steps
    assert outputs.target_q_continue_B is not None
    assert not outputs.target_q_continue_B.requires_grad
    torch.testing.assert_close(outputs.target_q_continue_B, expected_B)


def test_a_segment_and_its_target_have_the_requested_depth() -> None:
    """A segment of an evaluation has the full depth, not that of a curriculum."""
    curriculum = [{"until": 0.5, "H_cycles": 1, "L_cycles": 1}]
    model, batch = small_model(H_cycles=2, L_cycles=2, depth_curriculum=curriculum), random_batch(BATCH)
    shallow = small_model(H_cycles=1, L_cycles=1)
    carry = initial_carry(model, batch)
    _, evaluated = segment(model, carry, batch)
    _, told_whole = segment(model, carry, batch, in_training(model))
    _, told_first = segment(model, carry, batch, in_training(model, depth=model.config.depth_at(1, 10)))
    _, of_shallow = segment(shallow, carry, batch, in_training(shallow))
    assert torch.equal(evaluated.logits_BSV, told_whole.logits_BSV)
    assert torch.equal(told_first.logits_BSV, of_shallow.logits_BSV)
    assert told_first.target_q_continue_B is not None and of_shallow.target_q_continue_B is not None
    assert torch.equal(told_first.target_q_continue_B, of_shallow.target_q_continue_B)
    assert not torch.equal(evaluated.logits_BSV, told_first.logits_BSV)


def test_exploration_has_its_frequency_and_bounds_and_follows_from_seed_and_step() -> None:
    draw = draw_min_halt_steps(0, 1, 100_000, 0.1, 5)
    torch.manual_seed(1)
    assert torch.equal(draw, draw_min_halt_steps(0, 1, 100_000, 0.1, 5))
    for seed, step in ((0, 2), (1, 1)):
        assert not torch.equal(draw, draw_min_halt_steps(seed, step, 100_000, 0.1, 5)), "two explorations coincide"
    explored = draw[draw != 0]
    assert abs(len(explored) / len(draw) - 0.1) < 0.005  # 5 standard errors
    counts = torch.bincount(explored)
    assert counts.nonzero().flatten().tolist() == [2, 3, 4, 5]
    assert (counts[2:].max() - counts[2:].min()) / counts.sum() < 0.05, "minimums are not equally likely"
    for share, most, found in ((0.0, 5, {0}), (1.0, 5, {2, 3, 4, 5}), (1.0, 2, {2}), (1.0, 1, {0})):
        assert set(draw_min_halt_steps(0, 1, 100, share, most).tolist()) == found
