"""A pipeline of text: a microbatch is a packed row."""

# N = tokens of a row, D = hidden size, V = vocabulary, B = prompts

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.carry import Outputs
from models.model import Model
from models.parallel.pipeline import PipelineLayout, Stage
from models.text.block import Attends, Stack, TextBlock
from models.text.config import CallCounts
from models.text.model import TextModel, call_stack
from models.text.objective import TextBatch, TextObjective
from models.text.packing import Packing


class TextStage(Stage):
    before = ("embed_tokens",)
    behind = ("level.norm", "lm_head")
    model: TextModel
    level: Stack

    def __init__(self, model: Model, blocks: Sequence[nn.Module], *, index: int, num_stages: int) -> None:
        super().__init__(model, blocks, index=index, num_stages=num_stages)
        (whole,) = self.model.stacks().values()
        own = [block for block in blocks if isinstance(block, TextBlock)]
        self.level = Stack(whole.shape, own, whole.norm if self.is_last else None)
        # The positions and the sequences of each microbatch. A schedule passes only tensors.
        self.rows: Sequence[tuple[Tensor, Attends]] = []

    def forward(self, x: Tensor, number_1: Tensor) -> Tensor:
        """Return x_ND of the next stage, or of the head, for the microbatch with this number."""
        positions_N, tokens = self.rows[int(number_1)]
        if self.is_first:
            x = self.model.embed(x)
        checkpointing = self.model.config.activation_checkpointing
        return call_stack(self.level, x, rotary=self.level.rotary(positions_N), tokens=tokens, keep=checkpointing)


class TextPipelineLayout(PipelineLayout[TextStage, None, TextBatch, CallCounts]):
    stage_class = TextStage
    model: TextModel

    _in_schedule: TextBatch | None = None
    """The rows of the part, and the labels of the step, that `_loss` is about."""

    def _take_calls(self) -> None:
        self.model.forward = self._losses  # type: ignore[method-assign]
        self.model.next_logits = self._next_logits  # type: ignore[method-assign]

    def forward_backward(
        self, carry: None, batch: TextBatch, settings: CallCounts, *, loss_scale: float = 1.0
    ) -> tuple[None, list[Outputs], Tensor]:
        """As in the base class. Each microbatch is a row, and all rows are equally long."""
        self._sums = self._zero_sums()
        self._loss_scale = loss_scale
        size = self._config.microbatches
        assert len(batch.rows) == size * self.num_microbatches, "the loader makes a row for each microbatch"
        for first in range(0, len(batch.rows), size):
            self._forward_backward_of_part(TextBatch(batch.rows[first : first + size], batch.num_labels))
        self._sum_gradients()
        self._take_from("last", self._sums)
        return None, [], self._sums

    def _forward_backward_of_part(self, part: TextBatch) -> None:
        num_tokens, numbers = len(part.rows[0].inputs_N), torch.arange(len(part.rows))
        first, last = self._stages[0], self._stages[-1]
        if num_tokens not in self._schedules:
            activation = (num_tokens, self.model.config.hidden_size), self.model.dtype
            self._schedules[num_tokens] = self._new_schedule([part.rows[0].inputs_N], activation, [activation])
        self._in_schedule = part
        for stage in self._stages:
            stage.rows = [(row.positions_N, row.packing) for row in part.rows]
        self._schedules[num_tokens].step(
            *((torch.cat([row.inputs_N for row in part.rows]),) if first.is_first else ()),
            number_1=numbers,
            target=numbers if last.is_last else None,
        )

    def _loss(self, output: Tensor, numbers: Tensor) -> Tensor:
        """As in the base class, for the number of a row, (1,), on the host."""
        assert self._in_schedule is not None and isinstance(self.objective, TextObjective)
        batch = TextBatch([self._in_schedule.rows[int(numbers)]], self._in_schedule.num_labels)
        found = self.objective.result(batch, self.model.losses(output, batch.rows[0].labels_N))
        self._sums += found.sums
        return found.loss * self._loss_scale

    # ---- without gradient -----------------------------------------------------------------------

    @torch.no_grad()
    def _losses(
        self, inputs_N: Tensor, labels_N: Tensor, positions_N: Tensor, packing: Packing, *, grad_calls: CallCounts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses of a row on all ranks of the pipeline: the model's forward."""
        device, read = self._world.device, self._hidden(inputs_N, positions_N, packing)
        if read:
            found = self.model.losses(read[0], labels_N)
        else:
            loss_N = torch.empty(len(labels_N), device=device)
            found = torch.empty((), device=device), loss_N, torch.empty_like(loss_N, dtype=torch.bool)
        self._take_from("last", *found)
        return found

    @torch.no_grad()
    def _next_logits(self, inputs_N: Tensor, positions_N: Tensor, tokens: Attends, places_B: Tensor) -> Tensor:
        """Return the logits (B, V) on all ranks of the pipeline: the model's next_logits."""
        if read := self._hidden(inputs_N, positions_N, tokens):
            logits_BV = self.model.logits(read[0][places_B])
        else:
            shape = len(places_B), self.model.vocab_size
            logits_BV = torch.empty(*shape, dtype=self.model.dtype, device=self._world.device)
        self._take_from("last", logits_BV)
        return logits_BV

    def _hidden(self, inputs_N: Tensor, positions_N: Tensor, tokens: Attends) -> list[Tensor]:
        """Return what the head reads, (N, D), on the rank that has the head; nothing elsewhere."""
        for stage in self._stages:
            stage.rows = [(positions_N, tokens)]
        shape = len(inputs_N), self.model.config.hidden_size
        return self._walk([inputs_N], [shape], lambda stage, x, number: stage(x, torch.tensor([number])))
