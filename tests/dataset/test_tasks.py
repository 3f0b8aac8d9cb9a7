"""Boards that people read: text to tokens and back, what is shown, and verdicts against slow rules."""
# S = cells of a board, L = side

import csv
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dataset import arc, maze
from dataset.augment import BOXES, Box
from dataset.sudoku import generate
from dataset.tasks import ArcTask, MazeTask, SudokuTask, task_of_shape

REAL_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
ANSI = re.compile(r"\x1b\[[0-9;]*m")

QUESTION = "1..4....4....3.1"
SOLUTION = "1234341241232341"
SUDOKU = SudokuTask(BOXES["2x2"])

# Four steps along the top, or twelve around the walls.
MAZE = "S   G" + " ### " * 3 + "     "
SHORT = "SoooG" + " ### " * 3 + "     "
LONG = "S   G" + "o###o" * 3 + "ooooo"
MAZE_5 = MazeTask(5)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((16, 6), "sudoku 2x2"),  # a maze of 4x4 has the same shape; nobody trains on that
        ((36, 8), "sudoku 2x3"),
        ((81, 11), "sudoku 3x3"),
        ((36, 6), "maze 6x6"),
        ((900, 6), "maze 30x30"),
        ((900, 12), "arc"),
        ((35, 6), None),
        ((81, 12), None),
        ((900, 11), None),
    ],
)
def test_tasks_are_told_by_their_shapes(shape: tuple[int, int], name: str | None) -> None:
    task = task_of_shape(*shape)
    assert name == (task and task.name)
    assert task is None or task.side**2 == shape[0]


