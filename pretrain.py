"""Train a recursive reasoning model, or a model of text: the whole run, in the order of events.

main             the whole run, again from a checkpoint if a step goes wrong
open_run         connect the devices, and open the data
build_state      the model in parts, its weights, its optimizers, and what a checkpoint has of both
train            the loop: a step, and what is due after it
stepper          what takes a step: train_step, or a CUDA graph that replays it
take_step        a step, and the row that is to be logged of it
train_step       one segment of every slot, or one pass over text, and an update of every weight
after_step       evaluate, log, save, stop

Every rank runs this file. The objects that it makes hide how many ranks there are. A docstring that
says "Every rank." marks a function that all ranks must call together.
"""
# B = slots of this rank, E = puzzle embedding size

from utils import openmp  # isort: skip # noqa: F401 - before torch

import sys
import uuid
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import record_function

from models import build_on_meta
from models.metric_sums import OpenSums
from models.parallel import parallelize
from models.puzzle_embedding import PUZZLE_TABLE
from models.text.objective import TextBatch
from optim.ema import EMA
from optim.loss_scale import LossScale
from optim.sparse_sign_sgd import sparse_sign_sgd_
from records.checkpoint.format import Progress
from records.folder import Launched
from records.heading import heading
from records.lock import RunLock
from records.metrics import Row
from training.compiling import with_compile
from training.data import Data
from training.dry_run import dry_run, smaller_step
from training.kernels import require_kernels
from training.number_watch import NumberWatch
from training.plan import Plan
from training.precision import with_forward_dtype
from training.recovery import Recovery
from training.resume import Start, read_start
from training.session import Session
from training.splits import open_data
from training.state import TrainState, optimizers_of, require_same_run
from training.step import StepResult, StepSettings, TrainStep
from training.step_graph import StepGraph, uses_cuda_graph
from training.swiglu_kernel import with_swiglu_kernel
from training.trained import initial_weights, weights_from, weights_of
from utils.batch import Batch
from utils.command_line import CommandLine
from utils.errors import UserError
from utils.out_of_memory import advising
from utils.perf.recording import AVERAGE
from utils.program import run
from utils.ranks.setup import connect_devices
from utils.ranks.world import World
from utils.stop import StopSignal
from utils.terminal import show, tell

USAGE = """
pretrain.py: train a recursive reasoning model, or a language model.

  python pretrain.py data_path=data/sudoku-extreme-1k-aug-1000 epochs=20000 eval_interval=2000    one process
  torchrun --nproc-per-node 8 pretrain.py experiment=sudoku_extreme_1k lr=2e-4                    eight
  python pretrain.py resume=auto checkpoint_path=checkpoints/<project>/<run>                      go on after a stop
  python pretrain.py resume=checkpoints/<project>/<run> run_name=branch lr=3e-5                   branch off
  python pretrain.py arch=gpt data_path=data/book global_batch_size=8192 max_steps=1000           a language model
  python pretrain.py --cfg job experiment=sudoku_extreme_1k                                       show, don't run
  python pretrain.py --dry-run arch=gpt_small vocab_size=50257 global_batch_size=65536 ranks=8    what it would take

Any key below is set with key=value, also inside groups (arch.hidden_size=128). experiment=path/to/my.yaml takes a
recipe from anywhere, and --config-dir DIR takes configs from a folder like config/. --dry-run starts nothing. It has
keys of its own: ranks (1 if not given), memory_gb of a device (80), tflops that a device computes (which gives hours),
and for data that are not there seq_len, vocab_size and num_puzzle_identifiers, or of text vocab_size alone.
"""

# ---- the run ------------------------------------------------------------------------------------


def main(world: World) -> None:
    """Train from a fresh state or from a checkpoint. Every rank."""
    overrides = world.from_main(lambda: read_overrides(sys.argv[1:], world.size))
    if overrides is None:
        return
    # From here on a signal only asks the run to stop, which it does after a step.
    answer = "stopping after the first step" if world.is_main else ""
    with StopSignal(answer, may_end=True) as stop, RunLock() as lock:
        start = world.from_main(lambda: read_start(overrides, lock, world.launch))
        world, data = open_run(start, world)
        start.notes[:0] = heading(sys.argv, start.config.run_path, world)
        recovery = Recovery(start, world)
        while not recovery.is_done:
            # With on_nonfinite=rewind, the context catches the error of a step that went wrong, and
            # the next start follows.
            with recovery.next_start() as start, advising(partial(smaller_step, start, data, world)):
                state = recovery.with_history(build_state(start, data, world))
                train(start, data, state, stop, lock, world)
            del state  # a state for the next start needs as much memory


def read_overrides(argv: list[str], num_ranks: int) -> list[str] | None:
    """Return the overrides of the command line; None after a page, such as --help. For rank 0."""
    command = CommandLine.parse(argv, "pretrain", USAGE, flags=["--dry-run"])
    if not command.page and "--dry-run" not in command.flags:
        return command.overrides
    for line in [command.page] if command.page else dry_run(command.overrides, num_ranks):
        show(line)
    return None


