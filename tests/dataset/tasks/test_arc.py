"""ARC as a task: grids as text and JSON, verdicts, validation and symmetries."""
# B = examples, S = cells of the canvas

import json
import re

import numpy as np
import pytest
import torch

from dataset import arc
from dataset.tasks.arc import ArcSymmetries, ArcTask, _grids
from tests.dataset.mazes import turned
from tests.dataset.shapes import arc_grids, on_canvas, tensors
from utils.batch import IGNORE_LABEL

ANSI = re.compile(r"\x1b\[[0-9;]*m")

GRID = np.array([[0, 1, 2], [3, 4, 5]], dtype=np.uint8)
OTHER = np.array([[0, 1, 2], [3, 4, 9]], dtype=np.uint8)
NO_GRID = np.zeros(arc.SEQ_LEN, dtype=np.uint8)


def test_verdicts_on_arc() -> None:
    for answer_S, solution_hw, valid, solved, reason in (
        (arc.to_tokens(GRID), GRID, True, True, "the output that the task gives"),
        (arc.to_tokens(OTHER), GRID, True, False, "1 of 6 cells not as in the output"),
        (arc.to_tokens(GRID), GRID.T, True, False, "the grid is 2x3, the output 3x2"),
        (arc.to_tokens(GRID), None, True, None, "not checked, since the task gives no output"),
        (NO_GRID, GRID, False, False, "the answer is no grid"),
        (NO_GRID, None, False, False, "the answer is no grid"),
    ):
        solution_S = None if solution_hw is None else arc.to_tokens(solution_hw)
        verdict = ArcTask().verdict(arc.to_tokens(GRID), answer_S, solution_S)
        assert (verdict.valid, verdict.solved, verdict.reason) == (valid, solved, reason)


def test_grids_as_text_and_as_json() -> None:
    task = ArcTask()
    tokens_S, other_S = arc.to_tokens(GRID), arc.to_tokens(OTHER)
    assert json.loads(json.dumps(task.plain(tokens_S))) == GRID.tolist() and task.plain(NO_GRID) == []
    gap_S = arc.to_tokens(GRID, top=1)
    gap_S[arc.SIDE + 1] = arc.END
    for shown_S, marks, expected in (
        (tokens_S, {"question_S": tokens_S, "previous_S": other_S}, "0 1 2\n3 4 5*"),
        (other_S, {"question_S": tokens_S, "solution_S": tokens_S}, "0 1 2\n3 4 9!"),
        (arc.to_tokens(GRID, top=3, left=7), {}, "0 1 2\n3 4 5"),
        (gap_S, {}, "0 · 2\n3 4 5"),
        (NO_GRID, {}, "(no grid)"),
    ):
        assert task.show(shown_S, **marks, color=False) == expected
    colored = task.show(other_S, question_S=tokens_S, previous_S=tokens_S, color=True)
    assert ANSI.sub("", colored) == "0 1 2 \n3 4 9*"
    assert len(set(re.findall(r"48;5;\d+", colored))) == 6, "each of the six colours must have its own code"


# ---- validation --------------------------------------------------------------------------------


def test_malformed_arc_canvases_are_found() -> None:
    framed_S = arc.to_tokens(np.arange(6, dtype=np.uint8).reshape(2, 3), 4, 7)
    damaged = [framed_S]
    for cell, token in (
        ((4, 8), 0),  # a hole
        ((5, 9), 1),  # an end marker in place of a colour
        ((4, 10), 0),  # a missing end marker on the right
        ((4, 10), 3),  # a colour in place of an end marker
        ((6, 8), 0),  # a missing end marker below
        ((6, 10), 1),  # an end marker where the two lines of end markers would meet
        ((3, 7), 1),  # an end marker above
        ((20, 20), 4),  # a cell of a second grid
        ((20, 20), 1),
    ):
        tokens_LL = framed_S.reshape(30, 30).copy()
        assert tokens_LL[cell] != token
        tokens_LL[cell] = token
        damaged.append(tokens_LL.ravel())
    right_N, _ = _grids(np.stack([*damaged, np.zeros(900, np.uint8)]))
    assert right_N.tolist() == [True] + [False] * 10


# ---- symmetries --------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [0, IGNORE_LABEL])
@pytest.mark.parametrize("transform", range(8))
def test_grids_are_transformed_inside_their_boxes(transform: int, around: int) -> None:
    rng = np.random.default_rng(transform)
    symmetries = ArcSymmetries()
    cases = [arc_grids(rng) for _ in range(30)]
    assert any(len(grid) == arc.SIDE or len(grid[0]) == arc.SIDE for one, other, *_ in cases for grid in (one, other))
    inputs_BS = np.stack([on_canvas(one, top, left) for one, _, top, left in cases]).astype(np.int32)
    labels_BS = np.stack([on_canvas(other, top, left) for _, other, top, left in cases]).astype(np.int32)
    labels_BS[labels_BS == 0] = around

    uniform_BU = rng.random((30, symmetries.num_draws))
    uniform_BU[:, -1] = (transform + 0.5) / 8
    chosen = symmetries.choose(uniform_BU, np.arange(30))
    batch = symmetries.apply(
        tensors(inputs_BS, labels_BS), {name: torch.from_numpy(array) for name, array in chosen.items()}
    )
    assert {batch[name].dtype for name in ("inputs", "labels")} == {torch.int32}
    for index, (one, other, top, left) in enumerate(cases):
        names = chosen["names"][index].tolist()
        assert names[:3] == [0, 1, 2] and sorted(names) == list(range(arc.VOCAB_SIZE))
        new_top, new_left = (left, top) if transform & 4 else (top, left)
        for name, grid in (("inputs", one), ("labels", other)):
            colours = np.vectorize(lambda colour, names=names: names[colour + 2] - 2)(grid)
            expected_S = on_canvas(turned(colours, transform), new_top, new_left).astype(np.int32)
            if name == "labels":
                expected_S[expected_S == 0] = around
            np.testing.assert_array_equal(batch[name][index].numpy(), expected_S, err_msg=f"{name} {index}")


@pytest.mark.parametrize("side", [5, 12, 30])
def test_a_canvas_of_any_side_is_the_corner_of_the_largest_one(side: int) -> None:
    """Its tokens, its grids and its symmetries are."""
    rng = np.random.default_rng(side)
    num, cases = 64, []
    for number in range(num):
        size = rng.integers(1, side + 1, 2) if number else np.array([side, side])
        top, left = rng.integers(0, side + 1 - size).tolist()
        cases.append((rng.integers(0, 10, size).astype(np.uint8), top, left))

    def corner(canvas_BS: np.ndarray) -> np.ndarray:
        return canvas_BS.reshape(num, arc.SIDE, arc.SIDE)[:, :side, :side].reshape(num, -1)

    small_BS = np.stack([arc.to_tokens(*case, side=side) for case in cases])
    large_BS = np.stack([arc.to_tokens(*case) for case in cases])
    np.testing.assert_array_equal(small_BS, corner(large_BS))
    right_N, first_N = _grids(small_BS)
    assert right_N.all() and first_N.tolist() == [top * side + left for _, top, left in cases]

    symmetries = ArcSymmetries()
    chosen = symmetries.choose(rng.random((num, symmetries.num_draws)), np.arange(num))
    of_batch = {name: torch.from_numpy(array) for name, array in chosen.items()}
    small, large = (symmetries.apply(tensors(rows_BS, rows_BS), of_batch) for rows_BS in (small_BS, large_BS))
    np.testing.assert_array_equal(small["inputs"].numpy(), corner(large["inputs"].numpy()))
