"""Loaders turn arrays into batches, with the right labels and identifiers, in the right order."""

import threading
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset import loader
from dataset.loader import DataOn, EvalLoader, TrainLoader
from dataset.sampler import Sampler
from dataset.schema import PuzzleSet, Split
from tests.dataset.shapes import split_of
from tests.spawn import world_of
from tests.utils.ranks.helpers import devices_of_threads
from utils.batch import IGNORE_LABEL
from utils.ranks.world import World

SEQ_LEN, VOCAB = 5, 7
DATA_ON: tuple[DataOn, ...] = ("host", "device")


def _split(sizes: list[list[int]], *, dtype: Any = np.uint8, ignore: int | None = 0) -> Split:
    """Return a split with a set for each list. The list has the number of examples of each puzzle.

    Each puzzle is a group, and has an identifier of its own. No two rows are equal.
    """
    sets = {}
    for index, puzzles in enumerate(sizes):
        num_examples, name = sum(puzzles), f"set{index}"
        rows = np.arange(num_examples)[:, None] + 100 * index
        sets[name] = PuzzleSet(
            name,
            inputs=(rows // VOCAB ** np.arange(SEQ_LEN) % VOCAB).astype(dtype),
            labels=((rows // VOCAB ** np.arange(SEQ_LEN) + np.arange(3, 3 + SEQ_LEN)) % VOCAB).astype(dtype),
            puzzle_identifiers=np.arange(len(puzzles)) + 50 * index,
            puzzle_indices=np.cumsum([0, *puzzles]),
            group_indices=np.arange(len(puzzles) + 1),
        )
    plain = split_of(SEQ_LEN, VOCAB)
    return replace(plain, metadata=plain.metadata.model_copy(update={"ignore_label_id": ignore}), sets=sets)


def _sampler(split: Split, size: int, **options: Any) -> Sampler:
    return Sampler(list(split.sets.values()), **({"seed": 0, "epochs": 2, "global_batch_size": size} | options))


def _rows_by_hand(split: Split, examples: np.ndarray) -> list[tuple[list[int], list[int], int]]:
    """Return (inputs, labels, identifier) of the examples. Their numbers count through all sets."""
    everything = []
    for puzzle_set in split.sets.values():
        for puzzle, identifier in enumerate(puzzle_set.puzzle_identifiers.tolist()):
            for row in range(puzzle_set.puzzle_indices[puzzle], puzzle_set.puzzle_indices[puzzle + 1]):
                ignored = split.metadata.ignore_label_id
                labels = [IGNORE_LABEL if label == ignored else int(label) for label in puzzle_set.labels[row]]
                everything.append((puzzle_set.inputs[row].tolist(), labels, identifier))
    return [everything[example] for example in examples]


def _unpack(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int], int]]:
    columns = [batch[name].tolist() for name in ("inputs", "labels", "puzzle_identifiers")]
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ">i2", np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("ignore", [0, 3, None])
@pytest.mark.parametrize("data_on", ["host", "device"])
def test_batches_hold_the_examples_that_the_sampler_names(dtype: Any, ignore: int | None, data_on: DataOn) -> None:
    split = _split([[1, 3, 2], [2, 2]], dtype=dtype, ignore=ignore)
    for puzzle_set in split.sets.values():  # the arrays may be maps of a file that others read
        puzzle_set.inputs.setflags(write=False)
        puzzle_set.labels.setflags(write=False)
    sampler = _sampler(split, 4, epochs=3)
    loader = TrainLoader(split, sampler, World.single(), data_on=data_on)
    batches = list(loader.batches(range(1, sampler.last_step + 1)))
    assert len(batches) == sampler.last_step == 7
    for step, batch in enumerate(batches, start=1):
        assert {tensor.dtype for tensor in batch.values()} == {torch.int32}
        assert _unpack(batch) == _rows_by_hand(split, sampler.examples(step, slice(0, 4)))
    ignored = sum(int((batch["labels"] == IGNORE_LABEL).sum()) for batch in batches)
    assert ignored > 0 if ignore is not None else ignored == 0


def test_sets_of_different_types_lie_on_the_device_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 11)  # copies two rows of uint8 at a time, or one row of int64
    split = _split([[1, 3, 2], [2, 2]])
    for name, dtype in (("inputs", np.int64), ("labels", np.uint8)):
        array = getattr(split.sets["set1"], name)
        split.sets["set1"] = replace(split.sets["set1"], **{name: array.astype(dtype)})
    sampler = _sampler(split, 5, epochs=3)
    host, device = (
        list(TrainLoader(split, sampler, World.single(), data_on=data_on).batches(range(1, sampler.last_step + 1)))
        for data_on in DATA_ON
    )
    assert list(map(_unpack, host)) == list(map(_unpack, device))
    assert {tensor.dtype for batch in device for tensor in batch.values()} == {torch.int32}


