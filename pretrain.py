"""Train a hierarchical reasoning model: the whole program, in the order in which it runs.

config -> world -> data -> model -> loop. Every rank runs this file; whatever differs between one process and many,
between devices, sinks
and architectures is inside the objects that the chapters make, so the loop at the end is the algorithm and nothing
else.
"""
# B = slots of this rank (of the global batch where so named), S = tokens of a puzzle, V = vocabulary

import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import yaml
from pydantic import Field, model_validator
from safetensors.torch import save_file
from torch import Tensor

from dataset.loader import IGNORE_LABEL, Batch, EvalLoader, TrainLoader
from dataset.sampler import Sampler
from dataset.schema import Split, check_contents, open_split
from models import ArchConfig, build_arch
from models.act import Carry, Outputs, RecursiveModel, draw_min_halt_steps, initial_carry, segment
from models.losses import LOSS_SUMS, METRICS, LossType, act_loss, correctness
from optim.adam_atan2 import AdamATan2
from optim.schedule import lr_multiplier
from optim.sparse_sign_sgd import sparse_sign_sgd_
from optim.state import export_state, import_state
from utils.checkpoint import Checkpoint, Checkpointer, find_checkpoint
from utils.command_line import CommandLine, differences, read_config, typed_changes, validate, with_changes
from utils.config import Bool, Float, Int, StrictModel
from utils.dist import DeviceName, DistConfig, Launch, UserError, World, run
from utils.metrics import Metrics, WandbConfig
from utils.profiling import StepClock, StepProfiler, max_memory_gb
from utils.run_folder import CHECKPOINTS, claim_fresh, mark_stopped, name_run, prepare, run_folder_of
from utils.stop import StopSignal

USAGE = """
pretrain.py: train a hierarchical reasoning model.

  python pretrain.py data_path=data/sudoku-extreme-1k-aug-1000 epochs=20000 eval_interval=2000    one process
  torchrun --nproc-per-node 8 pretrain.py experiment=sudoku_extreme_1k lr=2e-4                    eight
  python pretrain.py resume=auto checkpoint_path=checkpoints/<project>/<run>                      go on after a stop
  python pretrain.py --cfg job experiment=sudoku_extreme_1k                                       show, don't run

Any key below is set with key=value, also inside groups (arch.hidden_size=128).
"""

Positive = Field(gt=0)
NotNegative = Field(ge=0)
SavedOutput = Literal["inputs", "labels", "puzzle_identifiers", "logits", "predictions", "q_halt", "q_continue"]


# ---- config ----------------------------------------------------------------------------------------------


class PretrainConfig(StrictModel):
    """One run. config/pretrain.yaml holds the defaults and says what each key means."""

    arch: ArchConfig
    data_path: str
    global_batch_size: Int = Positive
    epochs: Int = Positive
    max_steps: Int | None = Field(gt=0)
    seed: Int = NotNegative
    overfit_one_batch: Bool

    lr: Float = NotNegative
    lr_min_ratio: Float = Field(ge=0, le=1)
    lr_warmup_steps: Int = NotNegative
    beta1: Float = Field(ge=0, lt=1)
    beta2: Float = Field(ge=0, lt=1)
    weight_decay: Float = NotNegative
    puzzle_emb_lr: Float = NotNegative
    puzzle_emb_weight_decay: Float = NotNegative

    eval_interval: Int | None = Field(gt=0)
    eval_every_n_steps: Int | None = Field(gt=0)
    eval_batch_size: Int | None = Field(gt=0)
    eval_save_outputs: list[SavedOutput]

    project_name: str | None
    run_name: str | None
    checkpoint_path: str | None
    resume: str | None
    checkpoint_every_eval: Bool
    checkpoint_every_n_steps: Int | None = Field(gt=0)
    keep_last_k: Int | None = Field(gt=0)
    best_metric: str | None
    best_mode: Literal["max", "min"]

    log_interval: Int = Positive
    wandb: WandbConfig
    profile: Bool

    device: DeviceName
    compile: Bool
    deterministic: Bool
    dist: DistConfig

    @model_validator(mode="after")
    def _best_is_evaluated(self) -> "PretrainConfig":
        if self.best_metric and not self.best_metric.startswith("eval/"):
            raise ValueError(
                f"best_metric is {self.best_metric!r}; name one of evaluation, such as eval/all/exact_accuracy"
            )
        return self

    @property
    def evaluates(self) -> bool:
        return self.eval_interval is not None or self.eval_every_n_steps is not None

    @property
    def run_path(self) -> Path:
        assert self.checkpoint_path is not None
        return Path(self.checkpoint_path)


