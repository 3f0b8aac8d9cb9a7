"""Make batches of packed rows of text, a few steps ahead of the model."""

import torch

from dataset.schema import unchanged
from dataset.text.packing import PackedRow
from dataset.text.sampler import TextSampler
from models.text.objective import TextBatch, TextRow
from models.text.packing import Packing
from models.text.stack_config import Kernel
from utils.prefetch import Prefetcher
from utils.ranks.world import World


class TextLoader(Prefetcher[TextBatch, TextBatch]):
    """Reads this rank's rows of each step.

    Args:
        num_parts: in how many microbatches the rank takes its rows.
        target_only: only responses are labelled; otherwise all tokens but the first are.
    """

    def __init__(
        self, sampler: TextSampler, world: World, *, num_parts: int, target_only: bool, kernel: Kernel = "sdpa"
    ) -> None:
        super().__init__(world.enter_thread)
        self._sampler, self._device, self._target_only, self._kernel = sampler, world.device, target_only, kernel
        mine = world.slice_of(sampler.rows_per_step)
        size = (mine.stop - mine.start) // num_parts
        self._parts = [slice(mine.start + n * size, mine.start + (n + 1) * size) for n in range(num_parts)]

    def _host_part(self, step: int) -> TextBatch:
        sampler = self._sampler
        with unchanged(sampler.split.files):
            packed = (sampler.packed_row(step, part, target_only=self._target_only) for part in self._parts)
            rows = [row_of(each, self._kernel) for each in packed]
        batch = TextBatch(rows, sampler.num_labels(step, target_only=self._target_only))
        return batch.apply(torch.Tensor.pin_memory) if self._device.type == "cuda" else batch

    def _whole(self, part: TextBatch) -> TextBatch:
        return part.apply(lambda tensor: tensor.to(self._device, non_blocking=True))


def row_of(packed: PackedRow, kernel: Kernel = "sdpa") -> TextRow:
    inputs_N, labels_N, positions_N = map(torch.from_numpy, (packed.inputs, packed.labels, packed.position_ids))
    sequences = list(zip(packed.prefix_lens.tolist(), packed.response_lens.tolist(), strict=True))
    return TextRow(inputs_N, labels_N, positions_N, Packing(sequences, len(inputs_N), kernel=kernel))
