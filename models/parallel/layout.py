"""How a model lies over the ranks of a run, and what training asks of any such layout.

`Layout` itself is the whole model in one process. Each strategy overrides what it does differently.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from models.act import ActObjective
from models.carry import Outputs
from models.model import Model
from models.objective import BatchT, CarryT, Objective, PartResult, SettingsT
from models.parallel.requirements import nearest_divisors, require_gradients
from models.text.objective import TextObjective
from utils.config import StrictModel
from utils.errors import UserError
from utils.perf.recording import BACKWARD, FORWARD
from utils.ranks.config import Axes
from utils.ranks.world import World

Compiled = bool | Literal["segment"]
"""True: each stack of blocks is one graph. segment: so is the forward pass of a training step.

DDP then gets all gradients after the backward pass. Evaluations call the stacks, because their
number of slots changes.
"""

OBJECTIVES: dict[str, Callable[[Any], Objective[Any, Any, Any]]] = {"puzzles": ActObjective, "text": TextObjective}


class LayoutConfig(StrictModel):
    """The options that every strategy has, as config/parallel/<name>.yaml explains them."""

    puzzle_table: Literal["replicated", "sharded"]

    @abstractmethod
    def axes(self, num_ranks: int) -> Axes | None:
        """Return how the ranks are laid out, or None where a single process needs no groups."""

    def num_parts(self, num_ranks: int) -> int:
        """Return into how many parts the ranks divide the model, or nearly so."""
        return num_ranks

    def num_microbatches(self, grad_accumulation: int) -> int:
        """Return into how many microbatches a rank cuts what it has of a step."""
        return grad_accumulation

    def require_parts(
        self, num_slots: int, num_parts: int, *, key: str = "global_batch_size", slots: str = "slots"
    ) -> None:
        """Raise UserError if a rank's slots don't split into `num_parts` equal parts."""
        if num_slots % num_parts:
            raise UserError(
                f"grad_accumulation={num_parts} doesn't divide the {num_slots} {slots} of a rank; give "
                f"{' or '.join(map(str, nearest_divisors(num_slots, num_parts)))}, or another {key}"
            )

    def require_support(self, model: Model, world: World) -> None:
        """Raise UserError on all ranks if model, device or backend can't be used. Every rank."""


class Layout(Generic[CarryT, BatchT, SettingsT]):
    """A model on the device of this rank, with its gradients, their norm and its weights."""

    lockstep = False
    """Whether a forward pass is a collective, so that all ranks must make equally many."""

    num_microbatches = 1
    """In how many parts a rank takes its slots."""

    def __init__(self, model: Model, world: World) -> None:
        """Keep the model, which must be on its device already."""
        self.model = model
        self.objective: Objective[CarryT, BatchT, SettingsT] = OBJECTIVES[model.config.kind](model)
        self._called: Callable[..., Any] = model  # for a forward with gradient
        self._world = world
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients_are_checked = False

    def forward_backward(
        self, carry: CarryT, batch: BatchT, settings: SettingsT, *, loss_scale: float = 1.0
    ) -> tuple[CarryT, list[Outputs], Tensor]:
        """Run the forward and the backward pass of a step, part by part. Every rank.

        Afterwards the `.grad` of a parameter, or of this rank's part of it, is the sum over the
        global batch. The gradients of puzzle rows are those of this rank's slots.

        Args:
            carry, batch, settings: as for the objective, of this rank's slots.
            loss_scale: the factor of the loss that lets float16 hold its gradients.

        Returns:
            The new carry; the outputs of each part, if the objective has any; and this rank's sums.
        """
        objective, results = self.objective, list[PartResult[CarryT]]()
        for n, part in enumerate(objective.split(carry, batch, settings, self.num_microbatches), start=1):
            with self._part(is_last=n == self.num_microbatches):
                with record_function(FORWARD):
                    result = objective.run(*part, forward=self._called)
                    loss = result.loss * loss_scale
                with record_function(BACKWARD):
                    loss.backward()
            results.append(result)
        outputs = [result.outputs for result in results if result.outputs is not None]
        sums = torch.stack([result.sums for result in results]).sum(0)
        return objective.join([result.carry for result in results]), outputs, sums

    def compile(self, what: Compiled) -> None:
        """Compile the stacks of blocks, the loss and, for "segment", the forward pass."""
        self.model.compile_levels()
        self.objective.compile()
        if what == "segment":
            self._called = torch.compile(self.model)

    def _part(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context for one part. Gradients travel with the last part only."""
        return nullcontext()

    def require_gradients(self) -> None:
        """Raise UserError if the first backward pass left out a trained parameter. Every rank."""
        if self._gradients_are_checked:
            return
        self._gradients_are_checked = True
        with self._world.shared_errors():  # the stages of a pipeline have different parameters
            require_gradients(self.model)

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients of all weights, without puzzle rows. Every rank."""
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self._world.device)

    def clip_(self, largest: float, norm: Tensor) -> None:
        """Scale the gradients, whose norm is `norm`, so that their norm is at most `largest`."""
        torch.nn.utils.clip_grads_with_norm_(self._trained, largest, norm)

    def values_changed(self) -> None:
        """Drop copies of the weights. The caller has overwritten the weights in place."""

    @torch.no_grad()
    def load(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite this rank's weights with the whole values, which come one after another."""
        live = self.model.state_dict()
        for name, whole in values:
            if name in live:
                self.from_portable(name, whole, live[name])
        self.values_changed()

    def portable_weights(self) -> dict[str, Tensor]:
        """Return what this rank holds of the state dict, in the portable form. Every rank."""
        return {name: self.to_portable(name, tensor) for name, tensor in self.model.state_dict().items()}

    def to_portable(self, name: str, tensor: Tensor) -> Tensor:
        """Return the form of a tensor that any strategy can load from a checkpoint. Every rank.

        The tensor is of the state dict, or has the shape and placement of one, such as a moment.
        """
        return tensor

    def from_portable(self, name: str, portable: Tensor, live: Tensor) -> None:
        """Copy a portable tensor into `live`: the inverse of `to_portable`. Every rank."""
        live.copy_(portable)