@dataclass
class Start:
    """Where a run begins: its config, and the checkpoint that it goes on from, if any."""

    config: PretrainConfig
    checkpoint: Checkpoint | None
    notes: list[str]


def read_start(overrides: list[str]) -> Start:
    """Compose the config, name the run, find its checkpoint. Rank 0 only: YAML and folders are read once. Raises
    ValueError.
    """
    launch = Launch.from_environment()
    asked = validate(PretrainConfig, read_config("pretrain", overrides))
    resume = asked.resume or ("auto" if launch.restarts else None)
    notes: list[str] = []

    if resume in (None, "auto"):
        asked = _with_names(asked, launch)
        checkpoint = find_checkpoint(asked.run_path, notes.append) if resume else None
        if checkpoint is None:
            claim_fresh(asked.run_path)
            notes += [f"resume=auto: no checkpoint in {asked.run_path}, starting afresh"] if resume else []
            return Start(asked, None, notes)
        run_path = asked.run_path
    else:
        where = Path(resume)
        run_path = run_folder_of(where)
        checkpoint = find_checkpoint(run_path, notes.append) if run_path == where else Checkpoint.open(where)
        if checkpoint is None:
            raise ValueError(f"resume={resume}: no checkpoint there; give the folder of a run or of one of its steps")
        if asked.checkpoint_path and Path(asked.checkpoint_path) != run_path:
            run_path = Path(asked.checkpoint_path)
            claim_fresh(run_path)
        elif (newest := find_checkpoint(run_path, notes.append)) and newest.step > checkpoint.step:
            raise ValueError(
                f"resume={resume}, but the run went on to {newest.path.name}; resume={run_path} continues it there, "
                "and a checkpoint_path of its own branches off here"
            )

    # What was stored holds, but for what was typed now.
    stored = checkpoint.state["config"]
    changes = typed_changes("pretrain", overrides) | {"resume": asked.resume, "checkpoint_path": str(run_path)}
    config = validate(PretrainConfig, with_changes(stored, changes))
    notes.append(f"resuming {checkpoint.path} at step {checkpoint.step}")
    told = [
        line
        for line in differences(stored, config.model_dump())
        if line.split(":")[0] not in ("resume", "checkpoint_path")
    ]
    notes += [f"changed on the command line: {line}" for line in told]
    return Start(config, checkpoint, notes)


def _with_names(config: PretrainConfig, launch: Launch) -> PretrainConfig:
    project = config.project_name or Path(config.data_path).name
    run_name = config.run_name or (
        Path(config.checkpoint_path).name if config.checkpoint_path else name_run(project, launch)
    )
    path = config.checkpoint_path or str(CHECKPOINTS / project / run_name)
    return config.model_copy(update={"project_name": project, "run_name": run_name, "checkpoint_path": path})


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
        train = open_split(Path(config.data_path), "train")
        test = open_split(Path(config.data_path), "test") if config.evaluates else None
        if config.global_batch_size % world.size:
            raise ValueError(
                f"global_batch_size={config.global_batch_size} can't be split over {world.size} ranks; "
                f"take {-(-config.global_batch_size // world.size) * world.size}, or another number of ranks"
            )
        for split in filter(None, (train, test)):
            require_same_task(task_of(train), split)
            if world.is_main:
                fingerprint[split.path.name] = check_contents(split)
    return Data(train, test, world.broadcast_object(fingerprint))


