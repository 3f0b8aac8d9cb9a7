"""How a text model is trained: cross-entropy over the labelled tokens of packed rows."""
# N = tokens of a row

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.objective import Objective, PartResult
from models.text.config import CallCounts
from models.text.losses import TEXT_SUMS, text_sums
from models.text.model import TextModel
from models.text.packing import Packing


@dataclass(frozen=True)
class TextRow:
    """A packed row: sequences one behind the other, then padding."""

    inputs_N: Tensor
    labels_N: Tensor  # what each token must predict, or the label that is ignored
    positions_N: Tensor  # from 0 in each sequence
    packing: Packing

    def apply(self, change: Callable[[Tensor], Tensor]) -> "TextRow":
        """Return the row with `change` of each of its tensors, such as a copy on a device."""
        inputs_N, labels_N, positions_N = map(change, (self.inputs_N, self.labels_N, self.positions_N))
        return TextRow(inputs_N, labels_N, positions_N, self.packing.apply(change))


@dataclass(frozen=True)
class TextBatch:
    """What a rank has of a step. A sequence can't be cut, so each part is a row of its own."""

    rows: list[TextRow]
    num_labels: int  # of the step, over all ranks and parts

    def apply(self, change: Callable[[Tensor], Tensor]) -> "TextBatch":
        return TextBatch([row.apply(change) for row in self.rows], self.num_labels)


class TextObjective(Objective[None, TextBatch, CallCounts]):
    """Each labelled token of a step counts the same. Nothing is carried from step to step.

    The settings of a step say how many of the last calls in each role carry gradient.
    """

    sums = TEXT_SUMS

    def __init__(self, model: TextModel) -> None:
        self._model = model

    def fresh_carry(self, num_slots: int, device: torch.device) -> None:
        return None

    def split(
        self, carry: None, batch: TextBatch, settings: CallCounts, num_parts: int
    ) -> list[tuple[None, TextBatch, CallCounts]]:
        assert len(batch.rows) == num_parts, "the loader makes a row for each part"
        return [(None, TextBatch([row], batch.num_labels), settings) for row in batch.rows]

    def run(
        self,
        carry: None,
        batch: TextBatch,
        settings: CallCounts,
        forward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
    ) -> PartResult[None]:
        (row,) = batch.rows
        tensors = (row.inputs_N, row.labels_N, row.positions_N)
        return self.result(batch, (forward or self._model)(*tensors, row.packing, grad_calls=settings))

    def result(self, batch: TextBatch, found: tuple[Tensor, Tensor, Tensor]) -> PartResult[None]:
        (row,), (loss, _, right_N) = batch.rows, found
        sums = text_sums(loss, right_N, row.labels_N, row.packing)
        return PartResult(None, None, loss / batch.num_labels, sums)

    def smallest_loss(self, forward: Callable[..., tuple[Tensor, Tensor, Tensor]], device: torch.device) -> Tensor:
        """As in the base class, from one sequence of one token."""
        token_1 = torch.zeros(1, dtype=torch.int32, device=device)
        packing, calls = Packing([(1, 0)], 1, device), self._model.config.num_calls
        loss, *_ = forward(token_1, token_1, token_1, packing, grad_calls=calls)
        return loss

    def join(self, carries: Sequence[None]) -> None:
        return None

    def divisor(self, batch: TextBatch, settings: CallCounts) -> int:
        return batch.num_labels
