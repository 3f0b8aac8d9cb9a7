"""What a task gets from its base class: texts, boards for a terminal, boards that are no square."""
# S = cells of a board

import numpy as np
import pytest

from dataset.augment import BOXES
from dataset.tasks.base import BoardTask, TextTask, Verdict
from dataset.tasks.maze import MazeTask
from dataset.tasks.sudoku import SudokuTask

QUESTION = "1..4....4....3.1"
SOLUTION = "1234341241232341"
SUDOKU = SudokuTask(BOXES["2x2"])
MAZE = "S   G" + " ### " * 3 + "     "
MAZE_5 = MazeTask(5)


def test_a_text_is_split_into_puzzles() -> None:
    rows = [QUESTION[start : start + 4] for start in range(0, 16, 4)]
    text = "\n".join([QUESTION, "", *rows, SOLUTION, "123", "  " + SOLUTION]) + "\n"
    assert list(SUDOKU.split(SUDOKU.lines_in(text), "stdin")) == [
        ("stdin:1", QUESTION),
        ("stdin:3", QUESTION),
        ("stdin:7", SOLUTION),
        ("stdin:8", "123"),  # `parse` refuses this line later
        ("stdin:9", SOLUTION),
    ]
    maze_rows = [MAZE[start : start + 5] for start in range(0, 25, 5)]
    found = list(MAZE_5.split(MAZE_5.lines_in("\n".join([*maze_rows, MAZE])), "here"))
    assert found == [("here:1", MAZE), ("here:6", MAZE)]
    for text, message in (
        ("....\n....\n...", "stdin:3 has 3 characters, but row 3 of this board needs 4"),
        ("....\n....\n", "stdin ends after row 2 of a board of 4 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            list(SUDOKU.split(SUDOKU.lines_in(text), "stdin"))


class Ribbon(TextTask):
    """Boards of two rows and three columns, in which every cell must be b."""

    kind, symbols, rows, columns, name = "ribbon", "?ab", 2, 3, "ribbon 2x3"

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> BoardTask | None:
        return cls() if (seq_len, vocab_size) == (6, 3) else None

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        return Verdict(True, bool((answer_S == 2).all()), "some cell is not b")


def test_a_board_that_is_no_square_can_be_read() -> None:
    task = Ribbon()
    assert list(task.split(task.lines_in("aba\nbba\naabbaa\n"), "here")) == [("here:1", "ababba"), ("here:3", "aabbaa")]
    question_S = task.parse("ababba", "here")
    assert question_S.tolist() == [1, 2, 1, 2, 2, 1] and task.plain(question_S) == "ababba"
    assert task.parse_solution("bbbbbb", "here", question_S).tolist() == [2] * 6
    for text, expected in (
        ("abab", "has 4 characters, this model's puzzles have 6 .ribbon 2x3.; give one for every cell"),
        ("ababbc", "has 'c' in cell 6 .row 2, column 3., where only a or b can be"),
        ("abab?a", "has '[?]' in cell 5 .row 2, column 2."),
    ):
        with pytest.raises(ValueError, match=f"here {expected}"):
            task.parse(text, "here")
    with pytest.raises(ValueError, match="here is no solution of its question: some cell is not b"):
        task.parse_solution("bbbbba", "here", question_S)
    assert task.show(question_S, color=False) == "a b a\nb b a"


class Numbers(BoardTask):
    """Boards of the same shape without symbols."""

    kind, rows, columns = "numbers", 2, 3

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> BoardTask | None:
        return cls() if (seq_len, vocab_size) == (6, 200) else None

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        return Verdict(True, None, "nobody knows")


def test_a_board_without_symbols_shows_numbers_with_their_marks() -> None:
    """A mark must not take the place of a digit."""
    task, board_S = Numbers(), np.array([1, 20, 199, 4, 5, 6])
    other_S = np.array([1, 20, 3, 4, 0, 6])
    shown = task.show(board_S, question_S=board_S, previous_S=board_S, solution_S=other_S, color=False)
    assert shown.splitlines() == ["  1  20 199!", "  4   5!  6"]
    assert task.plain(board_S) == [[1, 20, 199], [4, 5, 6]]
    assert task.drawing == {"kind": "numbers", "rows": 2, "columns": 3, "tokens": []}
