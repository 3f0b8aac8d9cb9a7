"""Pipeline parallelism: blocks lie on several ranks in a row, and microbatches pass along it.

All ranks of a pipeline are given the same slots. The first stage embeds them, each stage hands its
activations to the next, and the last stage has the heads and the loss. A pipeline pays only where a
slot passes each stage once. The state of a recurrent architecture would go through all stages again
and again, with one stage at work while the others wait.

There may be several pipelines beside one another, each with slots of its own. The ranks that hold
the same stages sum their gradients. They may also shard the weights of their blocks (FSDP2).
"""

# B = slots (of a microbatch inside a stage), S = tokens, T = positions (prefix and tokens),
# D = hidden size, V = vocabulary, E = puzzle embedding size

from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from models.act import ActSettings, Carry, loss_of_slots
from models.base import RecursiveModel, SegmentOutput, State
from models.block import Block, Level
from models.depth import Depth
from models.losses import METRICS, Outputs, widest_float
from models.model import Model, compile_each
from models.parallel.dtensor import DTensorLayout
from models.parallel.fsdp import shard_unit
from models.parallel.layout import LayoutConfig
from models.parallel.requirements import nearest_divisors
from models.transformer import Transformer, TransformerConfig
from utils.batch import Batch
from utils.config import Int
from utils.dist.config import Axes
from utils.dist.world import World, is_dtensor
from utils.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# Gradients are summed over the pipelines in pieces of this size.
_BUCKET_BYTES = 25 * 2**20


