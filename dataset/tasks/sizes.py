"""Split a text into puzzles whose boards may differ in size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dataset.tasks.base import TextTask
from utils.errors import UserError

BoardOf = Callable[[int], TextTask | None]
"""A function from a number of cells to the task with such boards; None if there is none."""


def split_sizes(text: str, where: str, own: TextTask, board_of: BoardOf) -> Iterator[tuple[str, str]]:
    """Split a text into puzzles, as `TextTask.split` does.

    Args:
        own: the task on whose boards the model was trained.
        board_of: finds the boards that the model can read.
    """
    lines = own.lines_in(text)
    first = 0
    while first < len(lines):
        number, line = lines[first]
        length = len(line)
        board = board_of(length * length) if length else None
        rows = [row for _, row in lines[first : first + length]]
        if board is not None and _are_rows(rows, own, board, board_of(length)):
            yield from board.split(lines[first : first + board.rows], where)
            first += board.rows
            continue
        if length:
            yield f"{where}:{number}", line
        first += 1


def _are_rows(lines: Sequence[str], own: TextTask, board: TextTask, whole: TextTask | None) -> bool:
    """Return whether lines are the rows of a board, and not each a whole board.

    A line of 16 characters may be a Sudoku of 4x4, or a row of one of 16x16. It is a row if it has
    a digit above 4, or if the lines are a board.
    """
    if whole is None:
        return True
    if len(lines) < board.rows or any(len(line) != board.columns for line in lines):
        return False
    if set(board.symbols) == set(whole.symbols):
        return board.rows == own.rows
    try:
        board.parse("".join(lines), "")
    except UserError:
        return not set(lines[0].upper()) <= {*whole.symbols, "0", "X"}
    return True
