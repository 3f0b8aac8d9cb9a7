"""Layers and blocks equal their definitions, written plainly with loops."""

# B = batch, T = positions, D = hidden size

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.attention import rotary_tables
from models.block import Block
from models.layers import (
    MLPS,
    ConvSwiGLU,
    Embedding,
    Linear,
    MlpKind,
    NormalizedSwiGLU,
    rms_norm,
    swiglu_width,
    truncated_normal_,
)
from tests.models.helpers import naive_block, naive_mlp, naive_rms


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(seed))


def _init(module: torch.nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, Linear | Embedding | ConvSwiGLU):
            child.init_weights(_generator(7))


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
        (32, 4.0, 256, 256),
        (100, 4.0, 256, 512),
        (96, 4.0, 256, 256),
        (18, 0.5, 256, 256),
        (64, 2.0, 64, 128),
        (37, 2.0, 64, 64),
        (37, 2.0, 1, 49),
        (8, 0.01, 32, 32),
    ],
)
def test_swiglu_widths(dim: int, expansion: float, multiple: int, width: int) -> None:
    assert swiglu_width(dim, expansion, multiple) == width


@pytest.mark.parametrize("kind", MLPS)
def test_mlps_equal_their_definitions(kind: MlpKind) -> None:
    layer = MLPS[kind](8, 32)
    _init(layer)
    x_BTD = 3 * _randn(2, 3, 8)
    for x_TD, y_TD in zip(x_BTD, layer(x_BTD), strict=True):
        torch.testing.assert_close(y_TD.double(), naive_mlp(layer, x_TD), rtol=1e-5, atol=1e-5)


def test_normalized_swiglu_does_not_grow_with_its_weights() -> None:
    """With an open gate the product has the scale of the norm, not that of the weights."""
    layer = NormalizedSwiGLU(8, 32)
    gate, up = _randn(5, 32).abs() + 20, _randn(5, 32, seed=1)
    y = layer.combine(gate, up, dim=-1)
    torch.testing.assert_close(layer.combine(gate, 1000 * up, dim=-1), y, rtol=1e-5, atol=1e-5)
    assert y.square().mean().sqrt().item() == pytest.approx(1, rel=1e-3)
    half = layer.combine(gate.bfloat16(), up.bfloat16(), dim=-1)
    assert half.dtype == torch.bfloat16


def test_convolution_looks_one_token_back_and_no_further() -> None:
    """The first token sees a zero before it. No token sees a later token or another sequence."""
    layer = ConvSwiGLU(8, 32)
    _init(layer)
    x_BTD = _randn(2, 5, 8)
    y_BTD = layer(x_BTD)
    for t in range(5):
        changed_BTD = x_BTD.clone()
        changed_BTD[0, t] += 1
        differs_BT = (layer(changed_BTD) - y_BTD).abs().amax(-1) > 1e-4
        assert differs_BT[0].nonzero().flatten().tolist() == [t, t + 1][: 5 - t], f"token {t} changed"
        assert not differs_BT[1].any()
    with torch.no_grad():
        layer.conv_weight_W12[:, 0, 0] = 1e3  # the weight of the token before
    torch.testing.assert_close(layer(x_BTD)[:, 0], y_BTD[:, 0])


def test_linear_computes_in_the_dtype_of_its_input_and_keeps_float32_weights() -> None:
    layer = Linear(8, 4, bias=True)
    _init(layer)
    layer(_randn(2, 8).bfloat16()).sum().backward()
    assert layer(_randn(2, 8).bfloat16()).dtype == torch.bfloat16
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("mlp_t", [False, True])
def test_a_block_normalizes_after_each_sum(mlp: MlpKind, mlp_t: bool) -> None:
    block = Block(hidden_size=12, num_heads=3, expansion=4.0, width_multiple=16, num_positions=5, mlp_t=mlp_t, mlp=mlp)
    _init(block)
    assert (block.mlp_t is None) != (block.self_attn is None)
    x_TD = _randn(5, 12)
    y_BTD = block(x_TD[None], None if mlp_t else rotary_tables(5, 4, 50.0))
    torch.testing.assert_close(y_BTD[0].double(), naive_block(block, x_TD, 50.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mlp", MLPS)
def test_mlp_t_multiplies_all_slots_at_once(mlp: MlpKind) -> None:
    """Products slot by slot took a fifth of the time of a compiled step (docs/log.md)."""
    block = Block(hidden_size=12, num_heads=3, expansion=4.0, width_multiple=16, num_positions=5, mlp_t=True, mlp=mlp)
    _init(block)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        block(_randn(2, 5, 12).bfloat16(), None)
    products = set(counter.get_flop_counts()["Global"])
    assert products == {torch.ops.aten.mm}, "PyTorch multiplies slot by slot, with the weights copied for each"


def test_mlp_t_has_no_convolution() -> None:
    """The MLP over positions mixes one component at a time, where a convolution has no meaning."""
    block = Block(
        hidden_size=12, num_heads=3, expansion=4.0, width_multiple=16, num_positions=5, mlp_t=True, mlp="conv_swiglu"
    )
    assert isinstance(block.mlp, ConvSwiGLU) and not isinstance(block.mlp_t, ConvSwiGLU)


def test_the_multiple_sets_the_width_of_both_mlps() -> None:
    block = Block(
        hidden_size=64, num_heads=4, expansion=2.0, width_multiple=32, num_positions=37, mlp_t=True, mlp="swiglu"
    )
    assert block.mlp_t is not None
    assert (block.mlp.down_proj.in_features, block.mlp_t.down_proj.in_features) == (96, 64)


def test_truncated_normal_has_the_requested_std() -> None:
    sample = torch.empty(400_000)
    truncated_normal_(sample, 0.5, _generator())
    # The standard error of this std is 0.0004; truncation without the correction would give 0.44.
    assert sample.std().item() == pytest.approx(0.5, abs=0.002)
    assert sample.mean().item() == pytest.approx(0, abs=0.004)
    assert sample.abs().max().item() == pytest.approx(
        2 * 0.5 / 0.87963, abs=0.002
    )  # two sigma of the normal distribution before the cut


def test_a_convolution_starts_at_the_scale_of_its_two_inputs() -> None:
    layer = ConvSwiGLU(512, 5632)
    layer.init_weights(_generator())
    assert layer.conv_weight_W12.shape == (5632, 1, 2)
    assert layer.conv_weight_W12.std().item() == pytest.approx(1 / math.sqrt(2), rel=0.03)
