"""Train a hierarchical reasoning model: the whole program, in the order in which it runs.

config -> data -> model -> loop. Every rank runs this file. Whatever differs between one process and many, between
devices, sinks and architectures is inside the objects that the chapters make, so that what is left here is the method.
"""
# B = slots of this rank (of the global batch where so named), S = tokens of a puzzle, V = vocabulary

import gc
import math
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dataset.evaluators import NO_EVALUATORS, EvaluatorName, Evaluators, build_evaluators
from dataset.loader import IGNORE_LABEL, Batch, DataOn, EvalLoader, TrainLoader
from dataset.online import OnlineAugmentation
from dataset.sampler import Sampler
from dataset.schema import Split, check_contents, open_datasets
from models import ArchConfig, build_arch
from models.act import Carry, draw_min_halt_steps, empty_batch, initial_carry
from models.base import RecursiveModel
from models.depth import Depth
from models.inference import Finished, Slots, idle_segment
from models.losses import LossConfig, Outputs, StepLoss
from models.metric_sums import EVAL_METRICS, EvalSums, NotFinite, OpenSums
from models.parallel import ParallelConfig, parallelize
from models.parallel.layout import Layout
from models.published import PuzzleTable, fit_weights, to_ours
from optim.build import OptimConfig, Optimizers, build_optimizers, require_same_state
from optim.ema import EMA, require_same_average
from optim.loss_scale import LossScale
from optim.schedule import BatchScaling, batch_scale, lr_multiplier
from optim.sparse_sign_sgd import sparse_sign_sgd_
from utils.checkpoint.format import RunState
from utils.checkpoint.reader import Checkpoint, find_checkpoint
from utils.checkpoint.writer import Checkpointer, Snapshot
from utils.command_line import CommandLine, differences, validate
from utils.config import Bool, Float, Int, StrictModel
from utils.dist.config import DeviceName, DistConfig
from utils.dist.setup import use_device
from utils.dist.world import World, local_part, shares
from utils.errors import UserError
from utils.metrics import Metrics, WandbConfig
from utils.out_of_memory import advice as out_of_memory_advice
from utils.out_of_memory import is_out_of_memory
from utils.profiling import CommSampler, Deadline, StepClock, StepProfiler, TimeShare
from utils.program import run
from utils.replicas import require_same_replicas
from utils.run.folder import RunConfig, clear_stopped, mark_stopped
from utils.run.lock import RunLock
from utils.run.resume import Start, completed, open_checkpoint, prepare, read_start
from utils.run.stop import StopSignal
from utils.saved_outputs import OutputWriter, SavedOutput
from utils.terminal import tell
from utils.weights_file import read_weights

USAGE = """
pretrain.py: train a hierarchical reasoning model.

  python pretrain.py data_path=data/sudoku-extreme-1k-aug-1000 epochs=20000 eval_interval=2000    one process
  torchrun --nproc-per-node 8 pretrain.py experiment=sudoku_extreme_1k lr=2e-4                    eight
  python pretrain.py resume=auto checkpoint_path=checkpoints/<project>/<run>                      go on after a stop
  python pretrain.py --cfg job experiment=sudoku_extreme_1k                                       show, don't run

Any key below is set with key=value, also inside groups (arch.hidden_size=128).
"""

T = TypeVar("T")
Positive = Field(gt=0)
NotNegative = Field(ge=0)


# ---- config ----------------------------------------------------------------------------------------------


