"""Layers against their definitions, written plainly with loops."""

import math

import pytest
import torch

from models.attention import Attention, apply_rotary, rotary_tables
from models.block import Block
from models.layers import Embedding, Linear, SwiGLU, rms_norm, swiglu_width, truncated_normal_


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(seed))


def _init(module: torch.nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, Linear | Embedding):
            child.init_weights(_generator(7))


def _naive_rms(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def _naive_swiglu(layer: SwiGLU, x: torch.Tensor) -> torch.Tensor:
    gate_up, down = layer.gate_up_proj.weight.double(), layer.down_proj.weight.double()
    width = down.shape[1]
    gate, up = x.double() @ gate_up[:width].T, x.double() @ gate_up[width:].T
    return (gate * torch.sigmoid(gate) * up) @ down.T


def _naive_rotate(x_H: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """One vector: the complex number x[i] + i x[i + H/2] times exp(i position theta^(-2i/H))."""
    x_H, half = x_H.detach(), len(x_H) // 2
    out = x_H.double().clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_H))
        turned = complex(x_H[i], x_H[i + half]) * complex(math.cos(angle), math.sin(angle))
        out[i], out[i + half] = turned.real, turned.imag
    return out


def _naive_attention(layer: Attention, x_TD: torch.Tensor, theta: float | None) -> torch.Tensor:
    num_positions, hidden_size = x_TD.shape
    head_dim = hidden_size // layer.num_heads
    projected = x_TD.double() @ layer.qkv_proj.weight.double().T
    heads = []
    for head in range(layer.num_heads):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        q, k, v = (projected[:, part * hidden_size : (part + 1) * hidden_size][:, columns] for part in range(3))
        if theta is not None:
            q = torch.stack([_naive_rotate(q[t], t, theta) for t in range(num_positions)])
            k = torch.stack([_naive_rotate(k[t], t, theta) for t in range(num_positions)])
        scores = (q @ k.T) / math.sqrt(head_dim)
        heads.append((scores.exp() / scores.exp().sum(-1, keepdim=True)) @ v)
    return torch.cat(heads, dim=-1) @ layer.o_proj.weight.double().T


def test_rms_norm_has_no_weights_and_works_in_float32() -> None:
    x = _randn(3, 5, 8) * 100
    torch.testing.assert_close(rms_norm(x).double(), _naive_rms(x), rtol=1e-6, atol=1e-6)
    tiny = torch.full((1, 4), 1e-3)  # eps is of the size of the mean square
    torch.testing.assert_close(rms_norm(tiny).double(), _naive_rms(tiny), rtol=1e-5, atol=0)
    half = x.bfloat16()
    assert rms_norm(half).dtype == torch.bfloat16
    torch.testing.assert_close(rms_norm(half), _naive_rms(half).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dim", "expansion", "width"), [(512, 4.0, 1536), (32, 4.0, 256), (100, 4.0, 512), (96, 4.0, 256), (18, 0.5, 256)]
)
def test_swiglu_widths(dim: int, expansion: float, width: int) -> None:
    assert swiglu_width(dim, expansion) == width


def test_swiglu_is_its_definition() -> None:
    layer = SwiGLU(8, 4.0)
    _init(layer)
    x = _randn(2, 3, 8)
    torch.testing.assert_close(layer(x).double(), _naive_swiglu(layer, x), rtol=1e-5, atol=1e-6)


def test_linear_computes_in_the_dtype_of_its_input_and_keeps_float32_weights() -> None:
    layer = Linear(8, 4, bias=True)
    _init(layer)
    layer(_randn(2, 8).bfloat16()).sum().backward()
    assert layer(_randn(2, 8).bfloat16()).dtype == torch.bfloat16
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_rotary_turns_half_with_half() -> None:
    x_BNTH = _randn(1, 1, 5, 6)
    turned = apply_rotary(x_BNTH, rotary_tables(5, 6, 100.0))
    for t in range(5):
        torch.testing.assert_close(
            turned[0, 0, t].double(), _naive_rotate(x_BNTH[0, 0, t], t, 100.0), rtol=1e-5, atol=1e-6
        )


def test_rotary_angles_are_float32_even_for_bfloat16() -> None:
    cos_TH, _ = rotary_tables(1000, 64, 10000.0)
    assert cos_TH.dtype == torch.float32
    x_BNTH = _randn(1, 1, 1000, 64).bfloat16()
    turned = apply_rotary(x_BNTH, rotary_tables(1000, 64, 10000.0))
    expected = _naive_rotate(x_BNTH[0, 0, 999], 999, 10000.0)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned[0, 0, 999].double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("theta", [None, 50.0])
def test_attention_is_full_and_is_its_definition(theta: float | None) -> None:
    layer = Attention(12, 3)
    _init(layer)
    x_BTD = 3 * _randn(2, 5, 12)
    y_BTD = layer(x_BTD, None if theta is None else rotary_tables(5, 4, theta))
    for x_TD, y_TD in zip(x_BTD, y_BTD, strict=True):
        torch.testing.assert_close(y_TD.double(), _naive_attention(layer, x_TD, theta), rtol=1e-4, atol=1e-5)


def test_block_norms_after_each_sum() -> None:
    block = Block(hidden_size=12, num_heads=3, expansion=4.0, num_positions=5, mlp_t=False)
    _init(block)
    assert block.self_attn is not None
    x_TD = _randn(5, 12)
    mixed_TD = _naive_rms(x_TD.double() + _naive_attention(block.self_attn, x_TD, 50.0))
    expected_TD = _naive_rms(mixed_TD + _naive_swiglu(block.mlp, mixed_TD))
    y_BTD = block(x_TD[None], rotary_tables(5, 4, 50.0))
    torch.testing.assert_close(y_BTD[0].double(), expected_TD, rtol=1e-4, atol=1e-5)


def test_block_with_token_mixing_norms_over_positions() -> None:
    block = Block(hidden_size=12, num_heads=3, expansion=4.0, num_positions=5, mlp_t=True)
    _init(block)
    assert block.mlp_t is not None and block.self_attn is None
    x_TD = _randn(5, 12)
    mixed_TD = _naive_rms(x_TD.T.double() + _naive_swiglu(block.mlp_t, x_TD.T)).T
    expected_TD = _naive_rms(mixed_TD + _naive_swiglu(block.mlp, mixed_TD))
    torch.testing.assert_close(block(x_TD[None], None)[0].double(), expected_TD, rtol=1e-4, atol=1e-5)


def test_truncated_normal_has_the_std_that_was_asked_for() -> None:
    sample = torch.empty(400_000)
    truncated_normal_(sample, 0.5, _generator())
    # The standard error of this std is 0.0004; truncation without the correction would give 0.44.
    assert sample.std().item() == pytest.approx(0.5, abs=0.002)
    assert sample.mean().item() == pytest.approx(0, abs=0.004)
    assert sample.abs().max().item() == pytest.approx(2 * 0.5 / 0.87963, abs=0.002)  # two sigma of what was truncated
