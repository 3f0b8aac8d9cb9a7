"""The SE-RRM: its recursion, its symmetry, its confidence, halting at random, and dropout."""

# B = batch, V = symbols, S = cells, T = cells and additional tokens, D = hidden size

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from models import ArchConfig
from models.act import ActObjective, ActSettings, draw_random_halts, draw_seeds, initial_carry, segment
from models.attention import rotary_tables
from models.dropout import Dropout, attend_with_dropout, kept
from models.se_rrm import SERRM, SERRMBlock
from models.symbols import NUM_SPECIAL, confidence_logit
from tests.models.helpers import (
    NUM_PUZZLES,
    SEQ_LEN,
    VOCAB_SIZE,
    build_puzzle_arch,
    fresh_state,
    in_training,
    naive_mlp,
    naive_rms,
    naive_rotate,
    random_batch,
)
from tests.models.helpers import small_options as options
from utils.batch import Batch

BATCH = 3
SMALL = {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "num_heads_t": 1, "head_dim_t": 6, "L_layers": 2}


def _model(*, seq_len: int = SEQ_LEN, vocab_size: int = VOCAB_SIZE, **changes: Any) -> SERRM:
    config = TypeAdapter[ArchConfig](ArchConfig).validate_python(options("se_rrm", **(SMALL | changes)))
    model = build_puzzle_arch(config, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=NUM_PUZZLES)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    if model.puzzle_embedding is not None:
        model.puzzle_embedding.weight.normal_(generator=generator)
    assert isinstance(model, SERRM)
    return model


