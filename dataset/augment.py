"""The symmetries of Sudoku: digits, bands, rows in bands, stacks, columns in stacks, transposition.

They turn a puzzle with one solution into another one of the same difficulty for a person, and are applied here to many
boards at once.
"""
# N = boards, L = side of a board, S = cells of a board (L * L), K = permutations of the rows (or columns),
# U = random numbers for one symmetry

import itertools
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """The shape of a Sudoku's boxes. A 2x3 board has side 6: three bands of two rows, two stacks of three columns."""

    rows: int
    columns: int

    @property
    def side(self) -> int:
        return self.rows * self.columns

    @property
    def num_cells(self) -> int:
        return self.side * self.side

    @property
    def is_square(self) -> bool:
        """Only then does transposition turn boxes into boxes."""
        return self.rows == self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


BOXES = {str(box): box for box in (Box(2, 2), Box(2, 3), Box(3, 3))}


def box_of(seq_len: int, vocab_size: int) -> Box | None:
    """The boxes of a dataset whose tokens are padding, blank and digits; None where its shape is no Sudoku's."""
    for box in BOXES.values():
        if (seq_len, vocab_size) == (box.num_cells, box.side + 2):
            return box
    return None


@cache
def _line_permutations(num_groups: int, size: int) -> np.ndarray:
    """(K, lines): all orders of num_groups * size lines in which groups of `size` stay together."""
    inside = list(itertools.permutations(range(size)))
    orders = [
        [group * size + line for group, lines in zip(groups, within, strict=True) for line in lines]
        for groups in itertools.permutations(range(num_groups))
        for within in itertools.product(inside, repeat=num_groups)
    ]
    table = np.array(orders, dtype=np.intp)
    table.flags.writeable = False
    return table


def row_orders(box: Box) -> np.ndarray:
    """(K, L): every order of the rows that a symmetry may produce."""
    return _line_permutations(box.columns, box.rows)


def column_orders(box: Box) -> np.ndarray:
    """(K, L): every order of the columns that a symmetry may produce."""
    return _line_permutations(box.rows, box.columns)


def cell_sources(rows_NL: np.ndarray, columns_NL: np.ndarray, transposed_N: np.ndarray) -> np.ndarray:
    """For each cell of the transformed boards the cell of the original that it shows: (N, S)."""
    num, side = rows_NL.shape
    starts_NL = rows_NL * side
    swap_N1 = transposed_N[:, None]
    down_NL = np.where(swap_N1, columns_NL, starts_NL)
    across_NL = np.where(swap_N1, starts_NL, columns_NL)
    return (down_NL[:, :, None] + across_NL[:, None, :]).reshape(num, side * side)


@dataclass(frozen=True)
class DrawnSymmetries:
    """One symmetry for each of N boards."""

    cells_NS: np.ndarray  # as in `cell_sources`
    digits_ND: np.ndarray  # (N, L + 1) uint8: what 0 (a blank), 1, ..., L become

    def apply(self, boards_NS: np.ndarray) -> np.ndarray:
        """Transforms board i by symmetry i: (N, S) -> (N, S) uint8."""
        # Flat indices, because take() on them is several times faster than two-dimensional fancy indexing.
        row_N1 = np.arange(len(boards_NS))[:, None]
        moved_NS = boards_NS.take(self.cells_NS + row_N1 * boards_NS.shape[1])
        return self.digits_ND.take(moved_NS + row_N1 * self.digits_ND.shape[1])


def draws_per_symmetry(box: Box) -> int:
    """U: a number for each digit, and one each for rows, columns and transposition."""
    return box.side + 3


def draw_symmetries(rng: np.random.Generator, num: int, box: Box) -> DrawnSymmetries:
    """Draws `num` symmetries independently and uniformly.

    Each takes the next U numbers of `rng`, so a call for n and one for m give what one call for n + m gives.
    """
    return symmetries_from(rng.random((num, draws_per_symmetry(box))), box)


def symmetries_from(uniform_NU: np.ndarray, box: Box) -> DrawnSymmetries:
    """The symmetries that these numbers in [0, 1) stand for, one for each row."""
    num, side = len(uniform_NU), box.side
    digits_ND = np.zeros((num, side + 1), dtype=np.uint8)
    digits_ND[:, 1:] = uniform_NU[:, :side].argsort(axis=1) + 1

    rows, columns = row_orders(box), column_orders(box)
    rows_NL = rows[(uniform_NU[:, side] * len(rows)).astype(np.intp)]
    columns_NL = columns[(uniform_NU[:, side + 1] * len(columns)).astype(np.intp)]
    transposed_N = (uniform_NU[:, side + 2] < 0.5) & box.is_square
    return DrawnSymmetries(cell_sources(rows_NL, columns_NL, transposed_N), digits_ND)
