"""A run of pretrain.py whose steps another program takes, one at a time."""

from contextlib import ExitStack
from pathlib import Path

from pretrain import build_state, open_run, read_overrides, stepper, take_step
from records.checkpoint.format import read_name
from records.lock import RunLock
from records.metrics import Row
from training.plan import Plan
from training.resume import read_start
from training.session import Session
from training.state import HostCopy
from utils.errors import UserError
from utils.ranks.world import World
from utils.stop import StopSignal


class SteppedRun:
    """A run that takes a step, evaluates and saves when it is told to. Every rank, in each method.

    Steps, metrics and checkpoints are those of pretrain.py with log_interval=1.
    """

    def __init__(self, overrides: list[str], world: World) -> None:
        """Begin a run, or go on with one (resume=...), in its folder."""
        with ExitStack() as opened:
            lock = opened.enter_context(RunLock())
            typed = world.from_main(lambda: read_overrides([*overrides, "log_interval=1"], world.size))
            if typed is None:
                raise UserError("--help, --cfg and --dry-run show a page; give them to pretrain.py")
            start = world.from_main(lambda: read_start(typed, lock, world.launch))
            self._world, data = open_run(start, world)
            self._state = build_state(start, data, self._world)
            plan = Plan.make(start.config, data, self._state.progress, self._world)
            # Nobody asks it to stop: signals belong to the program that takes the steps.
            session = Session(start, data, self._state, plan, StopSignal(), lock, self._world)
            self._session = opened.enter_context(session)
            self._opened = opened.pop_all()
        self._batches = self._session.batches()
        self._take = stepper(self._state, self._session.say, self._world)
        self._is_best = False
        # The row of the newest step, until it is logged. A step has one row in metrics.jsonl, which
        # also holds the metrics of its evaluation.
        self._row = self._state.progress.pending_row
        self._state.progress.pending_row = None

    @property
    def step(self) -> int:
        return self._state.progress.step

    def train_step(self) -> Row:
        """Take a step, and return its metrics, which are whole on rank 0.

        metrics.jsonl gets them when the next step begins, or at save() or close().
        """
        self._log()
        batch = next(self._batches, None)
        if batch is None:
            raise UserError(f"the run has done all {self._session.plan.last_step} steps; raise epochs or max_steps")
        self._is_best = False
        self._row = row = take_step(self._session, self._take, batch, self._world)
        _, data_failed, _ = self._session.vote()  # who takes the steps saves
        if data_failed:
            self._session.raise_data_error()
        return {"step": self.step, "epoch": self._session.plan.sampler.epoch(self.step), **row}

    def evaluate(self) -> Row:
        """Evaluate the test split, and return metrics.

        They join the row of the step in metrics.jsonl, unless it is written. The best step so far
        is saved at once, because no later save can have its weights.
        """
        if not self._session.config.evaluates:
            raise UserError("this config never evaluates; give eval_interval or eval_every_n_steps")
        try:
            done = self._session.evaluate(self._row or {}, limited=False)
        finally:
            self._state.progress.pending_row = None  # a checkpoint that the error has left behind holds it
        before = self._row or {}
        if self._row is not None:
            self._row = done.row
        self._is_best = self._is_best or done.is_best
        if done.is_best:
            self.save()
        return {"step": self.step, **{name: value for name, value in done.row.items() if name not in before}}

    def get_state(self) -> HostCopy:
        """Return everything that a step of this rank changes, in host memory."""
        return self._state.host_copy(self._session.config, self._world)

    def set_state(self, copy: HostCopy) -> None:
        """Go on bit for bit where the same rank of another run was."""
        self._log()
        step = copy.progress.step
        with self._world.shared_errors():
            if step < self.step:
                raise UserError(
                    f"the state is of step {step}, but {self._session.config.run_path} holds the steps up to "
                    f"{self.step} already; give the state to workers with another checkpoint_path"
                )
            if copy.progress.draws != self._session.plan.sampler.draws_before(step + 1):
                raise UserError("the state is of a run with another global_batch_size; give workers the same one")
        self._state.take_host_copy(copy, self._session.config, self._world)
        self._batches.close()
        self._batches = self._session.batches()
        self._is_best = False

    def save(self) -> Path:
        """Write a checkpoint, and return its folder, which pretrain.py resume=... accepts."""
        self._log()
        self._session.save(is_best=self._is_best)
        with self._session.clock.doing("save"):
            self._session.saves.finish_last()
        run = self._session.config.run_path
        return run / read_name(run / "latest")

    def close(self) -> None:
        try:
            self._log()
        finally:
            self._batches.close()
            self._opened.close()
            self._world.close()

    def _log(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            self._session.log(row)
