"""Random examples of the small models of tests/models/helpers.py, as a split of a dataset."""

from pathlib import Path

import numpy as np

from dataset.schema import DatasetMetadata, PuzzleSet, Split
from tests.models.helpers import NUM_PUZZLES, SEQ_LEN, VOCAB_SIZE

IGNORED = 0  # the label in the file that is not scored


def random_rows(num_examples: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "inputs": rng.integers(1, VOCAB_SIZE, (num_examples, SEQ_LEN)).astype(np.uint8),
        "labels": rng.integers(1, VOCAB_SIZE, (num_examples, SEQ_LEN)).astype(np.uint8),
        "puzzle_identifiers": rng.integers(0, NUM_PUZZLES, num_examples),
    }


def made_split(**sets: dict[str, np.ndarray]) -> Split:
    metadata = DatasetMetadata(
        pad_id=0,
        ignore_label_id=IGNORED,
        blank_identifier_id=0,
        vocab_size=VOCAB_SIZE,
        seq_len=SEQ_LEN,
        num_puzzle_identifiers=NUM_PUZZLES,
        total_groups=sum(len(rows["inputs"]) for rows in sets.values()),
        mean_puzzle_examples=1.0,
        sets=list(sets),
    )
    puzzle_sets = {
        name: PuzzleSet(
            name,
            rows["inputs"],
            rows["labels"],
            rows["puzzle_identifiers"],
            puzzle_indices=np.arange(len(rows["inputs"]) + 1),
            group_indices=np.arange(len(rows["inputs"]) + 1),
        )
        for name, rows in sets.items()
    }
    return Split(Path("test"), metadata, puzzle_sets)
