"""Layers and blocks equal their definitions, written plainly with loops."""

# B = batch, T = positions, D = hidden size

import itertools
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from models.attention import apply_rotary, rotary_tables, rotary_tables_2d
from models.block import Block
from models.layers import (
    MLPS,
    BoardConv,
    ConvSwiGLU,
    Embedding,
    Linear,
    LinearOfColumns,
    MlpKind,
    NormalizedSwiGLU,
    fill,
    fp8_product,
    modulo_normal,
    rms_norm,
    swiglu_width,
    to_fp8,
    truncated_normal,
)
from tests.models.helpers import blank_model, naive_block, naive_mlp, naive_rms, naive_rotate, needs_fp8, small_config


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _block(**changes: Any) -> Block:
    options = {"hidden_size": 12, "num_heads": 3, "width_multiple": 16, "puzzle_emb_ndim": 0}
    block = Block(small_config("trm", **(options | changes)), num_positions=5)
    _init(block)
    return block


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(seed))


def _init(module: torch.nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, BoardConv | Linear | Embedding | ConvSwiGLU):
            fill(child.initial_values(_generator(7)))


def test_rms_norm_has_no_weights_and_works_in_float32() -> None:
    x = _randn(3, 5, 8) * 100
    torch.testing.assert_close(rms_norm(x).double(), naive_rms(x), rtol=1e-6, atol=1e-6)
    tiny = torch.full((1, 4), 1e-3)  # the mean square is as small as eps
    torch.testing.assert_close(rms_norm(tiny).double(), naive_rms(tiny), rtol=1e-5, atol=0)
    half = x.bfloat16()
    assert rms_norm(half).dtype == torch.bfloat16
    torch.testing.assert_close(rms_norm(half), naive_rms(half).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dim", "expansion", "multiple", "width"),
    [
        (512, 4.0, 256, 1536),
        (100, 4.0, 256, 512),
        (37, 2.0, 1, 49),
        (8, 0.01, 32, 32),
    ],
)
def test_swiglu_widths(dim: int, expansion: float, multiple: int, width: int) -> None:
    assert swiglu_width(dim, expansion, multiple) == width


@pytest.mark.parametrize("prefix_len", [0, 1, 3])
def test_a_convolution_over_the_board_equals_loops_over_neighbours(prefix_len: int) -> None:
    block = _block(conv_2d=True, num_registers=prefix_len)
    for side in (2, 5):
        x_TD = _randn(prefix_len + side * side, 12)
        expected = naive_block(block, x_TD, None)
        torch.testing.assert_close(block(x_TD[None], None)[0].double(), expected, rtol=1e-4, atol=1e-5)
        first = block(x_TD[None], None, first_position_only=True)
        torch.testing.assert_close(first[0].double(), expected[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mlp", MLPS)
def test_mlp_t_multiplies_all_slots_at_once(mlp: MlpKind) -> None:
    """Products slot by slot took a fifth of the time of a compiled step (docs/lab/log.md)."""
    block = _block(mlp_t=True, mlp=mlp)
    assert isinstance(block.mlp_t, NormalizedSwiGLU) == (mlp == "normalized_swiglu")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        block(_randn(2, 5, 12).bfloat16(), None)
    products = set(counter.get_flop_counts()["Global"])
    assert products == {torch.ops.aten.mm}, "PyTorch multiplies slot by slot, with the weights copied for each"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 7e-3)])
