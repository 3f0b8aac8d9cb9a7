"""Write a run's metrics to all sinks. Rank 0 writes. On other ranks every call does nothing.

row_file            metrics.jsonl, the truth about the run, which a resumed run reads again
progress            the terminal, or a log
weights_and_biases  Weights & Biases: optional
tensorboard         TensorBoard: optional
trackio             Trackio: optional
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from records.metrics.progress import Progress
from records.metrics.row_file import RowFile
from records.metrics.sink import Picture, Row, Sink
from records.metrics.tensorboard import TensorBoard
from records.metrics.trackio import Trackio
from records.metrics.weights_and_biases import WandbConfig, start_wandb
from utils.errors import UserError
from utils.files import writing
from utils.ranks.world import World

__all__ = ["Metrics", "Picture", "Row", "WandbConfig"]


class Metrics:
    """The sinks of a run. Rows after `first_step` are removed, because the run repeats the steps.

    Args:
        wandb_run: the id, name, project and config of the W&B run. A resumed run has the same id.
    """

    def __init__(
        self,
        world: World,
        run: Path,
        wandb: WandbConfig,
        tensorboard: bool,
        trackio: bool,
        wandb_run: dict[str, Any],
        first_step: int,
        last_step: int,
    ) -> None:
        self._rows: RowFile | None = None
        self._progress: Progress | None = None
        self._optional: list[Sink] = []
        if world.is_main:
            if tensorboard:
                self._optional.append(TensorBoard(run / "tensorboard", first_step))
            if trackio:
                self._optional.append(Trackio(wandb_run))
            self._rows, self._progress = RowFile(run / "metrics.jsonl", first_step), Progress(first_step, last_step)
            if started := start_wandb(wandb, wandb_run, run, self._rows.kept, self.say):
                self._optional.append(started)
        self._working = self._optional  # the optional sinks that have taken every row so far

    @property
    def num_pictures(self) -> int:
        """How many pictures the sinks of this rank want at each evaluation."""
        return max([sink.num_pictures for sink in self._working], default=0)

    def write(self, step: int, row: Row, *, may_wait: bool = False) -> None:
        """Write the row of a step, which holds all its metrics.

        If `may_wait`, a row that the disk refuses waits for the next row or `write_waiting`.
        """
        if self._rows is None or self._progress is None:
            return
        try:
            with writing(self._rows.path):
                self._rows.write(step, row)
        except UserError as error:
            if not may_wait:
                raise
            self.say(f"WARNING: {error}; the row waits in memory")
        self._progress.write(step, row)
        what = f"step {step}; metrics.jsonl goes on without it"
        self._working = self._try(self._working, lambda sink: sink.write(step, row), what)

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        """Show the pictures of a step, before its row is written."""
        wanting = [sink for sink in self._working if sink.num_pictures and pictures]
        self._try(wanting, lambda sink: sink.show(step, pictures[: sink.num_pictures]), f"the pictures of step {step}")

    def add_checkpoint(self, folder: Path, *, is_best: bool) -> None:
        """Hand over a whole checkpoint in the thread that wrote it. It may be removed after."""
        self._try(self._working, lambda sink: sink.add_checkpoint(folder, is_best=is_best), folder.name)

    def write_waiting(self) -> None:
        """Write the rows that wait, before a checkpoint which would lose them, or raise OSError."""
        if self._rows is not None:
            self._rows.write_waiting()

    def _try(self, sinks: Sequence[Sink], do: Callable[[Sink], None], what: str) -> list[Sink]:
        """Do something with each of the sinks. Say which of them failed, and return the others."""
        working = []
        for sink in sinks:
            try:
                do(sink)
                working.append(sink)
            except Exception as error:  # no failure of a package, a service or the network may end the run
                self.say(f"{sink.name} does not take {what} ({type(error).__name__}: {error})")
        return working

    def advance(self, step: int) -> None:
        """Move the progress bar: this step is done."""
        if self._progress is not None:
            self._progress.advance(step)

    def say(self, text: str) -> None:
        """Show a line of text above the progress bar."""
        if self._progress is not None:
            self._progress.say(text)

    def close(self, *, failed: bool = False, at_most_s: float | None = None) -> None:
        """Close all sinks, also those that failed before. Wait for W&B at most `at_most_s`.

        `failed` means that the run ends with a mistake. Not called after a fault.
        """
        if self._rows is not None and self._progress is not None:
            with suppress(OSError):  # a failed save has said so; these rows are of steps after the last good one
                self._rows.write_waiting()
            self._progress.close()
        self._try(self._optional, lambda sink: sink.close(failed=failed, at_most_s=at_most_s), "the end of the run")