class PretrainConfig(RunConfig):
    """One run, with the keys of RunConfig. config/pretrain.yaml holds the defaults and says what each key means."""

    arch: ArchConfig
    optim: OptimConfig
    parallel: ParallelConfig

    data_paths_test: list[str]
    data_on: DataOn
    augment: Literal["none", "online"]
    global_batch_size: Int = Field(gt=0, le=10**6)  # slots are memory, and configs may be strangers'
    grad_accumulation: Int = Positive
    epochs: Int = Field(gt=0, le=10**7)  # the end of each is kept in memory
    max_steps: Int | None = Field(gt=0)
    seed: Int = Field(ge=0, lt=2**63)
    overfit_one_batch: Bool

    lr: Float = NotNegative
    lr_min_ratio: Float = Field(ge=0, le=1)
    lr_warmup_steps: Int = NotNegative
    lr_scaling: BatchScaling
    lr_scaling_reference: Int = Positive
    beta1: Float = Field(ge=0, lt=1)
    beta2: Float = Field(ge=0, lt=1)
    weight_decay: Float = NotNegative
    puzzle_emb_lr: Float = NotNegative
    puzzle_emb_weight_decay: Float = NotNegative
    grad_clip: Float | None = Field(gt=0)
    ema: Bool
    ema_rate: Float = Field(ge=0, lt=1)
    ema_start: Float = Field(ge=0, lt=1)

    init_from: str | None = Field(min_length=1)
    load_checkpoint: str | None = Field(min_length=1)
    puzzle_table: PuzzleTable | None
    freeze: Literal["none", "blocks", "puzzle_table"]
    freeze_weights: Bool

    eval_interval: Int | None = Field(gt=0)
    eval_every_n_steps: Int | None = Field(gt=0)
    min_eval_interval: Int = NotNegative
    eval_batch_size: Int | None = Field(gt=0)
    eval_max_examples: Int | None = Field(gt=0)
    eval_adaptive: Bool
    eval_max_share: Float | None = Field(gt=0, lt=1)
    eval_save_outputs: list[SavedOutput]
    evaluators: list[EvaluatorName]
    early_stop_patience: Int | None = Field(gt=0)

    on_nonfinite: Literal["stop", "rewind"]
    max_rewinds: Int = Positive
    loss_spike: Float | None = Field(gt=1)
    check_replicas_every_n_steps: Int | None = Field(gt=0)

    checkpoint_every_eval: Bool
    checkpoint_every_n_steps: Int | None = Field(gt=0)
    keep_last_k: Int | None = Field(gt=0)
    best_metric: str | None
    best_mode: Literal["max", "min"]

    log_interval: Int = Positive
    wandb: WandbConfig
    profile: Bool
    perf_every_n_steps: Int | None = Field(gt=0)

    device: DeviceName
    compile: Bool
    deterministic: Bool
    dist: DistConfig

    @model_validator(mode="after")
    def _best_is_evaluated(self) -> "PretrainConfig":
        known = self.best_metric is None or self.best_metric.startswith("eval/") or self.best_metric in EVAL_METRICS
        if not known and not self.evaluators:  # whose metrics the data decides about
            raise ValueError(
                f"best_metric is {self.best_metric!r}; name one of evaluation, such as eval/all/exact_accuracy"
            )
        return self

    @model_validator(mode="after")
    def _something_is_left_to_train(self) -> "PretrainConfig":
        if self.freeze_weights and self.freeze != "none":
            raise ValueError(
                f"freeze_weights trains the puzzle table only, and freeze={self.freeze} leaves less; give one of them"
            )
        if self.freeze_weights and not self.arch.puzzle_emb_ndim:
            raise ValueError(
                "freeze_weights trains the puzzle table only, but arch.puzzle_emb_ndim is 0: there is none; "
                "give it a size, or freeze=blocks"
            )
        if self.freeze == "puzzle_table" and not self.arch.puzzle_emb_ndim:
            raise ValueError("freeze=puzzle_table, but arch.puzzle_emb_ndim is 0: there is none; leave freeze out")
        return self

    @model_validator(mode="after")
    def _one_batch_stays_one_batch(self) -> "PretrainConfig":
        if self.overfit_one_batch and self.augment != "none":
            raise ValueError(
                f"overfit_one_batch repeats a batch, and augment={self.augment} varies it; give augment=none"
            )
        return self

    @model_validator(mode="after")
    def _weights_have_one_source(self) -> "PretrainConfig":
        if self.init_from and self.load_checkpoint:
            raise ValueError(
                f"init_from={self.init_from} and load_checkpoint={self.load_checkpoint} mean the same; give one"
            )
        if self.puzzle_table and not self.initial_weights:
            raise ValueError(
                f"puzzle_table={self.puzzle_table} says what becomes of the table of init_from; give that too"
            )
        return self

    @model_validator(mode="after")
    def _patience_has_a_metric(self) -> "PretrainConfig":
        if self.early_stop_patience and not (self.best_metric and self.evaluates):
            raise ValueError(
                f"early_stop_patience={self.early_stop_patience} counts evaluations without a better best_metric; "
                "give that, and eval_interval or eval_every_n_steps"
            )
        return self

    @property
    def initial_weights(self) -> str | None:
        return self.init_from or self.load_checkpoint

    @property
    def test_paths(self) -> list[str]:
        return self.data_paths_test or self.train_paths

    @property
    def evaluates(self) -> bool:
        return self.eval_interval is not None or self.eval_every_n_steps is not None


# ---- data ------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """The splits of a run and the hashes of what they hold."""

    train: Split
    test: Split | None
    fingerprint: dict[str, str]


def open_data(config: PretrainConfig, world: World) -> Data:
    """Open the splits on every rank; rank 0 reads them through once. Raises UserError."""
    fingerprint: dict[str, str] = {}
    with world.agree():
        train = open_datasets(config.train_paths, "train", numbered_by=config.train_paths)
        test = None
        if config.evaluates:
            test = open_datasets(config.test_paths, "test", numbered_by=config.train_paths)
        require_whole_shares(config, world)
        for split in filter(None, (train, test)):
            require_same_task(task_of(train), split, config.arch)
            if world.is_main:
                fingerprint[split.path.name] = check_contents(split)
    return Data(train, test, world.broadcast_object(fingerprint))


def require_whole_shares(config: PretrainConfig, world: World) -> None:
    """Raises ValueError where ranks would hold different numbers of slots unasked, or one none, or no whole parts."""
    batch_size, num_ranks = config.global_batch_size, world.data_size
    if batch_size % num_ranks and not config.dist.rank_weights:
        raise ValueError(
            f"global_batch_size={batch_size} can't be split over {num_ranks} ranks; "
            f"take {-(-batch_size // num_ranks) * num_ranks}, or another number of ranks"
        )
    slots = world.slice_of(batch_size)
    if slots.start == slots.stop:
        raise ValueError(
            f"dist.rank_weights={config.dist.rank_weights} leaves rank {world.rank} none of the {batch_size} slots; "
            "take other weights, or a larger global_batch_size"
        )
    sizes = [share.stop - share.start for share in shares(world.weights, batch_size)]
    config.parallel.require_parts(math.gcd(*sizes), config.grad_accumulation)


def task_of(split: Split) -> dict[str, int]:
    """The sizes that a model is built for."""
    metadata = split.metadata
    return {key: getattr(metadata, key) for key in ("seq_len", "vocab_size", "num_puzzle_identifiers")}


def require_same_task(task: dict[str, int], other: Split, arch: ArchConfig) -> None:
    """Raises ValueError where a model built for `task` can't read another split."""
    theirs = task_of(other)
    if theirs["seq_len"] != task["seq_len"] or theirs["vocab_size"] != task["vocab_size"]:
        raise ValueError(f"{other.path} has {theirs}, but the model was built for {task}; take data of the same task")
    if arch.puzzle_emb_ndim and theirs["num_puzzle_identifiers"] > task["num_puzzle_identifiers"]:
        raise ValueError(
            f"{other.path} has {theirs['num_puzzle_identifiers']} puzzle identifiers, but the model's table only "
            f"{task['num_puzzle_identifiers']} rows; take data with puzzles that it was trained on"
        )


# ---- model -----------------------------------------------------------------------------------------------


@dataclass
class TrainState:
    """Everything that a step changes, which is what a checkpoint holds."""

    layout: Layout  # the model, and how it lies over the ranks
    optimizers: Optimizers
    ema: EMA | None
    loss_scale: LossScale | None
    carry: Carry
    sums: OpenSums
    wandb_run_id: str
    step: int = 0
    draws: int = 0  # examples taken from the stream: where the data goes on
    best: float | None = None
    evaluations_since_best: int = 0
    pending_row: dict[str, float] | None = None  # of this step, waiting for an evaluation that a stop interrupted
    skipped_steps: frozenset[int] = frozenset()  # which went wrong before the run was taken back, and are left out

    @property
    def model(self) -> RecursiveModel:
        return self.layout.model


