"""The parts that all builders share: arrays as a stream, and the folder."""
# N = examples, S = tokens, P = puzzles, G = groups

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from dataset.builder import SplitWriter, new_dataset
from dataset.schema import check_contents, open_split
from tests.dataset.builders import build, fingerprints


def _write(folder: Path, cuts: list[int]) -> None:
    """Write a split of 5 puzzles in parts, which begin at `cuts`."""
    sizes_P, identifiers_P = np.array([1, 3, 2, 1, 1]), np.array([1, 0, 3, 2, 2])
    inputs_NS = np.arange(8 * 4, dtype=np.uint8).reshape(8, 4) % 7
    labels_NS = inputs_NS[::-1]  # not contiguous
    starts_P = np.concatenate([[0], np.cumsum(sizes_P)])
    with SplitWriter(folder, seq_len=4, vocab_size=7, num_puzzle_identifiers=4) as writer:
        for first, end in zip([0, *cuts], [*cuts, 5], strict=True):
            rows = slice(starts_P[first], starts_P[end])
            writer.add(inputs_NS[rows], labels_NS[rows], sizes_P[first:end], identifiers_P[first:end])
            if first < end == 2:
                writer.end_groups(np.array([2]))
        writer.end_groups(np.array([2, 1]) if 2 in cuts else np.array([2, 2, 1]))


@pytest.mark.parametrize("cuts", [[], [1, 2, 2, 4]])
def test_a_stream_writes_the_same_bytes_as_numpy(tmp_path: Path, cuts: list[int]) -> None:
    _write(tmp_path / "train", cuts)
    inputs_NS = np.arange(8 * 4, dtype=np.uint8).reshape(8, 4) % 7
    expected: dict[str, np.ndarray] = {
        "inputs": inputs_NS,
        "labels": np.ascontiguousarray(inputs_NS[::-1]),
        "puzzle_identifiers": np.array([1, 0, 3, 2, 2], np.int32),
        "puzzle_indices": np.array([0, 1, 4, 6, 7, 8], np.int32),
        "group_indices": np.array([0, 2, 4, 5], np.int32),
    }
    for name, array in expected.items():
        np.save(tmp_path / "expected.npy", array)
        assert (tmp_path / "train" / f"all__{name}.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()
    assert json.loads((tmp_path / "train" / "dataset.json").read_text()) == {
        "pad_id": 0,
        "ignore_label_id": 0,
        "blank_identifier_id": 0,
        "vocab_size": 7,
        "seq_len": 4,
        "num_puzzle_identifiers": 4,
        "total_groups": 3,
        "mean_puzzle_examples": 1.6,
        "sets": ["all"],
    }
    check_contents(open_split(tmp_path, "train"))


@pytest.mark.parametrize("error", [ValueError("bad"), OSError("No space\nleft"), KeyboardInterrupt()])
def test_a_build_that_fails_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(ValueError if isinstance(error, OSError) else type(error)) as caught:  # noqa: SIM117
        with new_dataset(tmp_path / "data") as folder:
            _write(folder / "train", [])
            raise error
    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert "data (No space left); check space and permissions there" in str(caught.value)


@pytest.mark.parametrize(
    ("program", "options", "recorded"),
    [
        ("sudoku", "--generate 20 --box 2x2 --num-aug 3 --seed 5", ["e5922dbbe343", "2dc5eddc2c63"]),
        ("maze", "--generate 6 --size 7 --aug --seed 5", ["9d10299d64e8", "8912e8599686"]),
        ("lights_out", "--generate 20 --side 3 --max-presses 4 --num-aug 3 --seed 5", ["baa1d078c377", "8b5c9b294067"]),
    ],
)
def test_generated_datasets_are_those_of_commit_e03333b(
    tmp_path: Path, program: str, options: str, recorded: list[str]
) -> None:
    main = importlib.import_module(f"dataset.build_{program}_dataset").main
    build(main, tmp_path / "data", *options.split())
    assert [digest[:12] for digest in fingerprints(tmp_path / "data")] == recorded
