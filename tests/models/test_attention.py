"""Rotary positions and attention equal their definitions, written plainly with loops."""

# B = batch, T = positions (prefix and tokens), D = hidden size, N = heads, H = head size

import itertools
import math

import pytest
import torch

from models.attention import apply_rotary, rotary_tables, rotary_tables_2d
from tests.models.helpers import blank_model, naive_rotate

PREFIX, SIDE, HEAD_DIM, THETA = 2, 3, 8, 100.0


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def test_rotary_2d_needs_a_square_number_of_cells() -> None:
    with pytest.raises(ValueError, match="8 tokens"):
        blank_model(pos_encodings="rope_2d", seq_len=8)
