"""The layers that every architecture shares, and the distribution of initial weights.

Weights are float32. A layer casts them to the dtype of its input.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

RMS_EPS = 1e-5


def _std_after_truncation() -> float:
    """Return the standard deviation of a unit normal truncated to [-2, 2], about 0.8796."""
    density_at_2 = math.exp(-2.0) / math.sqrt(2 * math.pi)
    mass_within_2 = math.erf(math.sqrt(2.0))
    return math.sqrt(1 - 2 * 2 * density_at_2 / mass_within_2)


STD_AFTER_TRUNCATION = _std_after_truncation()


InitialValues = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Parameters and buffers with their initial values, whole and on the host, in a fixed order.

One value is drawn at a time. Where a tensor comes twice, the last value counts.
"""


@torch.no_grad()
def fill(values: InitialValues) -> None:
    for tensor, value in values:
        tensor.copy_(value)


def truncated_normal(shape: torch.Size, std: float, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor from a normal distribution truncated at two sigma, with this std.

    The values are drawn in float32 on the generator's device: a seed gives the same everywhere.
    """
    draw = torch.empty(shape, dtype=torch.float32, device=generator.device)
    sigma = std / STD_AFTER_TRUNCATION
    return nn.init.trunc_normal_(draw, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)


def uniform(shape: torch.Size, bound: float, generator: torch.Generator) -> torch.Tensor:
    draw = torch.empty(shape, dtype=torch.float32, device=generator.device)
    return draw.uniform_(-bound, bound, generator=generator)


def modulo_normal(shape: torch.Size, std: float, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor from a normal distribution reduced modulo 3, with its sign kept."""
    draw = torch.empty(shape, dtype=torch.float32, device=generator.device).normal_(generator=generator)
    # The factor gives unit standard deviation, and is that of the published code.
    return draw.fmod_(3.0).mul_(1.014762601732121 * std)


def rms_norm(x: torch.Tensor, dim: int = -1, eps: float = RMS_EPS) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) over a dimension, computed in float32, in x's dtype."""
    x32 = x.float()
    if dim == -1:
        return F.rms_norm(x32, x.shape[-1:], eps=eps).to(x.dtype)
    # F.rms_norm knows only the last dimensions, and would transpose its result.
    return (x32 * (x32.square().mean(dim, keepdim=True) + eps).rsqrt()).to(x.dtype)


# The largest number of float8_e4m3fn. A row whose numbers are all smaller than the other is not
# scaled up to it: a scale of zero would make NaN of a row of zeros.
_FP8_LARGEST, _FP8_SMALLEST_ROW = 448.0, 1e-30
# FP8 multiplies matrices whose sides are multiples of this. Only the number of rows of the first
# one is free.
FP8_MULTIPLE = 16