def build_model(arch: ArchConfig, task: dict[str, int], world: World, seed: int) -> RecursiveModel:
    """The whole model on the host, with rank 0's initial weights everywhere. Every rank.

    Args:
        task: seq_len, vocab_size and num_puzzle_identifiers of the dataset.
    """
    with world.agree():
        model = build_arch(arch, **task)
    model.init_weights(torch.Generator().manual_seed(seed))
    world.broadcast_(model.state_dict().values())
    return model


def build_train_state(start: Start[PretrainConfig], data: Data, world: World) -> TrainState:
    """A fresh state, or the checkpoint's. Every rank. Raises UserError where that is of other data or another arch."""
    config, checkpoint = start.config, start.checkpoint
    model = build_model(config.arch, task_of(data.train), world, config.seed)
    if checkpoint is not None:
        with world.agree():
            start.notes.extend(require_same_run(checkpoint, config, data))
            load_weights(model, checkpoint.weights(), checkpoint, config.arch)
    elif config.initial_weights:
        init_weights_from(config.initial_weights, model, config.puzzle_table, world)
    model.freeze("weights" if config.freeze_weights else config.freeze)
    layout = parallelize(
        model, config.parallel, world, num_microbatches=config.grad_accumulation, compile=config.compile
    )
    optimizers = build_optimizers(
        model,
        model.block_weights(),
        config.optim,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
    ema = EMA(model.trained_tensors()) if config.ema else None
    loss_scale = LossScale() if config.arch.forward_dtype == "float16" else None
    new_run_id = world.broadcast_object(uuid.uuid4().hex[:8])
    carry = fresh_carry(model, config, data, world)
    sums = OpenSums(world, config.loss_spike)
    state = TrainState(layout, optimizers, ema, loss_scale, carry, sums, new_run_id)
    if checkpoint is not None:
        restore(state, checkpoint, config, world)
        if start.branches_off:  # a run of its own, which has no best yet
            state.wandb_run_id, state.best, state.evaluations_since_best = new_run_id, None, 0
            # Those behind it were rewinds of the other run; those ahead would go wrong here as well.
            state.skipped_steps = frozenset(step for step in state.skipped_steps if step > state.step)
    return state


def init_weights_from(source: str, model: RecursiveModel, puzzle_table: PuzzleTable | None, world: World) -> None:
    """Load weights that were trained elsewhere: published, of another run, or on other puzzles. Every rank.

    Raises UserError that names what doesn't fit.
    """
    with world.agree():
        if world.is_main:  # one download, one reading
            path = Path(source)
            if path.is_dir():
                weights = open_checkpoint(path, lambda text: say(world, text)).trained_weights()
            else:
                weights = to_ours(read_weights(source))
            model.load_state_dict(fit_weights(weights, model.state_dict(), puzzle_table, source))
    world.broadcast_(model.state_dict().values())


def fresh_carry(model: RecursiveModel, config: PretrainConfig, data: Data, world: World) -> Carry:
    """Slots that have all halted, so that the first batch fills them."""
    slots = world.slice_of(config.global_batch_size)
    return initial_carry(model, empty_batch(slots.stop - slots.start, data.train.metadata.seq_len, world.device))


def live_tensors(state: TrainState) -> dict[str, tuple[str, Tensor]]:
    """What a step changes beside the weights and the slots, under a checkpoint's names: each with the name of the
    parameter that it belongs to, as which it lies over the ranks (empty: it lies whole on all of them).
    """
    tensors = {
        f"optimizer.{name}": (name.split(".", 2)[2], tensor)
        for name, tensor in state.optimizers.export_state(state.model).items()
    }
    if state.ema is not None:
        tensors |= {f"ema.{name}": (name, tensor) for name, tensor in state.ema.tensors().items()}
    if state.loss_scale is not None:
        tensors |= {f"loss_scale.{name}": ("", tensor) for name, tensor in state.loss_scale.tensors().items()}
    return tensors


def portable(state: TrainState) -> dict[str, Tensor]:
    """The live tensors as any strategy can read them. Every rank."""
    return {key: state.layout.to_portable(name, tensor) for key, (name, tensor) in live_tensors(state).items()}


def take_snapshot(state: TrainState, config: PretrainConfig, data: Data, world: World) -> Snapshot:
    """Everything that a run needs to go on as if nothing had happened. Every rank."""
    return Snapshot(
        weights=state.layout.whole_weights(),
        shared=portable(state) | {f"progress.{name}": tensor for name, tensor in state.sums.tensors().items()},
        slots=world.slice_of(config.global_batch_size),
        by_slot=state.carry.tensors(),
        by_rank=state.layout.compression_state(),
        state=RunState(
            step=state.step,
            draws=state.draws,
            skipped_steps=sorted(state.skipped_steps),
            open_steps=state.sums.num_steps,
            open_slots=state.sums.num_slots,
            best=state.best,
            evaluations_since_best=state.evaluations_since_best,
            pending_row=state.pending_row,
            wandb_run_id=state.wandb_run_id,
            fingerprint=data.fingerprint,
            task=task_of(data.train),
            config=config.model_dump(),
        ),
    )


def require_same_run(checkpoint: Checkpoint, config: PretrainConfig, data: Data) -> list[str]:
    """What a person should know where a run may go on from the checkpoint. Raises ValueError where it can't."""
    saved = checkpoint.state
    if config.initial_weights and config.initial_weights not in (
        saved.config["init_from"],
        saved.config["load_checkpoint"],
    ):
        raise ValueError(
            f"init_from={config.initial_weights} is where a run begins, but {checkpoint.path} goes on; "
            "give another run_name and no resume to begin there"
        )
    shared = saved.fingerprint.keys() & data.fingerprint.keys()  # a run that doesn't evaluate opens no test split
    changed = sorted(split for split in shared if saved.fingerprint[split] != data.fingerprint[split])
    if changed and not config.allow_changed_data:
        raise ValueError(
            f"{checkpoint.path} was trained on other data than {', '.join(config.train_paths)} holds now "
            f"({' and '.join(changed)} changed); give the data_path of that, or allow_changed_data=true to go on "
            "with these"
        )
    return [
        f"{split} data are others than before: {saved.fingerprint[split][:12]} -> {data.fingerprint[split][:12]}"
        for split in changed
    ]


def restore(state: TrainState, checkpoint: Checkpoint, config: PretrainConfig, world: World) -> None:
    """Overwrite all of a fresh state but its weights with a checkpoint's. Every rank. Raises UserError."""
    saved, live, tensors = checkpoint.state, live_tensors(state), portable(state)
    own = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    own = {key: shape for part in world.gather_objects(own) for key, shape in part.items()}  # of all stages
    with world.agree():
        require_same_state(checkpoint.sizes("optimizer"), without_prefix("optimizer.", own))
        kept = [prefix for prefix in ("ema", "loss_scale") if checkpoint.has(prefix)]  # others begin here
        if "ema" in kept and state.ema is not None:
            require_same_average(checkpoint.sizes("ema"), without_prefix("ema.", own))
        tensors = {key: tensor for key, tensor in tensors.items() if key.split(".")[0] in ("optimizer", *kept)}
        checkpoint.load_into(tensors)
    for key, tensor in tensors.items():
        state.layout.from_portable(live[key][0], tensor, live[key][1])
    state.step, state.draws, state.wandb_run_id = saved.step, saved.draws, saved.wandb_run_id
    state.pending_row, state.skipped_steps = saved.pending_row, frozenset(saved.skipped_steps)
    if (saved.config["best_metric"], saved.config["best_mode"]) == (config.best_metric, config.best_mode):
        state.best, state.evaluations_since_best = saved.best, saved.evaluations_since_best
    with world.agree():
        state.sums.restore(checkpoint.load("progress"), saved.open_steps, saved.open_slots)
        state.layout.load_compression_state(checkpoint.load_by_rank(world.rank, world.size))
        # With another batch size or dtype there are other slots: sequences start anew, and the draws go on.
        fresh = state.carry.tensors()
        if saved.config["global_batch_size"] == config.global_batch_size:
            slots = checkpoint.load_slots(world.slice_of(config.global_batch_size))
            if any(name not in slots or slots[name].shape != fresh[name].shape for name in fresh):
                raise ValueError(
                    f"{checkpoint.path} holds other slots than this model's; it is damaged or of another version"
                )
            state.carry = Carry.from_tensors({name: slots[name].to(world.device, fresh[name].dtype) for name in fresh})


def without_prefix(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def load_weights(
    model: RecursiveModel, weights: Mapping[str, Tensor], checkpoint: Checkpoint, arch: ArchConfig
) -> None:
    """Raises ValueError that names the tensor and the option where the architecture is another."""
    own = model.state_dict()
    for name in sorted({*weights, *own}):
        there, here = (tuple(tensors[name].shape) if name in tensors else "absent" for tensors in (weights, own))
        if there != here:
            changed = differences(checkpoint.state.config["arch"], arch.model_dump())
            hint = f"arch differs in {', '.join(changed)}" if changed else "its dataset has other sizes"
            raise ValueError(
                f"{checkpoint.path} doesn't fit this model: {name} is {there} there and {here} here; {hint}"
            )
    model.load_state_dict(weights)


class TrainedConfig(StrictModel):
    """What names a trained model: a run, which knows its architecture and its data, or a file of weights with both."""

    checkpoint: str
    arch: ArchConfig | None
    puzzle_table: PuzzleTable | None
    data_path: str | None

    @property
    def is_run(self) -> bool:
        return not (self.checkpoint.startswith("hf://") or Path(self.checkpoint).is_file())

    @model_validator(mode="after")
    def _a_file_needs_what_a_run_knows(self) -> "TrainedConfig":
        if self.arch and not Path(self.checkpoint).exists() and self.is_run:
            raise ValueError(f"{self.checkpoint} does not exist; give a file of weights for arch to read, or a run")
        if self.is_run and (self.arch or self.puzzle_table):
            given = "arch" if self.arch else "puzzle_table"
            raise ValueError(f"{given} is given, but {self.checkpoint} is a run, which knows its own; leave it out")
        if not self.is_run and not (self.arch and self.data_path):
            raise ValueError(
                f"{self.checkpoint} is a file of weights, which says neither its architecture nor its data; "
                "give arch=... (with the options that it was trained with) and data_path=..."
            )
        return self


def stored_config(checkpoint: Checkpoint) -> PretrainConfig:
    """What the checkpoint's run was trained with. Raises ValueError."""
    return validate(PretrainConfig, completed(checkpoint.state.config, "pretrain"))


def load_run(path: Path, world: World) -> tuple[PretrainConfig, RecursiveModel, Checkpoint]:
    """A trained model, for evaluation, from a run folder (its newest checkpoint) or a step folder. Every rank.

    Raises UserError where there is no whole checkpoint.
    """
    found: tuple[Checkpoint, PretrainConfig] | None = None
    with world.agree():
        if world.is_main:
            checkpoint = open_checkpoint(path, lambda text: say(world, text))
            found = checkpoint, stored_config(checkpoint)
    found = world.broadcast_object(found)
    assert found is not None
    checkpoint, config = found
    model = build_model(config.arch, checkpoint.state.task, world, config.seed)
    with world.agree():
        load_weights(model, checkpoint.trained_weights(), checkpoint, config.arch)
    return config, model.to(world.device), checkpoint


# ---- one step --------------------------------------------------------------------------------------------


@dataclass
class StepResult:
    """What one training step found out, on the device."""

    outputs: list[Outputs]  # of each microbatch
    sums: Tensor  # this rank's, in the order of METRICS
    grad_norm: Tensor  # of the global batch before clipping, over all parameters; NaN also for that of puzzle rows
    was_taken: bool  # False: float16 overflowed, and nothing was updated


def train_step(
    layout: Layout,
    optimizers: Optimizers,
    carry: Carry,
    batch: Batch,
    *,
    depth: Depth,
    loss_config: LossConfig,
    loss_scale: LossScale | None = None,
    lr_multiplier: float,
    puzzle_emb_lr: float,
    puzzle_emb_weight_decay: float,
    grad_clip: float | None,
    global_batch_size: int,
    min_halt_steps_B: Tensor | None,
    world: World,
) -> tuple[Carry, StepResult]:
    """One segment for every slot and one update of every weight. Every rank; the host never waits for the device.

    Gradients are of the loss summed over the global batch and divided by its number of slots, so no rank's share
    counts more than its slots.

    Args:
        loss_scale: of float16, for which alone the host does wait: whether the step is taken depends on its gradients.
        lr_multiplier: what the schedule makes of every learning rate; puzzle_emb_lr is multiplied already.
    """
    loss = StepLoss(loss_config, IGNORE_LABEL, global_batch_size, 1.0 if loss_scale is None else loss_scale.factor)
    carry, outputs, sums = layout.gradients(carry, batch, depth=depth, min_halt_steps_B=min_halt_steps_B, loss=loss)
    rows = [part.puzzle_rows_BE for part in outputs if part.puzzle_rows_BE is not None]
    rows_grads = [part_BE.grad for part_BE in rows if part_BE.grad is not None]
    if loss_scale is not None:
        loss_scale.unscale_(weight.grad for weight in layout.model.parameters() if weight.grad is not None)
    grad_norm = layout.grad_norm()
    was_taken = loss_scale is None or loss_scale.update([grad_norm, *rows_grads], world)
    if was_taken:
        if grad_clip is not None:
            layout.clip_(grad_clip, grad_norm)
        table = layout.model.puzzle_embedding
        if table is not None and table.trainable:
            rows_are_finite = sparse_sign_sgd_(
                table.weight,
                carry.current["puzzle_identifiers"],
                torch.cat(rows_grads),
                lr=puzzle_emb_lr,
                weight_decay=puzzle_emb_weight_decay,
                num_slots=global_batch_size,
                world=world,
            )
            grad_norm = torch.where(rows_are_finite, grad_norm, torch.nan)  # the only gradients of freeze_weights
        optimizers.step(lr_multiplier)
    else:
        grad_norm = torch.zeros_like(grad_norm)  # no fault, which OpenSums would take it for
    optimizers.zero_grad()
    return carry, StepResult(outputs, sums, grad_norm, was_taken)


# ---- evaluation ------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    model: RecursiveModel,
    split: Split,
    world: World,
    *,
    batch_size: int,
    num_steps: int | None = None,
    adaptive: bool = False,
    max_examples: int | None = None,
    evaluators: Evaluators = NO_EVALUATORS,
    keep_votes: bool = False,
    lockstep: bool = False,
    stop_requested: Callable[[], bool] = lambda: False,
    deadline: Deadline | None = None,
    save_outputs: Sequence[SavedOutput] = (),
    save_to: Path | None = None,
) -> dict[str, float] | None:
    """Examples of every set, each once; the same metrics on all ranks. Every rank.

    Args:
        batch_size: slots over all ranks together; it changes nothing but speed and memory.
        num_steps: segments of an example; None: halt_max_steps.
        adaptive: examples that are settled leave, and others take their slots (models/inference.py).
        max_examples: of each larger set only so many, evenly spread.
        evaluators: what else to find out about the answers.
        keep_votes: add to the votes of the evaluation before, for several checkpoints that vote together.
        lockstep: a segment of this model takes all ranks, so that one without examples of its own computes along.
        stop_requested: asked between segments; when any rank's says so, the evaluation is abandoned and None returned.
        deadline: of rank 0. Where it is set, a batch counts whole or not at all, since those that halt early are the
            easy ones; what doesn't fit is left out, evenly spread. Several sets share the time.
        save_outputs, save_to: what to write of each example, beside its row in the dataset, and into which folder;
            evaluators write theirs there too.

    Returns:
        eval/<set>/<name> for EVAL_METRICS, the evaluators' metrics, exact_accuracy_at_step/<n> and num_examples, those
        with labels. `steps` are those that ran, `halt_step` is where the Q head would have stopped.
    """
    num_steps, deadline = num_steps or model.config.halt_max_steps, deadline or Deadline()
    metrics: dict[str, float] = {}
    if save_to is not None:
        OutputWriter.clear(save_to, list(split.sets), world)
    for set_name, part in deadline.shared_by(list(split.sets)):
        loader = EvalLoader(split, set_name, batch_size, max_examples, spread=part.is_set)
        examples = loader.batches(world)
        sums = EvalSums(num_steps, evaluators.checks, world)
        if not keep_votes:
            evaluators.clear()
        writer = OutputWriter(save_to, set_name, world) if save_outputs and save_to is not None else None

        def count(done: Finished, sums: EvalSums = sums, writer: OutputWriter | None = writer) -> None:
            answers_NS = done.outputs.logits_BSV.argmax(-1)
            evaluators.vote(done.batch, answers_NS, done.outputs.q_halt_B.sigmoid())
            checks = evaluators.judge(done.batch["inputs"], answers_NS)
            labels_NS, loss_config = done.batch["labels"], model.config.loss
            sums.add_last(done.outputs, labels_NS, done.steps_N, checks, config=loss_config, ignore_label=IGNORE_LABEL)
            if writer is not None:
                writer.add({"rows": torch.from_numpy(done.rows_N), **_outputs_to_save(save_outputs, done)})

        while True:
            slots = Slots(
                model,
                islice(examples, 1) if part.is_set else examples,
                num_steps=num_steps,
                adaptive=adaptive,
                keep_steps=not {"predictions_at_step", "q_halt_at_step"}.isdisjoint(save_outputs),
            )
            more, late = world.any_of(slots.busy, world.is_main and part.is_near)
            part.was_met &= not (more and late)
            if late or not more:
                break
            part.begin_lap()
            of_batch, finished = EvalSums(num_steps, evaluators.checks, world), list[Finished]()
            while True:
                stopping, busy, over = world.any_of(stop_requested(), slots.busy, world.is_main and part.is_over)
                if stopping:
                    return None
                if over or not busy:
                    break
                if not slots.busy:  # others are
                    if lockstep:
                        idle_segment(model, split.metadata.seq_len, world.device)
                    continue
                said = slots.advance()
                of_batch.add_segment(
                    said.outputs, said.labels_BS, said.steps_B, said.halted_before_B, ignore_label=IGNORE_LABEL
                )
                if part.is_set:
                    world.wait_for_device()  # else the clock would time what was asked for, not what was done
                if said.finished is not None:
                    finished.append(said.finished) if part.is_set else count(said.finished)
            if busy:
                part.was_met = False
                break
            sums.add(of_batch)
            for done in finished:
                count(done)
            part.end_lap()
        with world.agree():
            loader.require_all_read()
        found = sums.reduce()
        if found:  # at least one example
            found |= evaluators.results(world, save_to)
        metrics |= {f"eval/{set_name}/{name}": value for name, value in found.items()}
        if writer is not None:
            writer.close(world)
    return metrics


def _outputs_to_save(names: Sequence[SavedOutput], done: Finished) -> dict[str, Tensor]:
    possible = done.batch | {
        "logits": done.outputs.logits_BSV,
        "predictions": done.outputs.logits_BSV.argmax(-1).int(),
        "q_halt": done.outputs.q_halt_B,
        "q_continue": done.outputs.q_continue_B,
        "steps": done.steps_N,
    }
    if done.predictions_NTS is not None and done.q_halt_NT is not None:
        possible |= {"predictions_at_step": done.predictions_NTS, "q_halt_at_step": done.q_halt_NT}
    return {name: possible[name] for name in names}


# ---- the loop --------------------------------------------------------------------------------------------


def fit(
    start: Start[PretrainConfig], data: Data, state: TrainState, stop: StopSignal, lock: RunLock, world: World
) -> None:
    """Train from the state's step to the last one, or until somebody asks to stop. Every rank.

    Raises NotFinite, when its metrics and checkpoints are on the disk.
    """
    config = start.config
    sampler = Sampler(
        list(data.train.sets.values()),
        seed=config.seed,
        epochs=config.epochs,
        global_batch_size=config.global_batch_size,
        first_step=state.step + 1,
        first_draw=state.draws,
        repeat_first_batch=config.overfit_one_batch,
    )
    last_step = min(sampler.last_step, config.max_steps or sampler.last_step)
    with world.agree():
        require_steps(config, sampler, last_step)
        evaluators = build_evaluators(config.evaluators, data.test) if data.test is not None else NO_EVALUATORS
        best_metric = full_best_metric(config, data, evaluators)
        augmentation = online_augmentation(config, data, world)

    def out_of_patience() -> bool:
        return config.early_stop_patience is not None and state.evaluations_since_best >= config.early_stop_patience

    if (state.step >= last_step or out_of_patience()) and state.pending_row is None:
        say(world, f"{config.run_path} is finished: it has done {state.step} of {last_step} steps")
        if world.is_main:
            clear_stopped(config.run_path)
        return

    with world.agree():
        loader = TrainLoader(data.train, sampler, world, augmentation=augmentation, data_on=config.data_on)
        if world.is_main:
            prepare(start, lock, world.attempt)
            world.note_beginning()
        # A step whose evaluation is pending has no row yet; where it has one, the run died after making up for it.
        logged = state.step if state.pending_row is None else state.step - 1
        checkpointer = Checkpointer(config.run_path, world, config.keep_last_k)
        metrics = Metrics(
            world, config.run_path, config.wandb, state.wandb_run_id, config.model_dump(), logged, last_step
        )
    profiler = StepProfiler(config.profile and world.is_main, config.run_path, metrics.say, world.device)
    comm = CommSampler(None if config.profile else config.perf_every_n_steps, world)
    clock, share = StepClock(), TimeShare(config.eval_max_share)
    lr_scale = batch_scale(config.lr_scaling, config.global_batch_size, config.lr_scaling_reference)
    for line in [*start.notes, describe(config, data, state, augmentation, last_step, world)]:
        metrics.say(line)

    def evaluation_due() -> bool:
        if state.step >= last_step:
            return True

        def due(interval: int | None, done: int, before: int) -> bool:
            return interval is not None and done // interval > max(before // interval, config.min_eval_interval)

        epochs = sampler.epochs_done(state.step), sampler.epochs_done(state.step - 1)
        return due(config.eval_every_n_steps, state.step, state.step - 1) or due(config.eval_interval, *epochs)

    def checkpoint_due(evaluated: bool) -> bool:
        by_steps = config.checkpoint_every_n_steps is not None and state.step % config.checkpoint_every_n_steps == 0
        return by_steps or (evaluated and config.checkpoint_every_eval) or state.step >= last_step

    def check_replicas() -> None:
        if config.check_replicas_every_n_steps is not None:
            others = {key: tensor for key, (_, tensor) in live_tensors(state).items()}
            require_same_replicas(state.model.state_dict() | others, state.step, world)

    def save_step(*, is_best: bool) -> None:
        state.sums.require_finite(checkpointer.settled_last_good)
        check_replicas()  # a checkpoint of one rank's tensors would make its errors everybody's
        checkpointer.save(take_snapshot(state, config, data, world), is_best=is_best)

    def finish_step(row: dict[str, float], mistake: ValueError | None = None) -> bool:
        """What may follow an update: evaluation, log, checkpoint, stop. True ends the run.

        Args: mistake: why this rank has no next batch; raised by all as a UserError, when nothing can be lost any more.
        """
        is_best = evaluated = False
        was_pending, state.pending_row = state.pending_row is not None, None
        if data.test is not None and evaluation_due():
            state.sums.require_finite(checkpointer.settled_last_good)
            # One that a stop put off has no time of this process to take a share of.
            try:
                with share.taking(limited=not was_pending) as deadline, averaged_weights(state):
                    outcome = evaluate(
                        state.model,
                        data.test,
                        world,
                        batch_size=config.eval_batch_size or config.global_batch_size,
                        adaptive=config.eval_adaptive,
                        max_examples=config.eval_max_examples,
                        evaluators=evaluators,
                        lockstep=state.layout.lockstep,
                        stop_requested=stop.requested,
                        deadline=deadline,
                        save_outputs=config.eval_save_outputs,
                        save_to=config.run_path / "eval_outputs" / f"step_{state.step:08d}",
                    )
            except UserError:  # of the data or the disk; the evaluation is made up for, and no step is lost
                state.pending_row = row
                save_step(is_best=False)
                raise
            if outcome is None:
                state.pending_row = row
            else:
                evaluated, row = True, row | outcome | {"perf/eval_share": share.share}
                if not deadline.was_met:  # some lucky ones of it are no measure
                    metrics.say(f"step {state.step}: no time for all of the evaluation (eval_max_share)")
                else:
                    is_best = improves(outcome.get(best_metric), state.best, config.best_mode)
                    state.best = outcome[best_metric] if is_best else state.best
                    state.evaluations_since_best = 0 if is_best else state.evaluations_since_best + 1
        if row and state.pending_row is None:
            with world.agree():
                metrics.write(state.step, row)
        stopping, unreadable = world.any_of(stop.requested(), mistake is not None)
        enough = evaluated and out_of_patience()
        if stopping or unreadable or enough or is_best or checkpoint_due(evaluated):
            save_step(is_best=is_best)
        elif config.check_replicas_every_n_steps and state.step % config.check_replicas_every_n_steps == 0:
            check_replicas()
        if unreadable:
            with world.agree():
                if mistake is not None:
                    raise mistake
        if enough:
            metrics.say(
                f"ended at step {state.step}: no better {best_metric} than {state.best} in "
                f"{state.evaluations_since_best} evaluations"
            )
        elif stopping and (state.step < last_step or state.pending_row is not None):
            reason = stop.name or "a signal to another rank"
            checkpointer.wait()  # what the marker promises
            metrics.say(f"stopped by {reason} at step {state.step}; resume=auto goes on from here")
            with world.agree():
                if world.is_main:
                    mark_stopped(config.run_path, reason)
        return stopping or enough

    try:
        # A row that waits: a stop came before its step was evaluated.
        with clock.paused():
            stopped = state.pending_row is not None and finish_step(state.pending_row)
        steps = range(0) if stopped else range(state.step + 1, last_step + 1)
        batches = loader.batches(steps)
        with clock.waiting_for_data(), world.agree():
            if (mistake := loader.next_mistake()) is not None:
                raise mistake
        for batch in clock.timing_data(batches):
            state.step, state.draws = state.step + 1, state.draws + config.global_batch_size
            multiplier = lr_multiplier(state.step, last_step, config.lr_warmup_steps, config.lr_min_ratio)
            if state.step not in state.skipped_steps:
                with comm.step(state.step):
                    state.carry, result = train_step(
                        state.layout,
                        state.optimizers,
                        state.carry,
                        batch,
                        depth=config.arch.depth_at(state.step, last_step),
                        loss_config=config.arch.loss,
                        loss_scale=state.loss_scale,
                        lr_multiplier=multiplier * lr_scale,
                        puzzle_emb_lr=config.puzzle_emb_lr * multiplier,
                        puzzle_emb_weight_decay=config.puzzle_emb_weight_decay,
                        grad_clip=config.grad_clip,
                        global_batch_size=config.global_batch_size,
                        min_halt_steps_B=exploration(config, state.step, world),
                        world=world,
                    )
                    if state.ema is not None and result.was_taken:
                        state.ema.update(config.ema_rate if state.step / last_step > config.ema_start else 0.0)
                    state.sums.add(state.step, config.global_batch_size, result.sums, result.grad_norm)
            profiler.step()
            metrics.advance(state.step)
            row: dict[str, float] = {}
            if state.step == 1 or state.step % config.log_interval == 0:
                state.sums.require_finite(checkpointer.settled_last_good)
                row = state.sums.reduce() | {"train/lr": config.lr * multiplier * lr_scale}
                if state.loss_scale is not None:
                    row["train/loss_scale"] = float(state.loss_scale.tensors()["scale"])
                if state.skipped_steps:
                    row["train/skipped_steps"] = len(state.skipped_steps)
                row |= clock.read(config.global_batch_size) | comm.row()
            with clock.waiting_for_data():
                mistake = loader.next_mistake()
            with clock.paused():
                if finish_step(row, mistake):
                    break
        checkpointer.wait()
    except UserError as error:
        try:
            checkpointer.wait()  # what is under way is still of use
        finally:
            profiler.close()
            rewinds = isinstance(error, NotFinite) and config.on_nonfinite == "rewind"
            # The others wait meanwhile: for the rewind, or for the line that says what was wrong.
            metrics.close(failed=not rewinds, at_most_s=min(60.0, world.timeout.total_seconds() / 2))
        raise
    except Exception as error:
        checkpointer.settle(error)
        error.add_note(f"at step {state.step}; {checkpointer.last_good}")
        raise
    if config.evaluates:
        metrics.say(f"evaluation took {share.share:.1%} of the time")
    profiler.close()
    metrics.close()


def fit_with_rewinds(start: Start[PretrainConfig], data: Data, stop: StopSignal, lock: RunLock, world: World) -> None:
    """fit, which begins anew from the last good checkpoint when a step went wrong and on_nonfinite=rewind; that step's
    batch is left out then. Every rank.

    The state is built as any resumed run's is: what a rewind leaves behind is what a restart would.
    """
    config, skipped, wandb_run_id = start.config, frozenset[int](), ""
    while True:
        state: TrainState | None = None
        try:
            state = build_train_state(start, data, world)
            state.skipped_steps |= skipped
            state.wandb_run_id = wandb_run_id = wandb_run_id or state.wandb_run_id
            fit(start, data, state, stop, lock, world)
            return
        except NotFinite as bad:
            if config.on_nonfinite == "stop":
                raise
            assert state is not None
            left_out = ", ".join(map(str, sorted(state.skipped_steps)))
            skipped = state.skipped_steps | {bad.step}
            if len(skipped) > config.max_rewinds:
                raise UserError(
                    f"{bad.what}; steps {left_out} were left out already (max_rewinds={config.max_rewinds}); "
                    f"{bad.last_good}; go on with a lower lr or more lr_warmup_steps"
                ) from bad
            what = bad.what
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(memory_advice(config, state, world))
            raise
        del state  # before another one takes as much memory
        gc.collect()
        with world.agree():
            if world.is_main:
                notes = [f"{what}: going back (rewind {len(skipped)} of {config.max_rewinds} at most)"]
                checkpoint = find_checkpoint(config.run_path, notes.append) or start.checkpoint
                where = f"{checkpoint.path} at step {checkpoint.state.step}" if checkpoint else "the start"
                left_out = ", ".join(map(str, sorted(skipped)))
                notes.append(f"going on from {where}, without the batch of step {left_out}")
                start = Start(config, checkpoint, notes)
        start = world.broadcast_object(start)


def memory_advice(config: PretrainConfig, state: TrainState | None, world: World) -> str:
    """What a run that is out of memory could turn."""
    num_slots = [share.stop - share.start for share in shares(world.weights, config.global_batch_size)]
    tensors: list[Tensor] = []
    if state is not None:
        tensors += [*state.model.parameters(), *state.model.parameters(), *state.model.buffers()]  # and the gradients
        tensors += [tensor for _, tensor in live_tensors(state).values()]
    return out_of_memory_advice(
        world.device,
        num_slots=num_slots[world.data_rank],
        divisible_slots=math.gcd(*num_slots),
        global_batch_size=config.global_batch_size,
        grad_accumulation=config.grad_accumulation,
        activation_checkpointing=config.arch.activation_checkpointing,
        parallel=config.parallel.name,
        num_state_bytes=sum(local_part(tensor).nbytes for tensor in tensors) if tensors else None,
    )


@contextmanager
def averaged_weights(state: TrainState) -> Iterator[None]:
    """Inside, the model has the moving average for weights, where the run keeps one. Every rank."""
    try:
        with state.ema.swapped() if state.ema is not None else nullcontext():
            state.layout.values_changed()
            yield
    finally:
        state.layout.values_changed()


def online_augmentation(config: PretrainConfig, data: Data, world: World) -> OnlineAugmentation | None:
    """What draws a symmetry for each visit, if that is asked for. Raises ValueError where the task has none known."""
    if config.augment == "none":
        return None
    return OnlineAugmentation.build(
        data.train,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        slots=world.slice_of(config.global_batch_size),
        device=world.device,
    )


def require_steps(config: PretrainConfig, sampler: Sampler, last_step: int) -> None:
    """Raises ValueError where the run would have no step."""
    if last_step < 1:
        raise ValueError(
            f"{config.epochs} epochs draw {sampler.num_draws} examples, which don't fill one global batch of "
            f"{config.global_batch_size}; raise epochs or lower global_batch_size"
        )


def full_best_metric(config: PretrainConfig, data: Data, evaluators: Evaluators) -> str:
    """The metric that `best` follows, with its set: the first one's where only a name is given; empty for none.

    Raises ValueError where evaluation never gives it.
    """
    if config.best_metric is None or data.test is None:
        return ""
    sets = list(data.test.sets)
    name = config.best_metric if "/" in config.best_metric else f"eval/{sets[0]}/{config.best_metric}"
    at_steps = [f"exact_accuracy_at_step/{n}" for n in range(1, config.arch.halt_max_steps + 1)]
    metrics = (*EVAL_METRICS, *evaluators.metrics)
    if name not in [f"eval/{each}/{metric}" for each in sets for metric in (*metrics, *at_steps)]:
        possible = ", ".join(f"eval/{each}/{metric}" for each in sets for metric in metrics)
        raise ValueError(f"best_metric={config.best_metric} is no metric of this data; take one of {possible}")
    return name


def improves(value: float | None, best: float | None, mode: Literal["max", "min"]) -> bool:
    """Whether an evaluation is the best so far; one without the metric (examples without labels) isn't."""
    if value is None or best is None:
        return value is not None
    return value > best if mode == "max" else value < best


def exploration(config: PretrainConfig, step: int, world: World) -> Tensor:
    """This rank's share of the step's drawn minimal halting steps."""
    arch = config.arch
    drawn = draw_min_halt_steps(
        config.seed, step, config.global_batch_size, arch.halt_exploration_prob, arch.halt_max_steps
    )
    return world.to_device(drawn[world.slice_of(config.global_batch_size)])


def describe(
    config: PretrainConfig,
    data: Data,
    state: TrainState,
    augmentation: OnlineAugmentation | None,
    last_step: int,
    world: World,
) -> str:
    """What is about to run, for the log's head."""
    network = sum(p.numel() for p in state.model.parameters())
    table = state.model.puzzle_embedding
    num_rows = f"{table.weight.numel():,} in the puzzle table" if table is not None else "no puzzle table"
    drawn = f", {augmentation.description} drawn on the fly" if augmentation is not None else ""
    return (
        f"{config.run_path}: {config.arch.name}, {network:,} parameters and {num_rows}; "
        f"{data.train.metadata.total_groups:,} groups{drawn}; {last_step:,} steps of {config.global_batch_size} "
        f"sequences; {config.parallel.name}, {world.size} x {world.device.type}"
    )


def say(world: World, text: str) -> None:
    if world.is_main:
        tell(text)


def main(world: World) -> None:
    """The chapters, in order. Every rank."""
    with StopSignal() as stop, RunLock() as lock:  # a stop while data are read is one after the first step
        start: Start[PretrainConfig] | None = None
        with world.agree():
            if world.is_main:
                command = CommandLine.parse(sys.argv[1:], "pretrain", USAGE)
                if command.page:
                    print(command.page)
                else:
                    start = read_start(PretrainConfig, "pretrain", command.overrides, lock, world.attempt)
        start = world.broadcast_object(start)
        if start is None:
            return
        config = start.config
        with world.agree():
            axes = config.parallel.axes(world.size)
        world = use_device(world, config.device, config.dist, axes=axes, deterministic=config.deterministic)
        data = open_data(config, world)
        fit_with_rewinds(start, data, stop, lock, world)


if __name__ == "__main__":
    run(main)
