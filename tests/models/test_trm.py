"""The TRM: its recursion, gradient and prefix, and halting with and without q_continue."""

# B = batch, S = tokens, T = positions, D = hidden size

from typing import Any

import pytest
import torch
from torch import Tensor

from models.act import initial_carry, segment
from models.trm import TRM
from tests.models.helpers import (
    SEQ_LEN,
    assert_same_gradients,
    embedded,
    fresh_state,
    gradients_of,
    naive_level,
    naive_read_out,
    random_batch,
    run,
    small_model,
)

BATCH = 2


def _small_trm(**changes: Any) -> TRM:
    model = small_model("trm", **changes)
    assert isinstance(model, TRM)
    return model


@pytest.mark.parametrize("mlp_t", [False, True])
def test_the_recursion_equals_an_unrolled_loop(mlp_t: bool) -> None:
    """Each of two cycles computes z = f(x + y + z) three times and then y = f(y + z).

    The function f is made of loops, in float64.
    """
    model, batch = _small_trm(L_layers=2, L_cycles=3, mlp_t=mlp_t), random_batch(BATCH)
    state, logits_BSV, q_halt_B, q_continue_B = run(model, batch)
    f = naive_level(model.L_level, 10000.0)
    for b, x_TD in enumerate(embedded(model, batch).detach()):
        y = model.get_buffer("H_init").expand_as(x_TD)
        z = model.get_buffer("L_init").expand_as(x_TD)
        for _ in range(2):
            z = f(x_TD + y + z)
            z = f(x_TD + y + z)
            z = f(x_TD + y + z)
            y = f(y + z)
        torch.testing.assert_close(state["z_H"][b].double(), y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state["z_L"][b].double(), z, rtol=1e-4, atol=1e-4)
        logits_SV, q_2 = naive_read_out(model, y)
        torch.testing.assert_close(logits_BSV[b].double(), logits_SV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.stack([q_halt_B[b], q_continue_B[b]]).double(), q_2, rtol=1e-4, atol=1e-4)


def test_the_gradient_is_that_of_the_last_cycle() -> None:
    model, batch = _small_trm(L_cycles=3), random_batch(BATCH)
    rotary, x_BTD = (model.rotary_cos, model.rotary_sin), embedded(model, batch)
    states = fresh_state(model, BATCH)

    def cycle(y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            z = model.L_level(x_BTD + y + z, rotary=rotary)
        return model.L_level(y + z, rotary=rotary), z

    with torch.no_grad():
        y, z = cycle(states["z_H"], states["z_L"])
    y, z = cycle(y, z)
    q_halt_B, q_continue_B = model.q_head(y[:, 0]).unbind(-1)
    theirs = gradients_of(model, ({}, model.lm_head(y[:, model.prefix_len :]), q_halt_B, q_continue_B))
    # The gradients are not equal bit for bit, because this test sums x, y and z in the order of the
    # paper.
    assert_same_gradients(gradients_of(model, run(model, batch)), theirs)


def test_one_network_takes_both_roles() -> None:
    """H_layers is an option of the published configs, and has no effect."""
    batch = random_batch(BATCH)
    one, other = small_model("trm", H_layers=0), small_model("trm", H_layers=4)
    assert one.state_dict().keys() == other.state_dict().keys()
    assert not any("H_level" in name for name in one.state_dict())
    assert torch.equal(run(one, batch)[1], run(other, batch)[1])


def test_puzzle_row_is_padded_to_its_positions() -> None:
    model, batch = _small_trm(puzzle_emb_ndim=40, puzzle_emb_len=3), random_batch(BATCH)
    assert (model.puzzle_len, model.prefix_len, model.num_positions) == (3, 3, 3 + SEQ_LEN)
    x_BTD = embedded(model, batch)
    assert model.puzzle_embedding is not None
    rows_BE = model.puzzle_embedding.weight[batch["puzzle_identifiers"]]
    prefix_BE = x_BTD[:, :3].flatten(1)
    torch.testing.assert_close(prefix_BE[:, :40], 32**0.5 * rows_BE)
    assert (prefix_BE[:, 40:] == 0).all()
    state, logits_BSV, _, _ = run(model, batch)
    assert state["z_H"].shape == (BATCH, 3 + SEQ_LEN, 32)
    torch.testing.assert_close(logits_BSV, model.lm_head(state["z_H"][:, 3:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("q_halt", "halts"), [(0.1, True), (0.0, False), (-0.1, False)])
@pytest.mark.parametrize("q_continue", [-9.0, 9.0])
def test_by_default_the_sign_of_q_halt_decides_whether_a_slot_halts(
    q_halt: float, halts: bool, q_continue: float
) -> None:
    model, batch = _small_trm(), random_batch(BATCH)
    with torch.no_grad():
        model.q_head.weight.zero_()
        assert model.q_head.bias is not None
        model.q_head.bias.copy_(torch.tensor([q_halt, q_continue]))
    carry, outputs = segment(model, initial_carry(model, batch), batch, training=True)
    assert outputs.target_q_continue_B is None
    assert carry.halted_B.tolist() == [halts] * BATCH


def test_with_q_continue_it_has_a_target_and_decides_with_q_halt() -> None:
    model, batch = _small_trm(no_ACT_continue=False), random_batch(BATCH)
    with torch.no_grad():
        model.q_head.weight.zero_()
        assert model.q_head.bias is not None
        model.q_head.bias.copy_(torch.tensor([1.0, 2.0]))
    carry, outputs = segment(model, initial_carry(model, batch), batch, training=True)
    assert outputs.target_q_continue_B is not None
    torch.testing.assert_close(outputs.target_q_continue_B, torch.full((BATCH,), 2.0).sigmoid())
    assert not carry.halted_B.any()
