"""ARC: tasks in JSON and their mistakes, grids and tokens, symmetries, and the score of a vote."""
# N = examples, S = cells of the canvas, hw = rows and columns of a grid

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.arc import (
    CONFIDENCE_UNIT,
    IDENTITY_C,
    SEQ_LEN,
    SIDE,
    Pair,
    all_transforms,
    augmented_name,
    crop,
    draw_augmentations,
    grid_key,
    grid_of,
    parse_name,
    rank,
    read_tasks,
    score,
    to_tokens,
    transform,
    undo,
)
from tests.dataset.shapes import on_canvas

SMALL = {"input": [[1, 2], [0, 0], [3, 9]], "output": [[5]]}
TASK = {"train": [SMALL], "test": [SMALL, {"input": [[7]], "output": [[8, 8]]}]}


def _write(file: Path, value: Any) -> Path:
    text = value if isinstance(value, str) else json.dumps(value)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def _grids() -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(1, SIDE), st.integers(1, SIDE), st.integers(0, 2**32))
    return shapes.map(lambda shape: _random_grid(np.random.default_rng(shape[2]), *shape[:2]))


def _random_grid(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(10, size=(height, width), dtype=np.uint8)


# ---- tasks as JSON -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_one_task_has_the_name_of_its_file(tmp_path: Path, suffix: str) -> None:
    (task,) = read_tasks(_write(tmp_path / f"0a1b{suffix}", TASK))
    assert task.name == "0a1b"
    assert (len(task.train), len(task.test)) == (1, 2)
    assert task.train[0].input.dtype == np.uint8
    assert task.train[0].input.tolist() == SMALL["input"]
    assert task.test[1].output is not None and task.test[1].output.tolist() == [[8, 8]]


def test_many_tasks_with_solutions_and_without(tmp_path: Path) -> None:
    hidden = {"train": [SMALL], "test": [{"input": [[7]]}]}
    # A task may have the name "train", which is also a key of a task.
    file = _write(tmp_path / "x_challenges.json", {"train": hidden, "b": hidden})
    assert [(task.name, task.test[0].output) for task in read_tasks(file)] == [("train", None), ("b", None)]
    solutions = _write(tmp_path / "x_solutions.json.gz", {"b": [[[1]]], "train": [[[2, 2]]], "other": []})
    outputs = [task.test[0].output for task in read_tasks(file, solutions)]
    assert [output.tolist() for output in outputs if output is not None] == [[[2, 2]], [[1]]]


def _with(part: str, pair: Any) -> dict[str, Any]:
    return {**TASK, part: [SMALL, pair]}


BAD_GRIDS: list[Any] = [3, [[]], [1], [[1, 2], [1]], [[0]] * 31, [[1, 10]], [[1], [-1]], [[True]]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (" \n", "t.json: is empty"),
        ("{'train'", "t.json: is no JSON"),
        ("{}", "t.json: holds no ARC task"),
        ({"train": [SMALL]}, "t.json: test is missing"),
        ({"a": TASK, "b": 3}, "t.json: task b: is no ARC task"),
        (_with("train", [[1]]), "t.json: train pair 2 has no input"),
        (_with("train", {"input": [[1]]}), "t.json: train pair 2 has no output"),
        (_with("test", {"input": [[1]]}), "t.json: a test pair has no output, but others have"),
        *(
            (_with("test", {"input": grid, "output": [[1]]}), "t.json: test pair 2, input: is no grid of 1x1 to 30x30")
            for grid in BAD_GRIDS
        ),
        (_with("test", {"input": [[1]], "output": [[0] * 31]}), "t.json: test pair 2, output: is no grid"),
    ],
)
def test_malformed_tasks_are_refused(tmp_path: Path, value: Any, expected: str) -> None:
    with pytest.raises(ValueError) as error:
        read_tasks(_write(tmp_path / "t.json", value))
    message = str(error.value)
    assert expected in message and message.startswith(str(tmp_path)) and "\n" not in message and ";" in message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none\.json"):
        read_tasks(tmp_path / "none.json")
    whole = _write(tmp_path / "t.json.gz", TASK).read_bytes()
    (tmp_path / "t.json.gz").write_bytes(whole[:-12])
    with pytest.raises(ValueError, match=r"t\.json\.gz: cannot be read \(Compressed file ended"):
        read_tasks(tmp_path / "t.json.gz")


