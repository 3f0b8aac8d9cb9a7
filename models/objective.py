"""What a training step computes for a kind of model, and what it sums up on the way."""
# B = slots of this rank

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from models.carry import Carry, Outputs

CarryT = TypeVar("CarryT", bound=Carry | None)
"""What a step hands to the next: the carry of puzzles; None for text."""

BatchT = TypeVar("BatchT")
"""What the data offer a step: a Batch of puzzles, or a TextBatch."""

SettingsT = TypeVar("SettingsT")
"""What the config and the number of a step decide: ActSettings, or CallCounts of text."""

SLOTS = "slots"
"""As the divisor of a metric: the slots of the steps that were summed up."""


@dataclass(frozen=True)
class SumsSpec:
    """The sums of a step, and the metrics that they give.

    Attributes:
        means: for each metric, the sum that divides it, or SLOTS.
        losses: the metrics that are losses. The first one is watched for spikes.
    """

    names: tuple[str, ...]
    means: Mapping[str, str]
    losses: tuple[str, ...]


@dataclass(frozen=True)
class PartResult(Generic[CarryT]):
    """What one part of a step computed.

    Attributes:
        outputs: detached but for the puzzle rows, leaves that get a gradient; None for text.
        loss: a scalar with gradient. Parts and ranks add up to the loss of the step.
        sums: detached, in the order of SumsSpec.names.
    """

    carry: CarryT
    outputs: Outputs | None
    loss: Tensor
    sums: Tensor


class Objective(ABC, Generic[CarryT, BatchT, SettingsT]):
    """How a model is trained. No method makes the host wait for the device."""

    sums: ClassVar[SumsSpec]

    def compile(self) -> None:
        """Compile the loss of a part, if that is worth it."""

    @abstractmethod
    def fresh_carry(self, num_slots: int, device: torch.device) -> CarryT:
        """Return what the first step of a run is handed."""

    @abstractmethod
    def split(
        self, carry: CarryT, batch: BatchT, settings: SettingsT, num_parts: int
    ) -> Sequence[tuple[CarryT, BatchT, SettingsT]]:
        """Return the arguments of `run` for each of `num_parts` equal parts of a step."""

    @abstractmethod
    def run(
        self, carry: CarryT, batch: BatchT, settings: SettingsT, forward: Callable[..., Any] | None = None
    ) -> PartResult[CarryT]:
        """Run the forward pass of a part, by `forward` if a strategy has wrapped the model."""

    @abstractmethod
    def smallest_loss(self, forward: Callable[..., Any], device: torch.device) -> Tensor:
        """Return a scalar with a gradient for every weight, from the least work that gives one."""

    @abstractmethod
    def join(self, carries: Sequence[CarryT]) -> CarryT:
        """Return the carry of all parts together."""

    @abstractmethod
    def divisor(self, batch: BatchT, settings: SettingsT) -> int:
        """Return what the losses of a step are divided by, over all ranks and parts."""
