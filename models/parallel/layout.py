"""How a model lies over the ranks of a run, and what training asks of any such layout.

`Layout` itself is the whole model on one device, for one process. Each strategy has a file beside
this file and overrides what it does differently.
"""
# B = slots of this rank (of one part of them inside a part), S = tokens, V = vocabulary

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from models.act import Carry, segment
from models.base import RecursiveModel, SegmentOutput
from models.depth import Depth
from models.losses import LossSpec, Outputs, act_loss
from models.parallel.requirements import nearest_divisors, require_gradients
from utils.batch import Batch
from utils.config import StrictModel
from utils.dist.config import Axes
from utils.dist.world import World
from utils.errors import UserError
from utils.perf.recording import BACKWARD, FORWARD


class LayoutConfig(StrictModel):
    """The options that every strategy has.

    config/parallel/<name>.yaml explains the options and holds the defaults.
    """

    puzzle_table: Literal["replicated", "sharded"]

    @abstractmethod
    def axes(self, num_ranks: int) -> Axes | None:
        """Return how the ranks are laid out, or None where a single process needs no groups.

        Raises:
            UserError: the degrees don't multiply to `num_ranks`. The message names degrees that do.
        """

    def require_parts(self, num_slots: int, num_parts: int) -> None:
        """Raise UserError if the slots of a rank don't split into `num_parts` equal parts.

        Args:
            num_slots: a number that divides the number of slots of every rank.
            num_parts: the number of microbatches (`grad_accumulation`).
        """
        if num_slots % num_parts:
            raise UserError(
                f"grad_accumulation={num_parts} doesn't divide the {num_slots} slots of a rank; give "
                f"{' or '.join(map(str, nearest_divisors(num_slots, num_parts)))}, or another global_batch_size"
            )

    def require_support(self, model: RecursiveModel, world: World) -> None:
        """Raise UserError if the strategy can't use this model, device or backend. Every rank.

        The message says which model, device or backend would do. All ranks raise the same error.
        """


class Layout:
    """A model on the device of this rank, with its gradients, their norm and its weights.

    Call the methods marked "Every rank." on all ranks together: in most strategies they are
    collectives.
    """

    lockstep = False
    """Whether a forward pass is a collective, so that all ranks must make equally many."""

    def __init__(self, model: RecursiveModel, world: World, *, num_microbatches: int = 1) -> None:
        """Keep the model, which must be on its device already.

        Args:
            num_microbatches: in how many parts `forward_backward` takes the slots of this rank, one
                after another.
        """
        self.model = model
        self._called: Callable[..., SegmentOutput] = model  # for a forward with gradient
        self._world = world
        self._num_microbatches = num_microbatches
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients_are_checked = False

    def forward_backward(
        self, carry: Carry, batch: Batch, *, depth: Depth, min_halt_steps_B: Tensor | None, loss: LossSpec
    ) -> tuple[Carry, list[Outputs], Tensor]:
        """Run one segment for each slot of this rank, and its backward pass. Every rank.

        Afterwards the `.grad` of a parameter is the sum over all slots of the global batch, or this
        rank's part of that sum if the rank holds a part of the parameter. The gradients of puzzle
        rows are those of this rank's slots; sparse_sign_sgd_ sums them.

        Args:
            carry, batch, depth, min_halt_steps_B: as for models.act.segment, of all slots of this
                rank.
            loss: what to differentiate.

        Returns:
            The new carry of all slots; the outputs of each part, detached except for the puzzle
            rows, which are leaves with a `.grad`; and the sums of METRICS over the slots of this
            rank.
        """
        num_slots, num_parts = len(carry.steps_B), self._num_microbatches
        assert num_slots % num_parts == 0, "the config asks for whole parts"
        carries, all_outputs, all_sums = list[Carry](), list[Outputs](), list[Tensor]()
        for n in range(num_parts):
            part = slice(n * num_slots // num_parts, (n + 1) * num_slots // num_parts)
            with self._part(is_last=n == num_parts - 1):
                with record_function(FORWARD):
                    new_carry, outputs = segment(
                        self.model,
                        _carry_of(carry, part),
                        {name: tensor[part] for name, tensor in batch.items()},
                        training=True,
                        depth=depth,
                        min_halt_steps_B=None if min_halt_steps_B is None else min_halt_steps_B[part],
                        forward=self._called,
                    )
                    part_of_loss, sums = loss_of_slots(outputs, new_carry, loss)
                with record_function(BACKWARD):
                    part_of_loss.backward()
            carries.append(new_carry)
            all_outputs.append(_detached(outputs))
            all_sums.append(sums)
        return _joined(carries), all_outputs, torch.stack(all_sums).sum(0)

    def _part(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context for forward and backward of one part.

        Gradients travel with the last part only.
        """
        return nullcontext()

    def require_gradients(self) -> None:
        """Raise UserError if the first backward pass left out a trained parameter. Every rank.

        Later calls do nothing.
        """
        if self._gradients_are_checked:
            return
        self._gradients_are_checked = True
        with self._world.shared_errors():  # the stages of a pipeline have different parameters
            require_gradients(self.model)

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients of all trained parameters. Every rank.

        Returns:
            A scalar, equal on all ranks; 0 where nothing is trained.
        """
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self._world.device)

    def clip_(self, largest: float, norm: Tensor) -> None:
        """Scale the gradients, whose norm is `norm`, so that their norm is at most `largest`."""
        torch.nn.utils.clip_grads_with_norm_(self._trained, largest, norm)

    def values_changed(self) -> None:
        """Drop copies of the weights. The caller has overwritten the weights in place."""

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the state dict that one process would have. Every rank.

        Only rank 0's dict is complete. The dict of another rank is undefined.
        """
        return self.model.state_dict()

    def to_portable(self, name: str, tensor: Tensor) -> Tensor:
        """Return the form of a tensor that any strategy can load from a checkpoint. Every rank.

        Args:
            name: of a parameter or buffer, in the state dict.
            tensor: that parameter or buffer, or a tensor with the same shape and placement, such as
                its average or a moment of it.
        """
        return tensor

    def from_portable(self, name: str, portable: Tensor, live: Tensor) -> None:
        """Copy a portable tensor into `live`: the inverse of `to_portable`. Every rank."""
        live.copy_(portable)

    def compression_state(self) -> dict[str, Tensor]:
        """Return what the compression of gradients carries from step to step, of this rank."""
        return {}

    def load_compression_state(self, tensors: dict[str, Tensor]) -> None:
        """Load what `compression_state` returned.

        Raises:
            UserError: the tensors belong to another compression or model.
        """


def loss_of_slots(outputs: Outputs, carry: Carry, loss: LossSpec) -> tuple[Tensor, Tensor]:
    """Return the part of a step's loss that belongs to some slots, and their sums of METRICS.

    Args:
        outputs, carry: what `segment` returned for these slots.

    Returns:
        A scalar to differentiate. These scalars add up to the loss of the step over microbatches
        and ranks. Then the detached sums, in the order of METRICS.
    """
    loss_sum, sums = act_loss(
        outputs,
        carry.current["labels"],
        halted_B=carry.halted_B,
        steps_B=carry.steps_B,
        config=loss.config,
        ignore_label=loss.ignore_label,
    )
    return loss_sum / loss.global_batch_size * loss.scale, sums


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