def task_of(split: Split) -> dict[str, int]:
    """The sizes that a model is built for."""
    metadata = split.metadata
    return {key: getattr(metadata, key) for key in ("seq_len", "vocab_size", "num_puzzle_identifiers")}


def require_same_task(task: dict[str, int], other: Split) -> None:
    """Raises ValueError where a model built for `task` can't read another split."""
    theirs = task_of(other)
    if theirs["seq_len"] != task["seq_len"] or theirs["vocab_size"] != task["vocab_size"]:
        raise ValueError(f"{other.path} has {theirs}, but the model was built for {task}; take data of the same task")
    if theirs["num_puzzle_identifiers"] > task["num_puzzle_identifiers"]:
        raise ValueError(
            f"{other.path} has {theirs['num_puzzle_identifiers']} puzzle identifiers, but the model's table only "
            f"{task['num_puzzle_identifiers']} rows; take data with puzzles that it was trained on"
        )


# ---- model -----------------------------------------------------------------------------------------------


@dataclass
class TrainState:
    """Everything that a step changes, which is what a checkpoint holds."""

    model: RecursiveModel
    optimizer: AdamATan2
    carry: Carry | None  # None until the first batch tells its shape
    sums: "OpenSums"
    step: int = 0
    best: float | None = None
    row: dict[str, float] | None = None  # logged at this step, but waiting for an evaluation that a stop interrupted


def build_model(arch: ArchConfig, task: dict[str, int], world: World, seed: int) -> RecursiveModel:
    """The model on the world's device, with rank 0's initial weights everywhere. Every rank.

    Args:
        task: seq_len, vocab_size and num_puzzle_identifiers of the dataset.
    """
    model = build_arch(arch, **task)
    model.init_weights(torch.Generator().manual_seed(seed))
    model.to(world.device)
    world.broadcast_(model.state_dict().values())
    return model