@pytest.mark.parametrize("data_on", DATA_ON)
@pytest.mark.parametrize("ignore", [-100, -1, 200])
def test_a_label_outside_of_the_vocabulary_is_ignored(data_on: DataOn, ignore: int) -> None:
    split = _split([[4]], dtype=np.int64, ignore=ignore)
    split.sets["set0"].labels[1, 2] = ignore
    sampler = _sampler(split, 4)
    (batch,) = TrainLoader(split, sampler, World.single(), data_on=data_on).batches(range(1, 2))
    row = sampler.examples(1, slice(0, 4)).tolist().index(1)
    assert (batch["labels"] == IGNORE_LABEL).nonzero().tolist() == [[row, 2]]
    (_, batch), *_ = EvalLoader(split, "set0", 4).batches(World.single())
    assert (batch["labels"] == IGNORE_LABEL).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize(("free_bytes", "expected"), [(8 * 5 * 2 * 4 - 1, "host"), (8 * 5 * 2 * 4, "device")])
def test_arrays_of_at_most_a_quarter_of_the_free_memory_go_to_the_device(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, expected: str
) -> None:
    split = _split([[4, 4]])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 2 * free_bytes))
    monkeypatch.setattr(loader, "_Resident", lambda split, device: None)
    world = World(device=torch.device("cuda"))
    assert TrainLoader(split, _sampler(split, 4), world).data_on == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")
def test_the_batches_of_a_gpu_are_those_of_the_host() -> None:
    split = _split([[1, 3, 2], [2, 2]])
    sampler = _sampler(split, 4, epochs=3)
    steps = range(1, sampler.last_step + 1)
    expected = [_unpack(batch) for batch in TrainLoader(split, sampler, World.single()).batches(steps)]
    for data_on in ("auto", *DATA_ON):
        on_gpu = TrainLoader(split, sampler, World.single("cuda"), data_on=data_on)
        assert on_gpu.data_on == ("device" if data_on == "auto" else data_on)
        assert [_unpack(batch) for batch in on_gpu.batches(steps)] == expected


def test_a_failure_while_reading_reaches_the_loop_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    split = _split([[1] * 60])
    sampler = _sampler(split, 3)
    examples, reads = sampler.examples, list[int]()

    def failing(step: int, slots: slice) -> np.ndarray:
        reads.append(step)
        if step == 16:
            raise OSError("the disk is gone")
        return examples(step, slots)

    def num_threads() -> int:
        return sum(thread.name.startswith("loader") for thread in threading.enumerate())

    monkeypatch.setattr(sampler, "examples", failing)
    steps = TrainLoader(split, sampler, World.single()).batches(range(1, 31))
    next(steps)
    assert num_threads() == 1 and len(reads) <= 6, "batches are read ahead, and not without limit"
    assert isinstance(steps, Generator)
    steps.close()
    assert num_threads() == 0
    with pytest.raises(OSError, match="the disk is gone"):
        list(TrainLoader(split, sampler, World.single()).batches(range(1, 21)))
    assert num_threads() == 0


PUZZLES = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@given(puzzles=PUZZLES, batch_size=st.integers(1, 30), num_ranks=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_an_evaluation_covers_every_row_exactly_once(puzzles: list[int], batch_size: int, num_ranks: int) -> None:
    split = _split([[2], puzzles])
    loader = EvalLoader(split, "set1", batch_size)
    assert loader.num_examples == sum(puzzles)
    expected = _rows_by_hand(split, np.arange(2, 2 + sum(puzzles)))
    found: dict[int, object] = {}
    for rank in range(num_ranks):
        seen = -1
        for rows, batch in loader.batches(world_of(rank, num_ranks)):
            assert len(rows) > 0
            for row, example in zip(rows.tolist(), _unpack(batch), strict=True):
                assert row not in found and row > seen
                found[row], seen = example, row
    assert [found[row] for row in sorted(found)] == expected


def test_a_part_or_a_batch_of_an_evaluation_can_be_spread_evenly() -> None:
    """An evaluation that ends early has then seen rows of the whole file."""
    split, whole = _split([[1] * 10]), list(range(10))
    for max_examples, expected in ((1, [0]), (4, [0, 2, 5, 7]), (10, whole), (99, whole)):
        loader = EvalLoader(split, "set0", 3, max_examples)
        assert loader.num_examples == len(expected)
        rows = [row for rank in range(2) for numbers, _ in loader.batches(world_of(rank, 2)) for row in numbers]
        assert sorted(rows) == expected
    for batch_size, batches in ((3, [[0, 4, 8], [1, 5, 9], [2, 6, 3], [7]]), (99, [whole])):
        loader = EvalLoader(split, "set0", batch_size, spread=True)
        assert [rows.tolist() for rows, _ in loader.batches(World.single())] == batches


def test_the_reading_thread_uses_the_card_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first card, where it would open a context of half a gigabyte."""
    devices = devices_of_threads(monkeypatch)
    for name in ("_pinned", "_to_device"):  # need a card
        monkeypatch.setattr(loader, name, lambda batch, _: batch)
    split = _split([[3, 2]])
    world = World(device=torch.device("cuda", 1))
    list(TrainLoader(split, _sampler(split, 4), world, data_on="host").batches(range(1, 3)))
    assert devices == {"loader_0": torch.device("cuda", 1)}
