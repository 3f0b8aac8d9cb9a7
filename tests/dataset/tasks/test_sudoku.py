"""Sudoku as a task: text and tokens, boards as text, verdicts and symmetries."""
# B = boards, S = cells of a board

import re

import numpy as np
import pytest
import torch

from dataset.augment import BOXES, Box
from dataset.evaluators import build_evaluators
from dataset.sudoku import generate, random_solution
from dataset.tasks.sudoku import SudokuSymmetries, SudokuTask
from tests.dataset.shapes import is_valid_sudoku, split_of, tensors
from utils.batch import IGNORE_LABEL

QUESTION = "1..4....4....3.1"
SOLUTION = "1234341241232341"
SUDOKU = SudokuTask(BOXES["2x2"])


@pytest.mark.parametrize("box", BOXES.values(), ids=str)
def test_sudoku_text_and_tokens(box: Box) -> None:
    task = SudokuTask(box)
    for question_S, solution_S in generate(3, box, np.random.default_rng(0)):
        text = "".join(".123456789ABCDEFG"[digit] for digit in question_S)
        rows = [text[start : start + box.side] for start in range(0, len(text), box.side)]
        for written in (text, text.lower(), text.replace(".", "0"), "\n".join(rows) + "\n", f"  {text}\r\n"):
            tokens_S = task.parse(written, "puzzle")
            np.testing.assert_array_equal(tokens_S, question_S + 1)
            assert tokens_S.dtype == np.uint8
        assert task.plain(tokens_S) == text
        answer = "".join("?123456789ABCDEFG"[digit] for digit in solution_S)
        np.testing.assert_array_equal(task.parse_solution(answer, "answer", tokens_S), solution_S + 1)
    assert task.plain(np.array([0, 1, 2])) == "?.1"


def test_malformed_sudokus_are_refused() -> None:
    for text, expected in (
        ("1..4....4....3.5", r"here has '5' in cell 16 \(row 4, column 4\)"),
        ("14.4............", "the digit 4 twice in row 1"),
        (".3......" + ".3......", "the digit 3 twice in column 2"),
        ("..2....2........", "the digit 2 twice in box 2"),
    ):
        with pytest.raises(ValueError, match=expected):
            SUDOKU.parse(text, "here")


def _sudoku(text: str) -> np.ndarray:
    return np.array([".1234".index(symbol) + 1 for symbol in text])


def test_a_sudoku_as_text() -> None:
    """A digit is wrong if it occurs twice, or differs from the solution. So is an altered clue."""
    question_S, before_S = SUDOKU.parse(QUESTION, "puzzle"), _sudoku("1234341243222341")
    answer_S = _sudoku("1234341143222342")
    shown = SUDOKU.show(answer_S, question_S=question_S, previous_S=before_S, color=False).splitlines()
    assert shown == [
        "┌───────┬───────┐",
        "│ 1  2' │ 3' 4  │",
        "│ 3' 4' │ 1! 1× │",
        "├───────┼───────┤",
        "│ 4  3! │ 2! 2! │",
        "│ 2! 3  │ 4' 2× │",
        "└───────┴───────┘",
    ]
    colored = SUDOKU.show(answer_S, question_S=question_S, previous_S=before_S, color=True)
    styles = [code for code, _ in re.findall(r"\x1b\[([\d;]+)m(\d)", colored)]
    assert styles[:8] == ["1", "36", "36", "1", "36", "36", "31", "31;7"]
    solution_S = _sudoku(SOLUTION)
    shown = SUDOKU.show(answer_S, question_S=question_S, solution_S=solution_S, color=False).splitlines()
    assert [shown[row] for row in (2, 4, 5)] == ["│ 3' 4' │ 1' 1! │", "│ 4  3! │ 2' 2! │", "│ 2' 3  │ 4' 2! │"]