@pytest.mark.parametrize(
    ("solutions", "expected"),
    [
        ([], "s.json: is no object"),
        ({"a": [[[1]]]}, "s.json: task a: is no list of 2 outputs"),
        ({"a": [[[1]], [[10]]]}, "s.json: task a: output 2: is no grid"),
    ],
)
def test_wrong_solutions_are_refused(tmp_path: Path, solutions: Any, expected: str) -> None:
    file = _write(tmp_path / "t.json", {"a": TASK})
    with pytest.raises(ValueError) as error:
        read_tasks(file, _write(tmp_path / "s.json", solutions))
    assert expected in str(error.value)


# ---- grids and tokens --------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(grid_hw=_grids(), data=st.data())
def test_tokens_are_those_of_the_published_format(grid_hw: np.ndarray, data: st.DataObject) -> None:
    top = data.draw(st.integers(0, SIDE - grid_hw.shape[0]))
    left = data.draw(st.integers(0, SIDE - grid_hw.shape[1]))
    tokens_S = to_tokens(grid_hw, top, left)
    assert tokens_S.dtype == np.uint8 and tokens_S.shape == (SEQ_LEN,)
    np.testing.assert_array_equal(tokens_S, on_canvas(grid_hw, top, left))


@pytest.mark.parametrize(("top", "left"), [(-1, 0), (0, 29), (29, 0)])
def test_a_grid_that_leaves_the_canvas_is_refused(top: int, left: int) -> None:
    with pytest.raises(ValueError, match="goes over the edge"):
        to_tokens(np.zeros((2, 2), dtype=np.uint8), top, left)


def _largest_rectangle(canvas_RC: np.ndarray) -> tuple[int, int]:
    """Return the height and width of the largest rectangle of colours at the first cell.

    The search tries every rectangle, fewer rows first.
    """
    best = (0, 0)
    for height in range(1, SIDE + 1):
        for width in range(1, SIDE + 1):
            cells = canvas_RC[:height, :width]
            if cells.min() >= 2 and cells.max() <= 11 and height * width > best[0] * best[1]:
                best = (height, width)
    return best


def test_crop_is_the_largest_rectangle_of_colours() -> None:
    rng = np.random.default_rng(0)
    noisy = []
    for share in (0.0, 0.002, 0.02, 0.1, 0.3):
        tokens_NS = rng.integers(2, 12, size=(6, SEQ_LEN))
        noise_NS = rng.choice([-1, 0, 1, 12, 40], size=tokens_NS.shape)
        noisy.append(np.where(rng.random(tokens_NS.shape) < share, noise_NS, tokens_NS))
    tokens_NS = np.concatenate(noisy).astype(np.int32)
    tokens_NS[-1, 0] = 1
    grids = crop(tokens_NS)
    for tokens_S, grid_hw in zip(tokens_NS, grids, strict=True):
        height, width = _largest_rectangle(tokens_S.reshape(SIDE, SIDE))
        np.testing.assert_array_equal(grid_hw, tokens_S.reshape(SIDE, SIDE)[:height, :width] - 2)
        assert grid_hw.dtype == np.uint8
    assert grids[0].shape == (30, 30) and grids[-1].shape == (0, 0)
    assert len({grid_hw.shape for grid_hw in grids}) > 10, (
        "too few grids have different shapes, so that the test proves little"
    )


def test_crop_takes_the_flatter_of_two_equally_large_rectangles() -> None:
    canvas_RC = np.zeros((SIDE, SIDE), dtype=np.uint8)
    canvas_RC[0, :4] = 2
    canvas_RC[1, :2] = 3
    assert crop(canvas_RC.reshape(1, -1))[0].tolist() == [[0, 0, 0, 0]]


