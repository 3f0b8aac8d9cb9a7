"""A pipeline of puzzles: a microbatch is some of the slots."""

# B = slots (of a microbatch inside a stage), S = tokens, T = positions (prefix and tokens),
# D = hidden size, V = vocabulary, E = puzzle embedding size

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.act import ActSettings, loss_of_slots
from models.block import Block, Level
from models.carry import Carry, Outputs, SegmentOutput, State
from models.depth import Depth
from models.model import Model
from models.parallel.pipeline import PipelineLayout, Stage
from models.tokens import TokenModel
from utils.batch import Batch


class PuzzleStage(Stage):
    before = ("embed_tokens", "embed_pos", "registers")
    behind = ("lm_head", "q_head")
    model: TokenModel
    level: Level

    def __init__(self, model: Model, blocks: Sequence[nn.Module], *, index: int, num_stages: int) -> None:
        super().__init__(model, blocks, index=index, num_stages=num_stages)
        self.level = Level(block for block in blocks if isinstance(block, Block))
        self.rows: list[Tensor] = []  # puzzle rows of the microbatches so far, in their order; leaves

    def forward(
        self, x: Tensor, ids_B: Tensor | None = None, rows_BE: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return x_BTD of the next stage, or logits_BSV and q_B2 (float32) in the last stage.

        In training the first stage looks up the puzzle rows itself, so that they are leaves with a
        gradient. A schedule would hand on pieces of a larger tensor.
        """
        model = self.model
        if ids_B is not None:
            assert model.puzzle_embedding is not None
            rows_BE = model.puzzle_embedding.rows(ids_B)
            self.rows.append(rows_BE)
        if self.is_first:
            x = model.embed(x, rows_BE)
        x = model.calls(model.config.depth)(self.level, x, rotary=model.rotary())
        if not self.is_last:
            return x.contiguous()  # only contiguous tensors can be sent
        _, logits_BSV, q_halt_B, q_continue_B = model.read_out(x, {})
        return logits_BSV, torch.stack([q_halt_B, q_continue_B], dim=1)


class PuzzlePipelineLayout(PipelineLayout[PuzzleStage, Carry, Batch, ActSettings]):
    """A transformer that reads puzzles, of which each rank holds some stages.

    The puzzle table is on every rank, and each rank updates its copy with the same gradients.
    """

    stage_class = PuzzleStage
    model: TokenModel

    _in_schedule: Carry | None = None
    """The slots of the part that `_loss` is about."""

    def _take_calls(self) -> None:
        self.model.forward = self._infer  # type: ignore[method-assign]

    def forward_backward(
        self, carry: Carry, batch: Batch, settings: ActSettings, *, loss_scale: float = 1.0
    ) -> tuple[Carry, list[Outputs], Tensor]:
        """As in the base class. Only ranks of a last stage return logits and Q values.

        The caller has checked that the slots split into whole microbatches (`require_parts`): a
        check here would raise on some pipelines only.
        """
        num_slots = len(carry.halted_B)
        # Without recurrence a slot halts after its only segment, so a step takes the whole batch.
        carry = Carry({}, torch.ones_like(carry.steps_B), torch.ones_like(carry.halted_B), dict(batch))
        self._sums = self._zero_sums()
        self._settings, self._loss_scale = settings, loss_scale
        outputs = []
        for first in range(0, num_slots, num_slots // self.num_microbatches):
            part = slice(first, first + num_slots // self.num_microbatches)
            tensors = {name: tensor[part] for name, tensor in carry.tensors().items()}
            outputs.append(self._forward_backward_of_part(Carry.from_tensors(tensors)))
        # These three follow the parts, so that a stage that has done its work can sum gradients
        # while the stages before it still compute.
        self._sum_gradients()
        for part_of_slots in outputs:
            if part_of_slots.puzzle_rows_BE is not None and part_of_slots.puzzle_rows_BE.grad is not None:
                self._take_from("first", part_of_slots.puzzle_rows_BE.grad)
        self._take_from("last", self._sums)
        return carry, outputs, self._sums

    def _forward_backward_of_part(self, carry: Carry) -> Outputs:
        inputs_BS, ids_B = carry.current["inputs"], carry.current["puzzle_identifiers"]
        num_slots = len(ids_B)
        table, first, last = self.model.puzzle_embedding, self._stages[0], self._stages[-1]
        if num_slots not in self._schedules:
            size, hidden_size = num_slots // self._config.microbatches, self.model.config.hidden_size
            self._schedules[num_slots] = self._new_schedule(
                [inputs_BS[:size]] if table is None else [inputs_BS[:size], ids_B[:size]],
                ((size, self.model.num_positions, hidden_size), self.model.dtype),
                [((size, inputs_BS.shape[1], self.model.vocab_size), self.model.dtype), ((size, 2), torch.float32)],
            )
        first.rows.clear()
        self._in_schedule = carry
        merged = self._schedules[num_slots].step(
            *((inputs_BS,) if table is None else (inputs_BS, ids_B)) if first.is_first else (),
            # This tells `_loss` which slots a microbatch has.
            target=torch.arange(num_slots, device=ids_B.device) if last.is_last else None,
        )
        if last.is_last:
            logits_BSV, q_B2 = (tensor.detach() for tensor in merged)
        else:
            logits_BSV, q_B2 = torch.empty(0, device=ids_B.device), torch.empty(0, 2, device=ids_B.device)
        rows_BE = None
        if table is not None:
            rows_BE = table.rows(ids_B)
            if table.trainable:
                if first.is_first:
                    rows_BE.grad = torch.cat([rows.grad for rows in first.rows if rows.grad is not None])
                else:
                    rows_BE.grad = torch.empty_like(rows_BE)  # forward_backward fills it
        return Outputs(logits_BSV, q_B2[:, 0], q_B2[:, 1], None, rows_BE)

    def _loss(self, output: tuple[Tensor, Tensor], slots_B: Tensor) -> Tensor:
        """As in the base class, for the slots_B of the part."""
        assert self._in_schedule is not None and self._settings is not None
        logits_BSV, q_B2 = output
        tensors = {name: tensor[slots_B] for name, tensor in self._in_schedule.tensors().items()}
        outputs = Outputs(logits_BSV, q_B2[:, 0], q_B2[:, 1], None, None)
        config = self.model.config.loss
        part_of_loss, sums = loss_of_slots(outputs, Carry.from_tensors(tensors), self._settings, config)
        self._sums += sums
        return part_of_loss * self._loss_scale

    @torch.no_grad()
    def _infer(self, state: State, inputs_BS: Tensor, puzzle_rows_BE: Tensor | None, depth: Depth) -> SegmentOutput:
        """Run the model without gradient, for any number of slots. Every rank of the pipeline."""
        num_parts, model = self._config.microbatches, self.model
        inputs = inputs_BS.chunk(num_parts)
        rows = puzzle_rows_BE.chunk(num_parts) if puzzle_rows_BE is not None else (None,) * len(inputs)
        shapes = [(len(x), model.num_positions, model.config.hidden_size) for x in inputs]
        read = self._walk(inputs, shapes, lambda stage, x, number: stage(x, rows_BE=rows[number]))
        if read:
            logits_BSV, q_B2 = (torch.cat(parts) for parts in zip(*read, strict=True))
        else:
            device = self._world.device
            logits_BSV = torch.empty(*inputs_BS.shape, model.vocab_size, dtype=model.dtype, device=device)
            q_B2 = torch.empty(len(inputs_BS), 2, device=device)
        self._take_from("last", logits_BSV, q_B2)
        return {}, logits_BSV, q_B2[:, 0], q_B2[:, 1]