def to_fp8(x_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to float8_e4m3fn, and return it with the float32 scale (N, 1) of its rows."""
    scale_N1 = x_NK.abs().amax(1, keepdim=True).float().clamp(min=_FP8_SMALLEST_ROW) / _FP8_LARGEST
    return (x_NK / scale_N1).to(torch.float8_e4m3fn).contiguous(), scale_N1


def fp8_product(a_MK: torch.Tensor, b_NK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a b^T (M, N) in `dtype`, with both matrices rounded to FP8. It has no gradient."""
    a8_MK, a_scale_M1 = to_fp8(a_MK)
    b8_NK, b_scale_N1 = to_fp8(b_NK)
    # Hopper's fast accumulation adds up in fewer bits than float32, but in more than e4m3 has.
    return torch._scaled_mm(
        a8_MK, b8_NK.mT, scale_a=a_scale_M1, scale_b=b_scale_N1.mT, out_dtype=dtype, use_fast_accum=True
    )


class Linear(nn.Linear):  # torch's tensor parallelism splits subclasses of nn.Linear
    """y = x W^T (+ b) with float32 parameters, computed in the dtype of x."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Do nothing, because torch's method would draw from the global random state."""

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        yield self.weight, truncated_normal(self.weight.shape, 1 / math.sqrt(self.weight.shape[1]), generator)
        if self.bias is not None:
            yield self.bias, torch.zeros(self.bias.shape)

    @property
    def fits_fp8(self) -> bool:
        return self.bias is None and self.in_features % FP8_MULTIPLE == self.out_features % FP8_MULTIPLE == 0

    def forward(self, x: torch.Tensor, *, fp8: bool = False) -> torch.Tensor:
        """Return y. With fp8, x and W are rounded to FP8 if `fits_fp8`, only without gradient."""
        if fp8 and self.fits_fp8:
            return fp8_product(x.flatten(0, -2), self.weight, x.dtype).unflatten(0, x.shape[:-1])
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def aligned(weight_NK: torch.Tensor) -> torch.Tensor:
    """Return the same matrix in a layout that the fast kernels of a GPU can read.

    They need rows, or else columns, that begin at multiples of 16 bytes. If the rows do not, the
    result has its columns together in memory, and so has its gradient. torch.compile pads such
    matrices only if a timing says so, and that timing depends on what else runs.
    """
    if weight_NK.device.type in ("cpu", "mps") or weight_NK.shape[1] * weight_NK.itemsize % 16 == 0:
        return weight_NK
    return weight_NK.mT.contiguous().mT


class LinearOfColumns(Linear):
    """A Linear that is fast for a matrix x whose columns lie together in memory: W x^T."""

    @property
    def fits_fp8(self) -> bool:
        """Whether FP8 can multiply matrices of this size, if x has a multiple of 16 rows."""
        return self.in_features % FP8_MULTIPLE == 0

    def forward(self, x: torch.Tensor, *, fp8: bool = False) -> torch.Tensor:
        if fp8 and self.fits_fp8:
            return fp8_product(self.weight, x, x.dtype).mT
        y: torch.Tensor = aligned(self.weight.to(x.dtype)) @ x.mT
        return y.mT


class Embedding(nn.Module):
    """A float32 table (num_rows, dim) with std 1/sqrt(dim)."""

    def __init__(self, num_rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, dim))

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        yield self.weight, truncated_normal(self.weight.shape, 1 / math.sqrt(self.weight.shape[1]), generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


def swiglu_width(dim: int, expansion: float, multiple: int) -> int:
    """Return 2/3 of expansion * dim, rounded up to a multiple: three matrices instead of two."""
    return max(1, math.ceil(round(expansion * dim * 2 / 3) / multiple)) * multiple


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) over the last dimension, or the first (arXiv 2002.05202).

    One matrix holds the rows of gate, then the rows of up.
    """

    is_normalized = False
    """Whether the output of down is divided by the root mean square of gate(x) * up(x)."""

    gated_product: Callable[..., Any] | None = None
    """A kernel for calls without gradient, models/gated_product.py."""

    def __init__(self, dim: int, width: int, *, over_first: bool = False) -> None:
        super().__init__()
        linear = LinearOfColumns if over_first else Linear
        self.gate_up_proj = linear(dim, 2 * width)
        self.down_proj = linear(width, dim)
        self.over_first = over_first

    def forward(self, x: torch.Tensor, *, fp8: bool = False) -> torch.Tensor:
        dim = 0 if self.over_first else -1
        if self.gated_product is not None and not fp8 and not torch.is_grad_enabled():
            weight, has_squares = self.gate_up_proj.weight.to(x.dtype), self.is_normalized
            inner, mean_square = self.gated_product(x, weight, over_first=self.over_first, with_squares=has_squares)
        else:
            gate_up = self.gate_up_proj(x.mT, fp8=fp8).mT if self.over_first else self.gate_up_proj(x, fp8=fp8)
            gate, up = gate_up.chunk(2, dim=dim)
            inner, mean_square = self.combine(gate, up), None
            if self.is_normalized:  # before down, so that one kernel reads gate and up once
                mean_square = (gate * up).float().square().mean(dim, keepdim=True)
        y = self.down_proj(inner.mT, fp8=fp8).mT if self.over_first else self.down_proj(inner, fp8=fp8)
        return y if mean_square is None else (y * (mean_square + RMS_EPS).rsqrt()).to(y.dtype)

    def combine(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the input of down."""
        return F.silu(gate) * up


