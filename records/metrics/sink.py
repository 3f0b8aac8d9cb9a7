"""What is handed to optional sinks, such as TensorBoard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, float]
"""The metrics of a step by name, such as train/lm_loss."""


@dataclass(frozen=True)
class Picture:
    """A picture with its caption, and a function that draws it into a PNG file."""

    caption: str
    draw: Callable[[Path], None]


class Sink:
    """Takes what Metrics hands on. By default it ignores pictures and checkpoints."""

    name: str
    num_pictures: int = 0

    def write(self, step: int, row: Row) -> None:
        raise NotImplementedError

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        pass

    def add_checkpoint(self, folder: Path, *, is_best: bool) -> None:
        pass

    def close(self, *, failed: bool, at_most_s: float | None) -> None:
        raise NotImplementedError
