"""Compare tensors by name and shape, before anything is loaded or overwritten."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Differences:
    """What a source of tensors has otherwise than the place that they are to go to; names in order of the place."""

    missing: list[str]  # the source lacks them
    unexpected: list[str]  # only the source has them
    reshaped: list[str]  # both have them, with different shapes

    @property
    def first(self) -> str | None:
        """The alphabetically first name of all; None if nothing differs."""
        return min([*self.missing, *self.unexpected, *self.reshaped], default=None)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor. That of a DTensor is the shape of the whole."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def compare_shapes(source: Shapes, place: Shapes) -> Differences:
    """Compare the tensors of a source with the place that they are to go to."""
    return Differences(
        missing=[name for name in place if name not in source],
        unexpected=[name for name in source if name not in place],
        reshaped=[name for name in place if name in source and tuple(source[name]) != tuple(place[name])],
    )
