"""Augment on the fly: every visit of an example draws one of the symmetries of its task.

The draw is a pure function of (seed, step, slot of the global batch). So any number of ranks, and a
resumed run, see the same batches. Each rank draws the random numbers of the whole global batch on
the host, and keeps the numbers of its slots. The tokens are transformed on the device that trains.
"""
# B = slots of this rank, U = random numbers for one visit of an example

import numpy as np
import torch

from dataset.schema import Split
from dataset.tasks import KNOWN_SHAPES, task_of_shape
from dataset.tasks.base import Symmetries
from utils.batch import Batch
from utils.errors import UserError

# Keeps these random numbers independent of others that are seeded by (seed, step).
_STREAM = 0xA6


class OnlineAugmentation:
    """Draws and applies a symmetry of the split's task for each slot of this rank.

    Args:
        symmetries: the symmetries of the task.
        seed: the seed of the random numbers.
        global_batch_size: slots over all ranks.
        slots: the slots of this rank.
    """

    def __init__(self, symmetries: Symmetries, *, seed: int, global_batch_size: int, slots: slice) -> None:
        self._symmetries = symmetries
        self._seed, self._global_batch_size, self._slots = seed, global_batch_size, slots

    @classmethod
    def build(cls, split: Split, *, seed: int, global_batch_size: int, slots: slice) -> "OnlineAugmentation":
        """Return the augmentation for a split. Some tasks check every example here, once.

        Raises:
            UserError: The symmetries of the split's task are not known.
        """
        seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
        task = task_of_shape(seq_len, vocab_size)
        symmetries = task.symmetries(list(split.sets.values())) if task is not None else None
        if task is not None and symmetries is None:
            raise UserError(f"{split.path} holds {task.title}, a task without symmetries; set augment=none")
        if symmetries is None:
            raise UserError(
                f"{split.path} has {seq_len} tokens of {vocab_size} kinds, a task whose symmetries are not known "
                f"({KNOWN_SHAPES}); set augment=none"
            )
        return cls(symmetries, seed=seed, global_batch_size=global_batch_size, slots=slots)

    @property
    def description(self) -> str:
        """A phrase for the first lines of a run's log, such as "symmetries of Sudoku 3x3"."""
        return self._symmetries.description

    def draw(self, step: int, examples_B: np.ndarray) -> Batch:
        """Return the symmetries drawn for this rank's slots at a step, on the host.

        Args:
            step: the training step.
            examples_B: the sampler's number of the example in each slot.
        """
        rng = np.random.default_rng([_STREAM, self._seed, step])
        uniform_BU = rng.random((self._global_batch_size, self._symmetries.num_draws))[self._slots]
        chosen = self._symmetries.choose(uniform_BU, examples_B)
        return {name: torch.from_numpy(array) for name, array in chosen.items()}

    def apply(self, batch: Batch, drawn: Batch) -> Batch:
        """Return the batch with the drawn symmetries applied. All tensors are on the device."""
        return self._symmetries.apply(batch, drawn)
