"""Pipeline parallelism: blocks lie on several ranks in a row, and microbatches pass along it.

All ranks of a pipeline are given the same slots. The first stage embeds them, each stage hands its
activations to the next, and the last stage has the heads and the loss. A pipeline pays only where a
slot passes each stage once: the state of a recursion would go round and round.

There may be several pipelines beside one another, each with slots of its own. The ranks that hold
the same stages sum their gradients. They may also shard the weights of their blocks (FSDP2).

This file has what puzzles and text share.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from models.losses import widest_float
from models.model import Model, compile_each
from models.objective import BatchT, CarryT, SettingsT
from models.parallel.dtensor import DTensorLayout
from models.parallel.fsdp import shard_unit
from models.parallel.layout import Compiled, LayoutConfig
from models.parallel.requirements import nearest_divisors
from utils.config import Int
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.world import World, is_dtensor

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
        """Return the stages of so many ranks. Stage i lies on rank i modulo `num_ranks`."""
        return num_ranks * ((self.stages_per_rank or 2) if self.schedule == "interleaved" else 1)

    def axes(self, num_ranks: int) -> Axes:
        """Return pipelines of `stages` ranks each, as many as there are ranks for."""
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
        num_pieces = self.num_microbatches(num_parts)
        if num_slots % num_pieces:
            raise UserError(
                f"the {num_slots} {slots} of a pipeline can't be split into parallel.microbatches={self.microbatches}"
                + (f" x grad_accumulation={num_parts}" if num_parts > 1 else "")
                + f" of equal size; take {-(-num_slots // num_pieces) * num_pieces} {slots} of {key} for "
                "each pipeline, or parallel.microbatches of "
                f"{' or '.join(map(str, nearest_divisors(num_slots // num_parts, self.microbatches)))}"
            )

    def num_microbatches(self, grad_accumulation: int) -> int:
        return grad_accumulation * self.microbatches

    def require_support(self, model: Model, world: World) -> None:
        self.require_stack(model)
        length = world.ranks_per_share
        num_layers, num_stages = len(model.blocks()), self.num_stages(length)
        if num_layers < num_stages:
            per_rank = num_stages // length
            shorter = [n for n in range(1, length) if world.size % n == 0 and n * per_rank <= num_layers]
            fewer = f"parallel.stages={shorter[-1]}" if shorter else "another schedule"
            raise UserError(
                f"arch.num_layers is {num_layers}, but a pipeline of {length} ranks with {per_rank} stages each needs "
                f"a block for each of {num_stages} stages; take {num_stages} layers or more, or {fewer}"
            )

    @staticmethod
    def require_stack(model: Model) -> None:
        """Raise UserError if the model is no stack with a head of its own."""
        if not model.config.is_gone_through_once:
            raise UserError(
                "parallel=pipeline needs a stack that is gone through once (arch=gpt, arch=transformer_text, or "
                "arch=transformer with arch.recurrent=false); the state of a recurrent model would go round through "
                "all stages in every cycle, one at work while the others wait; take one of these, or another "
                "strategy (ddp, fsdp, hsdp, tp, fsdp_tp)"
            )
        if model.config.tied_head:
            raise UserError(
                "parallel=pipeline has the embedding in its first stage and the head in its last, but "
                "arch.tie_head=true gives them the same weights; set it to false, or take another strategy (ddp, "
                "fsdp, hsdp, tp, fsdp_tp)"
            )


class Stage(nn.Module):
    """Consecutive blocks; the first stage also has the embeddings, and the last one the heads."""

    before: ClassVar[tuple[str, ...]]
    """The modules of the model that only the first stage has."""

    behind: ClassVar[tuple[str, ...]]
    """The modules of the model that only the last stage has."""

    model: Model
    level: nn.Module
    """The blocks as one module, which is compiled as a whole."""

    def __init__(self, model: Model, blocks: Sequence[nn.Module], *, index: int, num_stages: int) -> None:
        super().__init__()
        # Not as a submodule, because FSDP takes the parameters of all submodules for the stage's.
        object.__setattr__(self, "model", model)
        self.index, self.num_stages = index, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.blocks = blocks


StageT = TypeVar("StageT", bound=Stage)


def take_stages(
    model: Model, stage_class: type[StageT], config: PipelineConfig, *, length: int, place: int
) -> list[StageT]:
    """Leave a model what one rank of a pipeline has of it, and return the rank's stages."""
    (level,) = model.levels()
    layers = level.get_submodule("layers")
    num_stages, num_layers = config.num_stages(length), len(model.blocks())
    blocks: dict[int, list[nn.Module]] = {i: [] for i in range(place, num_stages, length)}
    for name, block in list(layers.named_children()):
        if (i := int(name) * num_stages // num_layers) in blocks:
            blocks[i].append(block)
        else:  # None keeps the place, so that the other blocks keep their names
            setattr(layers, name, None)
    stages = [stage_class(model, own, index=i, num_stages=num_stages) for i, own in blocks.items()]
    for paths, i in ((stage_class.before, 0), (stage_class.behind, num_stages - 1)):
        if i not in blocks:
            for path in paths:
                owner, _, name = path.rpartition(".")
                setattr(model.get_submodule(owner), name, None)
    return stages


class PipelineLayout(DTensorLayout[CarryT, BatchT, SettingsT], ABC, Generic[StageT, CarryT, BatchT, SettingsT]):
    """A model of which each rank holds some stages.

    A forward pass without gradient runs all stages and gives every rank the outputs. Only weights
    between the embeddings and the heads are sharded.
    """

    stage_class: type[StageT]

    def __init__(self, model: Model, config: PipelineConfig, world: World) -> None:
        """Take the model apart, in place. `config.require_support` must have accepted the model."""
        assert world.mesh is not None
        self._config, self._group = config, world.mesh.get_group("model")  # of the ranks of this pipeline
        self._length = world.ranks_per_share
        self._place = world.rank % self._length  # of this rank in its pipeline
        self._stages = take_stages(model, self.stage_class, config, length=self._length, place=self._place)
        model.allocate(world.device)
        self._units: list[FSDPModule] = []
        if world.mesh["shard"].size() > 1:
            self._shard(world.mesh["replicate", "shard"] if world.mesh["replicate"].size() > 1 else world.mesh["shard"])
        super().__init__(model, world)
        self._schedules: dict[int, Any] = {}  # by the size of a microbatch
        # What `_loss` needs beside tensors: settings and scale of the step, and the sums so far.
        self._settings: SettingsT | None = None
        self._loss_scale = 1.0
        self._sums = self._zero_sums()
        self._take_calls()

    def compile(self, what: Compiled) -> None:
        """Compile the blocks of each stage."""
        self.model.is_compiled = True
        compile_each(stage.level for stage in self._stages)

    @abstractmethod
    def _take_calls(self) -> None:
        """Let the model's calls in evaluation walk through the stages of all ranks."""

    def _shard(self, mesh: DeviceMesh) -> None:
        """Shard each block over the pipelines. It stays whole through all microbatches."""
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

        precision = MixedPrecisionPolicy(cast_forward_inputs=False)  # rotary tables stay float32
        for stage in self._stages:
            units: list[nn.Module] = [*stage.blocks, stage]
            for unit in units:  # schedules know by the stage that there are shards
                shard_unit(unit, mesh, reshards=False, precision=precision)
                assert isinstance(unit, FSDPModule)
                self._units.append(unit)

    # ---- training -------------------------------------------------------------------------------

    @abstractmethod
    def _loss(self, output: Any, numbers: Tensor) -> Tensor:
        """Return the scaled loss of a microbatch, and add its sums to those of the step."""

    def _new_schedule(
        self,
        first_args: Sequence[Tensor],
        activation: tuple[Sequence[int], torch.dtype],
        last_args: Sequence[tuple[Sequence[int], torch.dtype]],
    ) -> Any:
        """Return a schedule for microbatches of one size.

        A schedule that is not given the shapes in advance makes a step of its own to find them.

        Args:
            first_args: what the first stage is given of a microbatch.
            activation: the shape and type of what one stage hands to the next.
            last_args: the same of what the last stage returns.
        """
        # This import takes almost a second, so runs without a pipeline should not wait for it.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        def on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)

        stages = [
            PipelineStage(
                stage,
                stage.index,
                stage.num_stages,
                self._world.device,
                input_args=tuple(arg.to("meta") for arg in first_args) if stage.is_first else on_meta(*activation),
                output_args=tuple(on_meta(*arg) for arg in last_args) if stage.is_last else on_meta(*activation),
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

    def _sum_gradients(self) -> None:
        """Sum the gradients over the pipelines. FSDP has summed those of its shards."""
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

    def _zero_sums(self) -> Tensor:
        device = self._world.device
        return torch.zeros(len(self.objective.sums.names), dtype=widest_float(device), device=device)

    def grad_norm(self) -> Tensor:
        square = super().grad_norm().square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    # ---- without gradient -----------------------------------------------------------------------

    def _walk(
        self, inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]], call: Callable[[StageT, Tensor, int], Any]
    ) -> list[Any]:
        """Run all stages of the pipeline without gradient. Every rank of the pipeline.

        Schedules need microbatches of one size, so the stages are run by hand. A microbatch goes
        through all stages of this rank before the next one does, so that ranks can't wait for one
        another in a circle.

        Args:
            inputs: what the first stage is given, for each microbatch.
            shapes: of what a stage hands to the next, for each microbatch.
            call: is given a stage, its input and the number of the microbatch.

        Returns:
            What the last stage makes of each microbatch; nothing on ranks that don't hold it.
        """
        before, after = (self._place - 1) % self._length, (self._place + 1) % self._length
        outputs, sent = [], []
        for number, (x, shape) in enumerate(zip(inputs, shapes, strict=True)):
            for stage in self._stages:
                if not stage.is_first and self._length > 1:
                    x = torch.empty(*shape, dtype=self.model.dtype, device=self._world.device)
                    dist.recv(x, group=self._group, group_src=before)
                output = call(stage, x, number)
                if stage.is_last:
                    outputs.append(output)
                    continue
                x = output
                if self._length > 1:
                    # x must live until it arrives.
                    sent.append((dist.isend(x, group=self._group, group_dst=after), x))
        for work, _ in sent:
            assert work is not None
            work.wait()
        return outputs

    def _take_from(self, place: Literal["first", "last"], *tensors: Tensor) -> None:
        """Overwrite tensors with those of the pipeline's first or last rank. Every rank of it."""
        for tensor in tensors:
            dist.broadcast(tensor, group=self._group, group_src=0 if place == "first" else self._length - 1)

    def values_changed(self) -> None:
        for unit in self._units:
            unit.reshard()
