"""A text is split into puzzles of several sizes, and a line of 16 cells is understood."""

import pytest

from dataset.augment import BOXES
from dataset.tasks.maze import MazeTask
from dataset.tasks.sizes import split_sizes
from dataset.tasks.sudoku import SudokuTask
from utils.errors import UserError

FOUR, LARGE = SudokuTask(BOXES["2x2"]), SudokuTask(BOXES["4x4"])
SMALL = "1..4....4....3.1"
ROW = "12...6789AbC...G"


def _split(text: str, own: SudokuTask | MazeTask = FOUR) -> list[tuple[str, str]]:
    return list(split_sizes(text, "stdin", own, own.of_other_size))


@pytest.mark.parametrize("own", [FOUR, LARGE], ids=["small", "large"])
def test_puzzles_of_several_sizes(own: SudokuTask) -> None:
    nine, six = "." * 81, "1" + "." * 35
    in_rows = "\n".join(six[row : row + 6] for row in range(0, 36, 6))
    text = f"{SMALL}\n{nine}\n\n{in_rows}\n{SMALL}\n"
    assert _split(text, own) == [("stdin:1", SMALL), ("stdin:2", nine), ("stdin:4", six), ("stdin:10", SMALL)]


@pytest.mark.parametrize("own", [FOUR, LARGE], ids=["small", "large"])
def test_sixteen_lines_of_sixteen_cells(own: SudokuTask) -> None:
    small = [SMALL] * 20
    assert _split("\n".join(small), own) == [(f"stdin:{n}", SMALL) for n in range(1, 21)]
    large = [ROW, *["." * 16] * 15]
    expected = [("stdin:1", SMALL), ("stdin:2", "".join(large)), ("stdin:18", SMALL)]
    assert _split("\n".join([SMALL, *large, SMALL]), own) == expected
    blank_first = [*["." * 16] * 15, ROW]
    assert _split("\n".join([SMALL, *blank_first]), own) == [expected[0], ("stdin:2", "".join(blank_first))]
    assert _split("\n".join([*large, SMALL]), own) == [("stdin:1", "".join(large)), ("stdin:17", SMALL)]


def test_incomplete_boards_are_refused() -> None:
    with pytest.raises(UserError, match=r"stdin ends after row 2 of a board of 6 rows"):
        _split("......\n......\n")
    with pytest.raises(UserError, match=r"stdin:3 has 5 characters, but row 3 of this board needs 6"):
        _split("......\n......\n.....\n")


@pytest.mark.parametrize("side", [8, 9, 10, 16, 25, 30])
def test_a_maze_in_rows_is_one_maze(side: int) -> None:
    rows = "\n".join(["#" * side] * side)
    assert _split(rows, MazeTask(10)) == [("stdin:1", "#" * side * side)]


def test_a_line_of_a_maze_is_read_as_the_training_was() -> None:
    large = MazeTask(36)
    rows = "\n".join(["#" * 36] * 36)
    assert [len(cells) for _, cells in _split(rows, large)] == [1296]
    assert [len(cells) for _, cells in _split(rows, MazeTask(6))] == [36] * 36
