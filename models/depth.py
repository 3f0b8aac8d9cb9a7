"""How deep a segment recurses and how much of that carries gradient, at each step of training.

A segment of any architecture is a row of calls of its networks; gradient flows through the last of them only.
"""

# B = batch, T = positions, D = hidden size

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator

from models.attention import Rotary
from models.block import Level, recomputed
from utils.config import Float, Int, StrictModel

Checkpointing = Literal["none", "block", "cycle"]
"""What a call with gradient keeps for the backward pass: everything, the input of each block, or its own (cycle)."""

# Of any count or width in a config: beyond it is a slip of the finger, better told than met as a failed allocation.
LARGEST_COUNT = 2**16


class Stage(StrictModel):
    """A shallower recursion for the first part of a run, up to the share `until` of its steps."""

    until: Float
    H_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    L_cycles: Int = Field(ge=1, le=LARGEST_COUNT)


class DepthConfig(StrictModel):
    """The options that decide about depth; config/arch/_common.yaml explains each."""

    # How many calls end each H cycle beside those of L_cycles: one where a network updates z_H, none where there is
    # one state.
    calls_of_H: ClassVar[int] = 0

    H_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    L_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    backprop: Literal["one_step", "last_H_cycle", "all"] | Int
    backprop_warmup_steps: Int = Field(ge=0)
    activation_checkpointing: Checkpointing
    depth_curriculum: list[Stage]

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _what_was_a_switch(cls, value: object) -> object:
        """It was a switch at first: config.yaml of a run from then, and fingers, say true or false."""
        return {False: "none", True: "cycle"}[value] if isinstance(value, bool) else value

    @field_validator("depth_curriculum")
    @classmethod
    def _stages_follow_one_another(cls, stages: list[Stage]) -> list[Stage]:
        ends = [0.0, *(stage.until for stage in stages), 1.0]
        if any(later <= earlier for earlier, later in itertools.pairwise(ends)):
            raise ValueError(
                f"depth_curriculum ends its stages at {ends[1:-1]}; give shares of the run that grow, between 0 and 1"
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
        """The whole depth: what evaluation runs, and training once every schedule has ended."""
        return self._depth(self.H_cycles, self.L_cycles)

    def depth_at(self, step: int, last_step: int) -> "Depth":
        """Of training step 1, 2, ..., last_step.

        The curriculum over depth is CGAR's (arXiv 2511.08653, section 3.3), a function of the share of the run that is
        done. The warm-up lets gradient through one step at first, and through `backprop` after its last step.
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
    """Of one segment: its cycles, the calls of networks that they make, and how many of the last carry gradient."""

    H_cycles: int
    L_cycles: int
    num_calls: int
    num_grad_calls: int


class Calls:
    """Calls the networks of one segment in turn, and keeps the gradient to the last `depth.num_grad_calls` calls.

    Args:
        checkpointing: less than everything is computed again in the backward pass, call by call or block by block, so
            that cycle keeps the least beyond the forward pass and block has the least at hand in the backward pass.
    """

    def __init__(self, depth: Depth, *, checkpointing: Checkpointing) -> None:
        self._left = depth.num_calls
        self._num_grad_calls = depth.num_grad_calls
        self._checkpointing = checkpointing
        self._grad_wanted = torch.is_grad_enabled()

    def __call__(self, network: Level, x_BTD: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """network(x_BTD, rotary)."""
        assert self._left > 0, "the recursion makes more calls than its depth says"
        self._left -= 1
        with torch.set_grad_enabled(self._grad_wanted and self._left < self._num_grad_calls):
            if self._checkpointing == "none" or not torch.is_grad_enabled():
                return network(x_BTD, rotary)
            if self._checkpointing == "block":
                return network(x_BTD, rotary, keep_inputs_only=True)
            return recomputed(network, x_BTD, rotary)