@settings(deadline=None, max_examples=60)
@given(grid_hw=_grids())
def test_crop_is_the_inverse_of_to_tokens(grid_hw: np.ndarray) -> None:
    np.testing.assert_array_equal(crop(to_tokens(grid_hw)[None])[0], grid_hw)
    np.testing.assert_array_equal(grid_of(grid_key(grid_hw)), grid_hw)


# ---- augmentation ------------------------------------------------------------------------------


def test_transforms_are_numbered_as_published() -> None:
    expected = {
        0: [[1, 2, 3], [4, 5, 6]],
        1: [[3, 6], [2, 5], [1, 4]],
        2: [[6, 5, 4], [3, 2, 1]],
        3: [[4, 1], [5, 2], [6, 3]],
        4: [[3, 2, 1], [6, 5, 4]],
        5: [[4, 5, 6], [1, 2, 3]],
        6: [[1, 4], [2, 5], [3, 6]],
        7: [[6, 3], [5, 2], [4, 1]],
    }
    assert {number: transform(np.array(expected[0]), number).tolist() for number in expected} == expected


@settings(deadline=None)
@given(grid_hw=_grids(), number=st.integers(0, 7), seed=st.integers(0, 2**32))
def test_undo_restores_the_grid(grid_hw: np.ndarray, number: int, seed: int) -> None:
    permutation_C = np.random.default_rng(seed).permutation(10).astype(np.uint8)
    again_hw = undo(permutation_C[transform(grid_hw, number)], number, permutation_C)
    assert again_hw.dtype == np.uint8
    np.testing.assert_array_equal(again_hw, grid_hw)


def test_a_name_has_the_transform_and_the_colours() -> None:
    permutation_C = np.array([0, 1, 9, 2, 8, 3, 7, 4, 6, 5], dtype=np.uint8)
    name = augmented_name("0a_b", 3, permutation_C)
    assert name == "0a_b|||t3|||0192837465"
    task, number, parsed_C = parse_name(name)
    assert (task, number) == ("0a_b", 3)
    np.testing.assert_array_equal(parsed_C, permutation_C)
    assert augmented_name("x", 0, IDENTITY_C) == "x"
    assert parse_name("x")[:2] == ("x", 0)
    np.testing.assert_array_equal(parse_name("x")[2], IDENTITY_C)


@pytest.mark.parametrize("rest", ["t8|||0123456789", "t3|||0123456788", "t3|||012345678x"])
def test_malformed_names_are_refused(rest: str) -> None:
    with pytest.raises(ValueError, match="rebuild the dataset"):
        parse_name(f"x|||{rest}")


def _pair(rng: np.random.Generator) -> Pair:
    return Pair(_random_grid(rng, 3, 4), _random_grid(rng, 2, 2))


def _content(pairs: list[Pair], number: int, permutation_C: np.ndarray) -> tuple[bytes, ...]:
    return tuple(
        sorted(
            b"".join(grid_key(permutation_C[transform(grid, number)]) for grid in (pair.input, pair.output))
            for pair in pairs
            if pair.output is not None
        )
    )


def test_versions_differ_by_content_and_keep_black() -> None:
    pairs = [_pair(np.random.default_rng(1)) for _ in range(3)]
    found = draw_augmentations(pairs, 200, np.random.default_rng(0))
    assert found.transforms_A[0] == 0 and found.permutations_AC[0].tolist() == list(range(10))
    assert (found.permutations_AC[:, 0] == 0).all()
    assert (np.sort(found.permutations_AC, axis=1) == IDENTITY_C).all()
    assert set(found.transforms_A.tolist()) == set(range(8))
    assert len({_content(pairs, int(t), p_C) for t, p_C in zip(*found, strict=True)}) == len(found.transforms_A) == 201


