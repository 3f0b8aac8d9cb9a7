"""Optimizers whose step can be replayed: what differs from step to step may lie on the device."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor
"""A number that differs from step to step, or a float32 tensor () on the device that holds it."""


class Replayable(torch.optim.Optimizer):
    """An optimizer that tells the numbers of its next step, and takes them as floats or tensors.

    A captured step (training/step_graph.py) reads tensors, because a float would be captured with
    its value. With tensors, a product may be rounded once more.
    """

    @abstractmethod
    def numbers(self) -> list[float]:
        """Return what the next update computes from the rates and from the number of its step."""

    @abstractmethod
    def update(self, numbers: Iterator[Number]) -> None:
        """Update the parameters that have a gradient. The host does not wait for the device."""

    def count(self) -> None:
        """Count a step that was replayed, as `update` does on the host."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed once, outside"
        self.update(iter(self.numbers()))
