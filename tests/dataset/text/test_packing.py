"""The packers and the packed rows: the recorded cases of the published code, and cases by hand."""
# N = samples, C = tokens of a row

import json

import numpy as np
import pytest

from dataset.text.packing import PackedRow, Shapes, packed_row, published_steps
from dataset.text.schema import Samples
from tests.runs import REPOSITORY

RECORDED = REPOSITORY.parent / "shared" / "reference_text"
recorded = pytest.mark.skipif(not RECORDED.is_dir(), reason=f"the recorded cases are not here: no folder {RECORDED}")


def _steps(lengths: list[int], capacity: int, num_rows: int, drop_last_batch: bool = False) -> list[list[list[int]]]:
    steps = published_steps(np.array(lengths), capacity, num_rows, drop_last_batch=drop_last_batch)
    return [[row.tolist() for row in step] for step in steps]


@recorded
def test_the_recorded_cases_of_the_packer() -> None:
    cases = json.loads((RECORDED / "packer.json").read_text())
    assert cases
    for case in cases:
        lengths, capacity, num_rows = case["lengths"], case["batch_max_length"], case["num_replicas"]
        steps = _steps(lengths, capacity, num_rows, case["drop_last_batch"])
        assert steps == case["steps"], case["name"]
        assert sum(lengths[sample] for step in steps for row in step for sample in row) == case["tokens_used"]
        assert len(steps) * capacity * num_rows == case["token_slots"], case["name"]


@pytest.mark.parametrize(
    "lengths, capacity, num_rows, drop_last_batch, expected",
    [
        # The first three fill the row. The later of two equal ones comes first.
        ([3, 5, 2, 5, 5], 10, 1, False, [[[1, 0, 2]], [[4, 3]]]),
        ([3, 5, 2, 5, 5], 10, 1, True, [[[1, 0, 2]]]),
        # Six samples have the length of a step, but no row of 10 takes 7, 6 and 5.
        ([7, 6, 5, 2], 10, 2, False, [[[0], [1]], [[2], [3]]]),
        # The third sample is above the capacity: alone in a row of one, and the end with two rows.
        ([4, 4, 30, 4], 10, 1, False, [[[1, 0]], [[2]], [[3]]]),
        ([4, 4, 30, 4], 10, 2, False, [[[1], [0]]]),
        ([4], 10, 2, False, []),
    ],
)
def test_the_published_packer_by_hand(
    lengths: list[int], capacity: int, num_rows: int, drop_last_batch: bool, expected: list[list[list[int]]]
) -> None:
    assert _steps(lengths, capacity, num_rows, drop_last_batch) == expected


def _filled(lengths_N: np.ndarray, capacity: int, seed: int = 0) -> list[list[int]]:
    shapes = Shapes(lengths_N, capacity)
    filled_N = shapes.fill(np.random.default_rng(seed).permutation(len(lengths_N)))
    return [filled_N[shapes.row(number)].tolist() for number in range(shapes.num_rows)]


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_is_in_one_row_of_best_fit_written_out_slowly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(5, 300))
    lengths_N = rng.integers(1, capacity + 1, int(rng.integers(1, 400)))
    rows = _filled(lengths_N, capacity, seed)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths_N)))
    rooms: list[int] = []
    for length in sorted(lengths_N.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        rooms.remove(min(fitting)) if fitting else None
        rooms.append((min(fitting) if fitting else capacity) - length)
    loads = [int(lengths_N[row].sum()) for row in rows]
    assert sorted(loads) == sorted(capacity - room for room in rooms) and max(loads) <= capacity
    other = _filled(lengths_N, capacity, seed + 1)
    assert len(other) == len(rows) and (other != rows or len(lengths_N) < 100)


def test_a_packed_row_by_hand() -> None:
    tokens = np.arange(100, 120, dtype=np.uint16)
    # An instruction of 3 and a response of 2; a text of 4; an instruction of 2 and a response of 1.
    samples = Samples(
        np.array([0, 5, 9]), np.array([3, 1, 2]), np.array([2, 3, 1]), None, np.array([0, 1, 0]), files=()
    )
    row = packed_row(tokens, samples.take(slice(None)), 12, target_only=True)
    no = -100
    assert row.inputs.tolist() == [100, 101, 102, 103, 105, 106, 107, 109, 110, 0, 0, 0]
    assert row.labels.tolist() == [no, no, 103, 104, 106, 107, 108, no, 111, no, no, no]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 0, 0]
    assert (row.prefix_lens.tolist(), row.response_lens.tolist()) == ([3, 1, 2], [1, 2, 0])
    assert row.tasks.tolist() == [0, 1, 0]
    every = packed_row(tokens, samples.take(slice(None)), 12, target_only=False)
    assert every.labels.tolist() == [101, 102, 103, 104, 106, 107, 108, 110, 111, no, no, no]
    empty = packed_row(tokens, samples.take(slice(0)), 2, target_only=True)
    assert isinstance(empty, PackedRow) and empty.labels.tolist() == [no, no] and len(empty.prefix_lens) == 0
