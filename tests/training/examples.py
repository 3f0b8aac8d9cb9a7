"""Random examples of the small models of tests/models/helpers.py, as a split of a dataset."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dataset.schema import Split
from tests.dataset.shapes import split_with
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
    splits = {name: split_with(rows["inputs"], rows["labels"], VOCAB_SIZE) for name, rows in sets.items()}
    puzzle_sets = {
        name: replace(split.sets["all"], name=name, puzzle_identifiers=sets[name]["puzzle_identifiers"])
        for name, split in splits.items()
    }
    metadata = next(iter(splits.values())).metadata
    changes = {"num_puzzle_identifiers": NUM_PUZZLES, "sets": list(sets)}
    return Split(Path("test"), metadata.model_copy(update=changes), puzzle_sets)