class PipelineConfig(LayoutConfig):
    """The options of a pipeline; config/parallel/pipeline.yaml explains them."""

    name: Literal["pipeline"]
    stages: Int | None = Field(ge=1)
    shard: Int = Field(ge=1)
    microbatches: Int = Field(ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved"]
    stages_per_rank: Int | None = Field(ge=2)

    @field_validator("puzzle_table")
    @classmethod
    def _every_rank_has_all_rows(cls, value: str) -> str:
        if value == "sharded":
            raise ValueError(
                "puzzle_table is sharded, so that a lookup is a collective, but the first stage of a pipeline looks "
                "rows up by itself for each microbatch; set it to replicated"
            )
        return value

    @model_validator(mode="after")
    def _only_interleaving_has_several_stages_per_rank(self) -> Self:
        if self.stages_per_rank is not None and self.schedule != "interleaved":
            raise ValueError(
                f"stages_per_rank is {self.stages_per_rank}, but schedule {self.schedule} has one stage on each rank; "
                "leave it null, or set schedule to interleaved"
            )
        return self

    def num_stages(self, num_ranks: int) -> int:
        """Return how many stages a pipeline of so many ranks has.

        Stage i lies on the pipeline's rank i modulo `num_ranks`.
        """
        return num_ranks * ((self.stages_per_rank or 2) if self.schedule == "interleaved" else 1)

    def axes(self, num_ranks: int) -> Axes:
        """Return pipelines of `stages` ranks each, as many as there are ranks for.

        Raises:
            UserError: `stages` x `shard` doesn't divide the ranks, or the schedule can't run on so
                many stages.
        """
        length = max(1, num_ranks // self.shard) if self.stages is None else self.stages
        if num_ranks % (length * self.shard):
            asked = f"stages {length}" + (f" x shard {self.shard}" if self.shard > 1 else "")
            shards = self.shard if num_ranks % self.shard == 0 else 1
            fitting = [str(n) for n in range(1, num_ranks // shards + 1) if num_ranks // shards % n == 0]
            raise UserError(
                f"parallel: {asked} doesn't divide {num_ranks} ranks; take stages of {', '.join(fitting)} with shard "
                f"{shards}, or start a multiple of {length * self.shard} ranks"
            )
        if self.schedule == "1f1b" and self.microbatches < length:
            raise UserError(
                f"parallel.microbatches is {self.microbatches}, but schedule 1f1b needs one for each of {length} "
                f"stages; take {length} or more, or schedule gpipe"
            )
        if self.schedule == "interleaved" and self.microbatches % max(1, self.microbatches // length):
            lower = self.microbatches // length * length
            raise UserError(
                f"parallel.microbatches is {self.microbatches}, which don't go round {length} interleaved ranks in "
                f"equal rounds; take {lower} or {lower + length}"
            )
        return Axes(replicate=num_ranks // (length * self.shard), shard=self.shard, model=length)

    def require_parts(
        self, num_slots: int, num_parts: int, *, key: str = "global_batch_size", slots: str = "slots"
    ) -> None:
        """Raise UserError if `num_parts` parts of the slots are no whole microbatches."""
        num_pieces = num_parts * self.microbatches
        if num_slots % num_pieces:
            raise UserError(
                f"the {num_slots} {slots} of a pipeline can't be split into parallel.microbatches={self.microbatches}"
                + (f" x grad_accumulation={num_parts}" if num_parts > 1 else "")
                + f" of equal size; take {-(-num_slots // num_pieces) * num_pieces} {slots} of {key} for "
                "each pipeline, or parallel.microbatches of "
                f"{' or '.join(map(str, nearest_divisors(num_slots // num_parts, self.microbatches)))}"
            )

    def require_support(self, model: Model, world: World) -> None:
        """As in the base class: puzzles, no recurrence, and a block for each stage."""
        if not isinstance(model, RecursiveModel):
            raise UserError(
                f"parallel=pipeline has stages for puzzles only, and arch={model.config.name} is a model of text; take "
                "another strategy (ddp, fsdp, hsdp, tp, fsdp_tp)"
            )
        if not isinstance(model.config, TransformerConfig) or model.config.recurrent:
            raise UserError(
                "parallel=pipeline needs a stack that is gone through once, and only arch=transformer with "
                "arch.recurrent=false is; the state of a recurrent model would go round through all stages in every "
                "cycle, one at work while the others wait; take that, or another strategy (ddp, fsdp, hsdp, tp, "
                "fsdp_tp)"
            )
        length = world.ranks_per_share
        num_layers, num_stages = model.config.num_layers, self.num_stages(length)
        if num_layers < num_stages:
            per_rank = num_stages // length
            shorter = [n for n in range(1, length) if world.size % n == 0 and n * per_rank <= num_layers]
            fewer = f"parallel.stages={shorter[-1]}" if shorter else "another schedule"
            raise UserError(
                f"arch.num_layers is {num_layers}, but a pipeline of {length} ranks with {per_rank} stages each needs "
                f"a block for each of {num_stages} stages; take {num_stages} layers or more, or {fewer}"
            )


class Stage(nn.Module):
    """Consecutive blocks of a model.

    The first stage has the embeddings before its blocks, and the last stage the heads behind them.
    """

    model: RecursiveModel

    def __init__(self, model: RecursiveModel, blocks: list[Block], *, index: int, num_stages: int) -> None:
        super().__init__()
        # Not as a submodule, because FSDP takes the parameters of all submodules for the stage's.
        object.__setattr__(self, "model", model)
        self.level = Level(blocks)
        self.index, self.num_stages = index, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.rows: list[Tensor] = []  # puzzle rows of the microbatches so far, in their order; leaves

    def forward(
        self, x: Tensor, ids_B: Tensor | None = None, rows_BE: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return x_BTD of the next stage, or logits_BSV and q_B2 (float32) in the last stage.

        The first stage needs puzzle rows. In training it looks them up itself, so that they are
        leaves and keep their gradient. A schedule would hand on pieces of a larger tensor.

        Args:
            x: x_BTD of the stage before, or inputs_BS in the first stage.
            ids_B: which rows to look up.
            rows_BE: the rows, if they were looked up before.
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


def take_stages(model: Transformer, config: PipelineConfig, length: int, place: int) -> list[Stage]:
    """Leave a model what one rank of a pipeline has of it, in place, and return the rank's stages.

    Args:
        length: the ranks of the pipeline.
        place: the number of the rank among them.
    """
    num_stages, num_layers = config.num_stages(length), len(model.level.layers)
    blocks: dict[int, list[Block]] = {i: [] for i in range(place, num_stages, length)}
    for name, block in list(model.level.layers.named_children()):
        if (i := int(name) * num_stages // num_layers) in blocks:
            assert isinstance(block, Block)
            blocks[i].append(block)
        else:  # None keeps the place, so that the other blocks keep their names
            setattr(model.level.layers, name, None)
    for names, i in ((("embed_tokens", "embed_pos", "registers"), 0), (("lm_head", "q_head"), num_stages - 1)):
        if i not in blocks:
            for name in names:
                setattr(model, name, None)
    return [Stage(model, own, index=i, num_stages=num_stages) for i, own in blocks.items()]


class PipelineLayout(DTensorLayout):
    """A transformer of which each rank holds some stages.

    The forward of the model runs all stages and gives every rank the outputs. The puzzle table is
    on every rank, and each rank updates its copy with the same gradients. Only weights of blocks
    are sharded; embeddings and heads are whole in their stages.
    """

    model: RecursiveModel

    def __init__(
        self,
        model: Model,
        config: PipelineConfig,
        world: World,
        *,
        num_microbatches: int = 1,
        compile: bool = False,
    ) -> None:
        """Take the model apart, in place. `config.require_support` must have accepted the model.

        Args:
            num_microbatches: in how many parts `forward_backward` takes the slots, one after
                another. Each part is split into `config.microbatches` for the schedule.
            compile: whether to torch.compile the stacks of blocks.
        """
        assert isinstance(model, Transformer) and world.mesh is not None
        self._config, self._group = config, world.mesh.get_group("model")  # of the ranks of this pipeline
        self._length = world.ranks_per_share
        self._place = world.rank % self._length  # of this rank in its pipeline
        self._stages = take_stages(model, config, self._length, self._place)
        model.allocate(world.device)
        self._units: list[FSDPModule] = []
        if world.mesh["shard"].size() > 1:
            self._shard(world.mesh["replicate", "shard"] if world.mesh["replicate"].size() > 1 else world.mesh["shard"])
        super().__init__(model, world, num_microbatches=num_microbatches, lockstep=True)
        if compile:
            model.is_compiled = True
            compile_each(stage.level for stage in self._stages)
        # Evaluation calls the model, whatever the strategy is. The stages of one rank can't compute
        # an answer, so the model's forward becomes the walk through the stages of all ranks. The
        # alternative is worse: everything that evaluates would have to pass a second callable along
        # beside the model, for this strategy alone.
        model.forward = self._infer  # type: ignore[method-assign]
        self._schedules: dict[int, Any] = {}  # by number of slots
        # What `_loss` is about: the slots of the part, and the settings of the step.
        self._in_schedule: Carry | None = None
        self._settings: ActSettings | None = None
        self._loss_scale = 1.0
        self._sums = self._zero_sums()

    def _shard(self, mesh: DeviceMesh) -> None:
        """Shard each block of the stages over the pipelines.

        A block stays whole from the first microbatch to the last. Otherwise each microbatch would
        gather it anew.
        """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

        precision = MixedPrecisionPolicy(cast_forward_inputs=False)  # rotary tables stay float32
        for stage in self._stages:
            for unit in (*stage.level.layers, stage):  # schedules know by the stage that there are shards
                shard_unit(unit, mesh, reshards=False, precision=precision)
                assert isinstance(unit, FSDPModule)
                self._units.append(unit)

    # ---- training -------------------------------------------------------------------------------

    def forward_backward(
        self, carry: Carry | None, batch: Batch, settings: ActSettings, *, loss_scale: float = 1.0
    ) -> tuple[Carry, list[Outputs], Tensor]:
        """As in the base class. Only ranks of a last stage return logits and Q values.

        The slots split into whole microbatches: the caller checks that for all pipelines before the
        first step (`require_parts`). A check here would raise on some pipelines only, and the
        others would wait for them.
        """
        assert carry is not None
        num_slots = len(carry.halted_B)
        # Without recurrence a slot halts after its only segment, so a step takes the whole batch.
        carry = Carry({}, torch.ones_like(carry.steps_B), torch.ones_like(carry.halted_B), dict(batch))
        self._sums = self._zero_sums()
        self._settings, self._loss_scale = settings, loss_scale
        outputs = []
        for first in range(0, num_slots, num_slots // self._num_microbatches):
            part = slice(first, first + num_slots // self._num_microbatches)
            tensors = {name: tensor[part] for name, tensor in carry.tensors().items()}
            outputs.append(self._forward_backward_of_part(Carry.from_tensors(tensors)))
        # These three follow the parts, so that a stage that has done its work can sum gradients
        # while the stages before it still compute.
        self._sum_gradients()
        for part_of_slots in outputs:
            if part_of_slots.puzzle_rows_BE is not None and part_of_slots.puzzle_rows_BE.grad is not None:
                dist.broadcast(part_of_slots.puzzle_rows_BE.grad, group=self._group, group_src=0)
        dist.broadcast(self._sums, group=self._group, group_src=self._length - 1)
        return carry, outputs, self._sums

    def _forward_backward_of_part(self, carry: Carry) -> Outputs:
        """Run the schedule once over the slots of one part."""
        inputs_BS, ids_B = carry.current["inputs"], carry.current["puzzle_identifiers"]
        num_slots = len(ids_B)
        if num_slots not in self._schedules:
            self._schedules[num_slots] = self._new_schedule(carry.current)
        table, first, last = self.model.puzzle_embedding, self._stages[0], self._stages[-1]
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

    def _sum_gradients(self) -> None:
        """Sum the gradients over the pipelines. FSDP has summed those of its shards already.

        DDP's reducer would sum while the last microbatch goes back. But it would do so for each
        part of the slots, and torch supports DDP in a stage only by reaching into the reducer. So
        this class sums by itself, once a step.
        """
        if self._world.data_size == 1:
            return
        gradients = [
            parameter.grad
            for parameter in self._trained
            if parameter.grad is not None and not is_dtensor(parameter.grad)
        ]
        for bucket in _take_tensors(gradients, _BUCKET_BYTES):
            summed = self._world.sum_(_flatten_dense_tensors(bucket))
            torch._foreach_copy_(bucket, _unflatten_dense_tensors(summed, bucket))

    def _new_schedule(self, batch: Batch) -> Any:
        """Return a schedule for batches of this size.

        The shapes that pass between stages are given in advance. A schedule would otherwise find
        them out with a forward and a backward pass of its own.
        """
        # This import takes almost a second, so runs without a pipeline should not wait for it.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        num_slots = len(batch["inputs"]) // self._config.microbatches
        first_args = [batch["inputs"][:num_slots].to("meta")]
        if self.model.puzzle_embedding is not None:
            first_args.append(batch["puzzle_identifiers"][:num_slots].to("meta"))
        seq_len, vocab_size = batch["inputs"].shape[1], self.model.vocab_size

        def activation(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_slots, *shape, dtype=dtype, device="meta", requires_grad=True)

        x_BTD = activation(self.model.num_positions, self.model.config.hidden_size, dtype=self.model.dtype)
        last_args = activation(seq_len, vocab_size, dtype=self.model.dtype), activation(2, dtype=torch.float32)
        stages = [
            PipelineStage(
                stage,
                stage.index,
                stage.num_stages,
                self._world.device,
                input_args=tuple(first_args) if stage.is_first else x_BTD,
                output_args=last_args if stage.is_last else x_BTD,
                group=self._group,
            )
            for stage in self._stages
        ]
        # The loss is divided by the global batch already, so gradients must not be divided again.
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        match self._config.schedule:
            case "gpipe":
                return ScheduleGPipe(stages[0], self._config.microbatches, **options)
            case "1f1b":
                return Schedule1F1B(stages[0], self._config.microbatches, **options)
            case "interleaved":
                return ScheduleInterleaved1F1B(list(stages), self._config.microbatches, **options)

    def _loss(self, output: tuple[Tensor, Tensor], slots_B: Tensor) -> Tensor:
        """Return the loss of a microbatch, and add its sums to those of the step.

        A schedule calls this function on the last stage, and passes nothing but tensors. The rest
        is in attributes.

        Args:
            slots_B: which slots of the part make up the microbatch.
        """
        assert self._in_schedule is not None and self._settings is not None
        logits_BSV, q_B2 = output
        tensors = {name: tensor[slots_B] for name, tensor in self._in_schedule.tensors().items()}
        outputs = Outputs(logits_BSV, q_B2[:, 0], q_B2[:, 1], None, None)
        part_of_loss, sums = loss_of_slots(outputs, Carry.from_tensors(tensors), self._settings)
        self._sums += sums
        return part_of_loss * self._loss_scale

    def _zero_sums(self) -> Tensor:
        device = self._world.device
        return torch.zeros(len(METRICS), dtype=widest_float(device), device=device)

    def grad_norm(self) -> Tensor:
        square = super().grad_norm().square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    # ---- without gradient -----------------------------------------------------------------------

    @torch.no_grad()
    def _infer(self, state: State, inputs_BS: Tensor, puzzle_rows_BE: Tensor | None, depth: Depth) -> SegmentOutput:
        """Run the model without gradient, for any number of slots: the model's forward.

        All ranks of a pipeline must call it. They return the same outputs. Schedules need batches
        of one size, so the stages are run by hand. A microbatch goes through all stages of this
        rank before the next microbatch does. Every rank keeps that order, so that ranks can't wait
        for one another in a circle. Ranks with one stage each work at the same time; ranks with
        interleaved stages take turns.
        """
        device, length, num_parts = self._world.device, self._length, self._config.microbatches
        inputs = inputs_BS.chunk(num_parts)
        rows = puzzle_rows_BE.chunk(num_parts) if puzzle_rows_BE is not None else (None,) * len(inputs)
        before, after = (self._place - 1) % length, (self._place + 1) % length
        read, sent = [], []
        for x, rows_BE in zip(inputs, rows, strict=True):
            shape = len(x), self.model.num_positions, self.model.config.hidden_size
            for stage in self._stages:
                if not stage.is_first and length > 1:
                    x = torch.empty(shape, dtype=self.model.dtype, device=device)
                    dist.recv(x, group=self._group, group_src=before)
                y = stage(x, rows_BE=rows_BE)
                if isinstance(y, tuple):
                    read.append(y)
                    continue
                x = y
                if length > 1:
                    sent.append((dist.isend(x, group=self._group, group_dst=after), x))  # x must live until it arrives
        for work, _ in sent:
            assert work is not None
            work.wait()
        if read:
            logits_BSV, q_B2 = (torch.cat(parts) for parts in zip(*read, strict=True))
        else:
            vocab_size = self.model.vocab_size
            logits_BSV = torch.empty(*inputs_BS.shape, vocab_size, dtype=self.model.dtype, device=device)
            q_B2 = torch.empty(len(inputs_BS), 2, device=device)
        for tensor in (logits_BSV, q_B2):
            dist.broadcast(tensor, group=self._group, group_src=length - 1)
        return {}, logits_BSV, q_B2[:, 0], q_B2[:, 1]

    def values_changed(self) -> None:
        for unit in self._units:
            unit.reshard()
