"""Augment on the fly: every visit of an example draws one of the symmetries of its task.

A visit may show answers as further clues, too (`augment_clues`).

The draw is a pure function of (seed, step, slot of the global batch). So any number of ranks, and a
resumed run, see the same batches. Each rank draws the random numbers of the whole global batch on
the host, and keeps the numbers of its slots. The tokens are transformed on the device that trains.
"""
# B = slots of this rank, U = random numbers for one visit of an example

import math
from collections.abc import Sequence

import numpy as np
import torch

from dataset.canvas import Corner
from dataset.schema import Split
from dataset.tasks import KNOWN_SHAPES, task_of_set, task_of_shape
from dataset.tasks.base import BoardTask, Symmetries, joined
from utils.batch import Batch
from utils.errors import UserError

# Keeps these random numbers independent of others that are seeded by (seed, step).
_STREAM = 0xA6
# The share of the visits that show further clues. The others keep the puzzle as hard as it is.
_SHARE_WITH_CLUES = 0.5


class OnlineAugmentation:
    """Draws and applies a symmetry of the split's task for each slot of this rank.

    Args:
        symmetries: the symmetries of the task.
        seed: the seed of the random numbers.
        global_batch_size: slots over all ranks.
        slots: the slots of this rank.
        clues: shows answers as further clues; None: visits keep their clues.
    """

    def __init__(
        self,
        symmetries: Symmetries,
        *,
        seed: int,
        global_batch_size: int,
        slots: slice,
        clues: "_FurtherClues | None" = None,
    ) -> None:
        self._symmetries, self._clues = symmetries, clues
        self._seed, self._global_batch_size, self._slots = seed, global_batch_size, slots

    @classmethod
    def build(
        cls, split: Split, *, seed: int, global_batch_size: int, slots: slice, most_clues: float = 0.0
    ) -> "OnlineAugmentation":
        """Return the augmentation for a split. Some tasks check every example here, once.

        Args:
            split: the examples.
            seed: as above, like global_batch_size and slots.
            most_clues: the largest share of the blank cells that a visit shows as further clues.

        Raises:
            UserError: The symmetries of the split's task are not known, or its boards have no blank
                cells to show clues in.
        """
        seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
        task = task_of_shape(seq_len, vocab_size)
        if task is None:
            raise UserError(
                f"{split.path} has {seq_len} tokens of {vocab_size} kinds, a task whose symmetries are not known "
                f"({KNOWN_SHAPES}); set augment=none"
            )
        symmetries = _symmetries_of(split, task)
        if symmetries is None:
            raise UserError(f"{split.path} holds {task.title}, a task without symmetries; set augment=none")
        clues = None
        if most_clues > 0:
            if task.blank is None:
                raise UserError(
                    f"augment_clues={most_clues} fills blank cells of Sudokus, and {task.plural} have none to fill; "
                    "leave it out"
                )
            clues = _FurtherClues(task.blank, most_clues, seq_len)
        return cls(symmetries, seed=seed, global_batch_size=global_batch_size, slots=slots, clues=clues)

    @property
    def description(self) -> str:
        """A phrase for the first lines of a run's log, such as "symmetries of Sudoku 3x3"."""
        of_symmetries = self._symmetries.description
        return of_symmetries if self._clues is None else f"{of_symmetries} with {self._clues.description}"

    def draw(self, step: int, examples_B: np.ndarray) -> Batch:
        """Return the symmetries and clues drawn for this rank's slots at a step, on the host.

        Args:
            step: the training step.
            examples_B: the sampler's number of the example in each slot.
        """
        rng = np.random.default_rng([_STREAM, self._seed, step])
        uniform_BU = rng.random((self._global_batch_size, self._symmetries.num_draws))[self._slots]
        chosen = self._symmetries.choose(uniform_BU, examples_B)
        if self._clues is not None:
            # After the symmetries, which are therefore the same with and without clues.
            chosen["shown"] = self._clues.choose(rng, self._global_batch_size, self._slots)
        return {name: torch.from_numpy(array) for name, array in chosen.items()}

    def apply(self, batch: Batch, drawn: Batch) -> Batch:
        """Return the batch with the drawn symmetries and clues. All tensors are on the device."""
        moved = self._symmetries.apply(batch, drawn)
        return moved if self._clues is None else self._clues.apply(moved, drawn["shown"])


class _FurtherClues:
    """Shows the answers of some blank cells as further clues, so that some visits are easier.

    Every blank cell of a visit is shown with the same probability. The probability is 0 in half of
    the visits. In the others it is uniform between 0 and `most`.

    Args:
        blank: the token of a blank cell.
        most: the largest probability.
        num_cells: the cells of a board.
    """

    def __init__(self, blank: int, most: float, num_cells: int) -> None:
        self._blank, self._most, self._num_cells = blank, most, num_cells
        self.description = f"up to {most:.0%} of the blanks as clues"

    def choose(self, rng: np.random.Generator, global_batch_size: int, slots: slice) -> np.ndarray:
        """Return which cells of this rank's slots are shown if they are blank, (B, S) bool."""
        visits_B2 = rng.random((global_batch_size, 2))[slots]
        cells_BS = rng.random((global_batch_size, self._num_cells))[slots]
        probability_B = np.where(visits_B2[:, 0] < _SHARE_WITH_CLUES, self._most * visits_B2[:, 1], 0)
        shown_BS: np.ndarray = cells_BS < probability_B[:, None]
        return shown_BS

    def apply(self, batch: Batch, shown_BS: torch.Tensor) -> Batch:
        """Return the batch with the answers of the shown blank cells in its inputs."""
        inputs_BS, labels_BS = batch["inputs"], batch["labels"]
        is_clue_BS = shown_BS & (inputs_BS == self._blank) & (labels_BS >= 0)  # < 0: an ignored label
        return {**batch, "inputs": labels_BS.to(inputs_BS.dtype).where(is_clue_BS, inputs_BS)}


def _symmetries_of(split: Split, task: BoardTask) -> Symmetries | None:
    """Return the symmetries of a split, or of each of its sets if their boards differ in size.

    Raises:
        UserError: The boards differ in size, and the symmetries of some are not known.
    """
    if all(puzzle_set.corner is None for puzzle_set in split.sets.values()):
        return task.symmetries(list(split.sets.values()))
    of_sets = []
    for name, puzzle_set in split.sets.items():
        task_of_boards = task_of_set(split, name)
        symmetries = task_of_boards.symmetries([puzzle_set]) if task_of_boards is not None else None
        if symmetries is None:
            raise UserError(f"the symmetries of the set {name} in {split.path} are not known; set augment=none")
        of_sets.append(symmetries)
    return _SymmetriesOnCanvas(split, of_sets)


class _SymmetriesOnCanvas(Symmetries):
    """The symmetries of each set's own boards, which stay in their corner of the canvas.

    Args:
        split: has sets with boards of several sides.
        of_sets: the symmetries of each set.
    """

    def __init__(self, split: Split, of_sets: Sequence[Symmetries]) -> None:
        side = math.isqrt(split.metadata.seq_len)
        corners = [puzzle_set.corner or Corner(side, side) for puzzle_set in split.sets.values()]
        self._of_sets = list(zip(of_sets, corners, strict=True))
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
