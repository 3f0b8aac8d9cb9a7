"""Lights Out as a task: labels, text, verdicts, symmetries, and the judge."""
# B, N = boards, S = cells of a board, L = side, T = transforms

import itertools

import numpy as np
import pytest

from dataset.evaluators import build_evaluators
from dataset.tasks import lights_out
from dataset.tasks.lights_out import DARK, LEAVE, LIT, PRESS, LightsOutTask, solve, toggled
from tests.dataset.mazes import turned_row
from tests.dataset.shapes import split_of, tensors

TASK = LightsOutTask(3)
# The lit lamps are the middle lamp of the upper row and its neighbours. One press turns them off.
QUESTION = "***.*...."
SOLUTION = "-x-------"
# On a 5x5 board, these presses together change no lamp.
IDLE_5 = "x-x-xx-x-x-----x-x-xx-x-x"


def _toggled(presses_S: list[bool]) -> list[bool]:
    """Return the lamps after all presses, applied one by one to a dark board."""
    side = int(len(presses_S) ** 0.5)
    lamps_S = [False] * len(presses_S)
    for cell, is_pressed in enumerate(presses_S):
        row, column = divmod(cell, side)
        for r, c in ((row, column), (row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if is_pressed and 0 <= r < side and 0 <= c < side:
                lamps_S[r * side + c] ^= True
    return lamps_S


def _boards(side: int, num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of random boards that have a solution, and the tokens of their labels."""
    lit_NS = toggled(np.random.default_rng(seed).random((num, side * side)) < 0.5)
    return np.where(lit_NS, LIT, DARK).astype(np.uint8), np.where(solve(lit_NS)[0], PRESS, LEAVE).astype(np.uint8)


# ---- labels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", range(3, 8))
def test_presses_toggle_a_plus(side: int) -> None:
    presses_NS = np.random.default_rng(side).random((20, side * side)) < 0.3
    assert toggled(presses_NS).tolist() == [_toggled(presses_S) for presses_S in presses_NS.tolist()]


@pytest.mark.parametrize("side", [3, 4])
def test_labels_are_the_first_of_the_fewest_presses(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    """A search of all sets of presses finds the expected labels.

    Smaller sets come first. Among equally large sets, the set with the earliest pressed cell comes
    first.
    """
    every_NS = np.array(list(itertools.product([True, False], repeat=side * side)))
    every_NS = every_NS[np.argsort(every_NS.sum(1), kind="stable")]
    expected: dict[bytes, np.ndarray] = {}
    for lit_S, presses_S in zip(toggled(every_NS), every_NS, strict=True):
        expected.setdefault(lit_S.tobytes(), presses_S)
    monkeypatch.setattr(lights_out, "_SOLVED_AT_ONCE", 1100)
    rng = np.random.default_rng(0)
    lit_NS = rng.random((3000, side * side)) < rng.random((3000, 1))
    presses_NS, is_solved_N = solve(lit_NS)
    for lit_S, presses_S, is_solved in zip(lit_NS, presses_NS, is_solved_N, strict=True):
        assert is_solved == (lit_S.tobytes() in expected)
        if is_solved:
            np.testing.assert_array_equal(presses_S, expected[lit_S.tobytes()])
    assert is_solved_N.all() == (side == 3) and is_solved_N.any()


# ---- boards as text ----------------------------------------------------------------------------


def test_text_and_tokens() -> None:
    question_S, solution_S = _tokens(QUESTION), _tokens(SOLUTION)
    for text in (QUESTION, "111\n010\n000\n"):
        np.testing.assert_array_equal(TASK.parse(text, "puzzle"), question_S)
    for text in (SOLUTION, "010000000"):
        np.testing.assert_array_equal(TASK.parse_solution(text, "answer", question_S), solution_S)
    assert TASK.plain(np.arange(5)) == "?.*-x"
    for side, text, expected in (
        (3, "x" + QUESTION[1:], r"here has 'x' in cell 1 \(row 1, column 1\)"),
        (5, "*" + "." * 24, "here has no solution"),
    ):
        with pytest.raises(ValueError, match=expected):
            LightsOutTask(side).parse(text, "here")


def _tokens(text: str) -> np.ndarray:
    return np.array(["?.*-x".index(symbol) for symbol in text], np.uint8)


def test_verdicts() -> None:
    question_S = _tokens(QUESTION)
    for answer, valid, solved, reason in (
        (SOLUTION, True, True, "every lamp is off after 1 press, and no fewer do"),
        ("---------", True, False, "4 lamps left on"),
        ("xx-------", True, False, "3 lamps left on"),
        (QUESTION, False, False, "9 cells neither pressed nor left alone"),
    ):
        verdict = TASK.verdict(question_S, _tokens(answer))
        assert (verdict.valid, verdict.solved, verdict.reason) == (valid, solved, reason)
    with pytest.raises(ValueError, match="there is no solution of its question"):
        TASK.parse_solution("---------", "there", question_S)


def test_a_lamp_that_stays_on_is_marked_as_wrong() -> None:
    question_S = _tokens(QUESTION)
    shown = TASK.show(_tokens("xx-------"), question_S=question_S, previous_S=_tokens(SOLUTION), color=False)
    assert shown.splitlines()[1:4] == ["│x×x!· │", "│·!· · │", "│· · · │"]


# ---- symmetries --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", range(3, 8))
def test_transforms_that_keep_the_label(side: int) -> None:
    """All eight transforms are allowed if boards of the size have only one solution.

    On other sizes, the transformed label must be the label of the transformed board.
    """
    inputs_NS, labels_NS = _boards(side, 60)
    allowed_NT = LightsOutTask(side)._allowed_transforms(inputs_NS, labels_NS)
    for n, transform in np.ndindex(60, 8):
        turned_S = turned_row(inputs_NS[n], transform)
        label_S = np.where(solve(turned_S[None] == LIT)[0][0], PRESS, LEAVE)
        assert allowed_NT[n, transform] == np.array_equal(turned_row(labels_NS[n], transform), label_S)
    assert allowed_NT.all() == (side not in (4, 5))


# ---- evaluation and validation -----------------------------------------------------------------


def test_any_presses_that_turn_all_lamps_off_are_right() -> None:
    (question_S,), (label_S,) = _boards(5, 1)
    idle_S = _tokens(IDLE_5) == PRESS
    other_S = np.where((label_S == PRESS) ^ idle_S, PRESS, LEAVE)
    is_as_short = bool((other_S == PRESS).sum() == (label_S == PRESS).sum())
    wrong_S, blank_S = label_S.copy(), label_S.copy()
    wrong_S[7] = PRESS + LEAVE - wrong_S[7]
    blank_S[7] = DARK
    answers_BS = np.stack([label_S, other_S, wrong_S, blank_S])
    batch = tensors(np.tile(question_S, (4, 1)), answers_BS)
    evaluators = build_evaluators(["lights_out"], split_of(25, 5))
    found = evaluators.judge(batch["inputs"], batch["labels"].long(), "all")
    assert evaluators.metrics == tuple(found) == ("lamps_off", "fewest_presses")
    assert found["lamps_off"].tolist() == [True, True, False, False]
    assert found["fewest_presses"].tolist() == [True, is_as_short, False, False]


def test_faults() -> None:
    inputs_NS, labels_NS = _boards(5, 8)
    task, labelled_NS = LightsOutTask(5), np.ones((8, 25), bool)
    assert not any(rows_N.any() for rows_N in task.faults(inputs_NS, labels_NS, labelled_NS).values())
    inputs_NS[0, 3] = PRESS
    labels_NS[1, 4] = LIT
    labels_NS[2, 0] = PRESS + LEAVE - labels_NS[2, 0]
    idle_S = _tokens(IDLE_5) == PRESS
    labels_NS[3] = np.where((labels_NS[3] == PRESS) ^ idle_S, PRESS, LEAVE)
    labels_NS[4], labelled_NS[4] = 0, False  # row 4 has no label, and row 5 only one
    labels_NS[5, 1:], labelled_NS[5, 1:] = 0, False
    faults = task.faults(inputs_NS, labels_NS, labelled_NS)
    found = {what: np.flatnonzero(rows_N).tolist() for (_, what), rows_N in faults.items()}
    assert found.pop("leaves a lamp on")[-1] == 2
    assert found == {
        "has a cell that is neither dark nor lit": [0],
        "has a cell that is neither pressed nor left alone": [1],
        "is not the first of the solutions with the fewest presses": [3],
    }
