"""The interface of optional sinks, such as TensorBoard, and what is handed to them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, float]
"""The metrics of a step by name, such as train/lm_loss."""


@dataclass(frozen=True)
class Picture:
    """A picture that a sink may show.

    Attributes:
        caption: a few words below the picture.
        draw: draws the picture into a PNG file with this path.
    """

    caption: str
    draw: Callable[[Path], None]


class Sink(ABC):
    """Takes the metrics of a run. A sink that can't show pictures or keep checkpoints ignores them.

    Attributes:
        name: the name in messages.
        num_pictures: how many pictures the sink wants at each evaluation.
    """

    name: str
    num_pictures: int = 0

    @abstractmethod
    def write(self, step: int, row: Row) -> None:
        """Take the row of a step, which holds all its metrics."""

    def show(self, step: int, pictures: Sequence[Picture]) -> None:  # noqa: B027
        """Show pictures that belong to a step. Called before the row of the step is written."""

    def add_checkpoint(self, folder: Path, *, is_best: bool) -> None:  # noqa: B027
        """Take a checkpoint that is whole. Called in the thread that wrote it.

        The folder may be removed as soon as this returns.
        """

    @abstractmethod
    def close(self, *, failed: bool, at_most_s: float | None) -> None:
        """Finish what is under way.

        Args:
            failed: the run ends with a mistake.
            at_most_s: how long to wait for a service; None: as long as it takes.
        """
