"""Sudoku as a task: text to tokens and back, boards for people, and verdicts against slow rules."""
# S = cells of a board

import re

import numpy as np
import pytest

from dataset.augment import BOXES, Box
from dataset.sudoku import generate
from dataset.tasks.sudoku import SudokuTask

ANSI = re.compile(r"\x1b\[[0-9;]*m")

QUESTION = "1..4....4....3.1"
SOLUTION = "1234341241232341"
SUDOKU = SudokuTask(BOXES["2x2"])


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
        verdict = task.verdict(question_S + 1, answer_S)
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
        assert SUDOKU.verdict(question_S, _sudoku(answer)).reason == expected


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
