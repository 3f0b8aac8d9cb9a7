"""Pictures of answers: which boards are drawn, what their titles say, and how their cells look."""

from pathlib import Path

import numpy as np
import pytest

from dataset import arc, pictures
from dataset.augment import BOXES
from dataset.pictures import KINDS, Board, Cell, board_of, draw_answers, whole_board
from dataset.tasks.arc import ArcTask
from dataset.tasks.sudoku import SudokuTask


def test_the_boards_of_a_puzzle_with_many_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last cell has no label, and each of the nine answers fills four more cells."""
    drawn: list[Board] = []
    monkeypatch.setattr(pictures, "draw_boards", lambda _, boards, *rest, **more: drawn.extend(boards))
    label_S, number_S = np.arange(36) % 6 + 2, np.arange(36)
    question_S, label_S[35] = np.where(number_S == 0, 2, 1), -100
    answers_TS = np.stack([np.where(number_S < 4 * t, label_S, 1) for t in range(9)])
    drawing = SudokuTask(BOXES["2x3"]).drawing
    draw_answers(drawing, question_S, label_S, answers_TS, "", Path(), confidence_T=[t / 10 for t in range(9)])
    shown = (0, 1, 2, 3, 4, 5, 8)
    of_steps = [f"step {t + 1}: {4 * t} of 35 right\nhalting confidence {10 * t}%" for t in shown]
    assert [board.title for board in drawn] == ["puzzle", *of_steps, "solution"]
    wrong = [np.flatnonzero(board.wrong_RC).tolist() for board in drawn if board.wrong_RC is not None]
    assert wrong == [[*range(4 * t, 35)] for t in shown]
    assert [cell.text for cell in drawn[-1].cells_RC.flat] == [*"123456" * 5, *"12345", ""]
    assert [int(cell.is_given) for cell in drawn[-1].cells_RC.flat] == [1] + [0] * 35
    assert drawing["box"] == [2, 3]


def test_the_looks_of_cells() -> None:
    cell_of, _ = KINDS["lights_out"]
    assert [cell_of(4, 1), cell_of(3, 2)] == [Cell("●"), Cell("", "#f8d68a")], "presses, on lit lamps and dark ones"
    tokens_S = arc.to_tokens(np.array([[1, 2, 3]]), 4, 5)
    board = whole_board(ArcTask().drawing, "", tokens_S, tokens_S)
    assert [cell.ground for cell in board.cells_RC.flat] == list(pictures._ARC_GROUNDS[1:4])
    assert board_of(None, 50) == {"kind": "numbers", "rows": 4, "columns": 16, "tokens": [], "wrapped": True}