def open_run(start: Start, world: World) -> tuple[World, Data]:
    """Connect the devices, choose the dtype, and open the data. Every rank."""
    config = start.config
    with world.shared_errors():
        axes = config.parallel.axes(world.size)
    world = connect_devices(world, config.device, config.dist, axes=axes, deterministic=config.deterministic)
    # forward_dtype=auto is decided once: a resumed run keeps the dtype of its checkpoint.
    before = start.checkpoint.state.config["arch"]["forward_dtype"] if start.checkpoint else None
    start.config = config.model_copy(update={"arch": with_forward_dtype(config.arch, world, before=before)})
    return world, open_data(start.config, world)


# ---- the state ---------------------------------------------------------------------------------


def build_state(start: Start, data: Data, world: World) -> TrainState:
    """Build a fresh state, or that of the checkpoint. Every rank."""
    config, checkpoint = start.config, start.checkpoint
    with world.shared_errors():  # shapes only: no rank needs memory for the whole model
        model = build_on_meta(config.arch, **data.sizes.of_model(), num_parts=config.parallel.num_parts(world.size))
    whole = model.state_dict()
    if checkpoint is not None:
        with world.shared_errors():
            start.notes.extend(require_same_run(checkpoint, config, data))
            weights = weights_of(checkpoint, checkpoint.weights(), whole, config.arch)
    elif config.initial_weights:
        tokenizer = data.sizes.as_dict().get("tokenizer")  # puzzles have none
        weights = weights_from(config.initial_weights, whole, config.puzzle_table, world, tokenizer)
        start.notes.append(f"starting from the weights of {config.initial_weights}")
    else:
        weights = initial_weights(config.arch, data.sizes, config.seed, world)
    start.notes.extend(require_kernels(model, world))
    # compile=auto is decided once, like forward_dtype=auto.
    was_compiled = checkpoint.state.config.get("compile", False) if checkpoint else None
    config, notes = with_compile(config, model, data, world, before=was_compiled)
    assert config.compile != "auto"
    start.config = config
    start.notes.extend(notes)
    model.freeze("weights" if config.freeze_weights else config.freeze)
    layout = parallelize(
        model, config.parallel, world, num_microbatches=config.grad_accumulation, compile=config.compile
    )
    layout.load(weights)
    had_kernel = checkpoint.state.config.get("swiglu_kernel", False) if checkpoint else None
    start.config, notes = with_swiglu_kernel(config, layout, world, before=had_kernel)
    start.notes.extend(notes)
    slots = world.slice_of(config.num_slots)
    fresh = Progress(wandb_run_id=world.broadcast_object(uuid.uuid4().hex[:8]))
    state = TrainState(
        layout,
        optimizers_of(config, model),
        ema=EMA(model.trained_tensors()) if config.ema else None,
        loss_scale=LossScale() if config.arch.forward_dtype == "float16" else None,
        carry=layout.objective.fresh_carry(slots.stop - slots.start, world.device),
        sums=OpenSums(layout.objective.sums, world),
        watch=NumberWatch(layout.objective.sums, world, config.loss_spike),
        progress=fresh,
    )
    if checkpoint is not None:
        state.restore(checkpoint, config, world)
        if start.branches_off:  # a run of its own, which has no best yet
            state.progress = state.progress.of_branch(fresh.wandb_run_id)
    state.is_replayed = uses_cuda_graph(config, state, world)
    return state


# ---- the loop ----------------------------------------------------------------------------------


def train(start: Start, data: Data, state: TrainState, stop: StopSignal, lock: RunLock, world: World) -> None:
    """Train from the step of the state to the last one, or until somebody asks to stop. Every rank.

    Raises:
        BadStep: A step went wrong. Its metrics and checkpoints are on the disk.
    """
    progress = state.progress
    plan = Plan.make(start.config, data, progress, world)
    if plan.is_finished(progress):
        with world.shared_errors():
            if start.checkpoint is not None and start.branches_off:
                raise UserError(
                    f"{start.checkpoint.path} has done {progress.step} steps, so a branch of {plan.last_step} steps "
                    "has nothing to do; give a larger epochs or max_steps for the branch"
                )
            if world.is_main:
                run_path = start.config.run_path
                tell(f"{run_path} is finished: it has done {progress.step} of {plan.last_step} steps")
                (run_path / "stopped").unlink(missing_ok=True)
                Launched.note_finished(run_path, progress.step, plan.last_step)
        return
    with Session(start, data, state, plan, stop, lock, world) as session:
        # The progress holds a row if a stop or an error interrupted the evaluation of its step.
        if progress.pending_row is not None and after_step(session, progress.pending_row):
            return
        step = stepper(state, session.say, world)
        for batch in session.batches():  # which moves progress.step and progress.draws on
            row = take_step(session, step, batch, world)
            if after_step(session, row):
                break


# ---- one step ----------------------------------------------------------------------------------