@pytest.mark.parametrize("over_first", [False, True])
def test_a_normalized_swiglu_is_as_exact_as_its_equation(over_first: bool, dtype: torch.dtype, bound: float) -> None:
    """In bfloat16 the operations of the equation, in its order, are off by up to 5.8e-3."""
    layer = NormalizedSwiGLU(24, 64, over_first=over_first)
    _init(layer)
    x_ND, passes = _randn(96, 24).to(dtype).requires_grad_(), list[list[torch.Tensor]]()
    for y_ND in (naive_mlp(layer, x_ND), layer(x_ND.mT).mT if over_first else layer(x_ND)):
        gradients = torch.autograd.grad(y_ND, [x_ND, *layer.parameters()], _randn(96, 24, seed=1).to(y_ND))
        passes.append([y_ND, *gradients])
    assert passes[1][0].dtype == dtype
    for exact, ours in zip(*passes, strict=True):
        assert (ours - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("over_first", [False, True])
def test_a_compiled_normalized_swiglu_keeps_nothing_but_gate_up_and_the_input_of_down(over_first: bool) -> None:
    layer, kept = NormalizedSwiGLU(24, 64, over_first=over_first), list[int]()
    _init(layer)
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    x = _randn(*((24, 96) if over_first else (96, 24))).requires_grad_()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(x)
    assert sum(numel for numel in kept if numel >= 96 * 64) == 96 * (2 * 64 + 64)


@pytest.mark.parametrize("num_positions", [81, 82, 97, 96])
def test_a_gpu_multiplies_positions_by_matrices_whose_rows_are_aligned(num_positions: int) -> None:
    """The device meta stands for a GPU: strides decide which kernels it takes."""
    seen = list[torch.Tensor]()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            if operator is torch.ops.aten.mm.default:
                seen.extend((*args, result))
            return result

    layer = MLPS["swiglu"](num_positions, 64, over_first=True).to("meta")
    x_TN = torch.empty(num_positions, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Products():
        layer(x_TN).backward(torch.empty_like(x_TN))
    assert len(seen) == 3 * 6  # two operands and a result of each product, forward and backward
    assert all(min(each.stride()) == 1 and max(each.stride()) % 8 == 0 for each in seen)


def test_truncated_normal_has_the_requested_std() -> None:
    sample = truncated_normal(torch.Size([400_000]), 0.5, _generator())
    # The standard error of this std is 0.0004; truncation without the correction would give 0.44.
    assert sample.std().item() == pytest.approx(0.5, abs=0.002)
    assert sample.mean().item() == pytest.approx(0, abs=0.004)
    # Two sigma of the normal distribution before the cut.
    assert sample.abs().max().item() == pytest.approx(2 * 0.5 / 0.87963, abs=0.002)


def test_weights_of_text_are_a_normal_distribution_reduced_modulo_3() -> None:
    drawn = modulo_normal(torch.Size([200_000]), 0.5, torch.Generator().manual_seed(0))
    normal = torch.empty(200_000).normal_(generator=torch.Generator().manual_seed(0))
    expected = torch.where(normal.abs() < 3, normal, normal - 3 * normal.sign()) * 1.014762601732121 * 0.5
    torch.testing.assert_close(drawn, expected)
    assert abs(drawn.std().item() / 0.5 - 1) < 5e-3


def test_weights_and_bias_of_a_convolution_are_uniform_as_in_the_published_code() -> None:
    layer, over_board = ConvSwiGLU(512, 5632), BoardConv(512, 0)
    for each in (layer, over_board):
        fill(each.initial_values(_generator()))
    assert layer.conv_bias_W is not None
    each_with_limit = [(values, 1 / math.sqrt(2)) for values in (layer.conv_weight_W12, layer.conv_bias_W)]
    for values, limit in (*each_with_limit, (over_board.weight_D33, 1 / 3)):
        assert values.abs().max().item() == pytest.approx(limit, rel=0.01)
        assert values.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.03)
        assert values.mean().item() == pytest.approx(0, abs=0.03)


def test_a_convolution_may_have_no_bias() -> None:
    layer, x_TD = ConvSwiGLU(8, 32, conv_bias=False), _randn(3, 8)
    _init(layer)
    torch.testing.assert_close(layer(x_TD[None])[0].double(), naive_mlp(layer, x_TD), rtol=1e-5, atol=1e-5)


# ---- rotary positions ---------------------------------------------------------------------------

PREFIX, SIDE, HEAD_DIM, THETA = 2, 3, 8, 100.0


def test_rotary_angles_are_float32_even_for_bfloat16() -> None:
    cos_TH, _ = rotary_tables(1000, 64, 10000.0)
    assert cos_TH.dtype == torch.float32
    x_BNTH = _randn(1, 1, 1000, 64).bfloat16()
    turned = apply_rotary(x_BNTH, rotary_tables(1000, 64, 10000.0))
    expected = naive_rotate(x_BNTH[0, 0, 999], 999, 10000.0)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned[0, 0, 999].double(), expected, rtol=2**-8, atol=1e-3)


def test_rotary_2d_turns_half_of_the_pairs_by_the_row_and_half_by_the_column() -> None:
    x_H = _randn(HEAD_DIM)
    tables = rotary_tables_2d(PREFIX, SIDE * SIDE, HEAD_DIM, THETA)
    turned_TH = apply_rotary(x_H.expand(1, 1, PREFIX + SIDE * SIDE, HEAD_DIM), tables)[0, 0]
    assert torch.equal(turned_TH[:PREFIX], x_H.expand(PREFIX, HEAD_DIM))
    pairs = HEAD_DIM // 2
    for row, column in itertools.product(range(SIDE), repeat=2):
        expected_H = x_H.double().clone()
        for i in range(pairs):
            # The pairs of the row and the pairs of the column each have all frequencies of a
            # one-dimensional rotary.
            place, frequency = (row, i) if i < pairs // 2 else (column, i - pairs // 2)
            angle = (place + 1) * THETA ** (-4 * frequency / HEAD_DIM)
            turned = complex(x_H[i], x_H[i + pairs]) * complex(math.cos(angle), math.sin(angle))
            expected_H[i], expected_H[i + pairs] = turned.real, turned.imag
        turned_H = turned_TH[PREFIX + row * SIDE + column].double()
        torch.testing.assert_close(turned_H, expected_H, rtol=1e-5, atol=1e-6, msg=f"cell {row}, {column}")


