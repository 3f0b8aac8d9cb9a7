"""What a run has open while it trains: folder, data loader, sinks and clocks."""

import socket
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from models.text.objective import TextBatch
from records.checkpoint.writer import Checkpointer
from records.folder import Launched, mark_stopped
from records.lock import RunLock
from records.metrics import Metrics, Row
from records.metrics.events import Events
from training.config import PretrainConfig
from training.data import Data, num_parameters
from training.evaluation import EvalOptions
from training.flops import FlopsGauge, FlopsOfRun
from training.goodput import Past, best_interval_s
from training.kinds import kind_of_arch
from training.laps import Interrupts
from training.number_watch import BadStep
from training.plan import Plan
from training.precision import multiplies_bfloat16
from training.resume import Start, prepare
from training.saves import Saves
from training.state import TrainState
from utils.batch import Batch
from utils.errors import UserError
from utils.out_of_memory import advising, half
from utils.overrides import typed_override
from utils.perf.clocks import RunClock
from utils.perf.ranks import RankSampler
from utils.perf.trace import StepProfiler
from utils.ranks.replicas import require_same_replicas
from utils.ranks.world import World
from utils.stop import StopSignal
from utils.text import for_shell, in_words, one_line

_LONG_EVALUATION_S, _LONG_RUN_S = 10.0, 86_400.0


@dataclass(frozen=True)
class Evaluation:
    """How an evaluation ended."""

    row: Row  # the row of the step, with the metrics of the evaluation
    is_done: bool  # False: a stop interrupted it, and the row waits in the progress
    is_best: bool = False


