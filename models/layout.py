"""How a model lies over the ranks of a run, and what training asks of it whichever way that is.

`Layout` itself is the whole model on one device, for one process. models/parallelize.py and models/pipeline.py hold the
others, each of which overrides what it does differently.
"""
# B = slots of this rank (of one part of them inside a part), S = tokens, V = vocabulary

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from models.act import Batch, Carry, segment
from models.base import RecursiveModel, SegmentOutput
from models.depth import Depth
from models.losses import Outputs
from utils.config import StrictModel
from utils.dist.config import Axes
from utils.dist.world import World

LossOf = Callable[[Outputs, Carry], tuple[Tensor, Tensor]]
"""Of a segment's outputs and the carry that it returned: what to differentiate, a sum over slots (divided by the global
batch already), and the sums of METRICS."""


class LayoutConfig(StrictModel):
    """What every strategy has; config/parallel/<name>.yaml explains its keys and holds the defaults."""

    puzzle_table: Literal["replicated", "sharded"]

    @abstractmethod
    def axes(self, num_ranks: int) -> Axes | None:
        """How the ranks are laid out; None where a single process needs no groups.

        Raises ValueError, naming what would fit, for degrees that don't multiply.
        """

    def require_parts(self, num_slots: int, num_parts: int) -> None:
        """Raises ValueError, naming what would fit, where the slots of ranks, all multiples of `num_slots`, don't split
        into so many microbatches.
        """
        if num_slots % num_parts:
            raise ValueError(
                f"grad_accumulation={num_parts} doesn't divide the {num_slots} slots of a rank; give "
                f"{' or '.join(map(str, nearest_divisors(num_slots, num_parts)))}, or another global_batch_size"
            )


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The four divisors of a number that are nearest to what was asked for, for messages."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:4])


class Layout:
    """A model on this rank's device, and how its gradients, their norm and its weights are had.

    Methods marked "every rank" are collectives where the strategy makes them so; here nothing is.
    """

    lockstep = False
    """Whether a forward is a collective already, so that all ranks must make the same number of them."""

    def __init__(self, model: RecursiveModel, world: World, *, num_microbatches: int = 1) -> None:
        """Args: num_microbatches: in how many parts `gradients` takes this rank's slots, one after another."""
        self.model = model
        self._called: Callable[..., SegmentOutput] = model  # for a forward with gradient
        self._world = world
        self._num_microbatches = num_microbatches
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(
        self, carry: Carry, batch: Batch, *, depth: Depth, min_halt_steps_B: Tensor | None, loss_of: LossOf
    ) -> tuple[Carry, list[Outputs], Tensor]:
        """One segment of each of this rank's slots, and the backward pass of its loss. Every rank.

        Returns:
            The new carry of all slots; the outputs of each part, detached but for the puzzle rows, leaves with a
            `.grad`; and the sums of METRICS of this rank's slots. A parameter's `.grad` is the sum over all ranks.
        """
        num_slots, num_parts = len(carry.steps_B), self._num_microbatches
        assert num_slots % num_parts == 0, "the config asks for whole parts"
        carries, all_outputs, all_sums = list[Carry](), list[Outputs](), list[Tensor]()
        for n in range(num_parts):
            part = slice(n * num_slots // num_parts, (n + 1) * num_slots // num_parts)
            with self._part(is_last=n == num_parts - 1):
                new_carry, outputs = segment(
                    self.model,
                    _carry_of(carry, part),
                    {name: tensor[part] for name, tensor in batch.items()},
                    training=True,
                    depth=depth,
                    min_halt_steps_B=None if min_halt_steps_B is None else min_halt_steps_B[part],
                    forward=self._called,
                )
                loss, sums = loss_of(outputs, new_carry)
                loss.backward()
            carries.append(new_carry)
            all_outputs.append(_detached(outputs))
            all_sums.append(sums)
        return _joined(carries), all_outputs, torch.stack(all_sums).sum(0)

    def _part(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one part; gradients travel with the last one only."""
        return nullcontext()

    def grad_norm(self) -> Tensor:
        """2-norm of the gradients of all trained parameters, wherever they lie: a scalar, equal on all ranks; 0 where
        nothing is trained. Every rank.
        """
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self._world.device)

    def clip_(self, largest: float, norm: Tensor) -> None:
        """Scale the gradients so that their norm, which is `norm` now, is at most `largest`."""
        torch.nn.utils.clip_grads_with_norm_(self._trained, largest, norm)

    def values_changed(self) -> None:
        """To be told when weights were overwritten in place: copies made of them are stale."""

    def whole_weights(self) -> dict[str, Tensor]:
        """The state dict that one process would have, complete on rank 0 (what others get is undefined). Every rank."""
        return self.model.state_dict()

    def to_portable(self, name: str, tensor: Tensor) -> Tensor:
        """What a checkpoint that any strategy reads can hold of a parameter, or of what is shaped and placed like it.
        Every rank.

        Args:
            name: of the parameter or buffer, in the state dict.
            tensor: that one itself, its average or a moment of it.
        """
        return tensor

    def from_portable(self, name: str, portable: Tensor, live: Tensor) -> None:
        """The inverse, into `live`, in place. Every rank."""
        live.copy_(portable)

    def compression_state(self) -> dict[str, Tensor]:
        """What compressing gradients carries from step to step, of this rank."""
        return {}

    def load_compression_state(self, tensors: dict[str, Tensor]) -> None:
        """The inverse. Raises ValueError where the tensors are of another compression or model."""


def _carry_of(carry: Carry, part: slice) -> Carry:
    return Carry.from_tensors({name: tensor[part] for name, tensor in carry.tensors().items()})


def _joined(carries: list[Carry]) -> Carry:
    if len(carries) == 1:
        return carries[0]
    parts = [carry.tensors() for carry in carries]
    return Carry.from_tensors({name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _detached(outputs: Outputs) -> Outputs:
    return replace(
        outputs,
        logits_BSV=outputs.logits_BSV.detach(),
        q_halt_B=outputs.q_halt_B.detach(),
        q_continue_B=outputs.q_continue_B.detach(),
    )
