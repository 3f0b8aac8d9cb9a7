"""The HRM's recursion and one-step gradient equal an unrolled loop."""

# B = batch, T = positions, D = hidden size

import math

import torch

from models.hrm import HRM
from tests.models.helpers import assert_same_gradients, gradients_of, random_batch, run, small_hrm

BATCH = 3


def _naive_forward(model: HRM, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unroll the recursion for H_cycles = L_cycles = 2. Return (z_H, z_L)."""
    rotary = (model.rotary_cos, model.rotary_sin)

    def L(z: torch.Tensor) -> torch.Tensor:
        return model.L_level(z, rotary=rotary)

    def H(z: torch.Tensor) -> torch.Tensor:
        return model.H_level(z, rotary=rotary)

    z_H, z_L = (model.get_buffer(start).expand_as(x_BTD) for start in ("H_init", "L_init"))
    z_L = L(z_L + z_H + x_BTD)
    z_L = L(z_L + z_H + x_BTD)
    z_H = H(z_H + z_L)
    z_L = L(z_L + z_H + x_BTD)
    z_H, z_L = z_H.detach(), z_L.detach()
    z_L = L(z_L + z_H + x_BTD)
    z_H = H(z_H + z_L)
    return z_H, z_L


def test_recursion_and_gradient_are_those_of_the_unrolled_loop() -> None:
    model, batch = small_hrm(), random_batch(BATCH)
    output = run(model, batch)
    state, logits_BSV, q_halt_B, q_continue_B = output
    ours = gradients_of(model, output)
    assert "embed_tokens.weight" in ours, "the token embedding has no gradient"

    assert model.puzzle_embedding is not None
    rows_B1D = model.puzzle_embedding.weight[batch["puzzle_identifiers"]][:, None]
    e_BTD = torch.cat([rows_B1D, model.embed_tokens.weight[batch["inputs"]]], dim=1)
    z_H, z_L = _naive_forward(model, math.sqrt(32) * e_BTD)
    naive_logits_BSV = z_H[:, 1:] @ model.lm_head.weight.T
    assert model.q_head.bias is not None
    naive_q_halt_B, naive_q_continue_B = (z_H[:, 0] @ model.q_head.weight.T + model.q_head.bias).unbind(1)
    torch.testing.assert_close(logits_BSV, naive_logits_BSV, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q_halt_B, naive_q_halt_B, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q_continue_B, naive_q_continue_B, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["z_H"], z_H.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state["z_L"], z_L.detach(), rtol=1e-5, atol=1e-5)
    naive = (state, naive_logits_BSV, naive_q_halt_B, naive_q_continue_B)
    assert_same_gradients(ours, gradients_of(model, naive))