@pytest.mark.parametrize(
    ("grids", "num_versions"),
    [
        # No transform changes a single cell. Only its 9 colours are left.
        (([[1]], [[0]]), 9),
        # All cells are black, so that only the shape differs: 1x2 or 2x1.
        (([[0, 0]], [[0]]), 2),
        # 9 first colours and 8 second colours, in a row or in a column. A mirrored grid only
        # exchanges the two colours.
        (([[1, 2]], [[0]]), 9 * 8 * 2),
    ],
)
def test_each_version_of_a_small_task_is_drawn_once(
    grids: tuple[list[list[int]], list[list[int]]], num_versions: int
) -> None:
    pair = Pair(*(np.array(grid, dtype=np.uint8) for grid in grids))
    found = draw_augmentations([pair], 300, np.random.default_rng(0))
    assert len(found.transforms_A) == num_versions


def test_all_transforms_keep_the_colours_and_differ_by_content() -> None:
    """A task of one square grid that equals its transpose has four versions."""
    pairs = [_pair(np.random.default_rng(1)) for _ in range(3)]
    found = all_transforms(pairs)
    assert found.transforms_A.tolist() == list(range(8))
    assert (found.permutations_AC == IDENTITY_C).all()
    symmetric = Pair(np.array([[1, 2], [2, 3]], np.uint8), np.zeros((1, 1), np.uint8))
    assert len(all_transforms([symmetric]).transforms_A) == 4


# ---- the score ---------------------------------------------------------------------------------

# These tests use letters as the keys of answers, because the score only compares keys.


def _votes(**votes: list[float]) -> dict[bytes, tuple[int, int]]:
    return {
        name.encode(): (len(confidences), sum(round(c * CONFIDENCE_UNIT) for c in confidences))
        for name, confidences in votes.items()
    }


def _order(**votes: list[float]) -> str:
    return "".join(candidate.key.decode() for candidate in rank(_votes(**votes)))


def test_the_number_of_votes_counts_before_confidence() -> None:
    assert _order(a=[0.99], b=[0.1, 0.1]) == "ba"


def test_confidence_breaks_ties() -> None:
    assert _order(a=[0.1, 0.5], b=[0.4, 0.3], c=[0.9]) == "bac"
    (first, second) = rank(_votes(a=[0.25, 0.75], b=[0.25, 0.5]))
    assert (first.num_votes, first.confidence, second.confidence) == (2, 0.5, 0.375)


def test_bytes_break_the_remaining_ties_in_any_order_of_votes() -> None:
    assert _order(c=[0.5], a=[0.5], b=[0.5]) == _order(a=[0.5], b=[0.5], c=[0.5]) == "abc"


RIGHT = b"r"


@pytest.mark.parametrize(
    ("tests", "ks", "expected"),
    [
        ([_votes(r=[0.5])], [1, 2], [1, 1]),
        ([_votes(w=[0.5])], [1, 2], [0, 0]),
        # The solution is second in the first case, and third in the next case.
        ([_votes(w=[0.5, 0.5], r=[0.9])], [1, 2, 5], [0, 1, 1]),
        ([_votes(v=[0.5, 0.5], w=[0.6], r=[0.5])], [1, 2, 3], [0, 0, 1]),
        # Several test inputs: some are wrong, and some have no vote.
        ([_votes(r=[0.5]), _votes(w=[0.5])], [1, 2], [0.5, 0.5]),
        ([_votes(r=[0.5]), {}], [1, 1000], [0.5, 0.5]),
        ([_votes(r=[0.5]), _votes(w=[0.9], r=[0.1])], [1, 2], [0.5, 1]),
        ([{}, {}, _votes(r=[0.1])], [1], [1 / 3]),
        ([{}], [1, 1000], [0, 0]),
    ],
)
def test_score(tests: list[dict[bytes, tuple[int, int]]], ks: list[int], expected: list[float]) -> None:
    assert score([rank(votes) for votes in tests], [RIGHT] * len(tests), ks) == pytest.approx(expected)
