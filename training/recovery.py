"""Recovery from a step that went wrong: go back to a good checkpoint, and on without the step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from records.checkpoint.format import Progress
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
        self._progress: Progress | None = None  # of the newest state
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
        before, now = self._progress, state.progress
        if before is not None:
            now.skipped_steps = sorted({*now.skipped_steps, *before.skipped_steps})
            now.failed_saves = max(now.failed_saves, before.failed_saves)
            now.wandb_run_id = before.wandb_run_id
        self._progress = now
        return state

    def _go_back(self, bad: BadStep) -> None:
        """Find the last good checkpoint, and leave the step out. Every rank."""
        assert self._progress is not None, "its step went wrong, so there is a state"
        before, start, most = self._progress.skipped_steps, self._start, self._config.max_rewinds
        self._progress.skipped_steps = skipped = sorted({*before, bad.step})
        if len(skipped) > most:
            raise UserError(
                f"{bad.what}; steps {str(before)[1:-1]} were left out already (max_rewinds={most}); {bad.last_good}; "
                "go on with a lower lr or more lr_warmup_steps"
            ) from bad

        def find() -> Start:
            notes = [f"{bad.what}: going back (rewind {len(skipped)} of {most} at most)"]
            checkpoint = find_checkpoint(self._config.run_path, notes.append) or start.checkpoint
            where = f"{checkpoint.path} at step {checkpoint.state.step}" if checkpoint else "the start"
            notes.append(f"going on from {where}, without the batch of step {str(skipped)[1:-1]}")
            return Start(self._config, checkpoint, notes, goes_back=True)

        self._start = self._world.from_main(find)