def build_train_state(start: Start, data: Data, world: World) -> TrainState:
    """A fresh state, or the checkpoint's. Every rank. Raises UserError where the checkpoint fits neither data nor
    architecture.
    """
    config, checkpoint = start.config, start.checkpoint
    model = build_model(config.arch, task_of(data.train), world, config.seed)
    optimizer = AdamATan2(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    state = TrainState(model, optimizer, carry=None, sums=OpenSums(world))
    if checkpoint is not None:
        with world.agree():
            restore(state, checkpoint, config, data, world)
    if config.compile:
        model.compile()
    return state


def restore(state: TrainState, checkpoint: Checkpoint, config: PretrainConfig, data: Data, world: World) -> None:
    """Overwrite a fresh state with a checkpoint. Raises ValueError."""
    saved = checkpoint.state
    shared = saved["fingerprint"].keys() & data.fingerprint.keys()  # a run that doesn't evaluate opens no test split
    if any(saved["fingerprint"][split] != data.fingerprint[split] for split in shared):
        raise ValueError(
            f"{checkpoint.path} was trained on other data than {config.data_path} holds now; give the data_path of that"
        )
    load_weights(state.model, checkpoint, config.arch)
    import_state(state.model, state.optimizer, checkpoint.load("optimizer"), saved["optimizer_step"])
    state.step, state.best, state.row = checkpoint.step, saved["best"], saved["row"]
    state.sums.restore(checkpoint.load("progress")["open_sums"], saved["open_steps"], world)
    # With another batch size there are other slots: their sequences start anew, and the draws go on where they were.
    if saved["config"]["global_batch_size"] == config.global_batch_size:
        slots = checkpoint.load_slots(world.slice_of(config.global_batch_size))
        state.carry = Carry.from_tensors({name: tensor.to(world.device) for name, tensor in slots.items()})


def load_weights(model: RecursiveModel, checkpoint: Checkpoint, arch: ArchConfig) -> None:
    """Raises ValueError that names the tensor and the option where the architecture is another."""
    weights, own = checkpoint.load("model"), model.state_dict()
    for name in sorted({*weights, *own}):
        there, here = (tuple(tensors[name].shape) if name in tensors else "absent" for tensors in (weights, own))
        if there != here:
            changed = differences(checkpoint.state["config"]["arch"], arch.model_dump())
            hint = f"arch differs in {', '.join(changed)}" if changed else "its dataset has other sizes"
            raise ValueError(
                f"{checkpoint.path} doesn't fit this model: {name} is {there} there and {here} here; {hint}"
            )
    model.load_state_dict(weights)


def load_run(path: Path, world: World) -> tuple[PretrainConfig, RecursiveModel, Checkpoint]:
    """A trained model from a run folder (its newest checkpoint) or a step folder, for evaluation. Every rank. Raises
    UserError.
    """
    found: tuple[Checkpoint, PretrainConfig] | None = None
    with world.agree():
        if world.is_main:
            checkpoint = (
                Checkpoint.open(path)
                if run_folder_of(path) != path
                else find_checkpoint(path, lambda text: print(text, file=sys.stderr))
            )
            if checkpoint is None:
                raise ValueError(
                    f"checkpoint={path}: no checkpoint there; give the folder of a run or of one of its steps"
                )
            found = checkpoint, validate(PretrainConfig, checkpoint.state["config"])
    found = world.broadcast_object(found)
    assert found is not None
    checkpoint, config = found
    model = build_model(config.arch, checkpoint.state["task"], world, config.seed)
    with world.agree():
        load_weights(model, checkpoint, config.arch)
    return config, model, checkpoint


# ---- one step --------------------------------------------------------------------------------------------


@dataclass
class StepResult:
    """What one training step found out, on the device and without gradients."""

    outputs: Outputs
    loss: Tensor  # summed over this rank's slots
    sums: Tensor  # this rank's, in the order of METRICS
    grad_norm: Tensor  # of the global batch, over all parameters (the puzzle table isn't one)


def train_step(
    model: RecursiveModel,
    optimizer: AdamATan2,
    carry: Carry,
    batch: Batch,
    *,
    lr: float,
    puzzle_emb_lr: float,
    puzzle_emb_weight_decay: float,
    loss_type: LossType,
    global_batch_size: int,
    min_halt_steps_B: Tensor | None,
    world: World,
) -> tuple[Carry, StepResult]:
    """One segment for every slot and one update of every weight. Every rank; the host never waits for the device.

    Gradients are of the loss summed over the global batch and divided by its number of slots, so no rank's share
    counts more than its slots.
    """
    carry, outputs = segment(model, carry, batch, training=True, min_halt_steps_B=min_halt_steps_B)
    loss, sums = act_loss(
        outputs,
        carry.current["labels"],
        halted_B=carry.halted_B,
        steps_B=carry.steps_B,
        loss_type=loss_type,
        ignore_label=IGNORE_LABEL,
    )
    (loss / global_batch_size).backward()
    world.sum_gradients_(model.parameters())
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    if model.puzzle_embedding is not None and outputs.puzzle_rows_BE is not None:
        assert outputs.puzzle_rows_BE.grad is not None
        sparse_sign_sgd_(
            model.puzzle_embedding.weight,
            carry.current["puzzle_identifiers"],
            outputs.puzzle_rows_BE.grad,
            lr=puzzle_emb_lr,
            weight_decay=puzzle_emb_weight_decay,
            world=world,
        )
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return carry, StepResult(outputs, loss.detach(), sums, grad_norm.detach())


class OpenSums:
    """Metric sums since the last log, kept on the device until the host reads them all at once.

    `first_bad_step` is the first step whose gradients were not finite; gradients are summed over ranks, so every rank
    holds the same.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        dtype = torch.float32 if world.device.type == "mps" else torch.float64
        self.values = torch.zeros(
            len(METRICS) + 1, dtype=dtype, device=world.device
        )  # METRICS, then the norm of the gradients
        self.num_steps = 0
        self._first_bad_step = torch.zeros((), dtype=torch.int32, device=world.device)

    def add(self, step: int, result: StepResult) -> None:
        # The norm is the same on all ranks and will be summed over them.
        self.values += torch.cat([result.sums, (result.grad_norm / self._world.size).to(result.sums.dtype).view(1)])
        self.num_steps += 1
        bad = (self._first_bad_step == 0) & ~result.grad_norm.isfinite()
        self._first_bad_step = torch.where(bad, step, self._first_bad_step)

    def require_finite(self, last_good: str) -> None:
        """The host waits for the device here. Raises UserError on every rank."""
        if bad_step := int(self._first_bad_step):
            raise UserError(
                f"the gradients are not finite (NaN or infinite) since step {bad_step}; {last_good}; "
                "resume from it with a lower lr or more lr_warmup_steps"
            )

    def reduce(self, global_batch_size: int) -> dict[str, float]:
        """The row of train metrics, complete on rank 0, and zero again. Every rank.

        Losses are per slot and step; the others are means over the sequences that halted, left out if there were none.
        """
        *sums, grad_norm = self._world.sum_to_main_(self.values).tolist()
        named = dict(zip(METRICS, sums, strict=True))
        count = named.pop("count")
        num_slots = max(1, self.num_steps) * global_batch_size
        row = {f"train/{name}": named.pop(name) / num_slots for name in LOSS_SUMS}
        row["train/grad_norm"] = grad_norm / max(1, self.num_steps)
        if count > 0:
            row |= {f"train/{name}": value / count for name, value in named.items()}
        self.values.zero_()
        self.num_steps = 0
        return row

    def restore(self, values_by_rank: Tensor, num_steps: int, world: World) -> None:
        """Each rank its own where their number is the same, so that the sums round alike; else rank 0 has all."""
        if len(values_by_rank) == world.size:
            self.values.copy_(values_by_rank[world.rank])
        elif world.is_main:
            self.values.copy_(values_by_rank.sum(0))
        self.num_steps = num_steps


# ---- evaluation ------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    model: RecursiveModel,
    split: Split,
    world: World,
    *,
    batch_size: int,
    loss_type: LossType,
    stop_requested: Callable[[], bool] = lambda: False,
    save_outputs: list[SavedOutput] | None = None,
    save_to: Path | None = None,
) -> dict[str, float] | None:
    """Every example of every set once, for halt_max_steps segments each; the same metrics on all ranks. Every rank.

    Args:
        batch_size: over all ranks together; it changes nothing but speed and memory.
        stop_requested: asked between batches; when any rank's says so, the evaluation is abandoned and None returned.
        save_outputs, save_to: what to write of each example after its last segment, one file per set and rank in this
        folder.

    Returns:
        eval/<set>/{exact_accuracy, accuracy, q_halt_accuracy, steps, halt_step, lm_loss, q_halt_loss} and
        eval/<set>/exact_accuracy_at_step/<n>.
        `steps` are those that ran, `halt_step` is where the Q head would have stopped.
    """
    metrics: dict[str, float] = {}
    for set_name in split.sets:
        loader = EvalLoader(split, set_name, batch_size)
        sums = _EvalSums(model.config.halt_max_steps, world)
        saved: dict[str, list[Tensor]] = {}
        for rows, batch in loader.batches(world):
            if world.any(stop_requested()):
                return None
            if len(rows) == 0:
                continue
            carry = initial_carry(model, batch)
            would_halt_B = torch.zeros_like(carry.halted_B)
            for n in range(1, model.config.halt_max_steps + 1):
                carry, outputs = segment(model, carry, batch, training=False)
                would_halt_B = sums.add_segment(n, outputs, batch["labels"], would_halt_B)
            _, last = act_loss(
                outputs,
                batch["labels"],
                halted_B=carry.halted_B,
                steps_B=carry.steps_B,
                loss_type=loss_type,
                ignore_label=IGNORE_LABEL,
            )
            sums.last += last
            for name in save_outputs or []:
                saved.setdefault(name, []).append(_saved_output(name, batch, outputs))
        metrics |= {f"eval/{set_name}/{name}": value for name, value in sums.reduce(loader.num_examples).items()}
        if save_outputs and save_to is not None:
            save_to.mkdir(parents=True, exist_ok=True)
            save_file(
                {name: torch.cat(parts) for name, parts in saved.items()},
                save_to / f"{set_name}_rank{world.rank}.safetensors",
            )
    return metrics


EVAL_METRICS = ("exact_accuracy", "accuracy", "q_halt_accuracy", "steps", "halt_step", "lm_loss", "q_halt_loss")


class _EvalSums:
    """What evaluation counts of one set, on the device until the one collective at its end."""

    def __init__(self, num_segments: int, world: World) -> None:
        dtype = torch.float32 if world.device.type == "mps" else torch.float64
        self._world = world
        self.last = torch.zeros(len(METRICS), dtype=dtype, device=world.device)
        self._exact_at = torch.zeros(num_segments, dtype=dtype, device=world.device)
        self._halt_steps = torch.zeros(1, dtype=dtype, device=world.device)

    def add_segment(self, n: int, outputs: Outputs, labels_BS: Tensor, would_halt_B: Tensor) -> Tensor:
        """Count segment n = 1, 2, ...; returns which slots would have halted by now."""
        labelled_B, _, exact_B = correctness(outputs.logits_BSV, labels_BS, IGNORE_LABEL)
        self._exact_at[n - 1] += (labelled_B & exact_B).sum()
        self._halt_steps += (labelled_B & ~would_halt_B).sum()
        return would_halt_B | (outputs.q_halt_B > outputs.q_continue_B)

    def reduce(self, num_examples: int) -> dict[str, float]:
        sums = self._world.sum_(torch.cat([self.last, self._exact_at, self._halt_steps])).tolist()
        named = dict(zip(METRICS, sums, strict=False))
        *exact_at, halt_steps = sums[len(METRICS) :]
        count = named.pop("count")
        row = {name: named.pop(name) / num_examples for name in LOSS_SUMS if name != "q_continue_loss"}
        named.pop("q_continue_loss")
        if count > 0:
            row |= {name: value / count for name, value in named.items()} | {"halt_step": halt_steps / count}
            row |= {f"exact_accuracy_at_step/{n}": value / count for n, value in enumerate(exact_at, start=1)}
        return row


def _saved_output(name: SavedOutput, batch: Batch, outputs: Outputs) -> Tensor:
    sources: dict[str, Callable[[], Tensor]] = {
        "logits": lambda: outputs.logits_BSV,
        "predictions": lambda: outputs.logits_BSV.argmax(-1).int(),
        "q_halt": lambda: outputs.q_halt_B,
        "q_continue": lambda: outputs.q_continue_B,
    }
    return (sources[name]() if name in sources else batch[name]).cpu()


# ---- the loop --------------------------------------------------------------------------------------------


def fit(start: Start, data: Data, state: TrainState, world: World) -> None:
    """Train from the state's step to the last one, or until somebody asks to stop. Every rank."""
    config, checkpoint = start.config, start.checkpoint
    sampler = Sampler(
        list(data.train.sets.values()),
        seed=config.seed,
        epochs=config.epochs,
        global_batch_size=config.global_batch_size,
        first_step=state.step + 1,
        first_draw=checkpoint.state["draws"] if checkpoint else 0,
        repeat_first_batch=config.overfit_one_batch,
    )
    last_step = min(sampler.last_step, config.max_steps or sampler.last_step)
    with world.agree():
        require_plan(config, data, sampler, last_step)
    if state.step >= last_step:
        say(world, f"{config.run_path} is finished: it has done {state.step} of {last_step} steps")
        return

    run_id = checkpoint.state["wandb_run_id"] if checkpoint else uuid.uuid4().hex[:8]
    with world.agree():
        if world.is_main:
            prepare(config.run_path, yaml.safe_dump(config.model_dump(), sort_keys=False))
        metrics = Metrics(world, config.run_path, config.wandb, run_id, config.model_dump(), state.step, last_step)
    checkpointer = Checkpointer(config.run_path, world, config.keep_last_k)
    loader = TrainLoader(data.train, sampler, world)
    profiler = StepProfiler(config.profile and world.is_main, config.run_path, metrics.say)
    clock = StepClock()
    for line in [*start.notes, describe(config, data, state, last_step, world)]:
        metrics.say(line)

    def evaluation_due() -> bool:
        by_steps = config.eval_every_n_steps is not None and state.step % config.eval_every_n_steps == 0
        done, before = sampler.epochs_done(state.step), sampler.epochs_done(state.step - 1)
        by_epochs = config.eval_interval is not None and done // config.eval_interval > before // config.eval_interval
        return by_steps or by_epochs or state.step == last_step

    def checkpoint_due(evaluated: bool) -> bool:
        by_steps = config.checkpoint_every_n_steps is not None and state.step % config.checkpoint_every_n_steps == 0
        return by_steps or (evaluated and config.checkpoint_every_eval) or state.step == last_step

    def save(*, is_best: bool = False) -> None:
        state.sums.require_finite(checkpointer.last_good)
        tensors, optimizer_step = export_state(state.model, state.optimizer)
        assert state.carry is not None
        checkpointer.save(
            state.step,
            shared={
                "model": state.model.state_dict(),
                "optimizer": tensors,
                "progress": {"open_sums": world.gather_rows(state.sums.values[None])},
            },
            slots=world.slice_of(config.global_batch_size),
            carry=state.carry.tensors(),
            state={
                "step": state.step,
                "draws": sampler.draws_before(state.step + 1),
                "optimizer_step": optimizer_step,
                "open_steps": state.sums.num_steps,
                "best": state.best,
                "row": state.row,
                "fingerprint": data.fingerprint,
                "task": task_of(data.train),
                "wandb_run_id": run_id,
                "config": config.model_dump(),
            },
            is_best=is_best,
        )

    def finish_step(row: dict[str, float]) -> bool:
        """What may follow an update: evaluation, log, checkpoint, stop. True ends the run."""
        is_best = evaluated = False
        if data.test is not None and evaluation_due():
            state.sums.require_finite(checkpointer.last_good)
            outcome = evaluate(
                state.model,
                data.test,
                world,
                batch_size=config.eval_batch_size or config.global_batch_size,
                loss_type=config.arch.loss.loss_type,
                stop_requested=stop.requested,
                save_outputs=config.eval_save_outputs,
                save_to=config.run_path / "eval_outputs" / f"step_{state.step:08d}",
            )
            state.row = row if outcome is None else None
            if outcome is not None:
                evaluated, row = True, row | outcome
                is_best = improves(outcome, state.best, config)
                state.best = outcome[config.best_metric] if is_best and config.best_metric else state.best
        if row and state.row is None:
            with world.agree():
                metrics.write(state.step, row)
        stopping = world.any(stop.requested())
        if stopping or is_best or checkpoint_due(evaluated):
            save(is_best=is_best)
        if stopping:
            metrics.say(
                f"stopped by {stop.name or 'a signal to another rank'} at step {state.step}; resume=auto goes on"
            )
            if world.is_main:
                mark_stopped(config.run_path, stop.name or "a signal to another rank")
        return stopping

    try:
        with StopSignal() as stop:
            if state.row is not None and finish_step(
                state.row
            ):  # a stop came before this step's evaluation was through
                return
            for batch in clock.timing_data(loader.steps(state.step + 1, last_step)):
                state.step += 1
                multiplier = lr_multiplier(state.step, last_step, config.lr_warmup_steps, config.lr_min_ratio)
                state.carry, result = train_step(
                    state.model,
                    state.optimizer,
                    state.carry or initial_carry(state.model, batch),
                    batch,
                    lr=config.lr * multiplier,
                    puzzle_emb_lr=config.puzzle_emb_lr * multiplier,
                    puzzle_emb_weight_decay=config.puzzle_emb_weight_decay,
                    loss_type=config.arch.loss.loss_type,
                    global_batch_size=config.global_batch_size,
                    min_halt_steps_B=exploration(config, state.step, world),
                    world=world,
                )
                state.sums.add(state.step, result)
                profiler.step()
                metrics.advance(state.step)
                row: dict[str, float] = {}
                if state.step == 1 or state.step % config.log_interval == 0:
                    state.sums.require_finite(checkpointer.last_good)
                    row = state.sums.reduce(config.global_batch_size) | {"train/lr": config.lr * multiplier}
                    row |= clock.read(config.global_batch_size) | {"perf/max_memory_gb": max_memory_gb(world.device)}
                with clock.paused():
                    if finish_step(row):
                        break
    except Exception as error:
        error.add_note(f"at step {state.step}; {checkpointer.last_good}")
        metrics.close(failed=True)
        raise
    profiler.close()
    metrics.close()


def require_plan(config: PretrainConfig, data: Data, sampler: Sampler, last_step: int) -> None:
    """Raises ValueError where the run would have no step, or a best metric that evaluation never gives."""
    if last_step < 1:
        raise ValueError(
            f"{config.epochs} epochs draw {sampler.num_draws} examples, which don't fill one global batch of "
            f"{config.global_batch_size}; raise epochs or lower global_batch_size"
        )
    if config.best_metric and data.test is not None:
        possible = [f"eval/{name}/{metric}" for name in data.test.sets for metric in EVAL_METRICS]
        if config.best_metric not in possible:
            raise ValueError(
                f"best_metric={config.best_metric} is no metric of this data; take one of {', '.join(possible)}"
            )


def improves(outcome: dict[str, float], best: float | None, config: PretrainConfig) -> bool:
    """Whether this evaluation is the best so far. One of examples without labels has no accuracy, and improves
    nothing.
    """
    value = outcome.get(config.best_metric or "")
    if value is None:
        return False
    return best is None or (value > best if config.best_mode == "max" else value < best)


def exploration(config: PretrainConfig, step: int, world: World) -> Tensor:
    """This rank's share of the step's drawn minimal halting steps."""
    arch = config.arch
    drawn = draw_min_halt_steps(
        config.seed, step, config.global_batch_size, arch.halt_exploration_prob, arch.halt_max_steps
    )
    return drawn[world.slice_of(config.global_batch_size)].to(world.device, non_blocking=True)


def describe(config: PretrainConfig, data: Data, state: TrainState, last_step: int, world: World) -> str:
    """What is about to run, for the log's head."""
    network = sum(p.numel() for p in state.model.parameters())
    table = state.model.puzzle_embedding
    num_rows = f"{table.weight.numel():,} in the puzzle table" if table is not None else "no puzzle table"
    return (
        f"{config.run_path}: {config.arch.name}, {network:,} parameters and {num_rows}; "
        f"{data.train.metadata.total_groups:,} groups; {last_step:,} steps of {config.global_batch_size} sequences; "
        f"{world.size} x {world.device.type}"
    )


def say(world: World, text: str) -> None:
    if world.is_main:
        print(text, file=sys.stderr, flush=True)


def main(world: World) -> None:
    """The chapters, in order. Every rank."""
    start: Start | None = None
    with world.agree():
        if world.is_main:
            command = CommandLine.parse(sys.argv[1:], "pretrain", USAGE)
            if command.page:
                print(command.page)
            else:
                start = read_start(command.overrides)
    start = world.broadcast_object(start)
    if start is None:
        return
    config = start.config
    world = world.use_device(config.device, timeout_s=config.dist.timeout_s, deterministic=config.deterministic)
    data = open_data(config, world)
    state = build_train_state(start, data, world)
    fit(start, data, state, world)


if __name__ == "__main__":
    run(main)
