"""ARC as a task: grids for programs and people, and verdicts."""
# S = cells of the canvas

import json
import re

import numpy as np
import pytest

from dataset import arc
from dataset.tasks.arc import ArcTask, _grids

ANSI = re.compile(r"\x1b\[[0-9;]*m")

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
    verdict = ArcTask().verdict(arc.to_tokens(GRID), answer_S, solution_S)
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


# ---- validation ------------------------------------------------------------------------------------------


def _canvases() -> list[np.ndarray]:
    """Grids of all kinds of sizes in all kinds of places."""
    rng = np.random.default_rng(0)
    found = []
    for height, width in [(1, 1), (30, 30), (30, 1), (1, 30), (29, 30), (3, 5), *rng.integers(1, 31, (20, 2)).tolist()]:
        grid = rng.integers(0, 10, (height, width)).astype(np.uint8)
        top, left = (int(rng.integers(0, 31 - size)) for size in (height, width))
        found += [arc.to_tokens(grid), arc.to_tokens(grid, top, left), arc.to_tokens(grid, 30 - height, 30 - width)]
    return found


def test_arc_grids_of_all_sizes_are_right() -> None:
    right_N, corner_N = _grids(np.stack(_canvases()))
    assert right_N.all()
    assert corner_N.tolist() == [int(np.flatnonzero(tokens_S > 1)[0]) for tokens_S in _canvases()]


FRAMED = arc.to_tokens(np.arange(6, dtype=np.uint8).reshape(2, 3), 4, 7)


@pytest.mark.parametrize(
    "cell, token",
    [
        ((4, 8), 0),  # a hole
        ((5, 9), 1),  # a marker in place of a colour
        ((4, 10), 0),  # no marker on the right
        ((4, 10), 3),  # a colour there
        ((6, 8), 0),  # no marker below
        ((6, 10), 1),  # a marker where the two lines of markers would meet
        ((3, 7), 1),  # one above
        ((20, 20), 4),  # a second grid
        ((20, 20), 1),
    ],
)
def test_arc_canvases_that_are_wrong(cell: tuple[int, int], token: int) -> None:
    tokens_LL = FRAMED.reshape(30, 30).copy()
    assert tokens_LL[cell] != token
    tokens_LL[cell] = token
    right_N, _ = _grids(np.stack([FRAMED, tokens_LL.ravel(), np.zeros(900, np.uint8)]))
    assert right_N.tolist() == [True, False, False]