# ---- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("box", BOXES.values(), ids=str)
def test_a_board_is_valid_if_every_row_column_and_box_is(box: Box) -> None:
    rng = np.random.default_rng(0)
    boards = [random_solution(box, rng).astype(np.int64) + 1 for _ in range(8)]
    for solution_S in boards[:8]:
        for _ in range(6):
            changed_S = solution_S.copy()
            changed_S[rng.integers(box.num_cells)] = rng.integers(0, box.side + 2)
            boards.append(changed_S)
        swapped_S = solution_S.copy()  # each digit occurs as often as before
        swapped_S[[0, 1]] = swapped_S[[1, 0]]
        boards.append(swapped_S)
    side = box.side
    # In this Latin square, digits occur twice in a box.
    latin_S = [(row + column) % side + 2 for row in range(side) for column in range(side)]
    # Boards of one digit would deceive a judge that adds powers of two, because the sums carry.
    boards += [np.array(latin_S), *(np.full(box.num_cells, token) for token in range(side + 2))]
    boards_BS = np.stack(boards)
    expected = [is_valid_sudoku(board_S - 1, box) for board_S in boards_BS]
    assert 8 <= sum(expected) < len(boards)
    task = SudokuTask(box)
    blank_S = np.ones(box.num_cells, np.int64)
    verdicts = [task.verdict(blank_S, board_S) for board_S in boards_BS]
    assert [verdict.valid for verdict in verdicts] == [verdict.solved for verdict in verdicts] == expected
    for dtype in (torch.int64, torch.int32):
        predictions_BS = torch.from_numpy(boards_BS).to(dtype)
        found = task.judge(torch.ones_like(predictions_BS, dtype=torch.int32), predictions_BS)
        assert found["valid_boards"].tolist() == expected
        assert found["valid_boards"].dtype == torch.bool
        assert found["clues_kept"].all(), "a board without clues must keep all clues"


def test_clues_are_kept_where_the_input_has_a_digit() -> None:
    inputs_BS = torch.ones(4, 16, dtype=torch.int32)
    inputs_BS[:, 3], inputs_BS[:, 5], inputs_BS[:, 9] = 2, 4, 0
    predictions_BS = torch.full((4, 16), 5)
    predictions_BS[:, 3], predictions_BS[:, 5] = 2, 4
    predictions_BS[1, 5] = 3
    predictions_BS[2, 3] = 1
    predictions_BS[3, 9] = 2
    found = build_evaluators(["sudoku"], split_of(16, 6)).judge(inputs_BS, predictions_BS, "all")
    assert found["clues_kept"].tolist() == [True, False, False, True]
    reasons = [SUDOKU.verdict(*pair).reason for pair in zip(inputs_BS.numpy(), predictions_BS.numpy(), strict=True)]
    assert ["1 clue altered" in reason for reason in reasons] == [False, True, True, False]
    assert not found["valid_boards"].any()


# ---- symmetries --------------------------------------------------------------------------------


def test_ignored_labels_and_padding_move_but_keep_their_value() -> None:
    box = BOXES["2x2"]
    symmetries = SudokuSymmetries(box)
    uniform_BU = np.random.default_rng(0).random((50, symmetries.num_draws))
    chosen = {name: torch.from_numpy(a) for name, a in symmetries.choose(uniform_BU, np.zeros(50, np.int64)).items()}
    inputs_BS = np.tile(np.arange(16) % 6, (50, 1))
    labels_BS = np.where(inputs_BS == 3, IGNORE_LABEL, inputs_BS)
    batch = symmetries.apply(tensors(inputs_BS, labels_BS), chosen)
    for value in (0, 1):
        assert torch.equal(batch["inputs"] == value, batch["labels"] == value)
        assert (batch["inputs"] == value).sum(1).tolist() == [int((inputs_BS[0] == value).sum())] * 50
    # The ignored cells are still the cells of one digit, at other places and under another name.
    ignored_BS = batch["labels"] == IGNORE_LABEL
    assert ignored_BS.sum(1).tolist() == [3] * 50
    assert all(len(set(row[hidden].tolist())) == 1 for row, hidden in zip(batch["inputs"], ignored_BS, strict=True))
    assert torch.equal(batch["inputs"][~ignored_BS], batch["labels"][~ignored_BS])
