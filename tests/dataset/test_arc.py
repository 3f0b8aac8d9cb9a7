"""ARC: tasks in JSON and their mistakes, grids and tokens, and symmetries."""
# N = examples, S = cells of the canvas, hw = rows and columns of a grid

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.arc import (
    IDENTITY_C,
    SEQ_LEN,
    SIDE,
    Pair,
    all_transforms,
    augmented_name,
    crop,
    draw_augmentations,
    grid_key,
    parse_name,
    read_tasks,
    transform,
)

SMALL = {"input": [[1, 2], [0, 0], [3, 9]], "output": [[5]]}
TASK = {"train": [SMALL], "test": [SMALL, {"input": [[7]], "output": [[8, 8]]}]}


def _write(file: Path, value: Any) -> Path:
    text = value if isinstance(value, str) else json.dumps(value)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


# ---- tasks as JSON -----------------------------------------------------------------------------


def test_one_task_or_many_with_solutions_and_without(tmp_path: Path) -> None:
    for suffix in (".json", ".json.gz"):
        (task,) = read_tasks(_write(tmp_path / f"0a1b{suffix}", TASK))
        assert (task.name, task.as_json(), task.side) == ("0a1b", TASK, 3)
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
        ("{'train'", "t.json: is no JSON"),
        ("{}", "t.json: holds no ARC task"),
        ({"train": [SMALL]}, "t.json: test is missing"),
        ({"a": TASK, "b": 3}, "t.json: task b: is no ARC task"),
        (_with("train", [[1]]), "t.json: train pair 2, input: is no grid"),
        (_with("train", {"input": [[1]]}), "t.json: train pair 2, output: is no grid"),
        (_with("test", {"input": [[1]]}), "t.json: a test pair has no output, but others have"),
        *(
            (_with("test", {"input": grid, "output": [[1]]}), "t.json: test pair 2, input: is no grid of 1x1 to 30x30")
            for grid in BAD_GRIDS
        ),
    ],
)
def test_malformed_tasks_are_refused(tmp_path: Path, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path}[^\n]*{re.escape(expected)}[^\n]*$"):
        read_tasks(_write(tmp_path / "t.json", value))


def test_wrong_solutions_and_files_are_refused(tmp_path: Path) -> None:
    file = _write(tmp_path / "t.json", {"a": TASK})
    for solutions, expected in (
        ([], "s.json: task a: is no list of 2 outputs"),
        ({"a": [[[1]]]}, "s.json: task a: is no list of 2 outputs"),
        ({"a": [[[1]], [[10]]]}, "s.json: task a: output 2: is no grid"),
    ):
        with pytest.raises(ValueError, match=expected):
            read_tasks(file, _write(tmp_path / "s.json", solutions))
    with pytest.raises(ValueError, match="there is no file"):
        read_tasks(tmp_path / "none.json")
    whole = _write(tmp_path / "t.json.gz", TASK).read_bytes()
    (tmp_path / "t.json.gz").write_bytes(whole[:-12])
    with pytest.raises(ValueError, match=r"t\.json\.gz: cannot be read"):
        read_tasks(tmp_path / "t.json.gz")


# ---- grids and tokens --------------------------------------------------------------------------


def _largest_rectangle(canvas_RC: np.ndarray) -> tuple[int, int]:
    """Return the size of the largest rectangle of colours at the first cell, by trying all."""
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
    tokens_NS[-2], tokens_NS[-2, :4], tokens_NS[-2, SIDE : SIDE + 2] = 0, 2, 3  # 1x4 or 2x2 cells
    grids = crop(tokens_NS)
    for tokens_S, grid_hw in zip(tokens_NS, grids, strict=True):
        height, width = _largest_rectangle(tokens_S.reshape(SIDE, SIDE))
        np.testing.assert_array_equal(grid_hw, tokens_S.reshape(SIDE, SIDE)[:height, :width] - 2)
        assert grid_hw.dtype == np.uint8
    assert grids[0].shape == (30, 30) and grids[-1].shape == (0, 0)
    assert len({grid_hw.shape for grid_hw in grids}) > 10


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
    for rest in ("x|||t8|||0123456789", "x|||t3|||0123456788", "x|||t3|||012345678x", "|||t3|||0123456789"):
        with pytest.raises(ValueError, match="rebuild the dataset"):
            parse_name(rest)


def _pair(rng: np.random.Generator) -> Pair:
    return Pair(*(rng.integers(10, size=size, dtype=np.uint8) for size in ((3, 4), (2, 2))))


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


def test_each_version_of_a_small_task_is_drawn_once() -> None:
    for row, num_versions in (
        ([1], 9),  # no transform changes a single cell; only its 9 colours are left
        ([0, 0], 2),  # all cells are black, so that only the shape differs: 1x2 or 2x1
        ([1, 2], 9 * 8 * 2),  # a mirrored grid only exchanges the two colours
    ):
        pair = Pair(np.array([row], np.uint8), np.zeros((1, 1), np.uint8))
        assert len(draw_augmentations([pair], 300, np.random.default_rng(0)).transforms_A) == num_versions


def test_all_transforms_keep_the_colours_and_differ_by_content() -> None:
    pairs = [_pair(np.random.default_rng(1)) for _ in range(3)]
    found = all_transforms(pairs)
    assert found.transforms_A.tolist() == list(range(8))
    assert (found.permutations_AC == IDENTITY_C).all()
    symmetric = Pair(np.array([[1, 2], [2, 3]], np.uint8), np.zeros((1, 1), np.uint8))
    assert len(all_transforms([symmetric]).transforms_A) == 4
    mirrored = [Pair(transform(pairs[0].input, number), np.zeros((1, 1), np.uint8)) for number in (0, 4)]
    assert len(all_transforms(mirrored).transforms_A) == 4, "the order of the pairs makes no other version"
