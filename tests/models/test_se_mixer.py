"""The symbol-equivariant mixer: its equations, its symmetries, and boards of any size."""

# B = batch, S = cells, K = symbols, D = hidden size, M = size of a message

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dataset.augment import Box
from dataset.sudoku import unit_ids
from models.act import initial_carry, segment
from models.attention import rotary_tables_2d
from models.carry import Outputs
from models.se_mixer import SEMixer, SEMixerBlock, SEMixerConfig, box_of, units_of_board
from tests.models.helpers import small_options

CELLS = ("units", "attention", "mlp")


def _mixer(side: int = 4, num_symbols: int | None = None, **changes: Any) -> SEMixer:
    config = SEMixerConfig.model_validate(small_options("se_mixer", hidden_size=8, message_size=8, **changes))
    num_puzzles = 3 if config.puzzle_emb_ndim else 1
    model = SEMixer(config, seq_len=side**2, vocab_size=(num_symbols or side) + 2, num_puzzle_identifiers=num_puzzles)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def _boards(side: int, batch: int = 3, seed: int = 0) -> Tensor:
    """Return boards (B, S) of random tokens: 1 is a blank, 2 the first digit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, side + 2, (batch, side**2), generator=generator, dtype=torch.int32)


def _on_canvas(boards_BS: Tensor, side: int) -> Tensor:
    small = math.isqrt(boards_BS.shape[1])
    canvas_BLL = boards_BS.new_zeros(len(boards_BS), side, side)
    canvas_BLL[:, :small, :small] = boards_BS.view(-1, small, small)
    return canvas_BLL.flatten(1)


@torch.no_grad()
def _logits(model: SEMixer, inputs_BS: Tensor) -> Tensor:
    return _outputs(model, inputs_BS).logits_BSV


def _outputs(model: SEMixer, inputs_BS: Tensor, num_segments: int = 2) -> Outputs:
    batch = {
        "inputs": inputs_BS,
        "labels": torch.zeros_like(inputs_BS),
        "puzzle_identifiers": torch.zeros(len(inputs_BS), dtype=torch.int32),
    }
    carry = initial_carry(model, batch)
    for _ in range(num_segments):
        carry, outputs = segment(model, carry, batch)
        carry.halted_B = torch.zeros_like(carry.halted_B)
    return outputs


@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.parametrize("side", [4, 6])
def test_renaming_symbols_renames_the_answer(cells: str, side: int) -> None:
    model, inputs_BS = _mixer(side, cells=cells), _boards(side)
    logits_BSV = _logits(model, inputs_BS)
    for seed in range(5):
        order_K = torch.randperm(side, generator=torch.Generator().manual_seed(seed)) + 2
        new_name_V = torch.cat([torch.arange(2), order_K])
        renamed_BSV = _logits(model, new_name_V[inputs_BS.long()].int())
        torch.testing.assert_close(renamed_BSV[..., new_name_V], logits_BSV, rtol=1e-5, atol=1e-5)
        same_BS = renamed_BSV.argmax(-1) == new_name_V[logits_BSV.argmax(-1)]
        assert same_BS.all(), "an answer differs by more than its names"
    assert _logits(_mixer(side, cells=cells, forward_dtype="bfloat16"), inputs_BS).dtype == torch.bfloat16


def test_symmetries_of_the_board_move_the_answer() -> None:
    """With units, the model knows no more of a cell than its row, its column and its box."""
    model, inputs_BS = _mixer(6, cells="units"), _boards(6)
    cells_SS = torch.arange(36).view(6, 6)
    rows_in_bands, columns_in_stacks = [3, 2, 0, 1, 5, 4], [5, 3, 4, 0, 2, 1]
    order_S = cells_SS[rows_in_bands][:, columns_in_stacks].flatten()
    moved_BSV = _logits(model, inputs_BS[:, order_S])
    torch.testing.assert_close(moved_BSV, _logits(model, inputs_BS)[:, order_S], rtol=1e-5, atol=1e-5)
    assert [_mixer(cells=cells).config.is_equivariant for cells in CELLS] == [True, False, False]


@pytest.mark.parametrize(("cells", "sharpness"), [("units", 1), ("attention", 1), ("units", 100)])
def test_a_small_board_on_a_large_canvas_has_the_same_answer(cells: str, sharpness: float) -> None:
    """Cells beyond the board are half sure at most, and a sharp model is surer of its cells."""
    small, large = _mixer(4, cells=cells), _mixer(6, cells=cells)
    boards_BS = _boards(4)
    with torch.no_grad():
        small.lm_head.weight.mul_(sharpness)
        large.load_state_dict(small.state_dict())  # no weight depends on the size
        beside_others = torch.cat([_on_canvas(boards_BS, 6), _boards(6)])
        on_canvas, alone = _outputs(large, beside_others), _outputs(small, boards_BS)
    on_canvas_BSV = on_canvas.logits_BSV[:3].view(3, 6, 6, 8)
    alone_BSV, tolerance = alone.logits_BSV.view(3, 4, 4, 6), 1e-5 if sharpness == 1 else 1e-3
    torch.testing.assert_close(on_canvas_BSV[:, :4, :4, :6], alone_BSV, rtol=tolerance, atol=tolerance)
    assert (on_canvas_BSV[:, :4, :4].argmax(-1) < 6).all(), "a symbol that the board lacks was the answer"
    assert (alone.q_halt_B.abs() > 1e-3).all(), "0 is the confidence of cells beyond the board"
    assert sharpness == 1 or (alone.q_halt_B > 0.1).all(), "the problem must have sure answers"
    torch.testing.assert_close(on_canvas.q_halt_B[:3], alone.q_halt_B, rtol=tolerance, atol=tolerance)
    assert _outputs(small, torch.zeros(2, 16, dtype=torch.int32)).q_halt_B.tolist() == [0.0, 0.0], "of empty slots"


@pytest.mark.parametrize("cells", ["units", "attention"])
def test_symbols_that_a_board_lacks_have_no_gradient(cells: str) -> None:
    """Through each norm of a zero, the gradient would grow by a factor of 316."""
    boards_BS = _boards(4)
    norms = []
    for side, inputs_BS in ((4, boards_BS), (9, _on_canvas(boards_BS, 9))):
        model = _mixer(side, cells=cells, L_cycles=20)
        model.load_state_dict(_mixer(4, cells=cells, L_cycles=20).state_dict())
        logits_BSV = _outputs(model, inputs_BS, 1).logits_BSV
        logits_BSV.logsumexp(-1)[inputs_BS != 0].sum().backward()
        gradients = [parameter.grad for parameter in model.L_level.parameters()]
        norms.append([gradient.norm().item() for gradient in gradients if gradient is not None])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_a_gpu_reads_units_in_aligned_rows() -> None:
    """The device meta stands for a GPU."""
    units_BUS = _mixer(9, cells="units").to("meta")._extent(_boards(9).to("meta")).units_BUS
    assert units_BUS is not None and units_BUS.shape == (3, 27, 81) and units_BUS.stride() == (27 * 88, 88, 1)


def test_the_block_equals_its_equations() -> None:
    """Sum over the candidates of each row, column, box and cell in loops, in float64."""
    model = _mixer(4, cells="units")
    (block,) = model.L_level.layers
    assert isinstance(block, SEMixerBlock)
    x_BSKD = torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    extent = model._extent(_boards(4, batch=2))
    with torch.no_grad():
        y_BSKD = block(x_BSKD, None, extent=extent)

    def matrix(name: str) -> Tensor:
        return block.get_parameter(f"{name}.weight").detach().double()

    def glu(weight_name: str, vector: Tensor) -> Tensor:
        gate, up = (matrix(weight_name) @ vector).chunk(2)
        return F.silu(gate) * up

    ids_3S = unit_ids(Box(2, 2))
    for x_SKD, y_SKD in zip(x_BSKD.double(), y_BSKD, strict=True):
        offers_SKM = F.silu(x_SKD @ matrix("offer_proj").T)
        for cell, symbol in itertools.product(range(16), range(4)):
            constraints = [[(cell, other) for other in range(4)]]
            for ids_S in ids_3S:
                constraints.append([(other, symbol) for other in range(16) if ids_S[other] == ids_S[cell]])
            message_M = torch.zeros(8, dtype=torch.float64)
            for candidates in constraints:
                message_M += glu("answer_proj", 0.5 * torch.stack([offers_SKM[c, k] for c, k in candidates]).sum(0))
            own_D = x_SKD[cell, symbol]
            moved_D = own_D + matrix("down_proj") @ glu("gate_up_proj", torch.cat([own_D, message_M]))
            expected_D = moved_D / (moved_D.square().mean() + 1e-5).sqrt()
            torch.testing.assert_close(y_SKD[cell, symbol].double(), expected_D, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("box", [Box(2, 2), Box(2, 3), Box(3, 3)])
def test_the_units_are_those_of_the_datasets(box: Box) -> None:
    assert box_of(box.side) == (box.rows, box.columns)
    member = units_of_board(box.side, canvas=box.side).view(3, box.side, box.num_cells)
    for kind, ids_S in enumerate(unit_ids(box)):
        assert (member[kind].argmax(0).numpy() == ids_S).all()
    assert (member.sum(1) == 1).all(), "every cell lies in one row, one column and one box"


def test_special_tokens_can_be_answers() -> None:
    """As in ARC, where a label marks the end of a grid."""
    model = _mixer(4, num_symbols=10, cells="attention", symbols="all")
    with torch.no_grad():
        model.special_head.weight[1].fill_(1.0)
        model.lm_head.weight.zero_()
    assert (_logits(model, _boards(4))[..., 1] != 0).all()


def test_puzzle_rows_speak_to_symbols() -> None:
    model = _mixer(4, cells="attention", symbols="all", puzzle_emb_ndim=1)
    assert model.puzzle_embedding is not None
    assert model.puzzle_embedding.weight.shape == (3, 8 + 4)
    before_BSV = _logits(model, _boards(4))
    model.puzzle_embedding.weight[0, 8] = 3.0  # of the first symbol alone
    change_BSV = (_logits(model, _boards(4)) - before_BSV).abs()
    assert (change_BSV[..., 2] > 1e-4).all()
    model.puzzle_embedding.weight[0] = 0.0
    model.puzzle_embedding.weight[0, :8] = 1.0  # of all symbols
    assert ((_logits(model, _boards(4)) - before_BSV).abs() > 1e-5).all()


def test_the_positions_of_attention_turn_fast_enough_for_small_boards() -> None:
    model = _mixer(4, cells="attention")
    for ours, expected in zip((model.rotary_cos, model.rotary_sin), rotary_tables_2d(0, 16, 8, 100.0), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("changes", "seq_len", "vocab_size", "said"),
    [
        ({"cells": "units", "symbols": "all"}, 16, 6, "set symbols to side"),
        ({"cells": "attention", "hidden_size": 8, "num_heads": 4}, 16, 6, r"not divisible by 4 \* num_heads"),
        ({}, 12, 6, "no square board"),
        ({}, 900, 12, "10 symbols on boards of side 30; set arch.symbols to all"),
        ({"cells": "attention", "symbols": "all"}, 12, 6, "arch.cells is attention, which needs square boards"),
    ],
)
def test_options_that_contradict_each_other_or_the_data(
    changes: dict[str, Any], seq_len: int, vocab_size: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        config = SEMixerConfig.model_validate(small_options("se_mixer", **changes))
        SEMixer(config, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=1)
