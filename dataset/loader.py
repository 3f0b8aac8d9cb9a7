"""Make batches of tensors from arrays, a few steps ahead of the model.

The arrays are memory maps on the host or tensors on the device. Both give the same batches.
"""
# B = slots of this rank, S = tokens of a puzzle, N = examples of all sets

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from dataset.canvas import PADDING, Corner
from dataset.online import OnlineAugmentation
from dataset.sampler import Sampler
from dataset.schema import CHUNK_BYTES, PuzzleSet, Split, unchanged
from utils.batch import IGNORE_LABEL, Batch
from utils.errors import UserError
from utils.prefetch import Prefetcher
from utils.ranks.world import World

DataOn = Literal["auto", "host", "device"]

# The largest share of the device's free memory that data_on=auto gives to the arrays. The model
# needs the rest.
_RESIDENT_SHARE = 0.25


class TrainLoader(Prefetcher[tuple[Batch, Batch], Batch]):
    """Reads this rank's slots of every global batch.

    A batch is `inputs` (B,S), `labels` (B,S) and `puzzle_identifiers` (B,), int32 on the device.

    Args:
        augmentation: draws a symmetry for each visit of an example; None: no augmentation.
        data_on: where the arrays are. With "device" the device's memory holds all arrays, and the
            host sends row numbers. "auto" means "device" on a CUDA device if the arrays take at
            most a quarter of the free memory, else "host".
    """

    def __init__(
        self,
        split: Split,
        sampler: Sampler,
        world: World,
        *,
        augmentation: OnlineAugmentation | None = None,
        data_on: DataOn = "auto",
    ) -> None:
        super().__init__(world.enter_thread)
        self._split, self._sampler, self._device = split, sampler, world.device
        self._slots = world.slice_of(sampler.global_batch_size)
        self._sets = list(split.sets.values())
        self._augmentation = augmentation
        if data_on == "auto":
            num_bytes = sum(array.nbytes for s in self._sets for array in (s.inputs, s.labels))
            free_bytes = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else 0
            data_on = "device" if num_bytes <= _RESIDENT_SHARE * free_bytes else "host"
        self.data_on = data_on
        self._resident = _Resident(split, world.device) if data_on == "device" else None

    def _host_part(self, step: int) -> tuple[Batch, Batch]:
        """Return the examples, or their numbers if the arrays are on the device, and symmetries."""
        examples = self._sampler.examples(step, self._slots)
        read = {"examples": examples} if self._resident else self._read(examples)
        drawn = self._augmentation.draw(step, examples) if self._augmentation else {}
        tensors = {name: torch.from_numpy(array) for name, array in read.items()}
        return _pinned(tensors, self._device), _pinned(drawn, self._device)

    def _whole(self, part: tuple[Batch, Batch]) -> Batch:
        read, drawn = part
        batch = _to_device(read, self._device)
        if self._resident:
            batch = self._resident.rows(batch["examples"])
        return self._augmentation.apply(batch, _to_device(drawn, self._device)) if self._augmentation else batch

    def _read(self, examples: np.ndarray) -> dict[str, np.ndarray]:
        set_index, rows = self._sampler.locate(examples)
        metadata = self._split.metadata
        arrays = {
            "inputs": np.empty((len(rows), metadata.seq_len), np.int32),
            "labels": np.empty((len(rows), metadata.seq_len), np.int32),
            "puzzle_identifiers": np.empty(len(rows), np.int32),
        }
        for index, puzzle_set in enumerate(self._sets):
            here = set_index == index
            for name, values in _read(puzzle_set, rows[here], metadata.ignore_label_id).items():
                arrays[name][here] = values
        return arrays


class _Resident:
    """The examples of all sets on the device, in the order in which the sampler numbers them."""

    def __init__(self, split: Split, device: torch.device) -> None:
        sets = list(split.sets.values())
        self._ignore_label_id = split.metadata.ignore_label_id
        # Boards of each side have inputs and labels of their own, and are placed on the canvas
        # batch by batch: on the canvas they would take several times the memory.
        self._parts: list[tuple[Corner | None, torch.Tensor, torch.Tensor]] = []
        with unchanged([file for each in sets for file in each.files]):
            for corner, group in groupby(sets, lambda each: each.corner):
                same = list(group)
                arrays = [s.inputs for s in same], [s.labels for s in same]
                self._parts.append((corner, *(_upload(each, device) for each in arrays)))
        identifiers_N = [np.repeat(s.puzzle_identifiers.astype(np.int32), np.diff(s.puzzle_indices)) for s in sets]
        self._identifiers_N = _upload(identifiers_N, device)

    def rows(self, examples_B: torch.Tensor) -> Batch:
        batch: Batch = {}
        start = 0
        for corner, inputs_NS, labels_NS in self._parts:
            # Every part is read for every slot, so that no shape depends on the examples. Otherwise
            # the host would wait for the device.
            rows_B = (examples_B - start).clamp(0, len(inputs_NS) - 1)
            inputs_BS, labels_BS = (array.index_select(0, rows_B).int() for array in (inputs_NS, labels_NS))
            if self._ignore_label_id is not None:
                labels_BS = labels_BS.masked_fill(labels_BS == self._ignore_label_id, IGNORE_LABEL)
            if corner is not None:
                inputs_BS, labels_BS = corner.place(inputs_BS, PADDING), corner.place(labels_BS, IGNORE_LABEL)
            of_part = {"inputs": inputs_BS, "labels": labels_BS}
            is_before_B1 = (examples_B < start)[:, None]
            batch = {name: torch.where(is_before_B1, batch[name], of_part[name]) for name in batch} or of_part
            start += len(inputs_NS)
        return batch | {"puzzle_identifiers": self._identifiers_N.index_select(0, examples_B)}


