"""Decide which example each slot is offered at each step: a pure function of (seed, step, slot).

All epochs together are one stream of examples. As long as the global batch B stays the same, step
s = 1, 2, ... takes the draws (s-1)*B .. s*B-1 of the stream, and slot i is offered the i-th of
them. A slot whose sequence goes on refuses its draw, and the draw is lost. So a run resumes from a
number, and no rank has a random state of its own.
"""
# G = groups, E = epochs, B = global batch

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dataset.schema import PuzzleSet

# Independent streams of random numbers. Counting the draws needs the choice of puzzles but not
# their order, which is expensive.
_CHOICE, _ORDER = 0, 1


class Sampler:
    """The training stream: which example each draw gives.

    An epoch offers each group once, in random order. It draws one puzzle of the group, and puts the
    puzzle's examples into the stream in random order. The examples of all sets are numbered
    consecutively. A resumed run goes on at `first_step`, before which there were `first_draw`
    draws: the global batch size may have changed. `repeat_first_batch` gives the first batch of the
    stream at each step.
    """

    def __init__(
        self,
        sets: Sequence[PuzzleSet],
        *,
        seed: int,
        epochs: int,
        global_batch_size: int,
        first_step: int = 1,
        first_draw: int = 0,
        repeat_first_batch: bool = False,
    ) -> None:
        self.seed, self.global_batch_size = seed, global_batch_size
        self.first_step, self.first_draw, self.repeat_first_batch = first_step, first_draw, repeat_first_batch
        self._example_starts, self._group_first, self._group_size = _pool(sets)
        self._set_starts = np.cumsum([0] + [len(s.inputs) for s in sets])
        self._epoch_end_E = self._count_draws(epochs)
        # An epoch is drawn once and used for many steps. A batch may lie in two epochs.
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    @property
    def draws_per_step(self) -> int:
        """By how much a step moves on in the stream."""
        return self.global_batch_size

    @property
    def num_draws(self) -> int:
        """The number of examples in the stream."""
        return int(self._epoch_end_E[-1])

    @property
    def last_step(self) -> int:
        """The last step for which the stream has a full global batch."""
        return self.first_step - 1 + max(0, self.num_draws - self.first_draw) // self.global_batch_size

    def draws_before(self, step: int) -> int:
        """Return the number of examples drawn before this step."""
        return self.first_draw + (step - self.first_step) * self.global_batch_size

    def epochs_done(self, step: int) -> int:
        """Return the number of whole epochs that are drawn by the end of a step."""
        return int(np.searchsorted(self._epoch_end_E, self.draws_before(step + 1), side="right"))

    def epoch(self, step: int) -> float:
        """Return how many epochs are drawn by the end of a step, with a share of the last one."""
        done = self.epochs_done(step)
        if done == len(self._epoch_end_E):
            return float(done)
        begin = int(self._epoch_end_E[done - 1]) if done else 0
        return done + (self.draws_before(step + 1) - begin) / (int(self._epoch_end_E[done]) - begin)

    def examples(self, step: int, slots: slice) -> np.ndarray:
        """Return the numbers of the examples for slots of the global batch, int64 (slots,)."""
        start = 0 if self.repeat_first_batch else self.draws_before(step)
        first, last = start + slots.start, start + slots.stop
        assert start >= 0 and last <= self.num_draws, f"step {step} lies outside of the stream"
        parts = []
        while first < last:
            epoch = int(np.searchsorted(self._epoch_end_E, first, side="right"))
            epoch_start = int(self._epoch_end_E[epoch - 1]) if epoch else 0
            part = self._epoch(epoch)[first - epoch_start : last - epoch_start]
            parts.append(part)
            first += len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each example's set, and its row in the arrays of that set."""
        index = np.searchsorted(self._set_starts, examples, side="right") - 1
        return index, examples - self._set_starts[index]

    def _choose(self, epoch: int) -> np.ndarray:
        """Return the puzzle that each group contributes to an epoch, (G,)."""
        generator = np.random.default_rng([self.seed, epoch, _CHOICE])
        return self._group_first + generator.integers(0, self._group_size)

    def _count_draws(self, epochs: int) -> np.ndarray:
        """Return the number of draws up to the end of each epoch, (E,)."""
        size_of_puzzle = np.diff(self._example_starts)
        smallest = np.minimum.reduceat(size_of_puzzle, self._group_first)
        largest = np.maximum.reduceat(size_of_puzzle, self._group_first)
        if (smallest == largest).all():
            return int(smallest.sum()) * np.arange(1, epochs + 1, dtype=np.int64)
        return np.cumsum([size_of_puzzle[self._choose(epoch)].sum() for epoch in range(epochs)], dtype=np.int64)

    def _draw_epoch(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, epoch, _ORDER])
        puzzles = self._choose(epoch)[generator.permutation(len(self._group_first))]
        sizes = self._example_starts[puzzles + 1] - self._example_starts[puzzles]
        owner = np.repeat(np.arange(len(puzzles)), sizes)
        within = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner]
        examples = self._example_starts[puzzles][owner] + within
        return examples[np.lexsort((generator.random(len(examples)), owner))]


def _pool(sets: Sequence[PuzzleSet]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where each puzzle's examples begin, and each group's first puzzle and size."""
    example_starts, group_first, group_size = [np.zeros(1, np.int64)], [], []
    num_examples = num_puzzles = 0
    for puzzle_set in sets:
        group_first.append(puzzle_set.group_indices[:-1].astype(np.int64) + num_puzzles)
        group_size.append(np.diff(puzzle_set.group_indices).astype(np.int64))
        example_starts.append(puzzle_set.puzzle_indices[1:].astype(np.int64) + num_examples)
        num_examples += len(puzzle_set.inputs)
        num_puzzles += len(puzzle_set.puzzle_identifiers)
    return np.concatenate(example_starts), np.concatenate(group_first), np.concatenate(group_size)
