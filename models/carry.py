"""What a segment of a puzzle model takes and returns: state, carry and outputs."""

# B = slots of the batch, S = tokens, V = vocabulary, E = puzzle embedding size

from dataclasses import dataclass

import torch

from utils.batch import Batch

State = dict[str, torch.Tensor]
"""The recurrent state of all slots, detached, in forward_dtype, by the architecture's names."""

NOISY = "noisy"
"""The name in a state of the noisy copy of the answer (B, S, V), which each segment gets anew."""

SegmentOutput = tuple[State, torch.Tensor, torch.Tensor, torch.Tensor]
"""The new state, detached; logits_BSV in forward_dtype; q_halt_B and q_continue_B in float32."""


@dataclass
class Carry:
    """What each slot hands to the next step, which gives a slot that halted a new example."""

    state: State
    steps_B: torch.Tensor
    halted_B: torch.Tensor
    current: Batch

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by flat names, such as "state.z_H" and "steps", for checkpoints."""
        return {
            **{f"state.{name}": tensor for name, tensor in self.state.items()},
            "steps": self.steps_B,
            "halted": self.halted_B,
            **{f"current.{name}": tensor for name, tensor in self.current.items()},
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> "Carry":
        def group(prefix: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        return cls(group("state."), tensors["steps"], tensors["halted"], group("current."))


@dataclass
class Outputs:
    """The outputs of one segment. There is a target only in training.

    Puzzle rows are a leaf that gets a gradient; None without a puzzle embedding.
    """

    logits_BSV: torch.Tensor
    q_halt_B: torch.Tensor
    q_continue_B: torch.Tensor
    target_q_continue_B: torch.Tensor | None
    puzzle_rows_BE: torch.Tensor | None