class Session:
    """A run from the moment when it may write into its folder to its end.

    Leaving this context finishes the checkpoint that is under way and closes the sinks, in the way
    that suits the end: done, a mistake of the user, or a fault.
    """

    def __init__(
        self, start: Start, data: Data, state: TrainState, plan: Plan, stop: StopSignal, lock: RunLock, world: World
    ) -> None:
        """Open everything. Every rank."""
        self.config, self.state, self.plan = start.config, state, plan
        self._data, self._stop, self._world = data, stop, world
        config, progress = start.config, state.progress
        config.profile.require_ranks(world.size)
        past = Past({}, time.time(), 0.0, 0)  # of rank 0, whose clock counts
        with world.shared_errors():
            self._loader = plan.kind.loader(config, data.train, plan.sampler, plan.augmentation, world)
            if world.is_main:
                past = Past.of(config.run_path, progress, goes_back=start.goes_back)
                prepare(start, lock, world.launch)
                Launched(
                    last_step=plan.last_step,
                    ranks=world.size,
                    device=world.device.type,
                    host=socket.gethostname(),
                    launch=world.launch.identity,
                    began_at=past.began_at,
                    faults=past.faults,
                    since=past.since,
                    spent_s=past.spent_s,
                ).write(config.run_path)
                world.note_beginning()
            self._checkpointer = Checkpointer(
                config.run_path, world, config.keep_last_k, most_file_bytes=config.checkpoint_file_gb * 1e9
            )
            # A step whose evaluation is pending has no row yet. If its row is there, the run died
            # after it finished the evaluation, which is now repeated.
            logged = progress.step if progress.pending_row is None else progress.step - 1
            self._metrics = Metrics(
                world,
                config.run_path,
                config.wandb,
                config.tensorboard,
                config.trackio,
                {
                    "id": progress.wandb_run_id,
                    "project": config.project_name,
                    "name": config.run_name,
                    "config": config.model_dump(),
                },
                logged,
                plan.last_step,
            )
        self.say = self._metrics.say
        self._events = (
            Events(config.on_event, str(config.run_path), self.say) if config.on_event and world.is_main else None
        )
        self.saves = Saves(self._checkpointer, config, progress, self.say)
        self._profiler = StepProfiler(config.profile, config.run_path, self.say, world)
        mine = world.slice_of(config.num_slots)
        self._ranks = RankSampler(
            None if config.profile.enabled else config.perf_every_n_steps,  # there is one profiler at a time
            world,
            num_examples=config.global_batch_size // config.num_slots * (mine.stop - mine.start),
            unit=plan.kind.unit,
            max_share=config.perf_max_share,
            say=self.say,
        )
        flops = FlopsOfRun(config, data.sizes, plan.last_step)
        self._flops = FlopsGauge(flops, state.model.dtype, progress.step, world)
        self.clock = RunClock(past.spent_s, past.since, config.eval_max_share)
        self._faults, self._num_saves, self._save_before_s = past.faults, 0, past.spent_s.get("save", 0.0)
        self._data_error: UserError | None = None  # why this rank has no next batch
        for line in [*start.notes, describe(config, data, state, plan, world), *warnings_of(plan, state, world)]:
            self.say(line)
        if past.is_restart:
            self._tell("restarted", f"at step {progress.step}, after {past.faults} faults in all")

    def __enter__(self) -> "Session":
        return self

    def _tell(self, event: str, text: str) -> None:
        if self._events is not None:
            self._events.tell(event, self.state.progress.step, text)

    # ---- one step ----

    def batches(self) -> Generator[Batch | TextBatch, None, None]:
        """Give this rank's slots of each batch, and move the progress on. Every rank."""
        progress = self.state.progress
        batches: Iterator[Batch | TextBatch] = self._loader.batches(range(progress.step + 1, self.plan.last_step + 1))
        with self.clock.doing("data"), self._world.shared_errors():
            if (mistake := self._loader.next_mistake()) is not None:
                raise mistake
        for batch in self.clock.timing(batches):
            progress.step += 1
            progress.draws += self.plan.sampler.draws_per_step
            yield batch

    def measuring_communication(self) -> AbstractContextManager[None]:
        """Measure in one step of every few what the ranks do inside."""
        return self._ranks.step(self.state.progress.step)

    def add_to_sums(self, metric_sums: Tensor, grad_norm: Tensor, divisor: int) -> None:
        """Add a step to the open sums, whose losses were divided by `divisor`, over all ranks."""
        state = self.state
        state.sums.add(metric_sums, grad_norm)
        state.watch.add(state.progress.step, divisor, metric_sums, grad_norm)
        state.progress.open_steps += 1
        state.progress.open_slots += self.config.global_batch_size

    def end_step(self) -> Row:
        """Return the row of the step, which is empty if none is due. Every rank."""
        step = self.state.progress.step
        self._stop.answer, self._stop.may_end = "stopping after this step" if self._world.is_main else "", False
        self._profiler.step()
        self._metrics.advance(step)
        row = self._row() if self.plan.log_due(step) else {}
        with self.clock.doing("data"):
            self._data_error = self._loader.next_mistake()
        return row

    def _row(self) -> Row:
        config, state, progress = self.config, self.state, self.state.progress
        state.watch.require_no_bad_step(self.saves.last_good)
        self.saves.look()  # a failed save is noticed here, even if the next save is hours away
        row = state.sums.reduce(progress.open_steps, progress.open_slots)
        progress.open_steps = progress.open_slots = 0
        row["train/lr"] = config.lr * self.plan.lr_multiplier(progress.step) * self.plan.lr_scale
        if state.loss_scale is not None:
            row["train/loss_scale"] = float(state.loss_scale.tensors()["scale"])
        if progress.skipped_steps:
            row["train/skipped_steps"] = len(progress.skipped_steps)
        if progress.failed_saves:
            row["train/failed_saves"] = progress.failed_saves
        row |= self.clock.row(config.global_batch_size, self.plan.kind.unit)
        with self.clock.doing("other"):
            row |= self._flops.row(progress.step, progress.skipped_steps, row["perf/step_ms"])
        return row | self._ranks.row()

    # ---- what may follow a step ----

    def evaluate(self, row: Row, *, limited: bool) -> Evaluation:
        """Evaluate the test split, with the averaged weights if there are any. Every rank.

        Args:
            row: what is logged of this step already.
            limited: keep to eval_max_share. An evaluation that a stop put off is not limited, since
                this process has no training time yet to take a share of.
        """
        config, kind, test = self.config, self.plan.kind, self._data.test
        state, progress = self.state, self.state.progress
        assert test is not None
        with self.clock.doing("steps"):  # which the device may still have to do
            state.watch.require_no_bad_step(self.saves.last_good)
        if (self.clock.last_evaluation_s or _LONG_EVALUATION_S) >= _LONG_EVALUATION_S:  # a silent run looks hung
            num_examples = sum(test.num_examples(config.eval_max_examples).values())
            self.say(f"step {progress.step}: evaluating {num_examples:,} examples")
        options = EvalOptions(
            config.eval_batch_size or config.global_batch_size,
            config.eval_max_examples,
            config.target_only,
            adaptive=config.eval_adaptive,
            save_outputs=config.eval_save_outputs,
            save_to=config.run_path / "eval_outputs" / f"step_{progress.step:08d}",
        )
        sample = kind.sample(self._metrics.num_pictures)
        try:
            most = max(test.num_examples(config.eval_max_examples).values())
            smaller = half("eval_batch_size", min(options.batch_size, most))
            graph = "; cuda_graph=false leaves it the memory of the graph" if state.is_replayed else ""
            advice = advising(lambda: smaller + graph)
            with self.clock.evaluating(limited=limited) as deadline, state.averaged_weights(), advice:
                interrupts = Interrupts(state.layout.lockstep, self._stop, deadline)
                metrics = kind.evaluate(
                    state.model, test, self._world, options, self.plan.evaluators, interrupts, sample
                )
        except UserError:
            progress.pending_row = row
            self.save(is_best=False, is_last=True)
            raise
        if metrics is None:
            progress.pending_row = row
            return Evaluation(row, is_done=False)
        if self._world.is_main:
            try:
                if pictures := sample.show(test, config.run_path, progress.step):
                    self._metrics.show(progress.step, pictures)
            except OSError as error:  # the run goes on without them
                self.say(f"the answers of step {progress.step} can't be written ({error.strerror})")
        row = row | metrics | {"perf/eval_share": self.clock.shares()["evaluation"]}
        if not deadline.was_met:  # a result on some of the examples may be luck
            self.say(f"step {progress.step}: no time for all of the evaluation (eval_max_share)")
            return Evaluation(row, is_done=True)
        if self.saves.may_fail:  # a best step that could not be saved must not count as the best any more
            self.saves.finish(last_comes=True)
        is_best = self.plan.update_best(metrics, progress)
        if is_best:
            self._tell("record", f"{self.plan.best_metric} is {progress.best:.6g}")
        return Evaluation(row, is_done=True, is_best=is_best)

    def log(self, row: Row) -> None:
        """Write a row to all sinks. Every rank.

        With on_save_error=continue, a row that the disk refuses waits for the next save.
        """
        step = self.state.progress.step
        if self._events is not None:
            self._events.row(step)
        with self._world.shared_errors():
            self._metrics.write(step, {"epoch": self.plan.sampler.epoch(step), **row}, may_wait=self.saves.may_fail)

    def vote(self) -> tuple[bool, bool, bool]:
        """Return whether a rank was asked to stop, one lacks a batch, a save is due. Every rank.

        The save is that of checkpoint_every_n_steps=auto, for which the clock of rank 0 decides.

        Raises:
            UserError: max_failed_saves saves in a row have failed, and the run does not end at this
                step otherwise. If it does, its last save is tried.
        """
        plan, progress = self.plan, self.state.progress
        stopping, data_failed, save_due = self._world.any_of(
            self._stop.requested(), self._data_error is not None, self._world.is_main and self._save_due()
        )
        if not (stopping or data_failed or plan.out_of_patience(progress) or progress.step >= plan.last_step):
            self.saves.require_attempts_left()
        return stopping, data_failed, save_due

    def _save_due(self) -> bool:
        if self.config.checkpoint_every_n_steps != "auto":
            return False
        if not self._num_saves:  # the first one tells what a save takes
            return True
        spent_s = self.clock.spent_s()
        save_s = (spent_s["save"] - self._save_before_s) / self._num_saves
        return time.time() - self.state.progress.spent_until > best_interval_s(
            save_s, sum(spent_s.values()), self._faults
        )

    def save(self, *, is_best: bool, is_last: bool = False) -> None:
        """Begin to write a checkpoint of this step, if no step went wrong. Every rank.

        Args:
            is_last: no other save follows, because the run ends.
        """
        with self.clock.doing("steps"):
            self.state.watch.require_no_bad_step(self.saves.last_good)
        with self.clock.doing("save"):
            self.check_replicas()  # a checkpoint of one rank's tensors would make its errors everybody's
            self.saves.finish(last_comes=is_last)  # its failure changes the progress, which the snapshot holds
            progress = self.state.progress
            progress.spent_s, progress.spent_until = self.clock.spent_s(), time.time()
            snapshot = self.state.snapshot(self.config, self._data, self._world)
            upload = partial(self._metrics.add_checkpoint, is_best=is_best)
            self.saves.begin(snapshot, is_best=is_best, first=self._metrics.write_waiting, then=upload)
        self._num_saves += 1

    def check_replicas(self) -> None:
        """Compare the tensors that ranks hold alike, if the config asks for it. Every rank."""
        if self.config.check_replicas_every_n_steps is not None:
            tensors, off = self.state.replicated_tensors(), "check_replicas_every_n_steps=null"
            require_same_replicas(tensors, self.state.progress.step, self._world, off)

    def raise_data_error(self) -> None:
        """Raise what keeps a rank from its next batch as a UserError on all ranks. Every rank."""
        with self._world.shared_errors():
            if self._data_error is not None:
                raise self._data_error

    def mark_stopped(self) -> None:
        """Write the marker of a graceful stop after the checkpoint is whole. Every rank."""
        reason = self._stop.name or "a signal to another rank"
        with self.clock.doing("save"):
            self.saves.finish_last()
        self._tell("stopped", reason)
        self.say(f"stopped by {reason} at step {self.state.progress.step}; resume=auto goes on from here")
        with self._world.shared_errors():
            if self._world.is_main:
                mark_stopped(self.config.run_path, reason)

    # ---- the ways out ----

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                with self.clock.doing("save"):
                    self.saves.finish_last()
            except Exception as failed:
                self._end_after(failed)
                raise
            if self._world.is_main:
                with suppress(UserError):  # on a full disk, only the account of the time is less exact
                    Launched.note_end(self.config.run_path)
            self.say(where_the_time_went(self.clock))
            if self.plan.is_finished(self.state.progress):
                self._tell("ended", where_the_time_went(self.clock))
                self.say(what_next(self.config, self._data))
            if self._events is not None:
                self._events.close()
            self._profiler.close()
            self._metrics.close()
        elif isinstance(error, Exception):
            self._end_after(error)

    def _end_after(self, error: Exception) -> None:
        self._tell("not_finite" if isinstance(error, BadStep) else "failed", one_line(error))
        if self._events is not None:
            self._events.close(at_most_s=2.0)
        if not isinstance(error, UserError):  # a fault: sinks stay open, because nobody would wait for them
            self._checkpointer.settle(error)
            error.add_note(f"at step {self.state.progress.step}; {self._checkpointer.last_good}")
            return
        try:
            self.saves.finish_last()  # the save that is under way is still of use
        except UserError as failed:
            raise UserError(f"{error}; and {failed}") from failed
        finally:
            self._profiler.close()
            rewinds = isinstance(error, BadStep) and self.config.on_nonfinite == "rewind"
            # The other ranks wait meanwhile, for the rewind or for the error message.
            at_most_s = min(60.0, self._world.timeout.total_seconds() / 2)
            self._metrics.close(failed=not rewinds, at_most_s=at_most_s)


