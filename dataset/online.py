"""Augmentation on the fly: every visit of an example draws one of the symmetries of its task.

What is drawn is a pure function of (seed, step, slot of the global batch), so any number of ranks and a resumed run see
the same batches. The random numbers are drawn on the host for the whole global batch, and a rank keeps its slots. The
tokens are moved on the device that trains.
"""
# B = slots of this rank, U = random numbers for one visit

import numpy as np
import torch

from dataset.schema import Split
from dataset.tasks import KNOWN_SHAPES, task_of_shape
from dataset.tasks.base import Symmetries
from utils.batch import Batch
from utils.errors import UserError

# Tells this random stream from others made of (seed, step).
_STREAM = 0xA6


class OnlineAugmentation:
    """The symmetries of a split's task, drawn anew for these slots of every global batch."""

    def __init__(self, symmetries: Symmetries, *, seed: int, global_batch_size: int, slots: slice) -> None:
        self._symmetries = symmetries
        self._seed, self._global_batch_size, self._slots = seed, global_batch_size, slots

    @classmethod
    def build(cls, split: Split, *, seed: int, global_batch_size: int, slots: slice) -> "OnlineAugmentation":
        """Return the augmentation of a split's task. Some tasks check every example here, once.

        Raises:
            UserError: If the symmetries of the task are not known.
        """
        seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
        task = task_of_shape(seq_len, vocab_size)
        symmetries = task.symmetries(list(split.sets.values())) if task is not None else None
        if symmetries is None:
            raise UserError(
                f"{split.path} has {seq_len} tokens of {vocab_size} kinds, a task whose symmetries are not known "
                f"({KNOWN_SHAPES}); set augment=none"
            )
        return cls(symmetries, seed=seed, global_batch_size=global_batch_size, slots=slots)

    @property
    def description(self) -> str:
        """A phrase for the head of a run: "symmetries of Sudoku 3x3"."""
        return self._symmetries.description

    def draw(self, step: int, examples_B: np.ndarray) -> Batch:
        """Return what is drawn for this rank's slots at a step, on the host.

        Args:
            examples_B: The sampler's numbers for the slots.
        """
        rng = np.random.default_rng([_STREAM, self._seed, step])
        uniform_BU = rng.random((self._global_batch_size, self._symmetries.num_draws))[self._slots]
        chosen = self._symmetries.choose(uniform_BU, examples_B)
        return {name: torch.from_numpy(array) for name, array in chosen.items()}

    def apply(self, batch: Batch, drawn: Batch) -> Batch:
        """Return the augmented batch, from a batch and what was drawn for it, both on the device."""
        return self._symmetries.apply(batch, drawn)
