"""From memory-mapped arrays to batches of tensors, one step ahead of the model."""
# B = slots of this rank, S = tokens of a puzzle

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from dataset.sampler import Sampler
from dataset.schema import PuzzleSet, Split
from utils.dist import World

Batch = dict[str, torch.Tensor]

IGNORE_LABEL = -100
_PREFETCH = 4


class TrainLoader:
    """This rank's slots of every global batch.

    A batch is `inputs` (B,S), `labels` (B,S), `puzzle_identifiers` (B,), int32 on the world's device.
    """

    def __init__(self, split: Split, sampler: Sampler, world: World) -> None:
        self._split, self._sampler, self._device = split, sampler, world.device
        self._slots = world.slice_of(sampler.global_batch_size)
        self._sets = list(split.sets.values())

    def batches(self, steps: range) -> Iterator[Batch]:
        """The batches of these steps, in order, read by a thread that stays a few steps ahead."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            upcoming = iter(steps)
            pending = deque(
                pool.submit(self._host_batch, step) for _, step in zip(range(_PREFETCH), upcoming, strict=False)
            )
            try:
                while pending:
                    batch = pending.popleft().result()
                    pending.extend(
                        pool.submit(self._host_batch, step) for _, step in zip(range(1), upcoming, strict=False)
                    )
                    yield _to_device(batch, self._device)
            finally:
                for future in pending:
                    future.cancel()

    def _host_batch(self, step: int) -> Batch:
        set_index, rows = self._sampler.locate(self._sampler.examples(step, self._slots))
        seq_len = self._split.metadata.seq_len
        arrays = {
            "inputs": np.empty((len(rows), seq_len), np.int32),
            "labels": np.empty((len(rows), seq_len), np.int32),
            "puzzle_identifiers": np.empty(len(rows), np.int32),
        }
        for index, puzzle_set in enumerate(self._sets):
            here = set_index == index
            for name, values in _read(puzzle_set, rows[here], self._split.metadata.ignore_label_id).items():
                arrays[name][here] = values
        return _as_tensors(arrays, pin=self._device.type == "cuda")


class EvalLoader:
    """Every example of one set exactly once, in the order of the file, split over ranks batch by batch."""

    def __init__(self, split: Split, set_name: str, batch_size: int) -> None:
        self._split, self._set, self._batch_size = split, split.sets[set_name], batch_size

    @property
    def num_examples(self) -> int:
        return len(self._set.inputs)

    def batches(self, world: World) -> Iterator[tuple[np.ndarray, Batch]]:
        """This rank's share of each batch: the rows in the file, and the batch. Every rank gets equally many, some of
        which may be empty.
        """
        for start in range(0, self.num_examples, self._batch_size):
            num_rows = min(self._batch_size, self.num_examples - start)
            rows = np.arange(start, start + num_rows)[world.slice_of(num_rows)]
            arrays = _read(self._set, rows, self._split.metadata.ignore_label_id)
            yield rows, _to_device(_as_tensors(arrays, pin=world.device.type == "cuda"), world.device)


def _read(puzzle_set: PuzzleSet, rows: np.ndarray, ignore_label_id: int | None) -> dict[str, np.ndarray]:
    labels = puzzle_set.labels[rows].astype(np.int32)
    if ignore_label_id is not None:
        labels[labels == ignore_label_id] = IGNORE_LABEL
    puzzles = np.searchsorted(puzzle_set.puzzle_indices, rows, side="right") - 1
    return {
        "inputs": puzzle_set.inputs[rows].astype(np.int32),
        "labels": labels,
        "puzzle_identifiers": puzzle_set.puzzle_identifiers[puzzles].astype(np.int32),
    }


def _as_tensors(arrays: dict[str, np.ndarray], *, pin: bool) -> Batch:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin else tensors


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
