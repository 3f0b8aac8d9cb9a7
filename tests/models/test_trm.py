"""The TRM: its recursion, gradient and prefix, and halting with and without q_continue."""

# B = batch, S = tokens, T = positions, D = hidden size

from typing import Any

import pytest
import torch

from models.trm import TRM
from tests.models.helpers import (
    embedded,
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
    """Each of two cycles computes z = f(x + y + z) three times and then y = f(y + z)."""
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


def test_one_network_takes_both_roles() -> None:
    """H_layers is an option of the published configs, and has no effect."""
    batch = random_batch(BATCH)
    one, other = small_model("trm", H_layers=0), small_model("trm", H_layers=4)
    assert one.state_dict().keys() == other.state_dict().keys()
    assert not any("H_level" in name for name in one.state_dict())
    assert torch.equal(run(one, batch)[1], run(other, batch)[1])
