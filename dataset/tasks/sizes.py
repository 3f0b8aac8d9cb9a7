"""Split a text into puzzles whose boards may differ in size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dataset.tasks.base import TextTask
from utils.errors import UserError

BoardOf = Callable[[int], TextTask | None]
"""A function from a number of cells to the task with such boards; None if there is none."""


def split_sizes(text: str, where: str, own: TextTask, board_of: BoardOf) -> Iterator[tuple[str, str]]:
    """Split a text into puzzles. A puzzle takes one line, or a line for each of its rows.

    A line of 16 characters may be a Sudoku of 4x4, or a row of one of 16x16: see `_is_row`.

    Args:
        own: the task on whose boards the model was trained.
        board_of: finds the boards that the model can read.

    Yields:
        The place where the puzzle begins, as <where>:<line>, and the text of its cells.

    Raises:
        UserError: A board of several lines is incomplete, or a line has another length.
    """
    lines = own.lines_in(text)
    first = 0
    while first < len(lines):
        number, line = lines[first]
        length = len(line)
        board = board_of(length * length) if length else None
        rows = [row for _, row in lines[first : first + length]]
        if board is not None and _is_row(rows, own, board, board_of(length)):
            yield from board.split_lines(lines[first : first + board.rows], where)
            first += board.rows
            continue
        if length:
            yield f"{where}:{number}", line
        first += 1


def _is_row(lines: Sequence[str], own: TextTask, rows_of: TextTask, whole: TextTask | None) -> bool:
    """Return whether the first line is a row of a board, and not a whole board.

    Args:
        lines: the lines of the board, if it is one in rows.
        rows_of: the task of that board.
        whole: the task of a board with as many cells as the line; None if there is none.
    """
    if whole is None:
        return True
    if len(lines) < rows_of.rows or any(len(line) != rows_of.columns for line in lines):
        return False
    if set(rows_of.symbols) == set(whole.symbols):
        return rows_of.rows == own.rows
    # Small Sudokus have small digits only. A row of a large one may have no others, but then the
    # board has, and no digit occurs twice in the row.
    small = {*whole.symbols, "0", "X"}
    if not set(lines[0].upper()) <= small:
        return True
    if set("".join(lines).upper()) <= small:
        return False
    try:
        rows_of.parse("".join(lines), "")
    except UserError:
        return False
    return True
