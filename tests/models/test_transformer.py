"""The baseline without recursion, and the Universal Transformer that recursion makes of it."""

# B = batch, T = positions, D = hidden size

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from models.act import initial_carry, segment
from models.transformer import Transformer
from tests.models.helpers import (
    embedded,
    naive_level,
    naive_read_out,
    random_batch,
    run,
    small_config,
    small_model,
)

BATCH = 2


def _small_transformer(**changes: Any) -> Transformer:
    model = small_model("transformer", **changes)
    assert isinstance(model, Transformer)
    return model


def test_without_recurrence_the_model_applies_its_stack_once() -> None:
    model, batch = _small_transformer(), random_batch(BATCH)
    _, logits_BSV, q_halt_B, q_continue_B = run(model, batch)
    stack = naive_level(model.level, 10000.0)
    for b, x_TD in enumerate(embedded(model, batch).detach()):
        logits_SV, q_2 = naive_read_out(model, stack(x_TD))
        torch.testing.assert_close(logits_BSV[b].double(), logits_SV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.stack([q_halt_B[b], q_continue_B[b]]).double(), q_2, rtol=1e-4, atol=1e-4)


def test_without_recurrence_segments_have_no_state() -> None:
    model, old, new = _small_transformer(), random_batch(BATCH, seed=1), random_batch(BATCH, seed=2)
    first, outputs = segment(model, initial_carry(model, new), new, training=True)
    assert first.state == {} and not any(name.startswith("state.") for name in first.tensors())
    assert first.halted_B.all(), "a model without recurrence must halt after one segment"
    assert outputs.target_q_continue_B is None
    after_another, _ = segment(model, initial_carry(model, old), old, training=True)
    _, again = segment(model, after_another, new, training=True)
    assert torch.equal(again.logits_BSV, outputs.logits_BSV)


def test_with_recurrence_the_model_equals_an_unrolled_loop() -> None:
    """The loop computes z = stack(z + x) six times. The next segment continues from z."""
    model, batch = _small_transformer(recurrent=True, H_cycles=2, L_cycles=3, halt_max_steps=4), random_batch(BATCH)
    stack = naive_level(model.level, 10000.0)
    first_state, first_BSV, *_ = run(model, batch)
    state, second_BSV, q_halt_B, q_continue_B = run(model, batch, state=first_state)
    for b, x_TD in enumerate(embedded(model, batch).detach()):
        z_TD = model.get_buffer("z_init").expand_as(x_TD)
        for _ in range(6):
            z_TD = stack(z_TD + x_TD)
        torch.testing.assert_close(first_BSV[b].double(), naive_read_out(model, z_TD)[0], rtol=1e-4, atol=1e-4)
        for _ in range(6):
            z_TD = stack(z_TD + x_TD)
        torch.testing.assert_close(state["z"][b].double(), z_TD, rtol=1e-4, atol=1e-4)
        logits_SV, q_2 = naive_read_out(model, z_TD)
        torch.testing.assert_close(second_BSV[b].double(), logits_SV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.stack([q_halt_B[b], q_continue_B[b]]).double(), q_2, rtol=1e-4, atol=1e-4)
    assert (first_BSV - second_BSV).abs().max() > 1e-3, (
        "the state has settled, so that the test can't tell the second segment from the first"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"H_cycles": 2}, "recurrent is false, so that H_cycles 2 would compute the same again; set it to 1"),
        ({"H_cycles": 2, "halt_max_steps": 4}, "H_cycles 2, halt_max_steps 4 would"),
        ({"depth_curriculum": [{"until": 0.5, "H_cycles": 1, "L_cycles": 1}]}, "depth_curriculum would"),
    ],
)
def test_cycles_and_segments_need_recurrent(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small_config("transformer", **changes)
    if "depth_curriculum" not in changes:
        small_config("transformer", recurrent=True, **changes)


def test_recurrent_needs_cycles_or_segments() -> None:
    with pytest.raises(ValidationError, match="recurrent is true, but H_cycles, L_cycles and halt_max_steps are all 1"):
        small_config("transformer", recurrent=True)