def where_the_time_went(clock: RunClock) -> str:
    """Return a line for the end of a run: its goodput, and the shares of what else took time."""
    shares = clock.shares()
    rest = sorted(((share, name) for name, share in shares.items() if name != "steps" and share >= 5e-4), reverse=True)
    return f"goodput {shares['steps']:.1%} of {in_words(sum(clock.spent_s().values()))}: " + ", ".join(
        f"{name} {share:.1%}" for share, name in rest
    )


def what_next(config: PretrainConfig, data: Data) -> str:
    """Return the folder of a run that has ended, and the commands that use its model."""
    trained = typed_override("checkpoint", str(config.run_path))
    question = kind_of_arch(config.arch).question(data.test or data.train)
    return (
        f"done; {config.run_path} has the model\n"
        f"python evaluate.py {trained}\n"
        f"python solve.py {trained} {for_shell([question])}\n"
        f"python view.py {for_shell([str(config.run_path)])}"
    )


def describe(config: PretrainConfig, data: Data, state: TrainState, plan: Plan, world: World) -> str:
    """Return the line at the head of the log that says what is about to run."""
    network = num_parameters(config, data.sizes)  # a rank of a pipeline holds some of them
    data_in_words, batch_in_words = plan.kind.description(config, data.train, plan.sampler, state.model)
    drawn = f", {plan.augmentation.description} drawn on the fly" if plan.augmentation is not None else ""
    return (
        f"{config.run_path}: {config.arch.name}, {network:,} parameters{data_in_words}{drawn}; "
        f"{plan.last_step:,} steps of {batch_in_words}; {config.parallel.name}, {world.size} x {world.device.type}"
    )


