"""Share the code of tasks whose boards may be turned and mirrored, such as mazes and Lights Out."""
# B = slots, N = examples, L = side of a board, S = cells (L * L), T = 8 transforms, U = 1

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from dataset.schema import PuzzleSet, unchanged
from dataset.tasks.base import Cell, Symmetries, TextTask
from dataset.transforms import NUM_TRANSFORMS, transform_sources

# The number of examples that are checked at a time, so that memory does not grow with the dataset.
_CHECKED_AT_ONCE = 1024


class SquareTask(TextTask):
    """A task whose symmetries are the eight transforms of a square. A subclass adds the rules."""

    noun: ClassVar[str]  # the name of the task in titles, such as "Lights Out"
    # The text of each token and its own colour, for a board in a frame; empty: there is no frame.
    looks: ClassVar[tuple[tuple[str, str], ...]] = ()
    most_variations = NUM_TRANSFORMS

    def __init__(self, side: int) -> None:
        self.title, self.side = f"{self.noun} {side}x{side}", side
        self.rows = self.columns = side
        self.name = self.title.lower()

    @abstractmethod
    def _allowed_transforms(self, inputs_NS: np.ndarray, labels_NS: np.ndarray) -> np.ndarray:
        """Return which transforms make the label that of the transformed input, (N, T) bool."""

    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        if not self.looks:
            return super()._lines(tokens_S, cell)
        edge = "─" * (2 * self.side)
        cells = [cell(number, *self.looks[token]) for number, token in enumerate(tokens_S.tolist())]
        rows = ["".join(cells[first : first + self.side]) for first in range(0, len(cells), self.side)]
        return [f"┌{edge}┐", *(f"│{row}│" for row in rows), f"└{edge}┘"]

    def symmetries(self, sets: Sequence[PuzzleSet]) -> "SquareSymmetries":
        return SquareSymmetries(sets, self)

    def images(
        self, inputs_NS: np.ndarray, labels_NS: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        allowed_NT = self._allowed_transforms(inputs_NS, labels_NS)
        for cells_S, allowed_N in zip(transform_sources(self.side), allowed_NT.T, strict=True):
            yield inputs_NS[:, cells_S], labels_NS[:, cells_S], allowed_N

    def variations(self, numbers_N: np.ndarray, count: int) -> dict[str, np.ndarray]:
        # Variation k of an example is transform k.
        return {"cells": transform_sources(self.side)[numbers_N % count]}


class SquareSymmetries(Symmetries):
    """Symmetries that draw uniformly from the allowed transforms of each training example."""

    num_draws = 1

    def __init__(self, sets: Sequence[PuzzleSet], task: SquareTask) -> None:
        allowed = []
        with unchanged([file for each in sets for file in each.files]):
            for puzzle_set in sets:
                for start in range(0, len(puzzle_set.inputs), _CHECKED_AT_ONCE):
                    rows = slice(start, start + _CHECKED_AT_ONCE)
                    allowed.append(task._allowed_transforms(puzzle_set.inputs[rows], puzzle_set.labels[rows]))
        allowed_NT = np.concatenate(allowed)
        self._count_N = allowed_NT.sum(axis=1)
        # The allowed transforms of each example come first, in order.
        self._transforms_NT = np.argsort(~allowed_NT, axis=1, kind="stable").astype(np.uint8)
        self._sources_TS = transform_sources(task.side)
        kept = f"{allowed_NT.sum():,} of {len(allowed_NT) * NUM_TRANSFORMS:,} keep the label"
        self.description = f"symmetries of {task.plural} {task.side}x{task.side} ({kept})"

    def transforms(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> np.ndarray:
        """Return the number of the transform that is drawn for each slot, (B,) uint8."""
        nth_B = (uniform_BU[:, 0] * self._count_N[examples_B]).astype(np.intp)
        return self._transforms_NT[examples_B, nth_B]

    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        return {"cells": self._sources_TS[self.transforms(uniform_BU, examples_B)]}
