"""Draw and apply symmetries of Sudoku, to many boards at once.

A symmetry permutes the digits, the bands, the rows in a band, the stacks and the columns in a
stack, and may transpose the board. It turns a puzzle with one solution into another such puzzle,
which is equally difficult for a person.
"""
# N = boards, L = side of a board, S = cells of a board (L * L),
# G = bands, K = orders of the rows, U = random numbers for one symmetry

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """The shape of a Sudoku's boxes. With 2x3 boxes a board has three bands and two stacks."""

    rows: int
    columns: int

    @property
    def side(self) -> int:
        return self.rows * self.columns

    @property
    def num_cells(self) -> int:
        return self.side * self.side

    @property
    def transposed(self) -> "Box":
        return Box(self.columns, self.rows)

    @property
    def is_square(self) -> bool:
        """Whether the boxes are square. Only then transposition is a symmetry."""
        return self.rows == self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


BOXES = {str(box): box for box in (Box(2, 2), Box(2, 3), Box(2, 4), Box(3, 3), Box(3, 4), Box(4, 4))}


def box_of(seq_len: int, vocab_size: int) -> Box | None:
    """Return the boxes of a Sudoku dataset of this shape; None if Sudokus have no such shape."""
    boxes = {(box.num_cells, box.side + 2): box for box in BOXES.values()}  # tokens: padding, blank and the digits
    return boxes.get((seq_len, vocab_size))


@cache
def _permutations(size: int) -> np.ndarray:
    """Return all orders of `size` things, (size!, size), read-only because they are cached."""
    table = np.array(list(itertools.permutations(range(size))), dtype=np.intp)
    table.flags.writeable = False
    return table


def num_row_orders(box: Box) -> int:
    """Return K: how many orders of the rows keep bands together. Columns: `box.transposed`."""
    return math.factorial(box.columns) * math.factorial(box.rows) ** box.columns


def row_orders(numbers_N: np.ndarray, box: Box) -> np.ndarray:
    """Return the orders of the rows with these numbers in [0, K), (N, L)."""
    inside = _permutations(box.rows)
    # From the last digit to the first: an order for each place of a band, and one of the bands.
    digits = []
    for _ in range(box.columns):
        numbers_N, digit_N = np.divmod(numbers_N, len(inside))
        digits.append(digit_N)
    within_NGL = inside[np.stack(digits[::-1], axis=1)]
    groups_NG = _permutations(box.columns)[numbers_N]
    return (groups_NG[:, :, None] * box.rows + within_NGL).reshape(len(groups_NG), box.side)


def cell_sources(rows_NL: np.ndarray, columns_NL: np.ndarray, transposed_N: np.ndarray) -> np.ndarray:
    """Return for each cell of the transformed boards the original cell that it shows, (N, S)."""
    num, side = rows_NL.shape
    starts_NL = rows_NL * side
    swap_N1 = transposed_N[:, None]
    down_NL = np.where(swap_N1, columns_NL, starts_NL)
    across_NL = np.where(swap_N1, starts_NL, columns_NL)
    return (down_NL[:, :, None] + across_NL[:, None, :]).reshape(num, side * side)


@dataclass(frozen=True)
class DrawnSymmetries:
    """One symmetry for each of N boards."""

    cells_NS: np.ndarray  # from `cell_sources`
    digits_ND: np.ndarray  # (N, L + 1) uint8: the new values of 0 (a blank), 1, ..., L

    def apply(self, boards_NS: np.ndarray) -> np.ndarray:
        """Transform board i by symmetry i: (N, S) -> (N, S) uint8."""
        # take() on flat indices is several times faster than two-dimensional fancy indexing.
        row_N1 = np.arange(len(boards_NS))[:, None]
        moved_NS = boards_NS.take(self.cells_NS + row_N1 * boards_NS.shape[1])
        return self.digits_ND.take(moved_NS + row_N1 * self.digits_ND.shape[1])


def draws_per_symmetry(box: Box) -> int:
    """Return U: one number for each digit, and one each for rows, columns and transposition."""
    return box.side + 3


def draw_symmetries(rng: np.random.Generator, num: int, box: Box) -> DrawnSymmetries:
    """Draw `num` symmetries uniformly. Each takes the next U numbers of `rng`."""
    return symmetries_from(rng.random((num, draws_per_symmetry(box))), box)


def symmetries_from(uniform_NU: np.ndarray, box: Box) -> DrawnSymmetries:
    """Return the symmetries that these numbers in [0, 1) encode, one for each row."""
    num, side = len(uniform_NU), box.side
    digits_ND = np.zeros((num, side + 1), dtype=np.uint8)
    digits_ND[:, 1:] = uniform_NU[:, :side].argsort(axis=1) + 1

    rows_NL = row_orders((uniform_NU[:, side] * num_row_orders(box)).astype(np.intp), box)
    columns_NL = row_orders((uniform_NU[:, side + 1] * num_row_orders(box.transposed)).astype(np.intp), box.transposed)
    transposed_N = (uniform_NU[:, side + 2] < 0.5) & box.is_square
    return DrawnSymmetries(cell_sources(rows_NL, columns_NL, transposed_N), digits_ND)
