"""How deep a segment recurses, and which of its calls carry gradient, at each step of training.

A segment of any architecture is a row of calls of its networks. Gradient flows only through the
last calls of the row.
"""

# B = batch, T = positions, D = hidden size

import functools
import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch.profiler import record_function

from models.attention import Rotary
from models.block import Level, recomputed
from models.model import ArchBase, Checkpointing
from utils.config import Float, Int, StrictModel
from utils.perf.recording import NO_GRAD

# The largest count or width in a config. A larger one is a typing error, and a message about it is
# clearer than a failed allocation.
LARGEST_COUNT = 2**16


class Stage(StrictModel):
    """A shallower recursion for the first part of a run, up to the share `until` of its steps."""

    until: Float
    H_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    L_cycles: Int = Field(ge=1, le=LARGEST_COUNT)


class DepthConfig(ArchBase):
    """The options that decide about depth; config/arch/_common.yaml explains each."""

    # The calls that end each H cycle, after those of L_cycles: one if a network updates z_H, none
    # if there is only one state.
    calls_of_H: ClassVar[int] = 0

    H_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    L_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    backprop: Literal["one_step", "last_H_cycle", "all"] | Int
    backprop_warmup_steps: Int = Field(ge=0)
    depth_curriculum: list[Stage]

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _what_was_a_switch(cls, value: object) -> object:
        """Read true as cycle and false as none, because this key was a switch at first."""
        return {False: "none", True: "cycle"}[value] if isinstance(value, bool) else value

    @field_validator("depth_curriculum")
    @classmethod
    def _stages_follow_one_another(cls, stages: list[Stage]) -> list[Stage]:
        ends = [0.0, *(stage.until for stage in stages), 1.0]
        if any(later <= earlier for earlier, later in itertools.pairwise(ends)):
            raise ValueError(
                f"depth_curriculum ends its stages at {ends[1:-1]}; give increasing shares of the run, between 0 and 1"
            )
        return stages

    @model_validator(mode="after")
    def _gradient_reaches_every_network(self) -> Self:
        least = 1 + self.calls_of_H
        if isinstance(self.backprop, int) and self.backprop < least:
            raise ValueError(
                f"backprop is {self.backprop} calls, but {least} are needed to reach every network; "
                f"give {least} or more, or one_step, last_H_cycle or all"
            )
        return self

    @property
    def depth(self) -> "Depth":
        """Return the whole depth: that of evaluation, and of training after all schedules."""
        return self._depth(self.H_cycles, self.L_cycles)

    @property
    def has_calls_without_gradient(self) -> bool:
        """Whether a segment of any training step has calls that carry no gradient."""
        depths = [self.depth, *(self._depth(stage.H_cycles, stage.L_cycles) for stage in self.depth_curriculum)]
        fewest = 1 + self.calls_of_H
        return any((fewest if self.backprop_warmup_steps else d.num_grad_calls) < d.num_calls for d in depths)

    def depth_at(self, step: int, last_step: int) -> "Depth":
        """Return the depth of a training step, one of 1, 2, ..., last_step.

        The depth curriculum is that of CGAR (arXiv 2511.08653, section 3.3): it depends on the
        share of the run that is done. The warm-up of backprop grows the calls with gradient from
        those of one_step to those of `backprop`.
        """
        H_cycles, L_cycles = self.H_cycles, self.L_cycles
        for stage in reversed(self.depth_curriculum):
            if step / last_step <= stage.until:
                H_cycles, L_cycles = stage.H_cycles, stage.L_cycles
        full = self._depth(H_cycles, L_cycles)
        if step >= self.backprop_warmup_steps:
            return full
        one_step = 1 + self.calls_of_H
        grown = (full.num_grad_calls - one_step) * step // self.backprop_warmup_steps
        return Depth(H_cycles, L_cycles, full.num_calls, one_step + grown)

    def _depth(self, H_cycles: int, L_cycles: int) -> "Depth":
        per_H_cycle = L_cycles + self.calls_of_H
        num_calls = H_cycles * per_H_cycle
        match self.backprop:
            case "one_step":
                num_grad_calls = 1 + self.calls_of_H
            case "last_H_cycle":
                num_grad_calls = per_H_cycle
            case "all":
                num_grad_calls = num_calls
            case number:
                num_grad_calls = min(number, num_calls)
        return Depth(H_cycles, L_cycles, num_calls, num_grad_calls)


@dataclass(frozen=True)
class Depth:
    """The depth of one segment: its cycles, its calls, and how many of the last carry gradient.

    With `q_values_only`, only the Q values of the segment are of use. They come from the first
    position, so the last block of the last call computes nothing else if it carries no gradient.
    """

    H_cycles: int
    L_cycles: int
    num_calls: int
    num_grad_calls: int
    q_values_only: bool = False


class Calls:
    """Calls the networks of one segment in turn.

    Only the last `depth.num_grad_calls` calls carry gradient.

    Args:
        checkpointing: what a call keeps for the backward pass, which computes the rest again. With
            cycle the least memory is held after the forward pass; with block the backward pass
            needs the least memory.
        fp8_no_grad: in training, compute the calls without gradient in FP8.
    """

    def __init__(self, depth: Depth, *, checkpointing: Checkpointing, fp8_no_grad: bool) -> None:
        self._left = depth.num_calls
        self._num_grad_calls, self._q_values_only = depth.num_grad_calls, depth.q_values_only
        self._checkpointing = checkpointing
        self._grad_wanted = torch.is_grad_enabled()
        # Segments of an evaluation carry no gradient either, and stay as they are. Only training
        # asks for a gradient, or for Q values alone.
        self._fp8 = fp8_no_grad and (self._grad_wanted or self._q_values_only)

    def __call__(
        self, network: Level, *inputs_BTD: torch.Tensor, rotary: Rotary | None, **of_blocks: Any
    ) -> torch.Tensor:
        """Return what the network makes of the sum of the inputs.

        It has a gradient if this is one of the last calls. With Depth.q_values_only, the last call
        returns only the first position, (B,1,D).

        Args:
            of_blocks: more arguments, which every block of the network takes.
        """
        assert self._left > 0, (
            "the recursion makes more calls than its depth says; does calls_of_H of the config class count the call "
            "that ends each H cycle?"
        )
        self._left -= 1
        has_grad = self._grad_wanted and self._left < self._num_grad_calls
        if not has_grad:
            named = nullcontext() if torch.compiler.is_compiling() else record_function(NO_GRAD)
            # The compiler makes another graph for inputs that require a gradient.
            with named, torch.no_grad():
                detached = (x_BTD.detach() for x_BTD in inputs_BTD)
                first_only = self._q_values_only and self._left == 0
                return network(*detached, rotary=rotary, first_position_only=first_only, fp8=self._fp8, **of_blocks)
        if self._checkpointing == "cycle":
            # Only the sum is kept, not each input.
            return recomputed(network, functools.reduce(torch.add, inputs_BTD), rotary=rotary, **of_blocks)
        return network(*inputs_BTD, rotary=rotary, keep_inputs_only=self._checkpointing == "block", **of_blocks)