class NormalizedSwiGLU(SwiGLU):
    """down(sigmoid(gate(x)) * rms(gate(x) * up(x))) (Speed is Confidence, arXiv 2601.19085).

    The product keeps unit scale however large the weights grow. rms divides each vector by one
    number, so the layer divides the output of down(silu(g) * u) instead. Then the backward pass has
    no sum over the inner width.
    """

    is_normalized = True


class ConvSwiGLU(SwiGLU):
    """down(silu(conv(silu(gate(x)) * up(x)))) (arXiv 2512.14693, section 3.2).

    x is (B, T, D). The convolution combines, component by component, each token with the token
    before it. The equation of the paper has no bias, which the published code has.
    """

    def __init__(self, dim: int, width: int, *, conv_bias: bool = True) -> None:
        super().__init__(dim, width)
        self.conv_weight_W12 = nn.Parameter(torch.empty(width, 1, 2))
        self.conv_bias_W = nn.Parameter(torch.empty(width)) if conv_bias else None

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        """Yield the convolution's values, uniform in +-1/sqrt(2): PyTorch's for two inputs."""
        for parameter in (self.conv_weight_W12, self.conv_bias_W):
            if parameter is not None:
                yield parameter, uniform(parameter.shape, 1 / math.sqrt(2), generator)

    def combine(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        own_BTW = F.silu(gate) * up
        previous_BTW = F.pad(own_BTW, (0, 0, 1, 0))[:, :-1]
        before_W, here_W = self.conv_weight_W12.to(own_BTW.dtype).squeeze(1).unbind(1)
        sum_BTW = before_W * previous_BTW + here_W * own_BTW
        if self.conv_bias_W is not None:
            sum_BTW = sum_BTW + self.conv_bias_W.to(own_BTW.dtype)
        return F.silu(sum_BTW)


class BoardConv(nn.Module):
    """A depthwise convolution of 3x3 cells over a square board, whatever its side.

    The prefix_len positions before the board (puzzle row and registers) get the mean of its cells
    instead. Cells outside of the board are zero.
    """

    def __init__(self, dim: int, prefix_len: int) -> None:
        super().__init__()
        self.prefix_len = prefix_len
        self.weight_D33 = nn.Parameter(torch.empty(dim, 3, 3))

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        """Yield the weight, uniform in +-1/3: PyTorch's distribution for nine inputs."""
        yield self.weight_D33, uniform(self.weight_D33.shape, 1 / 3, generator)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        board_BSD = x_BTD[:, self.prefix_len :]
        side = math.isqrt(board_BSD.shape[1])
        padded_BLLD = F.pad(board_BSD.unflatten(1, (side, side)), (0, 0, 1, 1, 1, 1))
        weight_33D = self.weight_D33.to(x_BTD.dtype).permute(1, 2, 0)
        # Sums of shifted boards: torch.compile makes one kernel of them, and the gradient has the
        # same bits in every run, which cuDNN's convolutions do not promise.
        shifted = (padded_BLLD[:, i : i + side, j : j + side] * weight_33D[i, j] for i in range(3) for j in range(3))
        mixed_BSD = functools.reduce(torch.add, shifted).flatten(1, 2)
        if not self.prefix_len:
            return mixed_BSD
        mean_B1D = board_BSD.mean(1, keepdim=True)
        return torch.cat([mean_B1D.expand(-1, self.prefix_len, -1), mixed_BSD], dim=1)


MlpKind = Literal["swiglu", "normalized_swiglu", "conv_swiglu"]
MLPS: dict[MlpKind, type[SwiGLU]] = {
    "swiglu": SwiGLU,
    "normalized_swiglu": NormalizedSwiGLU,
    "conv_swiglu": ConvSwiGLU,
}
