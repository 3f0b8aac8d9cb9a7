"""Parts that all architectures share: inputs, registers, states, weights, precision and options."""

# B = batch, S = tokens, T = positions, D = hidden size, E = puzzle embedding size, V = vocabulary

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch.utils.flop_counter import FlopCounterMode

from models import ArchConfig, build_arch, build_on_meta
from models.base import CommonConfig
from models.block import Level
from models.tokens import TokenModel
from tests.models.helpers import (
    ARCH_NAMES,
    NUM_PUZZLES,
    RECURRENT,
    SEQ_LEN,
    VOCAB_SIZE,
    blank_model,
    embedded,
    fresh_state,
    gradients_of,
    random_batch,
    run,
    small_config,
    small_model,
    small_options,
)
from tests.models.parallel.helpers import config_of
from utils.errors import UserError

BATCH = 3


_VARIANTS: list[dict[str, Any]] = [
    *({"name": name, "mlp": mlp} for name in ARCH_NAMES for mlp in ("swiglu", "normalized_swiglu", "conv_swiglu")),
    {"mlp_t": True, "pos_encodings": "none"},
    {"mlp_t": True, "puzzle_emb_ndim": 40, "num_registers": 1},
    {"pos_encodings": "learned", "num_registers": 2},
    {"pos_encodings": "rope_2d", "puzzle_emb_ndim": 0},
    *({"name": name, "L_cycles": 2, **changes} for name, changes in RECURRENT.items()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", _VARIANTS)
def test_a_segment_returns_what_training_needs_and_trains_all_weights(
    changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """The new state replaces the old one in the carry, so it has the same tensors."""
    model = small_model(**changes, forward_dtype=str(dtype).removeprefix("torch."))
    old, batch = fresh_state(model, BATCH), random_batch(BATCH)
    state, logits_BSV, q_halt_B, q_continue_B = run(model, batch, state=old)
    assert {z: (of.shape, of.dtype) for z, of in state.items()} == {z: (of.shape, of.dtype) for z, of in old.items()}
    assert all(of.dtype == dtype and of.shape == (BATCH, model.num_positions, 32) for of in state.values())
    assert not any(tensor.requires_grad for tensor in state.values())
    assert logits_BSV.shape == (BATCH, SEQ_LEN, VOCAB_SIZE) and logits_BSV.dtype == dtype
    assert q_halt_B.shape == q_continue_B.shape == (BATCH,)
    assert q_halt_B.dtype == q_continue_B.dtype == torch.float32
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            _, evaluated_BSV, _, _ = run(model, batch)
        assert not evaluated_BSV.requires_grad
        torch.testing.assert_close(evaluated_BSV, logits_BSV.detach(), rtol=0, atol=0)
    gradients = gradients_of(model, (state, logits_BSV, q_halt_B, q_continue_B))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert name in gradients and gradients[name].isfinite().all(), name
        assert gradients[name].abs().sum() > 0, f"{name} is not trained"


@pytest.mark.parametrize("mlp_t", [False, True])
@pytest.mark.parametrize("name", ARCH_NAMES)
def test_q_values_alone_are_the_same(name: str, mlp_t: bool) -> None:
    """With Depth.q_values_only, the last block computes only the first position."""
    changes = RECURRENT.get(name, {}) | ({"mlp_t": True, "pos_encodings": "none"} if mlp_t else {})
    model, batch = small_model(name, **changes), random_batch(BATCH)
    depth = model.config.depth
    with torch.no_grad(), FlopCounterMode(display=False) as whole:
        _, _, *expected = run(model, batch, depth=depth)
    with torch.no_grad(), FlopCounterMode(display=False) as cut:
        _, _, *found = run(model, batch, depth=replace(depth, q_values_only=True))
    assert cut.get_total_flops() < whole.get_total_flops(), "the other positions were computed as well"
    for ours_B, theirs_B in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_B, theirs_B)


@pytest.mark.parametrize(("length", "positions"), [(0, 2), (2, 2), (5, 5)])
def test_the_prefix_is_the_puzzle_row_with_padding_at_its_end(length: int, positions: int) -> None:
    """A length of 0 means as many positions as needed: 40 numbers at 32 a position need 2."""
    model = small_model(puzzle_emb_ndim=40, puzzle_emb_len=length, pos_encodings="learned")
    assert model.puzzle_len == model.prefix_len == positions
    assert model.embed_pos is not None
    rows_BE = torch.arange(40.0).expand(BATCH, 40)
    inputs_BS = random_batch(BATCH)["inputs"]
    x_BTD = model.embed(inputs_BS, rows_BE)
    prefix_PD = torch.cat([torch.arange(40.0), torch.zeros(positions * 32 - 40)]).view(positions, 32)
    expected = torch.cat([prefix_PD, model.embed_tokens.weight[inputs_BS[0]]])
    expected = math.sqrt(32) * (expected + model.embed_pos.weight) / math.sqrt(2)
    torch.testing.assert_close(x_BTD[0], expected)


@pytest.mark.parametrize(("puzzle_emb_ndim", "puzzle_len"), [(0, 0), (40, 2)])
def test_registers_are_learned_positions_between_the_puzzle_and_its_tokens(
    puzzle_emb_ndim: int, puzzle_len: int
) -> None:
    model, batch = small_model(num_registers=3, puzzle_emb_ndim=puzzle_emb_ndim), random_batch(BATCH)
    assert model.registers is not None
    assert (model.puzzle_len, model.prefix_len) == (puzzle_len, puzzle_len + 3)
    x_BTD = embedded(model, batch)
    assert x_BTD.shape == (BATCH, model.num_positions, 32) == (BATCH, puzzle_len + 3 + SEQ_LEN, 32)
    for x_TD in x_BTD:
        torch.testing.assert_close(x_TD[puzzle_len : puzzle_len + 3], math.sqrt(32) * model.registers.weight)
    tokens_BSD = math.sqrt(32) * model.embed_tokens.weight[batch["inputs"]]
    torch.testing.assert_close(x_BTD[:, -SEQ_LEN:], tokens_BSD)
    gradient_RD = gradients_of(model, run(model, batch))["registers.weight"]
    assert (gradient_RD.abs().sum(1) > 0).all(), "a register has no gradient"


@pytest.mark.parametrize("name", ARCH_NAMES)
def test_reset_restarts_halted_slots_only(name: str) -> None:
    model = small_model(name)
    state = model.initial_state(2, torch.device("cpu"))
    new = model.reset({z: torch.full_like(tensor, 7.0) for z, tensor in state.items()}, torch.tensor([True, False]))
    assert new.keys() == state.keys()
    for z, tensor_BTD in new.items():
        start_D = model.get_buffer(model._states[z])
        assert tensor_BTD.shape == (2, model.num_positions, 32)
        assert torch.equal(tensor_BTD[0], start_D.expand(model.num_positions, 32)), z
        assert (tensor_BTD[1] == 7).all(), z


def test_initial_weights_have_the_published_scales() -> None:
    config = small_config(hidden_size=256, num_heads=4, pos_encodings="learned", puzzle_emb_ndim=256, num_registers=64)
    model = build_arch(config, seq_len=200, vocab_size=400, num_puzzle_identifiers=NUM_PUZZLES)
    model.init_weights(torch.Generator().manual_seed(1))
    for name, tensor in model.state_dict().items():
        if name == "q_head.bias":
            assert (tensor == -5).all()
        elif name in ("q_head.weight", "puzzle_embedding.weight"):
            assert (tensor == 0).all(), name
        else:
            # The last axis is D or the fan-in.
            expected = 1.0 if name in ("H_init", "L_init") else 1 / math.sqrt(tensor.shape[1])
            tolerance = 0.2 if tensor.ndim == 1 else 0.02
            assert tensor.std().item() == pytest.approx(expected, rel=tolerance), name


@pytest.mark.parametrize("changes", _VARIANTS)
def test_initial_weights_fill_everything_and_are_a_function_of_the_generator(changes: dict[str, Any]) -> None:
    def initialised(seed: int) -> dict[str, torch.Tensor]:
        model = blank_model(**changes)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(math.nan)
        model.init_weights(torch.Generator().manual_seed(seed))
        assert all(buffer.isfinite().all() for buffer in model.buffers())
        return model.state_dict()

    first, again, other = initialised(3), initialised(3), initialised(4)
    constant = {"q_head.weight", "q_head.bias", "puzzle_embedding.weight"}
    for name, tensor in first.items():
        assert tensor.isfinite().all(), f"{name} is not written everywhere"
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, other[name]) == (name in constant), (
            f"{name}: only constants may be equal for two seeds"
        )


def _names(model: TokenModel, weights: Iterable[torch.Tensor]) -> set[str]:
    name_of = {id(weight): name for name, weight in model.named_parameters()}
    return {name_of[id(weight)] for weight in weights}


@pytest.mark.parametrize("name", ARCH_NAMES)
def test_block_weights_are_the_weights_inside_the_recursion(name: str) -> None:
    model = small_model(name, num_registers=1)
    weights = model.block_weights()
    assert len({id(weight) for weight in weights}) == len(weights), "a weight is listed twice"
    in_levels = {id(weight) for level in model.modules() if isinstance(level, Level) for weight in level.parameters()}
    assert {id(weight) for weight in weights} == in_levels
    outside = _names(model, model.parameters()) - _names(model, weights)
    assert outside >= {"embed_tokens.weight", "registers.weight", "lm_head.weight", "q_head.weight", "q_head.bias"}


@pytest.mark.parametrize(
    ("name", "changes", "fits"),
    [
        ("trm_mlp", {"hidden_size": 30, "num_heads": 4}, (False, False)),  # it has no heads
        ("trm_conv", {}, (True, False)),
        ("trm_conv", {"pos_encodings": "learned"}, (False, False)),
        ("se_rrm", {}, (True, True)),
        ("se_rrm", {"puzzle_emb_ndim": 1}, (False, False)),
        ("se_rrm", {"equivariant_symbols": False}, (False, False)),
        ("se_rrm", {"pos_encodings": "learned"}, (False, False)),
        ("se_mixer", {"cells": "mlp"}, (False, False)),
        ("se_mixer", {"puzzle_emb_ndim": 1}, (False, False)),
    ],
)
def test_weights_fit_boards_of_another_size_with_the_same_or_other_symbols(
    name: str, changes: dict[str, Any], fits: tuple[bool, bool]
) -> None:
    config = TypeAdapter[ArchConfig](ArchConfig).validate_python(small_options(name, **changes))
    assert isinstance(config, CommonConfig)
    assert (config.weights_fit(same_vocabulary=True), config.weights_fit(same_vocabulary=False)) == fits


def test_a_rank_needs_memory_for_its_part_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sizes = small_config(), {"seq_len": SEQ_LEN, "vocab_size": VOCAB_SIZE, "num_puzzle_identifiers": 10**6}
    room = {"SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 32 * 4 * 2 // 3}  # two thirds of the puzzle table
    monkeypatch.setattr("models.os.sysconf", room.get)
    build_on_meta(config, num_parts=config_of("fsdp").num_parts(2), **sizes)
    for num_parts in (config_of("ddp").num_parts(2), config_of("fsdp").num_parts(1)):
        with pytest.raises(UserError, match="but this machine has"):
            build_on_meta(config, num_parts=num_parts, **sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30, "num_heads": 4}, "30 is not divisible by num_heads 4"),
        ({"hidden_size": 6, "num_heads": 2}, "rope positions turn groups of 2"),
        ({"hidden_size": 12, "num_heads": 2, "pos_encodings": "rope_2d"}, "rope_2d positions turn groups of 4"),
        ({"puzzle_emb_ndim": 65, "puzzle_emb_len": 2}, "is less than puzzle_emb_ndim"),
        ({"hidden_size": 10**6}, "hidden_size"),
        ({"halt_exploration_prob": 1.5}, "halt_exploration_prob"),
        ({"expansion": float("nan")}, "expansion"),
        ({"H_cycles": True}, "H_cycles"),
        ({"recurrent": True}, "recurrent"),  # an option of another architecture
        ({"mlp_t": True, "conv_2d": True}, "mlp_t and conv_2d"),
        ({"conv_2d": True}, "set puzzle_emb_ndim to 0"),
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small_config(**changes)
