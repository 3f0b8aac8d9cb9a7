"""The recursions of TRM, URM and transformer equal unrolled loops."""

# B = batch, T = positions, D = hidden size

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from models.act import initial_carry, segment
from models.block import Block, Level
from models.layers import MLPS, ConvSwiGLU
from models.tokens import TokenModel
from tests.models.helpers import (
    embedded,
    in_training,
    naive_level,
    naive_read_out,
    random_batch,
    run,
    small_config,
    small_model,
)
from utils.batch import Batch

BATCH = 2


def _unrolled(model: TokenModel, batch: Batch, num_segments: int) -> list[dict[str, Tensor]]:
    """Return the states of each slot: the TRM computes z = f(x + y + z), then y = f(y + z)."""
    (level,) = (module for module in model.modules() if isinstance(module, Level))
    config, found = model.config, []
    f = naive_level(level, 10000.0 if config.pos_encodings == "rope" else None)
    for x_TD in embedded(model, batch).detach():
        states = {name: model.get_buffer(buffer).expand_as(x_TD) for name, buffer in model._states.items()}
        for _ in range(num_segments * config.H_cycles):
            for _ in range(config.L_cycles):
                if config.name == "trm":
                    states["z_L"] = f(x_TD + states["z_H"] + states["z_L"])
                else:
                    states["z"] = f(states["z"] + x_TD)
            if config.name == "trm":
                states["z_H"] = f(states["z_H"] + states["z_L"])
        found.append(states)
    return found


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("trm", {"L_layers": 2, "L_cycles": 3}),
        ("trm", {"L_layers": 2, "L_cycles": 3, "pos_encodings": "none"}),
        *(("trm", {"L_layers": 2, "mlp": mlp}) for mlp in MLPS),
        *(("trm", {"L_layers": 2, "mlp": mlp, "mlp_t": True}) for mlp in MLPS),
        ("urm", {"num_layers": 2, "L_cycles": 3}),
        ("transformer", {"recurrent": True, "H_cycles": 2, "L_cycles": 3, "halt_max_steps": 4}),
    ],
)
def test_two_segments_equal_an_unrolled_loop(name: str, changes: dict[str, Any]) -> None:
    model, batch = small_model(name, **changes), random_batch(BATCH)
    if name == "urm":
        assert all(isinstance(block.mlp, ConvSwiGLU) for block in model.modules() if isinstance(block, Block))
    state, logits = None, []
    for num_segments in (1, 2):
        state, logits_BSV, q_halt_B, q_continue_B = run(model, batch, state=state)
        logits.append(logits_BSV)
        for b, states in enumerate(_unrolled(model, batch, num_segments)):
            for of, z_TD in states.items():
                torch.testing.assert_close(state[of][b].double(), z_TD, rtol=1e-4, atol=1e-4)
            logits_SV, q_2 = naive_read_out(model, states["z_H" if name == "trm" else "z"])
            torch.testing.assert_close(logits_BSV[b].double(), logits_SV, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(torch.stack([q_halt_B[b], q_continue_B[b]]).double(), q_2, rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[1]).abs().max() > 1e-3, "the state has settled, so that segments look alike"


def test_one_network_of_the_trm_takes_both_roles() -> None:
    """H_layers is an option of the published configs, and has no effect."""
    batch = random_batch(BATCH)
    one, other = small_model("trm", H_layers=0), small_model("trm", H_layers=4)
    assert one.state_dict().keys() == other.state_dict().keys()
    assert torch.equal(run(one, batch)[1], run(other, batch)[1])


def test_without_recurrence_the_stack_is_applied_once_and_segments_have_no_state() -> None:
    model, old, new = small_model("transformer"), random_batch(BATCH, seed=1), random_batch(BATCH, seed=2)
    first, outputs = segment(model, initial_carry(model, new), new, in_training(model))
    (level,) = (module for module in model.modules() if isinstance(module, Level))
    for b, x_TD in enumerate(embedded(model, new).detach()):
        logits_SV, q_2 = naive_read_out(model, naive_level(level, 10000.0)(x_TD))
        q_values = torch.stack([outputs.q_halt_B[b], outputs.q_continue_B[b]])
        torch.testing.assert_close(outputs.logits_BSV[b].double(), logits_SV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(q_values.double(), q_2, rtol=1e-4, atol=1e-4)
    assert first.state == {} and not any(name.startswith("state.") for name in first.tensors())
    assert first.halted_B.all(), "a model without recurrence must halt after one segment"
    assert outputs.target_q_continue_B is None
    after_another, _ = segment(model, initial_carry(model, old), old, in_training(model))
    _, again = segment(model, after_another, new, in_training(model))
    assert torch.equal(again.logits_BSV, outputs.logits_BSV)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"H_cycles": 2, "halt_max_steps": 4}, "H_cycles 2, halt_max_steps 4"),
        ({"depth_curriculum": [{"until": 0.5, "H_cycles": 1, "L_cycles": 1}]}, "depth_curriculum"),
        ({"recurrent": True}, "recurrent is true"),
    ],
)
def test_recurrent_and_cycles_or_segments_need_one_another(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small_config("transformer", **changes)
    small_config("transformer", recurrent=True, halt_max_steps=4, H_cycles=2)