def _upload(arrays: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """Copy arrays to the device as one tensor, in pieces, so that the host never holds a copy.

    The tensor has the arrays' type if they share one that torch can index, else int32.
    """
    (kind, *others) = {array.dtype.newbyteorder("=") for array in arrays}
    dtype = np.dtype(np.int32) if others or kind in (np.uint16, np.uint32, np.uint64) else kind
    shape = sum(map(len, arrays)), *arrays[0].shape[1:]
    resident = torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=device)
    end = 0
    for array in arrays:
        rows_at_once = max(1, CHUNK_BYTES // (array.nbytes // len(array)))
        for start in range(0, len(array), rows_at_once):
            chunk = torch.from_numpy(array[start : start + rows_at_once].astype(dtype))
            resident[end : end + len(chunk)] = chunk
            end += len(chunk)
    return resident


class EvalLoader:
    """Reads each example of one set once, in the order of the file, and divides batches over ranks.

    Args:
        max_examples: read at most this many examples, evenly spread over the file; None: all.
        spread: spread each batch over the whole file, for an evaluation that may have to end early.
    """

    def __init__(
        self, split: Split, set_name: str, batch_size: int, max_examples: int | None = None, *, spread: bool = False
    ) -> None:
        self._split, self._set, self._batch_size = split, split.sets[set_name], batch_size
        size = len(self._set.inputs)
        self.num_examples = size if max_examples is None else min(size, max_examples)
        self._mistake: UserError | None = None
        self._rows = np.arange(self.num_examples) * size // self.num_examples
        if spread:
            num_batches = -(-self.num_examples // batch_size)
            self._rows = np.concatenate([self._rows[first::num_batches] for first in range(num_batches)])

    def batches(self, world: World) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield this rank's share of each batch: its row numbers in the file, and the batch.

        If a file changed, the batches end early. `require_all_read` then raises the error, where
        all ranks can end together.
        """
        return self.read(self.shares(world), world)

    def read(self, shares: Iterable[np.ndarray], world: World) -> Iterator[tuple[np.ndarray, Batch]]:
        """As `batches`, for the row numbers of each of this rank's batches."""
        for rows in shares:
            try:
                arrays = _read(self._set, rows, self._split.metadata.ignore_label_id)
            except UserError as mistake:
                self._mistake = mistake
                return
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            yield rows, _to_device(_pinned(tensors, world.device), world.device)

    def shares(self, world: World) -> Iterator[np.ndarray]:
        """Yield the row numbers of this rank's share of each batch. Empty shares are left out."""
        for start in range(0, self.num_examples, self._batch_size):
            num_rows = min(self._batch_size, self.num_examples - start)
            rows = self._rows[start : start + num_rows][world.slice_of(num_rows)]
            if len(rows):
                yield rows

    def require_all_read(self) -> None:
        """Raise UserError if `batches` ended early because a file changed."""
        if self._mistake is not None:
            raise self._mistake


def _read(puzzle_set: PuzzleSet, rows: np.ndarray, ignore_label_id: int | None) -> dict[str, np.ndarray]:
    """Read these rows of a set as int32 arrays, with IGNORE_LABEL for ignored labels."""
    with unchanged(puzzle_set.files):
        inputs, labels = (array[rows].astype(np.int32) for array in (puzzle_set.inputs, puzzle_set.labels))
    if ignore_label_id is not None:
        labels[labels == ignore_label_id] = IGNORE_LABEL
    if (corner := puzzle_set.corner) is not None:
        inputs = corner.place(torch.from_numpy(inputs), PADDING).numpy()
        labels = corner.place(torch.from_numpy(labels), IGNORE_LABEL).numpy()
    puzzles = np.searchsorted(puzzle_set.puzzle_indices, rows, side="right") - 1
    return {
        "inputs": inputs,
        "labels": labels,
        "puzzle_identifiers": puzzle_set.puzzle_identifiers[puzzles].astype(np.int32),
    }


def _pinned(batch: Batch, device: torch.device) -> Batch:
    """Pin the memory of a batch, so that copies to a CUDA device don't wait."""
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if device.type == "cuda" else batch


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
