"""The evaluators against boards that are judged cell by cell."""
# B = boards, S = cells of a board

from typing import get_args

import numpy as np
import pytest
import torch

from dataset import maze
from dataset.augment import BOXES, Box
from dataset.evaluators import JUDGES, EvaluatorName, build_evaluators, fitting_evaluators
from dataset.sudoku import random_solution
from tests.dataset.shapes import split_of


def _is_valid(tokens_S: list[int], box: Box) -> bool:
    digits = set(range(2, box.side + 2))
    units: dict[tuple[str, int], set[int]] = {}
    for cell, token in enumerate(tokens_S):
        row, column = divmod(cell, box.side)
        corner = row // box.rows * 10 + column // box.columns
        for unit in (("row", row), ("column", column), ("box", corner)):
            units.setdefault(unit, set()).add(token)
    return len(units) == 3 * box.side and all(seen == digits for seen in units.values())


@pytest.mark.parametrize("box", BOXES.values(), ids=str)
def test_boards_are_valid_as_each_unit_says(box: Box) -> None:
    rng = np.random.default_rng(0)
    boards = [random_solution(box, rng).astype(np.int64) + 1 for _ in range(8)]
    for solution_S in boards[:8]:
        for _ in range(6):
            changed_S = solution_S.copy()
            changed_S[rng.integers(box.num_cells)] = rng.integers(0, box.side + 2)
            boards.append(changed_S)
        swapped_S = solution_S.copy()  # every digit as often as before
        swapped_S[[0, 1]] = swapped_S[[1, 0]]
        boards.append(swapped_S)
    side = box.side
    latin_S = [(row + column) % side + 2 for row in range(side) for column in range(side)]  # boxes repeat digits
    # All of one digit: in a sum of powers of two they carry.
    boards += [np.array(latin_S), *(np.full(box.num_cells, token) for token in range(side + 2))]
    boards_BS = np.stack(boards)
    expected = [_is_valid(board_S.tolist(), box) for board_S in boards_BS]
    assert 8 <= sum(expected) < len(boards)
    evaluator = JUDGES["sudoku"](split_of(box.num_cells, box.side + 2))
    for dtype in (torch.int64, torch.int32):
        predictions_BS = torch.from_numpy(boards_BS).to(dtype)
        found = evaluator(torch.ones_like(predictions_BS, dtype=torch.int32), predictions_BS)
        assert found["valid_boards"].tolist() == expected
        assert found["valid_boards"].dtype == torch.bool
        assert found["clues_kept"].all(), "where nothing is given, nothing is changed"


def test_clues_are_kept_where_the_input_has_a_digit() -> None:
    inputs_BS = torch.ones(4, 16, dtype=torch.int32)
    inputs_BS[:, 3], inputs_BS[:, 5], inputs_BS[:, 9] = 2, 4, 0
    predictions_BS = torch.full((4, 16), 5)
    predictions_BS[:, 3], predictions_BS[:, 5] = 2, 4
    predictions_BS[1, 5] = 3
    predictions_BS[2, 3] = 1
    predictions_BS[3, 9] = 2
    found = build_evaluators(["sudoku"], split_of(16, 6)).judge(inputs_BS, predictions_BS)
    assert found["clues_kept"].tolist() == [True, False, False, True]
    assert not found["valid_boards"].any()


def test_mazes_are_judged_by_the_path_alone() -> None:
    """There are two shortest ones, of which a label would be one."""
    question = "S   #   G"
    answers = {
        question: (False, False),  # no path
        "Soo #o  G": (True, True),
        "S  o# ooG": (True, True),
        "Soo #ooG ": (False, False),  # another goal
        "Sooo#oooG": (False, False),  # both, which is a ring
        "Soo  o  G": (False, False),  # without the wall
    }
    inputs_BS = torch.from_numpy(np.stack([maze.to_tokens(question)] * len(answers))).int()
    predictions_BS = torch.from_numpy(np.stack([maze.to_tokens(answer) for answer in answers])).long()
    found = build_evaluators(["maze"], split_of(9, 6)).judge(inputs_BS, predictions_BS)
    assert list(zip(found["path_valid"].tolist(), found["path_optimal"].tolist(), strict=True)) == list(
        answers.values()
    )
    assert found["path_valid"].dtype == torch.bool


def test_names_and_metrics() -> None:
    assert set(get_args(EvaluatorName)) == {*JUDGES, "arc"}
    evaluators = build_evaluators(["sudoku", "sudoku"], split_of(81, 11))
    tokens_BS = torch.ones(3, 81, dtype=torch.int64)
    assert evaluators.metrics == ("valid_boards", "clues_kept") == tuple(evaluators.judge(tokens_BS, tokens_BS))
    nothing = build_evaluators([], split_of(900, 12))
    assert nothing.metrics == () and nothing.judge(tokens_BS, tokens_BS) == {}


def test_the_task_says_who_knows_it() -> None:
    """Of an ARC dataset its builder's list of tasks: without it nobody could vote."""
    sizes = [(36, 8), (900, 6), (25, 6), (24, 6), (900, 12), (100, 10)]
    assert [fitting_evaluators(split_of(*size)) for size in sizes] == [["sudoku"], ["maze"], ["maze"], [], [], []]


@pytest.mark.parametrize(("seq_len", "vocab_size"), [(81, 11), (24, 6), (900, 12)])
def test_what_is_no_maze_is_a_mistake(seq_len: int, vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"data/test has {seq_len} tokens of {vocab_size} kinds, which is no maze"):
        build_evaluators(["maze"], split_of(seq_len, vocab_size))


@pytest.mark.parametrize(("seq_len", "vocab_size"), [(81, 10), (36, 6), (900, 6), (64, 10)])
def test_what_is_no_sudoku_is_a_mistake(seq_len: int, vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"data/test has {seq_len} tokens of {vocab_size} kinds, which is no Sudoku"):
        build_evaluators(["sudoku"], split_of(seq_len, vocab_size))
