"""Recovery from a step that went wrong: go back to a good checkpoint, and on without the step."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from records.checkpoint.reader import find_checkpoint
from training.number_watch import BadStep
from training.resume import Start
from training.state import TrainState
from utils.compiled_code import is_of_compiler
from utils.errors import UserError
from utils.ranks.world import World


class Recovery:
    """Starts a run, and starts it again from its last good checkpoint when a step went wrong."""

    def __init__(self, start: Start, world: World) -> None:
        self._start, self._config, self._world = start, start.config, world
        self._skipped: list[int] = []
        self._failed_saves = 0
        # A weak reference, so that a state that went wrong frees its memory before the next state
        # is built.
        self._state: weakref.ref[TrainState] | None = None
        self._wandb_run_id = ""
        self.is_done = False

    @contextmanager
    def next_start(self) -> Iterator[Start]:
        """Give the checkpoint and the config to go on from. The run goes on inside. Every rank."""
        gc.collect()  # frees the tensors of the last start before this one takes as much memory
        try:
            yield self._start
            self.is_done = True
        except BadStep as bad:
            if self._config.on_nonfinite == "stop":
                raise
            self._go_back(bad)
        except Exception as error:
            if is_of_compiler(error):
                error.add_note("torch.compile failed; compile=false trains without it, also from a checkpoint")
            raise

    def with_history(self, state: TrainState) -> TrainState:
        """Add to a new state what is known since its checkpoint, and return it."""
        self._state, progress = weakref.ref(state), state.progress
        progress.skipped_steps = sorted({*progress.skipped_steps, *self._skipped})
        progress.failed_saves = max(progress.failed_saves, self._failed_saves)
        progress.wandb_run_id = self._wandb_run_id = self._wandb_run_id or progress.wandb_run_id
        return state

    def _go_back(self, bad: BadStep) -> None:
        """Find the last good checkpoint, and leave the step out. Every rank."""
        state = self._state() if self._state is not None else None
        assert state is not None, "its step went wrong, so there is a state"
        before, start, most = state.progress.skipped_steps, self._start, self._config.max_rewinds
        self._failed_saves, self._skipped = state.progress.failed_saves, sorted({*before, bad.step})
        if len(self._skipped) > most:
            raise UserError(
                f"{bad.what}; steps {str(before)[1:-1]} were left out already (max_rewinds={most}); {bad.last_good}; "
                "go on with a lower lr or more lr_warmup_steps"
            ) from bad
        with self._world.shared_errors():
            if self._world.is_main:
                notes = [f"{bad.what}: going back (rewind {len(self._skipped)} of {most} at most)"]
                checkpoint = find_checkpoint(self._config.run_path, notes.append) or start.checkpoint
                where = f"{checkpoint.path} at step {checkpoint.state.step}" if checkpoint else "the start"
                notes.append(f"going on from {where}, without the batch of step {str(self._skipped)[1:-1]}")
                start = Start(self._config, checkpoint, notes)
        self._start = self._world.broadcast_object(start)
