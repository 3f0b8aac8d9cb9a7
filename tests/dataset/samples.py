"""Correct examples of every task in the table, for the tests that run over the table."""
# N = examples, S = tokens of an example

from collections.abc import Callable

import numpy as np

from dataset.arc import VOCAB_SIZE
from dataset.augment import BOXES
from dataset.schema import Split
from dataset.tasks.base import BoardTask
from dataset.tasks.lights_out import DARK, LEAVE, LIT, PRESS, solve, toggled
from tests.dataset.shapes import maze_split, on_canvas, split_with, sudoku_split


def _lights_out_split() -> Split:
    lit_NS = toggled(np.random.default_rng(0).random((12, 25)) < 0.3)
    labels_NS = np.where(solve(lit_NS)[0], PRESS, LEAVE)
    return split_with(np.where(lit_NS, LIT, DARK).astype(np.uint8), labels_NS.astype(np.uint8), 5)


def _arc_split() -> Split:
    """Return pairs whose grids begin in the corner of the canvas, as those of test puzzles do."""
    rng = np.random.default_rng(0)
    grids = [(rng.integers(0, 10, (3, 4)), rng.integers(0, 10, (5, 2))) for _ in range(12)]
    inputs_NS, labels_NS = (np.stack([on_canvas(pair[side], 0, 0) for pair in grids]) for side in (0, 1))
    return split_with(inputs_NS, labels_NS, VOCAB_SIZE)


SAMPLES: dict[str, Callable[[], Split]] = {
    "sudoku": lambda: sudoku_split(BOXES["3x3"], 12),
    "maze": maze_split,
    "arc": _arc_split,
    "lights_out": _lights_out_split,
}
"""For the kind of each task a function that returns a split with some correct examples."""


def samples_of(kind: type[BoardTask]) -> tuple[BoardTask, Split]:
    """Return the task and correct examples of it."""
    assert kind.kind in SAMPLES, f"add correct examples of {kind.kind} to SAMPLES in tests/dataset/samples.py"
    split = SAMPLES[kind.kind]()
    task = kind.of_shape(split.metadata.seq_len, split.metadata.vocab_size)
    assert task is not None, f"of_shape of {kind.__name__} does not know the shape of its samples"
    return task, split