# ---- Sudoku ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", BOXES.values(), ids=str)
def test_sudoku_text_and_tokens(box: Box) -> None:
    task = SudokuTask(box)
    for question_S, solution_S in generate(3, box, np.random.default_rng(0)):
        text = "".join(".123456789"[digit] for digit in question_S)
        rows = [text[start : start + box.side] for start in range(0, len(text), box.side)]
        for written in (text, text.replace(".", "0"), "\n".join(rows) + "\n", f"  {text}\r\n"):
            tokens_S = task.parse(written, "puzzle")
            np.testing.assert_array_equal(tokens_S, question_S + 1)
            assert tokens_S.dtype == np.uint8
        assert task.plain(tokens_S) == text
        answer = "".join(map(str, solution_S))
        np.testing.assert_array_equal(task.parse_solution(answer, "answer", tokens_S), solution_S + 1)
    assert task.plain(np.array([0, 1, 2])) == "?.1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (QUESTION[1:], "here has 15 characters, this model's puzzles have 16 (sudoku 2x2)"),
        ("", "here has 0 characters"),
        ("1" * 100, "here has 100 characters"),
        (
            "1..4....4....3.5",
            "here has '5' in cell 16 (row 4, column 4), where only 1 to 4, and . or 0 for a blank, can",
        ),
        ("1..4...x4....3.1", "here has 'x' in cell 8 (row 2, column 4)"),
        ("1..4...٤4....3.1", "here has '٤' in cell 8"),
        ("14.4............", "here has the digit 4 twice in row 1 (columns 2 and 4); correct it"),
        (".3......" + ".3......", "here has the digit 3 twice in column 2 (rows 1 and 3); correct it"),
        ("..2....2........", "here has the digit 2 twice in box 2 (its cells 1 and 4); correct it"),
        ("3333............", "here has the digit 3 twice in row 1 (columns 1, 2, 3 and 1 more); correct it"),
    ],
)
def test_what_is_no_sudoku(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        SUDOKU.parse(text, "here")


def test_what_is_no_solution_of_a_sudoku() -> None:
    question_S = SUDOKU.parse(QUESTION, "puzzle")
    for text, expected in (
        (SOLUTION[:-1] + ".", "there has '.' in cell 16"),
        (
            "4123" + SOLUTION[4:],
            "there is no solution of its question: 2 clues altered; a digit stands twice in column",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            SUDOKU.parse_solution(text, "there", question_S)


def _is_solved(question_S: np.ndarray, answer_S: np.ndarray, box: Box) -> bool:
    """The rules, cell by cell."""
    side = box.side
    for a in range(side * side):
        if answer_S[a] < 2 or (question_S[a] > 1 and answer_S[a] != question_S[a]):
            return False
        for b in range(a):
            (row, column), (other_row, other_column) = divmod(a, side), divmod(b, side)
            same_box = (row // box.rows, column // box.columns) == (other_row // box.rows, other_column // box.columns)
            if answer_S[a] == answer_S[b] and (row == other_row or column == other_column or same_box):
                return False
    return True


@pytest.mark.parametrize("box", [BOXES["2x2"], BOXES["2x3"]], ids=str)
def test_verdicts_on_sudokus_are_those_of_the_rules(box: Box) -> None:
    rng = np.random.default_rng(1)
    task = SudokuTask(box)
    seen = set()
    for question_S, solution_S in generate(40, box, rng):
        answer_S = solution_S + 1
        cells = rng.choice(box.num_cells, rng.integers(0, 3), replace=False)
        answer_S[cells] = rng.integers(0, box.side + 2, len(cells))
        expected = _is_solved(question_S + 1, answer_S, box)
        verdict = task.check(question_S + 1, answer_S)
        assert (verdict.valid, verdict.solved) == (expected, expected), verdict
        seen.add(expected)
    assert seen == {True, False}


def test_verdicts_say_what_is_wrong() -> None:
    question_S = SUDOKU.parse(QUESTION, "puzzle")
    for answer, expected in (
        (SOLUTION, "every row, column and box holds each digit once, and the clues are kept"),
        (SOLUTION[:1] + "." + SOLUTION[2:], "1 cell left blank"),
        (QUESTION, "11 cells left blank"),
        ("1324" + SOLUTION[4:], "a digit stands twice in column 2, column 3, box 1 and 1 more"),
        ("2" + SOLUTION[1:], "1 clue altered; a digit stands twice in row 1, column 1 and box 1"),
    ):
        assert SUDOKU.check(question_S, _sudoku(answer)).reason == expected


def _sudoku(text: str) -> np.ndarray:
    return np.array([".1234".index(symbol) + 1 for symbol in text])


def test_a_sudoku_as_text() -> None:
    question_S, before_S = SUDOKU.parse(QUESTION, "puzzle"), _sudoku("1234341243222341")
    answer_S = _sudoku("1234341143222342")
    assert SUDOKU.show(question_S, color=False).splitlines() == [
        "┌───────┬───────┐",
        "│ 1  .  │ .  4  │",
        "│ .  .  │ .  .  │",
        "├───────┼───────┤",
        "│ 4  .  │ .  .  │",
        "│ .  3  │ .  1  │",
        "└───────┴───────┘",
    ]
    # Twice in a row, column or box, and not given: wrong. So is a clue that was altered.
    shown = SUDOKU.show(answer_S, question_S=question_S, previous_S=before_S, color=False).splitlines()
    assert [shown[row] for row in (1, 2, 4, 5)] == [
        "│ 1  2' │ 3' 4  │",
        "│ 3' 4' │ 1! 1× │",
        "│ 4  3! │ 2! 2! │",
        "│ 2! 3  │ 4' 2× │",
    ]
    solution_S = _sudoku(SOLUTION)
    shown = SUDOKU.show(answer_S, question_S=question_S, solution_S=solution_S, color=False).splitlines()
    assert [shown[row] for row in (1, 2, 4, 5)] == [
        "│ 1  2' │ 3' 4  │",
        "│ 3' 4' │ 1' 1! │",
        "│ 4  3! │ 2' 2! │",
        "│ 2' 3  │ 4' 2! │",
    ]


def test_colours_say_what_marks_say() -> None:
    question_S, before_S, answer_S = (_sudoku(text) for text in (QUESTION, "13" + SOLUTION[2:], SOLUTION[:-1] + "4"))
    options = {"question_S": question_S, "previous_S": before_S, "solution_S": _sudoku(SOLUTION)}
    shown = SUDOKU.show(answer_S, color=True, **options)
    marks = re.compile("['*!×]")
    assert ANSI.sub("", shown) == marks.sub(" ", SUDOKU.show(answer_S, color=False, **options))
    first, *_, last = [line for line in shown.splitlines() if ANSI.search(line)]
    assert first.startswith("│ \x1b[1m1 \x1b[0m \x1b[36;7m2 \x1b[0m │ \x1b[36m3 \x1b[0m")
    assert last.endswith("\x1b[31;7m4 \x1b[0m │")
    assert "\x1b" not in SUDOKU.show(answer_S, color=False, **options)
    for color in (True, False):
        assert "changed" in SUDOKU.legend(color=color) and "wrong" in SUDOKU.legend(color=color)


def test_puzzles_of_a_text() -> None:
    rows = [QUESTION[start : start + 4] for start in range(0, 16, 4)]
    text = "\n".join([QUESTION, "", *rows, SOLUTION, "123", "  " + SOLUTION]) + "\n"
    assert list(SUDOKU.split(text, "stdin")) == [
        ("stdin:1", QUESTION),
        ("stdin:3", QUESTION),
        ("stdin:7", SOLUTION),
        ("stdin:8", "123"),  # which `parse` refuses
        ("stdin:9", SOLUTION),
    ]
    assert list(SUDOKU.split("", "stdin")) == []
    with pytest.raises(ValueError, match="stdin:3 has 3 characters, but is row 3 of a board whose rows have 4"):
        list(SUDOKU.split("....\n....\n...", "stdin"))
    with pytest.raises(ValueError, match="stdin ends after row 2 of a board of 4 rows"):
        list(SUDOKU.split("....\n....\n", "stdin"))
    maze_rows = [MAZE[start : start + 5] for start in range(0, 25, 5)]
    assert list(MAZE_5.split("\n".join([*maze_rows, MAZE]), "here")) == [("here:1", MAZE), ("here:6", MAZE)]


# ---- mazes -----------------------------------------------------------------------------------------------


def test_maze_text_and_tokens() -> None:
    tokens_S = MAZE_5.parse(MAZE, "puzzle")
    np.testing.assert_array_equal(tokens_S, maze.to_tokens(MAZE))
    rows = "\n".join(MAZE[start : start + 5] for start in range(0, 25, 5))
    np.testing.assert_array_equal(MAZE_5.parse(rows, "puzzle"), tokens_S)
    assert MAZE_5.plain(tokens_S) == MAZE
    np.testing.assert_array_equal(MAZE_5.parse_solution(LONG, "answer", tokens_S), maze.to_tokens(LONG))
    assert MAZE_5.plain(np.arange(6)) == "?# SGo"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MAZE[:-1], "here has 24 characters, this model's puzzles have 25 (maze 5x5)"),
        (SHORT, "here has 'o' in cell 2 (row 1, column 2), where only # for a wall, blank, S and G can be"),
        (MAZE.replace("S", " "), "here has no S, where a maze has one"),
        (MAZE.replace(" ", "G", 1), "here has 2 G, where a maze has one"),
        ("S#  G" + "#### " + MAZE[10:], "here has no way from S to G"),
    ],
)
def test_what_is_no_maze(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        MAZE_5.parse(text, "here")


@pytest.mark.parametrize(
    ("answer", "valid", "solved", "reason"),
    [
        (SHORT, True, True, "a path of 4 steps, and there is no shorter one"),
        (LONG, True, False, "a path of 12 steps, but the shortest has 4"),
        (MAZE, False, False, "no path is marked"),
        (SHORT[:-1] + "o", False, False, "the marked cells are not one path from S to G"),
        (SHORT.replace("#", "o"), False, False, "9 cells of the maze altered"),
        (SHORT.replace("G", "o"), False, False, "1 cell of the maze altered"),
    ],
)
def test_verdicts_on_mazes(answer: str, valid: bool, solved: bool, reason: str) -> None:
    verdict = MAZE_5.check(maze.to_tokens(MAZE), maze.to_tokens(answer))
    assert (verdict.valid, verdict.solved, verdict.reason) == (valid, solved, reason)
    if not valid:
        with pytest.raises(ValueError, match="there is no solution of its question"):
            MAZE_5.parse_solution(answer, "there", maze.to_tokens(MAZE))


def test_a_maze_as_text() -> None:
    question_S, before_S = maze.to_tokens(MAZE), maze.to_tokens(LONG)
    answer_S = maze.to_tokens("SoooG" + "o## o" + LONG[10:])
    shown = MAZE_5.show(answer_S, question_S=question_S, previous_S=before_S, color=False)
    assert shown.splitlines() == [
        "┌──────────┐",
        "│S o*o*o*G │",
        "│o ████ ×o │",
        "│o ██████o │",
        "│o ██████o │",
        "│o o o o o │",
        "└──────────┘",
    ]
    colored = MAZE_5.show(answer_S, question_S=question_S, previous_S=before_S, color=True)
    assert ANSI.sub("", colored) == re.sub("[*×]", " ", shown)
    assert "\x1b[36;7mo \x1b[0m" in colored and "\x1b[31;7m  \x1b[0m" in colored and "\x1b[90m██\x1b[0m" in colored


# ---- ARC -------------------------------------------------------------------------------------------------

GRID = np.array([[0, 1, 2], [3, 4, 5]], dtype=np.uint8)
OTHER = np.array([[0, 1, 2], [3, 4, 9]], dtype=np.uint8)
NO_GRID = np.zeros(arc.SEQ_LEN, dtype=np.uint8)


@pytest.mark.parametrize(
    ("answer_S", "solution_hw", "valid", "solved", "reason"),
    [
        (arc.to_tokens(GRID), GRID, True, True, "the output that the task gives"),
        (arc.to_tokens(OTHER), GRID, True, False, "1 of 6 cells not as in the output"),
        (arc.to_tokens(GRID), GRID.T, True, False, "the grid is 2x3, the output 3x2"),
        (arc.to_tokens(GRID), None, True, None, "not checked, since the task gives no output"),
        (NO_GRID, GRID, False, False, "the answer is no grid"),
        (NO_GRID, None, False, False, "the answer is no grid"),
    ],
)
def test_verdicts_on_arc(
    answer_S: np.ndarray, solution_hw: np.ndarray | None, valid: bool, solved: bool | None, reason: str
) -> None:
    solution_S = None if solution_hw is None else arc.to_tokens(solution_hw)
    verdict = ArcTask().check(arc.to_tokens(GRID), answer_S, solution_S)
    assert (verdict.valid, verdict.solved, verdict.reason) == (valid, solved, reason)


def test_grids_for_programs_and_people() -> None:
    task = ArcTask()
    tokens_S, other_S = arc.to_tokens(GRID), arc.to_tokens(OTHER)
    assert json.loads(json.dumps(task.plain(tokens_S))) == GRID.tolist()
    assert task.plain(NO_GRID) == []
    assert task.show(tokens_S, color=False) == "0 1 2\n3 4 5"
    assert task.show(tokens_S, question_S=tokens_S, previous_S=other_S, color=False) == "0 1 2\n3 4 5*"
    assert task.show(other_S, question_S=tokens_S, solution_S=tokens_S, color=False) == "0 1 2\n3 4 9!"
    assert task.show(arc.to_tokens(GRID, top=3, left=7), color=False) == "0 1 2\n3 4 5"
    assert task.show(NO_GRID, color=False) == "(no grid)"
    gap_S = arc.to_tokens(GRID, top=1)
    gap_S[arc.SIDE + 1] = arc.END
    assert task.show(gap_S, color=False) == "0 · 2\n3 4 5"
    colored = task.show(other_S, question_S=tokens_S, previous_S=tokens_S, color=True)
    assert ANSI.sub("", colored) == "0 1 2 \n3 4 9*"
    assert len(set(re.findall(r"48;5;\d+", colored))) == 6, "every colour has its own"
    assert task.legend(color=True) == task.legend(color=False)


# ---- real puzzles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "shape"), [("sudoku-extreme-1k", (81, 11)), ("maze-30x30-hard-1k", (900, 6))], ids=["sudoku", "maze"]
)
def test_published_answers_are_right(folder: str, shape: tuple[int, int]) -> None:
    file = REAL_DATA / folder / "test.csv.gz"
    if not file.exists():
        pytest.skip("the published puzzles are not here")
    task = task_of_shape(*shape)
    assert isinstance(task, SudokuTask | MazeTask)
    with gzip.open(file, "rt", newline="") as stream:
        for row, _ in zip(csv.DictReader(stream), range(40), strict=False):
            question_S = task.parse(row["question"], "question")
            answer_S = task.parse_solution(row["answer"], "answer", question_S)
            assert task.check(question_S, answer_S).solved
            assert not task.check(question_S, question_S).valid
            assert task.plain(answer_S) == row["answer"]