def stepper(state: TrainState, say: Callable[[str], None], world: World) -> TrainStep:
    """Return what takes a step of this state: `train_step`, or a CUDA graph that replays it."""

    def step(batch: Batch | TextBatch, settings: StepSettings) -> StepResult:
        return train_step(state, batch, settings, world)

    return StepGraph(step, state, say, world) if state.is_replayed else step


def take_step(session: Session, step: TrainStep, batch: Batch | TextBatch, world: World) -> Row:
    """Train on a batch, and return the row of the step, empty if none is due. Every rank."""
    progress = session.state.progress
    if progress.step not in progress.skipped_steps:
        with session.measuring_communication():
            result = step(batch, StepSettings.at(progress.step, session.plan, world))
            session.add_to_sums(result.sums, result.grad_norm, result.divisor)
    return session.end_step()


def train_step(state: TrainState, batch: Batch | TextBatch, settings: StepSettings, world: World) -> StepResult:
    """Run what the objective asks for, and update all weights and their average once. Every rank.

    The objective of puzzles runs one segment of every slot. A slot takes its example of the batch
    only if its sequence halted in the step before (models.act.segment decides that). That of text
    runs one pass over packed rows (models/text/objective.py).

    The gradients are of the loss summed over the global batch and divided by its number of slots,
    or of labelled tokens. Only float16 makes the host wait for the device, because there the
    gradients decide whether the step is taken.
    """
    layout, loss_scale = state.layout, state.loss_scale
    scale = 1.0 if loss_scale is None else loss_scale.factor
    divisor = layout.objective.divisor(batch, settings.objective)
    # Leaves the gradients in `.grad`, summed over the ranks; those of puzzle rows are summed below.
    state.carry, outputs, sums = layout.forward_backward(state.carry, batch, settings.objective, loss_scale=scale)
    layout.require_gradients()
    rows = [part.puzzle_rows_BE for part in outputs if part.puzzle_rows_BE is not None]
    rows_grads = [part_BE.grad for part_BE in rows if part_BE.grad is not None]
    if loss_scale is not None:  # gradients of puzzle rows stay scaled: only their signs are used
        loss_scale.unscale_(weight.grad for weight in layout.model.parameters() if weight.grad is not None)
    grad_norm = layout.grad_norm()
    was_taken = loss_scale is None or loss_scale.update([grad_norm, *rows_grads], world)
    if was_taken:
        if settings.grad_clip is not None:
            layout.clip_(settings.grad_clip, grad_norm)
        table = layout.model.puzzle_embedding
        if table is not None and table.trainable:
            with record_function(PUZZLE_TABLE):
                assert state.carry is not None
                rows_are_finite = sparse_sign_sgd_(
                    table.weight,
                    state.carry.current["puzzle_identifiers"],  # of the examples that the slots now hold
                    torch.cat(rows_grads),
                    lr=settings.puzzle_emb_lr,
                    weight_decay=settings.puzzle_emb_weight_decay,
                    num_slots=divisor,
                    world=world,
                )
            # With freeze_weights, the rows have the only gradients: NaN in them must not go
            # unnoticed.
            grad_norm = torch.where(rows_are_finite, grad_norm, torch.nan)
        state.optimizers.step(settings.lr_factor)
        if state.ema is not None:
            with record_function(AVERAGE):
                state.ema.update(settings.ema_rate)
    else:
        grad_norm = torch.zeros_like(grad_norm)  # otherwise NumberWatch would take the overflow for a fault
    state.optimizers.zero_grad()
    return StepResult(outputs, sums, divisor, grad_norm, was_taken)


# ---- what may follow a step --------------------------------------------------------------------


def after_step(session: Session, row: Row) -> bool:
    """Evaluate, log and save, as is due, and return whether the run ends here. Every rank."""
    plan, progress = session.plan, session.state.progress
    was_pending = progress.pending_row is not None
    progress.pending_row = None  # session.evaluate sets it again if the evaluation is interrupted
    with session.clock.doing("other"):
        is_best = evaluated = False
        if plan.evaluation_due(progress.step):
            evaluation = session.evaluate(row, limited=not was_pending)
            row, evaluated, is_best = evaluation.row, evaluation.is_done, evaluation.is_best
        if row and progress.pending_row is None:
            session.log(row)
        stopping, data_failed, save_due = session.vote()
        out_of_patience = evaluated and plan.out_of_patience(progress)
        save_due |= is_best or plan.checkpoint_due(progress.step, evaluated=evaluated)
        if stopping or data_failed or out_of_patience or save_due:
            ends = stopping or data_failed or out_of_patience or progress.step >= plan.last_step
            session.save(is_best=is_best, is_last=ends)
        elif plan.replicas_check_due(progress.step):
            session.check_replicas()
        if data_failed:
            session.raise_data_error()
        if out_of_patience:
            session.say(
                f"ended at step {progress.step}: no better {plan.best_metric} than {progress.best} in "
                f"{progress.evaluations_since_best} evaluations"
            )
        elif stopping and (progress.step < plan.last_step or progress.pending_row is not None):
            session.mark_stopped()
        return stopping or out_of_patience


if __name__ == "__main__":
    run(main)