def _run(model: SERRM, batch: Batch, seeds_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state, the logits and the logit of the confidence after a fresh segment."""
    num_slots = len(batch["inputs"])
    state = fresh_state(model, num_slots)
    table = model.puzzle_embedding
    rows_BE = None if table is None else table.rows(batch["puzzle_identifiers"])
    state, logits_BSV, q_halt_B, _ = model(state, batch["inputs"], rows_BE, model.config.depth, seeds_B)
    return state["z"], logits_BSV, q_halt_B


def _naive_attention(layer: Any, x_TD: Tensor, num_heads: int, places_T: list[Any] | None) -> Tensor:
    """Attend in float64. The places of a position are (row, column), or None for no rotation."""
    q, k, v = (x_TD.double() @ part.double().T for part in layer.qkv_proj.weight.chunk(3))
    heads = []
    for qh, kh, vh in zip(*(m.chunk(num_heads, 1) for m in (q, k, v)), strict=True):
        if places_T is not None:
            qh, kh = (torch.stack(list(map(_naive_turn, m, places_T))) for m in (qh, kh))
        heads.append((qh @ kh.T / qh.shape[1] ** 0.5).softmax(-1) @ vh)
    return torch.cat(heads, 1) @ layer.o_proj.weight.double().T


def _naive_turn(x_H: Tensor, place: tuple[int, int] | None) -> Tensor:
    """Turn the even quarters of a head by the row, and the odd ones by the column."""
    if place is None:
        return x_H
    out_4Q = x_H.view(4, -1).clone()
    for position, quarters in zip(place, ([0, 2], [1, 3]), strict=True):
        out_4Q[quarters] = naive_rotate(out_4Q[quarters].flatten(), position, 100.0).view(2, -1)
    return out_4Q.flatten()


@torch.no_grad()
def _naive_block(block: SERRMBlock, x_VTD: Tensor, places_T: list[Any]) -> Tensor:
    x_VTD = x_VTD.double()
    mixed = torch.stack([_naive_attention(block.attn, x_TD, 2, places_T) for x_TD in x_VTD])
    x_VTD = naive_rms(x_VTD + mixed)
    over_symbols = [_naive_attention(block.attn_t, x_VTD[:, t], 1, None) for t in range(x_VTD.shape[1])]
    x_VTD = naive_rms(x_VTD + torch.stack(over_symbols, 1))
    return naive_rms(x_VTD + torch.stack([naive_mlp(block.mlp, x_TD) for x_TD in x_VTD]))


def test_a_segment_equals_loops_over_symbols_and_cells() -> None:
    """The reference is in float64. Rows and columns count from 0; added tokens do not rotate."""
    model = _model(add_tokens=2, H_cycles=1, L_cycles=2, width_multiple=8, rope_theta=100.0)
    batch = random_batch(1)
    z_BVTD, logits_BSV, q_halt_B = _run(model, batch)
    places_T = [*((s // 3, s % 3) for s in range(SEQ_LEN)), None, None]
    x_VTD = model.embed(batch["inputs"], None)[0].detach()
    z_VTD = model.get_buffer("Z_init").expand_as(x_VTD)
    for _ in range(2):
        z_VTD = z_VTD + x_VTD
        for block in model.L_level.layers:
            assert isinstance(block, SERRMBlock)
            z_VTD = _naive_block(block, z_VTD, places_T)
    torch.testing.assert_close(z_BVTD[0].double(), z_VTD, rtol=1e-4, atol=1e-4)
    logits_SV = (z_VTD[:, :SEQ_LEN] @ model.lm_head.weight.double()[0]).T
    torch.testing.assert_close(logits_BSV[0].double(), logits_SV, rtol=1e-4, atol=1e-4)
    confidence = logits_SV.softmax(-1).amax(-1).amin()
    torch.testing.assert_close(q_halt_B[0].double().sigmoid(), confidence, rtol=1e-4, atol=1e-4)


def test_positions_of_one_dimension_turn_cells_and_leave_added_tokens() -> None:
    cos_TH, sin_TH = rotary_tables(SEQ_LEN, SMALL["head_dim"], 100.0)
    model = _model(pos_encodings="rope", rope_theta=100.0, add_tokens=2)
    assert torch.equal(model.rotary_cos[:SEQ_LEN], cos_TH) and torch.equal(model.rotary_sin[:SEQ_LEN], sin_TH)
    assert (model.rotary_cos[SEQ_LEN:] == 1).all() and (model.rotary_sin[SEQ_LEN:] == 0).all()


def test_a_cell_has_its_symbol_and_zeros_elsewhere() -> None:
    model = _model(add_tokens=2)
    x_BVTD = model.embed(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, 6]]), None)
    assert x_BVTD.shape == (1, VOCAB_SIZE, SEQ_LEN + 2, 16)
    special, symbols = (model.get_parameter(f"embed_{name}_tokens") for name in ("special", "symbol"))
    for s, symbol in enumerate([0, 1, 2, 3, 4, 5, 6, 6, 6]):
        own = special[0, symbol, 0] if symbol < NUM_SPECIAL else symbols[0, 0, 0]
        torch.testing.assert_close(x_BVTD[0, symbol, s], VOCAB_SIZE**0.5 * own)
        others = [v for v in range(VOCAB_SIZE) if v != symbol]
        assert not x_BVTD[0, others, s].any()
    torch.testing.assert_close(x_BVTD[0, 4, SEQ_LEN:], model.get_parameter("add_tokens")[0, 0])
    torch.testing.assert_close(x_BVTD[0, 1, SEQ_LEN:], model.get_parameter("add_tokens_special")[0, 1])


# ---- symmetry ----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"add_tokens": 2}, {"pos_encodings": "rope"}, {"pos_encodings": "learned"}])
@pytest.mark.parametrize("seed", range(2))
def test_renaming_the_symbols_renames_the_answer(changes: dict[str, Any], seed: int) -> None:
    model, batch = _model(**changes), random_batch(BATCH, seed=seed)
    # All symbols occur. Those that a puzzle lacks have equal logits, which no argmax tells apart.
    batch["inputs"][:, :VOCAB_SIZE] = torch.arange(VOCAB_SIZE)
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(VOCAB_SIZE - NUM_SPECIAL, generator=generator)
    new_V = torch.cat([torch.arange(NUM_SPECIAL), NUM_SPECIAL + others])
    _, logits_BSV, q_halt_B = _run(model, batch)
    _, renamed_BSV, renamed_q_B = _run(model, batch | {"inputs": new_V[batch["inputs"].long()].int()})
    torch.testing.assert_close(renamed_BSV[..., new_V], logits_BSV, rtol=1e-5, atol=1e-5)
    assert torch.equal(renamed_BSV.argmax(-1), new_V[logits_BSV.argmax(-1)])
    torch.testing.assert_close(renamed_q_B, q_halt_B, rtol=1e-5, atol=1e-5)


def test_a_puzzle_row_is_renamed_with_its_symbols() -> None:
    """A row has a number for each symbol: the task may treat symbols differently."""
    model, batch = _model(puzzle_emb_ndim=1), random_batch(BATCH)
    table = model.puzzle_embedding
    assert table is not None and table.weight.shape == (NUM_PUZZLES, 16 + VOCAB_SIZE)
    new_V = torch.tensor([0, 1, 3, 4, 2, 6, 5])
    inputs_BS = new_V[batch["inputs"].long()].int()
    _, logits_BSV, _ = _run(model, batch)
    _, other_BSV, _ = _run(model, batch | {"inputs": inputs_BS})
    assert (other_BSV[..., new_V] - logits_BSV).abs().max() > 1e-3
    of_each_KV = table.weight[:, 16:].clone()
    table.weight[:, 16:][:, new_V] = of_each_KV
    _, renamed_BSV, _ = _run(model, batch | {"inputs": inputs_BS})
    torch.testing.assert_close(renamed_BSV[..., new_V], logits_BSV, rtol=1e-5, atol=1e-5)


def test_symbols_with_embeddings_of_their_own_are_not_alike() -> None:
    model, batch = _model(equivariant_symbols=False, hidden_size=64), random_batch(BATCH)
    assert model.get_parameter("embed_symbols").std().item() == pytest.approx(1, abs=0.15)
    new_V = torch.tensor([0, 1, 3, 2, 4, 5, 6])
    logits, renamed = (
        _run(model, batch | {"inputs": of})[1] for of in (batch["inputs"], new_V[batch["inputs"].long()])
    )
    assert (renamed[..., new_V] - logits).abs().max() > 1e-3


def test_a_model_free_of_sizes_has_the_same_weights_for_all_sizes() -> None:
    for changes in ({}, {"pos_encodings": "rope"}, {"add_tokens": 2}):
        one, other = _model(**changes), _model(seq_len=16, vocab_size=11, **changes)
        assert one.config.is_free_of_sizes
        assert {n: t.shape for n, t in one.state_dict().items()} == {n: t.shape for n, t in other.state_dict().items()}


# ---- confidence and halting --------------------------------------------------------------------


def test_a_certain_answer_has_a_finite_logit() -> None:
    logits_BSV = torch.full((1, 2, 3), -500.0)
    logits_BSV[..., 1] = 500.0
    assert confidence_logit(logits_BSV).isfinite().all()


def test_chance_alone_halts_in_training() -> None:
    model, batch = _model(halt_max_steps=3), random_batch(BATCH)
    carry = initial_carry(model, batch)
    never = torch.full((BATCH,), 3, dtype=torch.int32)
    carry, _ = segment(model, carry, batch, in_training(model, min_halt_steps_B=torch.tensor([0, 3, 3])))
    assert carry.halted_B.tolist() == [True, False, False]
    carry, _ = segment(model, carry, batch, in_training(model, min_halt_steps_B=never))
    assert (carry.halted_B.tolist(), carry.steps_B.tolist()) == ([False] * 3, [1, 2, 2])
    carry, outputs = segment(model, carry, batch, in_training(model, min_halt_steps_B=never))
    assert (carry.halted_B.tolist(), carry.steps_B.tolist()) == ([False, True, True], [2, 3, 3])
    assert outputs.target_q_continue_B is None
    carry, _ = segment(model, initial_carry(model, batch), batch, in_training(model))
    assert not carry.halted_B.any(), "without a draw nothing halts early"


def test_halts_are_drawn_as_often_as_asked() -> None:
    draws = torch.stack([draw_random_halts(7, step, 200, 0.1, 16) for step in range(200)])
    assert set(draws.unique().tolist()) == {0, 16}
    assert 0.09 < (draws == 0).float().mean() < 0.11
    # From one stream, a halt would be drawn from the same 64 bits as two seeds.
    halts_B = draw_random_halts(7, 5, 200, 0.1, 16) == 0
    assert not torch.equal(draw_seeds(7, 5, 400)[1::2] < 0.1 * 2**32, halts_B)


@pytest.mark.parametrize(
    "draw", [draw_seeds, partial(draw_random_halts, prob=0.1, halt_max_steps=16)], ids=["seeds", "halts"]
)
def test_a_draw_follows_from_seed_and_step(draw: Callable[..., Tensor]) -> None:
    drawn = draw(7, 5, batch_size=200)
    assert torch.equal(drawn, draw(7, 5, batch_size=200))
    assert not torch.equal(drawn, draw(7, 6, batch_size=200)), "the next step draws the same"
    assert not torch.equal(drawn, draw(8, 5, batch_size=200)), "another seed draws the same"


# ---- dropout -----------------------------------------------------------------------------------


def test_the_trajectories_of_a_slot_draw_the_same() -> None:
    model, batch, given = _model(dropout=0.3, num_states=2), random_batch(BATCH), list[Tensor]()

    def forward(*arguments: Any, seeds_B: Tensor) -> Any:
        given.append(seeds_B)
        return model(*arguments, seeds_B=seeds_B)

    carry, seeds_B = initial_carry(model, batch, training=True), torch.arange(BATCH)
    segment(model, carry, batch, in_training(model, seeds_B=seeds_B), forward=forward)
    assert [each.tolist() for each in given] == [sorted([*range(BATCH)] * 2), [*range(BATCH)]]


def test_dropout_equals_its_definition() -> None:
    q, k, v = torch.randn(3, 4, 2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    dropout = Dropout(draw_seeds(0, 1, 4), 0.3)
    mask = kept(dropout, 2, 5, 5)
    expected = (q @ k.mT / 8**0.5).softmax(-1) * mask / 0.7 @ v
    torch.testing.assert_close(attend_with_dropout(q, k, v, dropout), expected)


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_the_masks_are_like_random_ones(rate: float) -> None:
    """Shares and correlations along every axis are within five standard deviations."""
    mask = kept(Dropout(draw_seeds(0, 1, 64), rate), 4, 32, 32).double()
    deviation = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(mask.mean() - (1 - rate)) < 5 * deviation
    centred = (mask - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    for dim in range(4):
        correlation = (centred * centred.roll(1, dim)).mean()
        assert abs(correlation) < 5 / mask.numel() ** 0.5, dim


def test_dropout_depends_on_the_seed_of_the_slot_alone() -> None:
    model, batch, seeds_B = _model(dropout=0.3, add_tokens=1), random_batch(BATCH), draw_seeds(3, 4, BATCH)
    _, logits_BSV, _ = _run(model, batch, seeds_B)
    _, plain_BSV, _ = _run(model, batch)
    assert (logits_BSV - plain_BSV).abs().max() > 1e-3
    part = {name: tensor[1:] for name, tensor in batch.items()}
    torch.testing.assert_close(_run(model, part, seeds_B[1:])[1], logits_BSV[1:])
    same = {name: tensor[:1].expand(2, *tensor.shape[1:]) for name, tensor in batch.items()}
    one_SV, other_SV = _run(model, same, seeds_B[:2])[1]
    assert (one_SV - other_SV).abs().max() > 1e-3


def test_every_attention_of_a_segment_draws_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls, blocks, attentions, rows or slots with neighbouring seeds never share a mask."""
    seen = list[int]()

    def remember(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:
        seen.extend(dropout.seeds_B.tolist())
        return attend_with_dropout(q, k, v, dropout)

    monkeypatch.setattr("models.attention.attend_with_dropout", remember)
    model, batch = _model(dropout=0.3, H_cycles=2, L_cycles=2), random_batch(2)
    _run(model, batch, torch.tensor([5, 6]))
    rows = VOCAB_SIZE + SEQ_LEN  # of the attention over cells, and of the one over symbols
    assert len(seen) == 2 * 4 * SMALL["L_layers"] * rows, "slots x calls x blocks x rows"
    assert len(set(seen)) == len(seen)


def test_checkpointing_drops_the_same() -> None:
    batch, seeds_B = random_batch(BATCH), draw_seeds(3, 4, BATCH)

    def gradients(checkpointing: str) -> list[Tensor]:
        model = _model(dropout=0.3, activation_checkpointing=checkpointing)
        _run(model, batch, seeds_B)[1].square().sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    for of_weight in zip(*map(gradients, ("none", "block", "cycle")), strict=True):
        assert all(torch.equal(of_weight[0], other) for other in of_weight[1:])


def test_parts_of_a_step_get_their_own_draws() -> None:
    model, batch = _model(dropout=0.3), random_batch(4)
    halts_B, config = torch.tensor([0, 4, 0, 4]), model.config
    settings = ActSettings(config.depth, 4, halts_B, draw_seeds(0, 1, 4))
    objective, carry = ActObjective(model), initial_carry(model, batch)
    whole = objective.run(carry, batch, settings)
    parts = [objective.run(*part) for part in objective.split(carry, batch, settings, 2)]
    joined = objective.join([part.carry for part in parts])
    assert whole.carry is not None and torch.equal(whole.carry.halted_B, joined.halted_B)
    torch.testing.assert_close(joined.state["z"], whole.carry.state["z"], rtol=1e-5, atol=1e-5)
    none = replace(settings, seeds_B=None)
    assert objective.run(carry, batch, none).loss != whole.loss
