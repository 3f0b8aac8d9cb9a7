"""Tasks whose boards are texts split a text into puzzles."""

import pytest

from dataset.augment import BOXES
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
    assert list(SUDOKU.split(text, "stdin")) == [
        ("stdin:1", QUESTION),
        ("stdin:3", QUESTION),
        ("stdin:7", SOLUTION),
        ("stdin:8", "123"),  # `parse` refuses this line later
        ("stdin:9", SOLUTION),
    ]
    assert list(SUDOKU.split("", "stdin")) == []
    with pytest.raises(ValueError, match="stdin:3 has 3 characters, but row 3 of this board needs 4"):
        list(SUDOKU.split("....\n....\n...", "stdin"))
    with pytest.raises(ValueError, match="stdin ends after row 2 of a board of 4 rows"):
        list(SUDOKU.split("....\n....\n", "stdin"))
    maze_rows = [MAZE[start : start + 5] for start in range(0, 25, 5)]
    assert list(MAZE_5.split("\n".join([*maze_rows, MAZE]), "here")) == [("here:1", MAZE), ("here:6", MAZE)]
