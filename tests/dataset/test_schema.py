"""Folders in the published format open unchanged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset import schema
from dataset.schema import check_contents, merge_splits, open_datasets, open_split
from tests.dataset.builders import put
from tests.records.checkpoint.helpers import Trap

NUM_GROUPS, GROUP_SIZE, EXAMPLES, SEQ_LEN, VOCAB = 3, 2, 2, 5, 7
METADATA: dict[str, Any] = {
    "pad_id": 0,
    "ignore_label_id": 0,
    "blank_identifier_id": 0,
    "vocab_size": VOCAB,
    "seq_len": SEQ_LEN,
    "num_puzzle_identifiers": 4,
    "total_groups": NUM_GROUPS,
    "mean_puzzle_examples": 2.0,
    "sets": ["all"],
}


def _write(data_path: Path, dtype: type = np.int64, **changes: object) -> Path:
    """Write a dataset as the published builders do, with int64 examples and int32 indices."""
    folder = data_path / "train"
    folder.mkdir(parents=True)
    metadata = {**METADATA, **changes}
    (folder / "dataset.json").write_text(
        json.dumps({key: metadata[key] for key in metadata if metadata[key] != "drop"})
    )
    rng = np.random.default_rng(0)
    num_puzzles = NUM_GROUPS * GROUP_SIZE
    shape = (num_puzzles * EXAMPLES, SEQ_LEN)
    for name in ("inputs", "labels"):
        np.save(folder / f"all__{name}.npy", rng.integers(0, VOCAB, shape).astype(dtype))
    np.save(folder / "all__puzzle_identifiers.npy", rng.integers(0, 4, num_puzzles).astype(np.int32))
    np.save(folder / "all__puzzle_indices.npy", np.arange(0, num_puzzles * EXAMPLES + 1, EXAMPLES, dtype=np.int32))
    np.save(folder / "all__group_indices.npy", np.arange(0, num_puzzles + 1, GROUP_SIZE, dtype=np.int32))
    return data_path


def _edit(data_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    file = data_path / "train" / f"all__{name}.npy"
    np.save(file, change(np.load(file)))


def _error(data_path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        check_contents(open_split(data_path, "train"))
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, f"no advice after a semicolon: {message}"
    return message


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_published_folders_open(tmp_path: Path, dtype: type) -> None:
    split = open_split(_write(tmp_path, dtype, total_puzzles=6), "train")
    puzzle_set = split.sets["all"]
    assert puzzle_set.inputs.shape == puzzle_set.labels.shape == (12, SEQ_LEN)
    assert puzzle_set.inputs.dtype == dtype
    assert isinstance(puzzle_set.inputs, np.memmap) and isinstance(puzzle_set.labels, np.memmap)
    assert puzzle_set.puzzle_indices.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert puzzle_set.group_indices.tolist() == [0, 2, 4, 6]
    assert len(check_contents(split)) == 64


def test_merged_datasets_share_arrays_and_number_puzzles_anew(tmp_path: Path) -> None:
    offsets = {"a/one": 0, "two": 4, "three": 13}
    splits = [
        open_split(_write(tmp_path / folder, np.uint8, num_puzzle_identifiers=num), "train")
        for folder, num in zip(offsets, (4, 9, 5), strict=True)
    ]
    merged = merge_splits(splits, [*offsets.values()])
    assert list(merged.sets) == merged.metadata.sets == ["one.all", "two.all", "three.all"]
    of = merged.metadata
    assert (of.num_puzzle_identifiers, of.total_groups, of.mean_puzzle_examples) == (18, 3 * NUM_GROUPS, EXAMPLES)
    for split, offset, puzzle_set in zip(splits, offsets.values(), merged.sets.values(), strict=True):
        original = split.sets["all"]
        assert puzzle_set.inputs is original.inputs and puzzle_set.labels is original.labels
        np.testing.assert_array_equal(puzzle_set.puzzle_identifiers, original.puzzle_identifiers + offset)
        np.testing.assert_array_equal(puzzle_set.group_indices, original.group_indices)
        assert str(split.path) in str(merged.path)
    other = open_split(_write(tmp_path / "other", pad_id=1), "train")
    with pytest.raises(ValueError, match=r"one/train has pad_id 0, but .*other/train has 1; train on"):
        merge_splits([splits[0], other], [0, 4])


def test_a_part_of_the_trained_datasets_keeps_its_place_in_the_puzzle_table(tmp_path: Path) -> None:
    """Only the part that is opened needs a test split."""
    paths = [str(_write(tmp_path / name)) for name in ("one", "two")]
    shutil.copytree(tmp_path / "two" / "train", tmp_path / "two" / "test")
    part = open_datasets(paths[1:], "test", numbered_by=paths)
    identifiers = np.load(tmp_path / "two/test/all__puzzle_identifiers.npy") + 4
    assert part.sets["two.all"].puzzle_identifiers.tolist() == identifiers.tolist()
    assert (part.metadata.blank_identifier_id, part.metadata.num_puzzle_identifiers) == (4, 8)


def test_merged_datasets_are_checked_one_by_one_and_have_a_fingerprint(tmp_path: Path) -> None:
    """It depends on contents, order and offsets."""
    one, two = (open_split(_write(tmp_path / folder), "train") for folder in ("one", "two"))
    orders = [([one, two], [0, 4]), ([two, one], [0, 4]), ([one, two], [0, 0]), ([one, two], [0, 5])]
    found = [check_contents(merge_splits(*order)) for order in orders]
    assert check_contents(merge_splits(*orders[0])) == found[0]
    (tmp_path / "two" / "fingerprint.json").write_text(json.dumps({"train": check_contents(two)}))
    _edit(tmp_path / "two", "inputs", lambda array: (array + 1) % VOCAB)
    changed = merge_splits([one, open_split(tmp_path / "two", "train")], [0, 4])
    with pytest.raises(ValueError, match="two/train changed after it was built"):
        check_contents(changed)
    (tmp_path / "two" / "fingerprint.json").unlink()
    assert len({*found, check_contents(changed), check_contents(one)}) == 6
    # Identifier 4 is possible in the merged data, but not in this dataset.
    _edit(tmp_path / "one", "puzzle_identifiers", put(1, 4))
    with pytest.raises(ValueError, match=r"one/train/all__puzzle_identifiers.npy: row 1 has puzzle identifier 4"):
        check_contents(merge_splits([open_split(tmp_path / "one", "train"), two], [0, 4]))


def test_the_fingerprint_depends_on_the_contents_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint() -> str:
        return check_contents(open_split(tmp_path, "train"))

    _write(tmp_path)
    found = [fingerprint()]
    monkeypatch.setattr(schema, "CHUNK_BYTES", 1)
    assert fingerprint() == found[0]
    for name in ("inputs", "labels", "puzzle_identifiers"):
        _edit(tmp_path, name, lambda a: np.where(a == a.flat[0], (a + 1) % 4, a).astype(a.dtype))
        found.append(fingerprint())
    assert len(set(found)) == 4
    for row in (3, 11):
        _edit(tmp_path, "inputs", put((row, 2), VOCAB))
    assert "row 3 has token 7, but 0 to 6 are possible (2 rows of 12 in all)" in _error(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": "drop"}, "vocab_size: Field required"),
        ({"pad_id": 7}, "pad_id is 7, but vocab_size is 7"),
        ({"seq_len": 6}, "rows have 5 tokens, but seq_len is 6"),
        ({"total_groups": 4}, "total_groups is 4, but the sets hold 3"),
        ({"blank_identifier_id": 4}, "blank_identifier_id is 4, but num_puzzle_identifiers is 4"),
        ({"mean_puzzle_examples": float("nan")}, "mean_puzzle_examples: Input should be a finite number"),
        ({"sets": ["../all"]}, "sets.0: String should match pattern"),
        ({"sets": ["all", "all"]}, "names a set twice"),
    ],
)
def test_wrong_metadata_are_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert expected in _error(_write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("labels", put((4, 0), -100), "all__labels.npy: row 4 has label -100"),
        ("puzzle_identifiers", lambda a: a[:-1], "5 entries, but puzzle_indices has 6 puzzles"),
        ("puzzle_indices", put(0, 1), "all__puzzle_indices.npy: does not rise from 0 to 12 rows"),
        ("puzzle_indices", lambda a: put(2, 1)(a.astype(np.uint8)), "does not rise"),
        ("group_indices", put(3, 7), "all__group_indices.npy: does not rise from 0 to 6 puzzles"),
        ("group_indices", lambda a: a[:0], "all__group_indices.npy: holds int32 of shape (0,)"),
        ("labels", lambda a: a[:-1], "all__labels.npy: has shape (11, 5), but inputs (12, 5)"),
        ("inputs", lambda a: a.astype(np.float32), "holds float32"),
    ],
)
def test_wrong_arrays_are_named(
    tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray], expected: str
) -> None:
    _edit(_write(tmp_path), name, change)
    assert expected in _error(tmp_path)


def test_a_label_may_be_the_ignored_id(tmp_path: Path) -> None:
    _edit(_write(tmp_path, ignore_label_id=-100), "labels", put((4, 0), -100))
    check_contents(open_split(tmp_path, "train"))


def test_truncated_and_garbled_arrays_are_named(tmp_path: Path) -> None:
    file = _write(tmp_path) / "train" / "all__inputs.npy"
    whole = file.read_bytes()
    damaged = [b"", whole[:-1]]
    for header in (b"{'descr': '<i8', 'fortran_order': False, 'shape': (12, -5), }", b"(" * 60, b"{'a", b"\xff" * 60):
        damaged.append(whole[:10] + header.ljust(117) + whole[127:])
    for contents in damaged:
        file.write_bytes(contents)
        assert str(file) in _error(tmp_path)


@pytest.mark.parametrize("name", ["inputs", "puzzle_identifiers"])
def test_no_code_runs_from_a_dataset(tmp_path: Path, name: str) -> None:
    file = _write(tmp_path / "data") / "train" / f"all__{name}.npy"
    trace = tmp_path / "trace"
    np.save(file, np.array([Trap(trace)], dtype=object), allow_pickle=True)
    assert f"{file}: cannot be mapped as a plain array" in _error(tmp_path / "data")
    file.write_bytes(b"\x80\x04]." + b"\x00" * 100)  # a bare pickle
    assert f"{file}: cannot be mapped as a plain array" in _error(tmp_path / "data")
    assert not trace.exists()
