"""Compare tensors by name and shape, before anything is loaded or overwritten."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Differences:
    """The names of tensors in which a source differs from the place that loads them."""

    missing: list[str]  # only the place has them; in its order
    unexpected: list[str]  # only the source has them; in its order
    reshaped: list[str]  # both have them, with different shapes; in the order of the place

    @property
    def first(self) -> str | None:
        """The first of all names in alphabetical order; None if nothing differs."""
        return min([*self.missing, *self.unexpected, *self.reshaped], default=None)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor. Of a DTensor it is the shape of the whole tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def compare_shapes(source: Shapes, place: Shapes) -> Differences:
    """Compare the tensors of a source with those of the place that loads them."""
    return Differences(
        missing=[name for name in place if name not in source],
        unexpected=[name for name in source if name not in place],
        reshaped=[name for name in place if name in source and tuple(source[name]) != tuple(place[name])],
    )
