"""Gate and up of a SwiGLU in one Triton kernel, for calls without gradient.

The activation is applied before anything is written: 200 MB less for a call on 384 puzzles.
"""
# M = vectors, K = inner size of the products, W = width of gate and of up, N = blocks of the width

from typing import Any

import torch
import triton
import triton.language as tl

_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_W": w, "BLOCK_K": 64}, num_warps=warps, num_stages=stages)
    for m, w, warps, stages in ((128, 64, 4, 3), (128, 128, 8, 3), (64, 128, 8, 4))
]


def gated_product(
    x: torch.Tensor, weight: torch.Tensor, *, over_first: bool, with_squares: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu(g) * u, and the mean square of g * u of each vector in float32 if that is wanted.

    g = G x and u = U x are kept in float32, where the plain formula rounds them.

    Args:
        x: (..., K); with over_first (K, M).
        weight: G, and below it U, (2W, K), in the dtype of x.
    """
    x_MK = x.mT if over_first else x.flatten(0, -2)
    (num_rows, inner), width = x_MK.shape, len(weight) // 2
    y_MW = x.new_empty(width, num_rows).mT if over_first else x.new_empty(num_rows, width)
    # A row for each block of 64 columns. Wider blocks fill fewer rows, and the rest stay zero.
    squares_NM = x.new_zeros(triton.cdiv(width, 64) if with_squares else 0, num_rows, dtype=torch.float32)

    def grid(block: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(num_rows, block["BLOCK_M"]) * triton.cdiv(width, block["BLOCK_W"]),)

    _kernel[grid](
        *(x_MK, weight, y_MW, squares_NM, num_rows, width, inner),
        *(*x_MK.stride(), *weight.stride(), *y_MW.stride()),
        with_squares,
    )
    y = y_MW.mT if over_first else y_MW.unflatten(0, x.shape[:-1])
    if not with_squares:
        return y, None
    mean_square_M = squares_NM.sum(0) / width
    return y, mean_square_M[None] if over_first else mean_square_M.view(*x.shape[:-1], 1)


# Many parameters: sizes, and the strides of three matrices.
@triton.autotune(_CONFIGS, key=["width", "inner"])
@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    y,
    squares,
    num_rows,
    width,
    inner,
    x_m,
    x_k,
    weight_w,
    weight_k,
    y_m,
    y_w,
    WITH_SQUARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Blocks of the same rows follow one another, so that they find x in the cache.
    num_blocks = tl.cdiv(width, BLOCK_W)
    block_m, block_w = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    m = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    w = (block_w * BLOCK_W + tl.arange(0, BLOCK_W)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = m < num_rows, w < width
    x_at = x + m[:, None] * x_m + k[None, :] * x_k
    gate_at = weight + w[None, :] * weight_w + k[:, None] * weight_k
    up_at = gate_at + width * weight_w
    gate = tl.zeros((BLOCK_M, BLOCK_W), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_W), dtype=tl.float32)
    for first in range(0, inner, BLOCK_K):
        is_inner = first + k < inner
        of_weight = is_inner[:, None] & is_column[None, :]
        part = tl.load(x_at, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        gate = tl.dot(part, tl.load(gate_at, mask=of_weight, other=0.0), gate)
        up = tl.dot(part, tl.load(up_at, mask=of_weight, other=0.0), up)
        x_at += BLOCK_K * x_k
        gate_at += BLOCK_K * weight_k
        up_at += BLOCK_K * weight_k
    product = gate * up
    if WITH_SQUARES:
        tl.store(squares + block_w * num_rows + m, tl.sum(product * product, 1), mask=is_row)
    result = (product * tl.sigmoid(gate)).to(y.dtype.element_ty)
    tl.store(y + m[:, None] * y_m + w[None, :] * y_w, result, mask=is_row[:, None] & is_column[None, :])
