"""Adaptive computation time (HRM, arXiv 2506.21734, section 2): a segment for every slot, and halting by Q values.

The carry is the state of training between segments. Nothing here makes the host wait for the device.
"""

# B = slots of the batch, S = tokens, V = vocabulary, E = puzzle embedding size

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import field_validator
from torch import nn

from models.puzzle_embedding import PuzzleEmbedding
from utils.config import Float, Int, StrictModel

Batch = dict[str, torch.Tensor]
"""inputs (B, S), labels (B, S), puzzle_identifiers (B,), all int32."""

State = dict[str, torch.Tensor]
"""The recurrent state of every slot, detached, in the forward's dtype; the names are the architecture's."""

# Tells the exploration's random stream from other streams made of (seed, step).
_EXPLORATION_STREAM = 0xE7

# Of any count or width in a config: beyond it is a slip of the finger, better told than met as a failed allocation.
LARGEST_COUNT = 2**16


class ActConfig(StrictModel):
    """What every architecture that halts has."""

    halt_max_steps: Int
    halt_exploration_prob: Float

    @field_validator("halt_max_steps")
    @classmethod
    def _at_least_one_segment(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"halt_max_steps is {value}, which leaves no segment; give 1 or more")
        if value > LARGEST_COUNT:
            raise ValueError(f"halt_max_steps is {value}, which no sequence lives to see; give {LARGEST_COUNT} or less")
        return value

    @field_validator("halt_exploration_prob")
    @classmethod
    def _is_a_probability(cls, value: float) -> float:
        if not 0 <= value <= 1:
            raise ValueError(f"halt_exploration_prob is {value}, no probability; give a number from 0 to 1")
        return value


class RecursiveModel(nn.Module, ABC):
    """What a segment asks of an architecture.

    forward(state, inputs_BS, rows_BE) -> (state, logits_BSV, q_halt_B, q_continue_B); the state that it returns is
    detached, the Q values are float32.
    """

    config: ActConfig
    puzzle_embedding: PuzzleEmbedding | None

    @abstractmethod
    def init_weights(self, generator: torch.Generator) -> None:
        """Fill every parameter and buffer, which the constructor leaves unset, in a fixed order from the generator."""

    @abstractmethod
    def initial_state(self, batch_size: int, device: torch.device) -> State:
        """A state of the right names, shapes and dtype whose values nobody reads before `reset`."""

    @abstractmethod
    def reset(self, state: State, halted_B: torch.Tensor) -> State:
        """The state with the slots that halted put back to the start."""


@dataclass
class Carry:
    """What goes from one training step to the next, by slot. A slot that halted is replaced at the next segment."""

    state: State
    steps_B: torch.Tensor
    halted_B: torch.Tensor
    current: Batch

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything under flat names ("state.z_H", "steps", "halted", "current.inputs"), for checkpoints."""
        return {
            **{f"state.{name}": tensor for name, tensor in self.state.items()},
            "steps": self.steps_B,
            "halted": self.halted_B,
            **{f"current.{name}": tensor for name, tensor in self.current.items()},
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> "Carry":
        """The inverse of `tensors`."""

        def group(prefix: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        return cls(group("state."), tensors["steps"], tensors["halted"], group("current."))


@dataclass
class Outputs:
    """What one segment gave: a target only in training, puzzle rows (a leaf that gets a gradient) if there are any."""

    logits_BSV: torch.Tensor
    q_halt_B: torch.Tensor
    q_continue_B: torch.Tensor
    target_q_continue_B: torch.Tensor | None
    puzzle_rows_BE: torch.Tensor | None


def initial_carry(model: RecursiveModel, batch: Batch) -> Carry:
    """A carry in which every slot has halted, so that the first segment takes the whole batch."""
    ids_B = batch["puzzle_identifiers"]
    return Carry(
        state=model.initial_state(len(ids_B), ids_B.device),
        steps_B=torch.zeros_like(ids_B, dtype=torch.int32),
        halted_B=torch.ones_like(ids_B, dtype=torch.bool),
        current={name: torch.zeros_like(tensor) for name, tensor in batch.items()},
    )


def segment(
    model: RecursiveModel,
    carry: Carry,
    batch: Batch,
    *,
    training: bool,
    min_halt_steps_B: torch.Tensor | None = None,
) -> tuple[Carry, Outputs]:
    """One segment for every slot. Slots that halted take their example of `batch` and start anew; the others go on.

    Args:
        training: halt early by the Q values and make the target of q_continue; else every slot runs halt_max_steps.
        min_halt_steps_B: exploration; a slot may not halt by its Q values before so many steps (0: as it likes).
    """
    halt_max_steps = model.config.halt_max_steps

    fresh_B = carry.halted_B
    state = model.reset(carry.state, fresh_B)
    steps_B = torch.where(fresh_B, 0, carry.steps_B) + 1
    current = {
        name: torch.where(fresh_B.view(-1, *[1] * (old.ndim - 1)), batch[name], old)
        for name, old in carry.current.items()
    }

    table = model.puzzle_embedding
    rows_BE = None if table is None else table.rows(current["puzzle_identifiers"])
    state, logits_BSV, q_halt_B, q_continue_B = model(state, current["inputs"], rows_BE)

    last_B = steps_B >= halt_max_steps
    halted_B = last_B
    target_B = None
    if training:
        wants_to_halt_B = q_halt_B > q_continue_B
        if min_halt_steps_B is not None:
            wants_to_halt_B = wants_to_halt_B & (steps_B >= min_halt_steps_B)
        halted_B = last_B | wants_to_halt_B
        if halt_max_steps > 1:
            # Q-learning without a replay buffer: the value of going on is what one more segment of the same example
            # would say, whether or not the slot halts here.
            with torch.no_grad():
                _, _, next_halt_B, next_continue_B = model(state, current["inputs"], rows_BE)
                best_next_B = torch.maximum(next_halt_B, next_continue_B)
                target_B = torch.where(last_B, next_halt_B, best_next_B).sigmoid()

    return Carry(state, steps_B, halted_B, current), Outputs(logits_BSV, q_halt_B, q_continue_B, target_B, rows_BE)


def draw_min_halt_steps(seed: int, step: int, batch_size: int, prob: float, halt_max_steps: int) -> torch.Tensor:
    """Exploration of one step for the slots of the *global* batch: int32 (B,) on the CPU, 0 where there is none.

    With probability `prob` a slot's earliest halt is drawn from 2..halt_max_steps. A pure function of its arguments: a
    rank takes its slice of it, and a resumed run draws what the first would have.
    """
    if halt_max_steps < 2:  # every slot halts after its only segment: nothing to delay
        return torch.zeros(batch_size, dtype=torch.int32)
    rng = np.random.default_rng([_EXPLORATION_STREAM, seed, step])
    explores_B = rng.random(batch_size) < prob
    steps_B = rng.integers(2, halt_max_steps, size=batch_size, endpoint=True, dtype=np.int32)
    return torch.from_numpy(np.where(explores_B, steps_B, np.int32(0)))
