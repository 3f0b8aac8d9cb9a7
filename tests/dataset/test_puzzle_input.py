"""A text is split into puzzles of several sizes, and a line of 16 cells is understood."""

import pytest

from dataset.augment import BOXES
from dataset.puzzle_input import split_sizes
from dataset.tasks.maze import MazeTask
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
    for text, message in (
        ("......\n......\n", "stdin ends after row 2 of a board of 6 rows"),
        ("......\n......\n.....\n", "stdin:3 has 5 characters, but row 3 of this board needs 6"),
    ):
        with pytest.raises(UserError, match=message):
            _split(text, own)


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


def test_a_maze_in_rows_is_one_maze_and_a_line_is_read_as_the_training_was() -> None:
    for side, own, num_mazes in (*((side, 10, 1) for side in (8, 9, 10, 16, 25, 30)), (36, 36, 1), (36, 6, 36)):
        rows = ["#" * side] * side
        expected = rows if num_mazes > 1 else ["".join(rows)]
        assert [cells for _, cells in _split("\n".join(rows), MazeTask(own))] == expected
