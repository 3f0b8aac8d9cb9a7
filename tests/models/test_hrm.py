"""The HRM: recursion, truncated gradient, inputs, initial weights, precision, and the options it refuses."""

# B = batch, S = tokens, T = positions, D = hidden size, E = puzzle embedding size

import itertools
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from models.act import State
from models.hrm import HRM, HRMConfig
from tests.models.helpers import NUM_PUZZLES, SEQ_LEN, VOCAB_SIZE, random_batch, small_hrm, small_options

BATCH = 3


def _run(model: HRM, state: State | None = None) -> tuple[State, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = random_batch(BATCH)
    if state is None:
        state = model.initial_state(BATCH, torch.device("cpu"))
        state = model.reset(state, torch.ones(BATCH, dtype=torch.bool))
    rows = None if model.puzzle_embedding is None else model.puzzle_embedding.rows(batch["puzzle_identifiers"])
    return model(state, batch["inputs"], rows)


def _naive_forward(model: HRM, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recursion unrolled for H_cycles = L_cycles = 2, cut by hand before the last L and H call; (z_H, z_L)."""
    rotary = (model.rotary_cos, model.rotary_sin)

    def L(z: torch.Tensor) -> torch.Tensor:
        return model.L_level(z, rotary)

    def H(z: torch.Tensor) -> torch.Tensor:
        return model.H_level(z, rotary)

    z_H, z_L = model.H_init.expand_as(x_BTD), model.L_init.expand_as(x_BTD)
    z_L = L(z_L + z_H + x_BTD)
    z_L = L(z_L + z_H + x_BTD)
    z_H = H(z_H + z_L)
    z_L = L(z_L + z_H + x_BTD)
    z_H, z_L = z_H.detach(), z_L.detach()
    z_L = L(z_L + z_H + x_BTD)
    z_H = H(z_H + z_L)
    return z_H, z_L


def test_recursion_and_gradient_are_those_of_the_unrolled_loop() -> None:
    model = small_hrm()
    state, logits_BSV, q_halt_B, q_continue_B = _run(model)
    logits_BSV.square().sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    batch = random_batch(BATCH)
    assert model.puzzle_embedding is not None
    e_BTD = torch.cat(
        [
            model.puzzle_embedding.weight[batch["puzzle_identifiers"]][:, None],
            model.embed_tokens.weight[batch["inputs"]],
        ],
        dim=1,
    )
    z_H, z_L = _naive_forward(model, math.sqrt(32) * e_BTD)
    naive_logits_BSV = z_H[:, 1:] @ model.lm_head.weight.T
    naive_logits_BSV.square().sum().backward()
    torch.testing.assert_close(logits_BSV, naive_logits_BSV, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q_halt_B, z_H[:, 0] @ model.q_head.weight[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q_continue_B, z_H[:, 0] @ model.q_head.weight[1], rtol=1e-4, atol=1e-5)

    torch.testing.assert_close(state["z_H"], z_H.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state["z_L"], z_L.detach(), rtol=1e-5, atol=1e-5)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    assert "embed_tokens.weight" in ours, "x lost its gradient"
    for name, gradient in theirs.items():
        scale = gradient.abs().max().item()
        error = (ours[name] - gradient).abs().max().item()
        assert error <= 1e-5 * scale, f"gradient of {name} is off by {error:.2g} of {scale:.2g}"


def test_returned_state_is_detached_and_evaluation_builds_no_graph() -> None:
    model = small_hrm()
    state, logits_BSV, q_halt_B, _ = _run(model)
    assert logits_BSV.requires_grad and q_halt_B.requires_grad
    assert not any(tensor.requires_grad for tensor in state.values())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            _, evaluated_BSV, _, _ = _run(model)
        assert not evaluated_BSV.requires_grad
        torch.testing.assert_close(evaluated_BSV, logits_BSV.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("pos_encodings", "mlp_t", "puzzle_emb_ndim", "dtype"),
    list(itertools.product(["rope", "learned", "none"], [False, True], [0, 40], ["float32", "bfloat16"])),
)
def test_every_variant_runs_and_trains_all_its_weights(
    pos_encodings: str, mlp_t: bool, puzzle_emb_ndim: int, dtype: str
) -> None:
    model = small_hrm(pos_encodings=pos_encodings, mlp_t=mlp_t, puzzle_emb_ndim=puzzle_emb_ndim, forward_dtype=dtype)
    state, logits_BSV, q_halt_B, q_continue_B = _run(model)
    assert logits_BSV.shape == (BATCH, SEQ_LEN, VOCAB_SIZE)
    assert logits_BSV.dtype == model.dtype
    assert state["z_H"].dtype == model.dtype
    assert state["z_H"].shape == (BATCH, SEQ_LEN + (2 if puzzle_emb_ndim else 0), 32)
    assert q_halt_B.dtype == q_continue_B.dtype == torch.float32
    (logits_BSV.float().square().sum() + (q_halt_B - q_continue_B).sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} is not trained"


def test_puzzle_row_is_padded_at_its_end_and_is_the_prefix() -> None:
    model = small_hrm(puzzle_emb_ndim=40, pos_encodings="learned")
    assert model.embed_pos is not None
    rows_BE = torch.arange(40.0).expand(BATCH, 40)
    inputs_BS = random_batch(BATCH)["inputs"]
    x_BTD = model._embed(inputs_BS, rows_BE)
    prefix_D2 = torch.cat([torch.arange(40.0), torch.zeros(24)]).view(2, 32)
    expected = torch.cat([prefix_D2, model.embed_tokens.weight[inputs_BS[0]]])
    expected = math.sqrt(32) * (expected + model.embed_pos.weight) / math.sqrt(2)
    torch.testing.assert_close(x_BTD[0], expected)


def test_puzzle_rows_are_leaves_with_a_gradient_and_the_table_is_saved_but_no_parameter() -> None:
    model = small_hrm()
    assert model.puzzle_embedding is not None
    assert "puzzle_embedding.weight" in model.state_dict()
    assert "puzzle_embedding.weight" not in dict(model.named_parameters())
    before = model.puzzle_embedding.weight.clone()
    rows_BE = model.puzzle_embedding.rows(torch.tensor([1, 1, 4], dtype=torch.int32))
    assert rows_BE.is_leaf and rows_BE.requires_grad
    rows_BE.sum().backward()
    assert rows_BE.grad is not None
    torch.testing.assert_close(model.puzzle_embedding.weight, before, rtol=0, atol=0)
    with torch.no_grad():
        assert not model.puzzle_embedding.rows(torch.tensor([0])).requires_grad


def test_reset_restarts_halted_slots_only() -> None:
    model = small_hrm()
    state = {name: torch.full((2, SEQ_LEN + 1, 32), 7.0) for name in ("z_H", "z_L")}
    new = model.reset(state, torch.tensor([True, False]))
    for name, start_D in (("z_H", model.H_init), ("z_L", model.L_init)):
        torch.testing.assert_close(new[name][0], start_D.expand(SEQ_LEN + 1, 32), rtol=0, atol=0)
        assert (new[name][1] == 7).all()


def test_initial_weights_have_the_published_scales() -> None:
    options = small_options(hidden_size=256, num_heads=4, pos_encodings="learned", puzzle_emb_ndim=256)
    model = HRM(HRMConfig.model_validate(options), seq_len=200, vocab_size=400, num_puzzle_identifiers=NUM_PUZZLES)
    model.init_weights(torch.Generator().manual_seed(1))
    for name, tensor in model.state_dict().items():
        if name == "q_head.bias":
            assert (tensor == -5).all()
        elif name in ("q_head.weight", "puzzle_embedding.weight"):
            assert (tensor == 0).all(), name
        else:
            expected = 1.0 if name in ("H_init", "L_init") else 1 / math.sqrt(tensor.shape[1])  # D or fan in: last axis
            tolerance = 0.2 if tensor.ndim == 1 else 0.02
            assert tensor.std().item() == pytest.approx(expected, rel=tolerance), name


def test_initial_weights_are_a_function_of_the_generator() -> None:
    first, again, other = small_hrm(seed=3), small_hrm(seed=3), small_hrm(seed=4)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_start_states_are_saved_in_the_forward_dtype() -> None:
    model = small_hrm(forward_dtype="bfloat16")
    assert model.state_dict()["H_init"].dtype == model.state_dict()["L_init"].dtype == torch.bfloat16
    assert not {"H_init", "L_init", "rotary_cos"} & dict(model.named_parameters()).keys()
    assert "rotary_cos" not in model.state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size 30 is not divisible by num_heads 4"),
        ({"hidden_size": 6, "num_heads": 2}, "hidden_size / num_heads is 3, but rotary"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"H_cycles": 0}, "H_cycles is 0"),
        ({"L_cycles": 0}, "L_cycles is 0"),
        ({"H_layers": 0}, "H_layers is 0"),
        ({"L_layers": -1}, "L_layers is -1"),
        ({"halt_max_steps": 0}, "halt_max_steps is 0"),
        ({"halt_exploration_prob": 1.5}, "halt_exploration_prob is 1.5"),
        ({"puzzle_emb_ndim": -1}, "puzzle_emb_ndim is -1"),
        ({"expansion": 0}, "expansion is 0"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"expansion": float("nan")}, "finite number"),
        ({"pos_encodings": "sine"}, "'rope', 'learned' or 'none'"),
        ({"forward_dtype": "float16"}, "'bfloat16' or 'float32'"),
        ({"H_cycles": True}, "valid integer"),
        ({"H_cycles": "2"}, "valid integer"),
        ({"expansion": "4"}, "valid number"),
        ({"mlp_t": 1}, "valid boolean"),
        ({"loss": {"loss_type": "cross_entropy"}}, "stablemax_cross_entropy"),
        ({"puzzle_emb_len": 16}, "Extra inputs"),
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        HRMConfig.model_validate(small_options(**changes))
    assert message in str(error.value)


def test_a_whole_number_is_a_number_and_odd_heads_do_without_rotary() -> None:
    assert HRMConfig.model_validate(small_options(expansion=4)).expansion == 4.0
    HRMConfig.model_validate(small_options(hidden_size=6, num_heads=2, pos_encodings="learned"))
