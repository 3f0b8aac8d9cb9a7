"""Make batches of packed rows of text, a few steps ahead of the model."""

from collections.abc import Iterator
from contextlib import closing

import torch

from dataset.schema import unchanged
from dataset.text.packing import PackedRow
from dataset.text.sampler import TextSampler
from models.text.objective import TextBatch, TextRow
from models.text.packing import Packing
from models.text.stack_config import Kernel
from utils.errors import UserError
from utils.prefetch import Prefetcher
from utils.ranks.world import World


class TextLoader:
    """Reads this rank's rows of each step.

    Args:
        num_parts: in how many microbatches the rank takes its rows.
        target_only: only responses are labelled; otherwise all tokens but the first are.
    """

    def __init__(
        self, sampler: TextSampler, world: World, *, num_parts: int, target_only: bool, kernel: Kernel = "sdpa"
    ) -> None:
        self._sampler, self._device, self._target_only, self._kernel = sampler, world.device, target_only, kernel
        mine = world.slice_of(sampler.rows_per_step)
        size = (mine.stop - mine.start) // num_parts
        self._parts = [slice(mine.start + n * size, mine.start + (n + 1) * size) for n in range(num_parts)]
        self._ahead = Prefetcher(self._host_part, world.enter_thread)

    def batches(self, steps: range) -> Iterator[TextBatch]:
        """Yield the batches of these steps, in order. A thread reads them, and begins at once."""
        read = self._ahead.values(steps)

        def arriving() -> Iterator[TextBatch]:
            with closing(read):
                for batch in read:
                    yield batch.apply(lambda tensor: tensor.to(self._device, non_blocking=True))

        return arriving()

    def next_mistake(self) -> UserError | None:
        return self._ahead.next_mistake()

    def _host_part(self, step: int) -> TextBatch:
        sampler = self._sampler
        with unchanged([sampler.split]):
            packed = (sampler.packed_row(step, part, target_only=self._target_only) for part in self._parts)
            rows = [row_of(each, self._kernel) for each in packed]
        batch = TextBatch(rows, sampler.num_labels(step, target_only=self._target_only))
        return batch.apply(torch.Tensor.pin_memory) if self._device.type == "cuda" else batch


def row_of(packed: PackedRow, kernel: Kernel = "sdpa") -> TextRow:
    inputs_N, labels_N, positions_N = map(torch.from_numpy, (packed.inputs, packed.labels, packed.position_ids))
    sequences = list(zip(packed.prefix_lens.tolist(), packed.response_lens.tolist(), strict=True))
    return TextRow(inputs_N, labels_N, positions_N, Packing(sequences, len(inputs_N), kernel=kernel))