@pytest.mark.parametrize("changes", [{"pos_encodings": "rope_2d"}, {"conv_2d": True, "puzzle_emb_ndim": 0}])
def test_rows_and_columns_need_a_square_number_of_cells(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="8 tokens"):
        blank_model(**changes, seq_len=8)


# ---- FP8 ---------------------------------------------------------------------------------------


def _with_unequal_rows(*shape: int, seed: int) -> torch.Tensor:
    """Return a matrix whose rows have sizes from 1e-4 to 1e4."""
    return _randn(*shape, seed=seed) * torch.logspace(-4, 4, shape[0]).unsqueeze(1)


def _beyond_rounding(product: torch.Tensor, a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """Return where a product errs by more than rounding both matrices to e4m3, row by row, allows.

    A number has 3 bits after its first one, so that it moves by at most a 16th. Below 2^-6 the
    distance of two numbers stays 2^-9.
    """

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x.abs() / 16, x.abs().amax(1, keepdim=True) / 448 * 2**-10)

    a, b = a_MK.double(), b_NK.double()
    allowed = moved(a) @ b.abs().T + a.abs() @ moved(b).T + moved(a) @ moved(b).T
    return (product.double() - a @ b.T).abs() > allowed * (1 + 1e-5)


@needs_fp8
def test_an_fp8_product_errs_by_no_more_than_rounding() -> None:
    a_MK, b_NK = _with_unequal_rows(24, 64, seed=1), _with_unequal_rows(32, 64, seed=2)
    product = fp8_product(a_MK, b_NK, torch.float32)
    assert product.dtype == torch.float32
    assert not _beyond_rounding(product, a_MK, b_NK).any()
    assert not torch.equal(product, a_MK @ b_NK.T)
    # With one scale for each matrix, the small rows would be rounded to zero.
    one_scale = [(x / x.abs().max() * 448).to(torch.float8_e4m3fn).float() * x.abs().max() / 448 for x in (a_MK, b_NK)]
    assert _beyond_rounding(one_scale[0] @ one_scale[1].T, a_MK, b_NK).any()


@needs_fp8
def test_a_row_of_zeros_stays_zero_in_fp8_and_what_is_not_finite_does_not_vanish() -> None:
    x_NK = _randn(5, 16)
    x_NK[1] = 0.0
    x_NK[2] = 1e-38  # its scale would be zero
    x_NK[3, 4], x_NK[4, 4] = torch.inf, torch.nan
    rounded_NK, scale_N1 = to_fp8(x_NK)
    assert scale_N1.shape == (5, 1) and scale_N1.dtype == torch.float32
    assert rounded_NK[0].float().abs().max() == 448 and not rounded_NK[1:3].float().any()
    product = fp8_product(x_NK, _randn(16, 16, seed=1), torch.bfloat16)
    assert product.dtype == torch.bfloat16
    assert product.isfinite().all(1).tolist() == [True, True, True, False, False] and not product[1:3].any()


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_linear_layer_in_fp8_is_one_product(dtype: torch.dtype) -> None:
    rows, columns = Linear(32, 48), LinearOfColumns(32, 48)
    _init(rows)
    columns.load_state_dict(rows.state_dict())
    x_BTD = _randn(2, 8, 32).to(dtype)
    with torch.no_grad():
        y_BTD, y_NW = rows(x_BTD, fp8=True), columns(x_BTD.flatten(0, 1).mT.contiguous().mT, fp8=True)
    assert y_BTD.dtype == y_NW.dtype == dtype and y_NW.mT.is_contiguous()
    expected = fp8_product(x_BTD.flatten(0, 1), rows.weight, dtype)
    assert torch.equal(y_BTD.flatten(0, 1), expected)
    torch.testing.assert_close(y_NW, expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


@needs_fp8
@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (Linear(32, 48), True),
        (Linear(37, 48), False),
        (Linear(32, 37), False),
        (Linear(32, 48, bias=True), False),
        (LinearOfColumns(32, 37), True),
        (LinearOfColumns(37, 32), False),
    ],
)
def test_a_size_that_fp8_cannot_multiply_keeps_its_dtype(layer: Linear, fits: bool) -> None:
    _init(layer)
    assert layer.fits_fp8 == fits
    x = _randn(16, layer.in_features)
    with torch.no_grad():
        assert torch.equal(layer(x, fp8=True), layer(x)) != fits
