"""Augment on the fly: every visit of an example draws one of the symmetries of its task.

The draw is a pure function of (seed, step, slot of the global batch). Each rank draws the random
numbers of the whole global batch on the host, and keeps the numbers of its slots. The tokens are
transformed on the device that trains.
"""
# B = slots of this rank, U = random numbers for one visit of an example, S = tokens of an example

import math

import numpy as np
import torch

from dataset.canvas import Corner
from dataset.schema import Split
from dataset.tasks import TASKS, task_of_set, task_of_shape
from dataset.tasks.base import Symmetries, joined
from utils.batch import Batch
from utils.errors import UserError

# Keeps these random numbers independent of others that are seeded by (seed, step).
_STREAM = 0xA6
# The share of the visits that show further clues. The others keep the puzzle as hard as it is.
_SHARE_WITH_CLUES = 0.5


class OnlineAugmentation:
    """Draws and applies a symmetry of the split's task for each slot of this rank.

    Args:
        split: the examples. Some tasks check each of them here, once.
        most_clues: the largest share of the blank cells that a visit shows as further clues. Every
            blank cell of a visit is shown with the same probability, which is 0 in half of the
            visits, and in the others uniform between 0 and `most_clues`.
    """

    def __init__(
        self, split: Split, *, seed: int, global_batch_size: int, slots: slice, most_clues: float = 0.0
    ) -> None:
        self._seed, self._global_batch_size, self._slots = seed, global_batch_size, slots
        self._most_clues, self._num_cells = most_clues, split.metadata.seq_len
        task = task_of_shape(*split.metadata.shape)
        if task is None:
            raise UserError(
                f"{split.path} has {split.metadata.seq_len} tokens of {split.metadata.vocab_size} kinds, a task whose "
                f"symmetries are not known ({'; '.join(task.shapes for task in TASKS)}); set augment=none"
            )
        on_canvas = any(puzzle_set.corner is not None for puzzle_set in split.sets.values())
        symmetries = _SymmetriesOnCanvas(split) if on_canvas else task.symmetries(list(split.sets.values()))
        if symmetries is None:
            raise UserError(f"{split.path} holds {task.title}, a task without symmetries; set augment=none")
        self._symmetries, self._blank = symmetries, task.blank
        # A phrase for the first lines of a run's log, such as "symmetries of Sudoku 3x3".
        self.description = self._symmetries.description
        if most_clues > 0:
            if task.blank is None:
                raise UserError(
                    f"augment_clues={most_clues} fills blank cells of Sudokus, and {task.plural} have none to fill; "
                    "leave it out"
                )
            self.description += f" with up to {most_clues:.0%} of the blanks as clues"

    def draw(self, step: int, examples_B: np.ndarray) -> Batch:
        """Return the symmetries and clues drawn for the examples of this rank, on the host."""
        rng, num = np.random.default_rng([_STREAM, self._seed, step]), self._global_batch_size
        uniform_BU = rng.random((num, self._symmetries.num_draws))[self._slots]
        chosen = self._symmetries.choose(uniform_BU, examples_B)
        if self._most_clues > 0:
            # After the symmetries, which are therefore the same with and without clues.
            visits_B2 = rng.random((num, 2))[self._slots]
            cells_BS = rng.random((num, self._num_cells))[self._slots]
            probability_B = np.where(visits_B2[:, 0] < _SHARE_WITH_CLUES, self._most_clues * visits_B2[:, 1], 0)
            chosen["shown"] = cells_BS < probability_B[:, None]
        return {name: torch.from_numpy(array) for name, array in chosen.items()}

    def apply(self, batch: Batch, drawn: Batch) -> Batch:
        """Return the batch with the drawn symmetries and clues. All tensors are on the device."""
        moved = self._symmetries.apply(batch, drawn)
        if self._most_clues == 0:
            return moved
        inputs_BS, labels_BS = moved["inputs"], moved["labels"]
        is_clue_BS = drawn["shown"] & (inputs_BS == self._blank) & (labels_BS >= 0)  # < 0: an ignored label
        return {**moved, "inputs": labels_BS.to(inputs_BS.dtype).where(is_clue_BS, inputs_BS)}


class _SymmetriesOnCanvas(Symmetries):
    """The symmetries of each set's own boards, which stay in their corner of the canvas."""

    def __init__(self, split: Split) -> None:
        side = math.isqrt(split.metadata.seq_len)
        self._of_sets: list[tuple[Symmetries, Corner]] = []
        for name, puzzle_set in split.sets.items():
            task = task_of_set(split, name)
            symmetries = task.symmetries([puzzle_set]) if task is not None else None
            if symmetries is None:
                raise UserError(f"the symmetries of the set {name} in {split.path} are not known; set augment=none")
            self._of_sets.append((symmetries, puzzle_set.corner or Corner(side, side)))
        self._set_starts = np.cumsum([0] + [len(puzzle_set.inputs) for puzzle_set in split.sets.values()])
        self._num_cells, self._vocab_size = split.metadata.shape
        self.num_draws = max(symmetries.num_draws for symmetries, _ in self._of_sets)
        self.description = joined(list(dict.fromkeys(symmetries.description for symmetries, _ in self._of_sets)))

    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        set_B = np.searchsorted(self._set_starts, examples_B, side="right") - 1
        chosen = {
            "cells": np.empty((len(examples_B), self._num_cells), np.uint8),
            "names": np.empty((len(examples_B), self._vocab_size), np.uint8),
        }
        for index, (symmetries, corner) in enumerate(self._of_sets):
            here_B = set_B == index
            uniform_NU = uniform_BU[here_B, : symmetries.num_draws]
            of_set = corner.widen(symmetries.choose(uniform_NU, examples_B[here_B] - self._set_starts[index]))
            for name, array in of_set.items():
                chosen[name][here_B] = array
        return chosen
