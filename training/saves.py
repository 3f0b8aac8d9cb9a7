"""Save checkpoints, and decide what a failed save means for the run (on_save_error)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from records.checkpoint.format import Progress
from records.checkpoint.writer import Checkpointer, FailedSave, Snapshot
from training.config import PretrainConfig
from utils.errors import UserError

# How long the run waits before it tries its last save again.
_PAUSE_S = 10.0


class Saves:
    """The saves of a run.

    With on_save_error=stop, a failed save ends the run. With on_save_error=continue (`may_fail`),
    the run goes on until max_failed_saves saves in a row have failed. All ranks see the same
    failures. Every method is for every rank.
    """

    def __init__(
        self, checkpointer: Checkpointer, config: PretrainConfig, progress: Progress, say: Callable[[str], None]
    ) -> None:
        self._checkpointer, self._progress, self._say = checkpointer, progress, say
        self.may_fail, self._most = config.on_save_error == "continue", config.max_failed_saves
        self._rewinds = config.on_nonfinite == "rewind"
        self._in_a_row: list[FailedSave] = []
        self._is_under_way = False
        self._best_on_disk = progress.best  # the value of the step that `best` names
        self._best_under_way: float | None = None  # the value of the step that is being saved, if it is the best

    def begin(
        self, snapshot: Snapshot, *, is_best: bool, first: Callable[[], None], then: Callable[[Path], None]
    ) -> None:
        """Begin a save, after `finish`. See Checkpointer.save."""
        self._checkpointer.save(snapshot, is_best=is_best, first=first, then=then)
        self._is_under_way, self._best_under_way = True, snapshot.state.best if is_best else None

    def look(self) -> None:
        """Count and report a failure of the save if it has ended already.

        This does not end a run that may go on: the last save may come next.
        """
        if not self._checkpointer.is_under_way():
            self._wait()

    def finish(self, *, last_comes: bool = False) -> None:
        """Wait for the save that is under way.

        Args:
            last_comes: the next save is the last of the run, which is tried however many saves have
                failed before it.
        """
        self._wait()
        if not last_comes:
            self.require_attempts_left()

    def require_attempts_left(self) -> None:
        """Raise UserError if max_failed_saves saves in a row have failed.

        Call this only where no last save follows, because the last save has attempts of its own.
        """
        if len(self._in_a_row) >= self._most:
            self._give_up(self._in_a_row[-1])

    def last_good(self) -> str:
        """Return a phrase that names the checkpoint to go on from, when a step went wrong.

        Without on_nonfinite=rewind, too many failed saves are no error here: the caller ends the
        run, and says what went wrong.
        """
        self.finish(last_comes=not self._rewinds)
        return self._checkpointer.last_good

    def finish_last(self) -> None:
        """Wait for the last save of the run, and try it again if it may fail."""
        for attempt in range(1, self._most + 1):
            try:
                self._checkpointer.wait()
                return
            except FailedSave as failed:
                if not self.may_fail:
                    raise
                if attempt == self._most:
                    self._give_up(failed)
                self._say(
                    f"WARNING: {failed.what}; {failed.last_good}; this is the last checkpoint of the run: trying "
                    f"again in {_PAUSE_S:g} s (attempt {attempt + 1} of {self._most}); free the disk"
                )
                time.sleep(_PAUSE_S)
                self._checkpointer.try_again()

    def _wait(self) -> None:
        best, self._best_under_way = self._best_under_way, None
        was_under_way, self._is_under_way = self._is_under_way, False
        try:
            self._checkpointer.wait()
        except FailedSave as failed:
            if not self.may_fail:
                raise
            self._progress.failed_saves += 1
            self._in_a_row.append(failed)
            lost = ""
            if best is not None:
                # The weights of this step are lost. A later step that is better than the one on the
                # disk must become `best`, although it may be worse than the lost one.
                self._progress.best = self._best_on_disk
                lost = "; it was the best step, and `best` stays as it is"
            self._say(
                f"WARNING: {failed.what}{lost}; {failed.last_good}; training goes on (failed saves in a row: "
                f"{len(self._in_a_row)}; the run ends at {self._most}); free the disk"
            )
        else:
            if was_under_way:
                self._in_a_row.clear()
                self._best_on_disk = self._best_on_disk if best is None else best

    def _give_up(self, failed: FailedSave) -> NoReturn:
        raise UserError(
            f"{failed.what}; {self._most} saves in a row failed (max_failed_saves); {failed.last_good}; "
            "free the disk, then resume"
        ) from failed
