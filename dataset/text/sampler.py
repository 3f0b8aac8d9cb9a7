"""Decide which samples each step trains on: a pure function of (seed, step, place in the batch).

The budget of a step is `global_batch_size` tokens. It is cut into rows of a fixed capacity. Samples
are packed into rows, and a step takes `rows_per_step` of them. Each rank gets some of these rows,
and joins them to one row. So 1, 2 and 4 ranks train on the same samples.
"""
# E = epochs, K = sequences of a row

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache

import numpy as np

from dataset.text.packing import PackedRow, Shapes, packed_row, published_steps
from dataset.text.schema import TextSplit
from utils.errors import UserError

# Independent streams of random numbers.
_SAMPLES, _ROWS = 0, 1


@dataclass(eq=False)
class TextSampler(ABC):
    """The training stream of a split of text."""

    split: TextSplit
    _: KW_ONLY
    epochs: int  # the length of the stream
    capacity: int  # the tokens of a row
    rows_per_step: int  # of all ranks together
    repeat_first_batch: bool = False
    last_step: int = field(init=False)  # the last step for which the stream has all rows; 0 if there is none
    waste: float = field(init=False)  # the share of the first epoch's budget that is padding

    def __post_init__(self) -> None:
        for samples in self.split.epochs[: self.epochs]:
            lengths_N = samples.lengths()
            if (longest := int(lengths_N.max())) > self.capacity:
                raise UserError(
                    f"{samples.files[0]}: sample {int(lengths_N.argmax()):,} reads {longest:,} tokens, but a row holds "
                    f"{self.capacity:,}; raise global_batch_size to {longest * self.rows_per_step:,}, cut it into "
                    f"fewer rows, or rebuild the dataset with --max-len {self.capacity}"
                )

    @abstractmethod
    def draws_before(self, step: int) -> int:
        """Return the number of rows of the stream before a step."""

    @abstractmethod
    def epoch(self, step: int) -> float:
        """Return how many epochs are drawn by the end of a step, parts of an epoch included."""

    @abstractmethod
    def places(self, step: int, rows: slice) -> np.ndarray:
        """Return where the samples in these rows of a step lie, int64 (K, 5) as `Samples.take`."""

    @property
    def draws_per_step(self) -> int:
        """By how much a step moves on in the stream, in rows."""
        return self.rows_per_step

    def epochs_done(self, step: int) -> int:
        """Return the number of whole epochs that are drawn by the end of a step."""
        return math.floor(self.epoch(step))

    def packed_row(self, step: int, rows: slice, *, target_only: bool) -> PackedRow:
        """Return some rows of a step, from 1, joined to one row, as `packing.packed_row`."""
        num_tokens = (rows.stop - rows.start) * self.capacity
        return packed_row(self.split.tokens, self.places(step, rows), num_tokens, target_only=target_only)

    def num_labels(self, step: int, *, target_only: bool) -> int:
        """Return the number of labelled tokens in all rows of a step. No token is read for it."""
        _, prefix_K, _, response_K, _ = self.places(step, slice(0, self.rows_per_step)).T
        return int((response_K if target_only else prefix_K + response_K - 1).sum())


@dataclass(eq=False)
class ShuffledSampler(TextSampler):
    """Each epoch visits each sample once, in an order drawn from (seed, epoch).

    Which samples of equal length share a row, and the order of the rows, is drawn for each epoch.
    A resumed run goes on at `first_step`, before which there were `first_row` rows. The step does
    not determine their number, because `rows_per_step` may have changed.
    """

    seed: int
    first_step: int = 1
    first_row: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        assert len(self.split.epochs) == 1, "the split prescribes the order of its epochs"
        self._lengths_N = self.split.epochs[0].lengths()
        self._shapes = Shapes(self._lengths_N, self.capacity)
        num_left = max(0, self.epochs * self._shapes.num_rows - self.first_row)
        self.last_step = self.first_step - 1 + num_left // self.rows_per_step
        self.waste = 1 - float(self._lengths_N.sum()) / (self._shapes.num_rows * self.capacity)
        # An epoch is drawn once and used for many steps. A step may lie in two epochs.
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def draws_before(self, step: int) -> int:
        return self.first_row + (step - self.first_step) * self.rows_per_step

    def epoch(self, step: int) -> float:
        return self.draws_before(step + 1) / self._shapes.num_rows

    def places(self, step: int, rows: slice) -> np.ndarray:
        assert self.first_step <= step <= self.last_step, f"step {step} lies outside of the stream"
        first = 0 if self.repeat_first_batch else self.draws_before(step)
        taken = []
        for row in range(first + rows.start, first + rows.stop):
            epoch, number = divmod(row, self._shapes.num_rows)
            filled_N, order = self._epoch(epoch)
            taken.append(filled_N[self._shapes.row(int(order[number]))])
        return self.split.epochs[0].take(np.concatenate(taken))

    def _draw_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples in the places of all rows, and the order of the rows."""
        order_N = np.random.default_rng([self.seed, epoch, _SAMPLES]).permutation(len(self._lengths_N))
        order = np.random.default_rng([self.seed, epoch, _ROWS]).permutation(self._shapes.num_rows)
        return self._shapes.fill(order_N), order


@dataclass(eq=False)
class FileOrderSampler(TextSampler):
    """Each epoch takes the samples in the order of the file, packed as in the published code.

    With R rows per step it gives what the published loader gives to R replicas. The number of steps
    depends on the order. So each epoch is packed once at the start.
    """

    drop_last_batch: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps = lru_cache(maxsize=2)(self._pack_epoch)
        lengths_N, steps = self.split.epochs[0].lengths(), self._steps(0)
        num_tokens = sum(int(lengths_N[row].sum()) for rows in steps for row in rows)
        self.waste = 1 - num_tokens / (len(steps) * self.rows_per_step * self.capacity) if steps else 0.0
        num_of = [len(self._steps(number)) for number in range(min(self.epochs, len(self.split.epochs)))]
        self._epoch_ends_E = np.cumsum([num_of[epoch % len(num_of)] for epoch in range(self.epochs)])
        self.last_step = int(self._epoch_ends_E[-1])

    def _pack_epoch(self, number: int) -> list[list[np.ndarray]]:
        lengths_N = self.split.epochs[number].lengths()
        drop = self.drop_last_batch
        return list(published_steps(lengths_N, self.capacity, self.rows_per_step, drop_last_batch=drop))

    def draws_before(self, step: int) -> int:
        return (step - 1) * self.rows_per_step

    def epoch(self, step: int) -> float:
        if step == 0:
            return 0.0
        epoch, before, num = self._epoch_of(step)
        return epoch + (step - before) / num

    def places(self, step: int, rows: slice) -> np.ndarray:
        step = 1 if self.repeat_first_batch else step
        epoch, before, _ = self._epoch_of(step)
        row_samples = self._steps(epoch % len(self.split.epochs))[step - before - 1][rows]
        return self.split.samples(epoch).take(np.concatenate(row_samples))

    def _epoch_of(self, step: int) -> tuple[int, int, int]:
        """Return the epoch of a step, the steps before this epoch, and the number of its steps."""
        assert 1 <= step <= self.last_step, f"step {step} lies outside of the stream"
        epoch = int(np.searchsorted(self._epoch_ends_E, step))
        before = int(self._epoch_ends_E[epoch - 1]) if epoch else 0
        return epoch, before, int(self._epoch_ends_E[epoch]) - before