def warnings_of(plan: Plan, state: TrainState, world: World) -> list[str]:
    """Return what a user would otherwise find out late, and the way out."""
    config, lines = plan.config, list[str]()
    if config.lr and config.lr_warmup_steps >= plan.last_step:
        lines.append(
            f"warning: the warm-up (lr_warmup_steps={config.lr_warmup_steps}) is as long as the run of "
            f"{plan.last_step} steps or longer, so that the learning rate stays below lr={config.lr:g}; set "
            f"lr_warmup_steps={plan.last_step // 10}"
        )
    if state.model.dtype == torch.bfloat16 and world.device.type == "cpu" and not multiplies_bfloat16(world.device):
        lines.append(
            "warning: this CPU emulates bfloat16, which takes many times as long; set arch.forward_dtype=float32"
        )
    # Every weight meets every position, forward and twice backward. A thread does less a second.
    flops = 6 * sum(weight.numel() for weight in state.model.parameters()) * state.model.positions_per_slot
    run_s = plan.last_step * config.global_batch_size * flops / (1e11 * torch.get_num_threads() * world.size)
    if world.device.type != "cuda" and run_s > _LONG_RUN_S:
        lines.append(
            f"warning: this run needs more than {in_words(run_s)} on this device; try experiment=demo, which trains a "
            "small model in a minute"
        )
    return lines
