"""The URM: its loops with ConvSwiGLU. Only the last loops carry gradient."""

# B = batch, T = positions, D = hidden size

from typing import Any

import torch

from models.block import Block
from models.layers import ConvSwiGLU
from models.urm import URM
from tests.models.helpers import (
    embedded,
    naive_level,
    naive_read_out,
    random_batch,
    run,
    small_model,
)

BATCH = 2


def _small_urm(**changes: Any) -> URM:
    model = small_model("urm", **changes)
    assert isinstance(model, URM)
    return model


def _mlps(model: URM) -> list[type]:
    return [type(module.mlp) for module in model.modules() if isinstance(module, Block)]


def test_the_recursion_equals_an_unrolled_loop() -> None:
    """The loop computes z = stack(z + x) six times."""
    model, batch = _small_urm(num_layers=2, H_cycles=2, L_cycles=3), random_batch(BATCH)
    assert _mlps(model) == [ConvSwiGLU, ConvSwiGLU]
    state, logits_BSV, q_halt_B, q_continue_B = run(model, batch)
    stack = naive_level(model.level, 10000.0)
    for b, x_TD in enumerate(embedded(model, batch).detach()):
        z_TD = model.get_buffer("z_init").expand_as(x_TD)
        for _ in range(6):
            z_TD = stack(z_TD + x_TD)
        torch.testing.assert_close(state["z"][b].double(), z_TD, rtol=1e-4, atol=1e-4)
        logits_SV, q_2 = naive_read_out(model, z_TD)
        torch.testing.assert_close(logits_BSV[b].double(), logits_SV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.stack([q_halt_B[b], q_continue_B[b]]).double(), q_2, rtol=1e-4, atol=1e-4)
