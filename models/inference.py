"""Evaluation and solving: run any number of sequences through a fixed number of slots.

A sequence stays in its slot for a given number of segments. In adaptive mode it leaves as soon as
it is settled: the Q head halts it, and its answer is the same as after the segment before. The Q
head alone does not decide, because more segments correct many wrong answers (docs/lab/log.md).
"""

# N = sequences, B = slots, T = segments of a sequence, S = tokens, V = vocabulary

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from models.act import empty_batch, initial_carry, segment, wants_to_halt
from models.base import RecursiveModel
from models.carry import Carry, Outputs, State
from models.trajectories import Trajectories
from utils.batch import Batch

Examples = tuple[np.ndarray, Batch]
"""Row numbers in a dataset (N,), and the batch of these rows on the model's device."""


@dataclass
class Segment:
    outputs: Outputs
    labels_BS: Tensor
    steps_B: Tensor  # segments of each sequence so far, including this one
    halted_before_B: Tensor  # whether the Q head wanted to halt the sequence in an earlier segment
    finished: "Finished | None"
    deltas_B: Tensor | None  # the relative change of the state, if it was asked for


@dataclass
class Finished:
    """Sequences that left their slots, with the outputs of their last segment.

    settled_N says whether the last segment settled each answer. With `keep_steps`, predictions_NTS
    and q_halt_NT hold every segment, and repeat the last one for later segments.
    """

    rows_N: np.ndarray
    batch: Batch
    outputs: Outputs
    steps_N: Tensor
    settled_N: Tensor
    predictions_NTS: Tensor | None
    q_halt_NT: Tensor | None


class Slots:
    """Runs the sequences of a stream, one segment of every slot at a time.

    At the end of the stream, slots without a sequence are removed. A compiled model keeps them,
    because it would be compiled again for another number of slots.

    Args:
        examples: pieces of the stream. The size of the first is the number of slots.
        adaptive: a sequence leaves when it is settled, for which the host waits once a segment.
        trajectories: how the sequences of one example differ. Their numbers then stand in the place
            of row numbers; None: every sequence is an example of its own.
    """

    def __init__(
        self,
        model: RecursiveModel,
        examples: Iterator[Examples],
        *,
        num_steps: int,
        adaptive: bool = False,
        keep_steps: bool = False,
        keep_deltas: bool = False,
        trajectories: Trajectories | None = None,
    ) -> None:
        self._model, self._examples = model, examples
        self._num_steps, self._adaptive, self._keep_steps = num_steps, adaptive, keep_steps
        self._keep_deltas, self._trajectories = keep_deltas, trajectories
        self._waiting: Examples | None = next(examples, None)
        self._carry: Carry | None = None
        # State of each slot. These arrays are on the host, so that reading them waits for nothing:
        self._rows_B, self._steps_B, self._free_B = np.zeros(0, np.int64), np.zeros(0, np.int64), np.ones(0, bool)
        self._empty_B = np.zeros(0, bool)  # free slots of a compiled model that no sequence will take
        # These tensors are on the device:
        self._halted_B = torch.empty(0)
        self._answers_BS = torch.empty(0)
        self._kept: dict[str, Tensor] = {}

    @property
    def busy(self) -> bool:
        return self._waiting is not None or not bool(self._free_B.all())

    @torch.no_grad()
    def advance(self) -> Segment:
        """Give the free slots to waiting sequences, then run one segment of every slot."""
        assert self.busy
        batch = self._refill()
        assert self._carry is not None
        fresh_B = self._carry.halted_B
        before_B = self._halted_B & ~fresh_B
        from_state: State = {}

        def before_segment(state: State) -> State:
            from_state.update(state)
            if self._trajectories is None:
                return state
            return self._trajectories.at(self._model, self._rows_B, self._steps_B + 1)(state)

        self._carry, outputs = segment(self._model, self._carry, batch, before_segment=before_segment)
        wants_B = wants_to_halt(self._model, outputs.q_halt_B, outputs.q_continue_B)
        self._halted_B = before_B | wants_B
        self._steps_B += 1
        self._free_B = self._empty_B | (self._steps_B >= self._num_steps)
        answers_BS = outputs.logits_BSV.argmax(-1)
        settled_B = wants_B & ~fresh_B & (answers_BS == self._answers_BS).all(-1)
        self._answers_BS = answers_BS
        if self._adaptive:
            self._free_B = self._free_B | settled_B.cpu().numpy()
        # segment() marks slots as halted after halt_max_steps, but num_steps may differ.
        self._carry.halted_B = _on(fresh_B.device, self._free_B)
        if self._keep_steps:
            self._keep(answers_BS, outputs.q_halt_B)
        taken = self._places(~self._empty_B)
        return Segment(
            _of_slots(outputs, taken),
            self._carry.current["labels"][taken],
            self._carry.steps_B[taken],
            before_B[taken],
            self._finished(outputs, settled_B),
            relative_change(from_state, self._carry.state)[taken] if self._keep_deltas else None,
        )

    def _refill(self) -> Batch:
        if self._carry is None:
            assert self._waiting is not None
            rows_B, batch = self._waiting
            self._waiting = next(self._examples, None)
            self._carry = initial_carry(self._model, batch)
            self._rows_B, self._steps_B = rows_B.astype(np.int64), np.zeros(len(rows_B), np.int64)
            self._free_B, self._empty_B = np.zeros(len(rows_B), bool), np.zeros(len(rows_B), bool)
            self._halted_B = torch.zeros_like(self._carry.halted_B)
            self._answers_BS = torch.zeros_like(batch["inputs"], dtype=torch.int64)
            if self._keep_steps:
                dtype = torch.uint8 if self._model.vocab_size <= 256 else torch.int32
                num_slots, seq_len = batch["inputs"].shape
                self._kept = {
                    "predictions": self._answers_BS.new_zeros(num_slots, self._num_steps, seq_len, dtype=dtype),
                    "q_halt": torch.zeros(num_slots, self._num_steps, device=self._answers_BS.device),
                }
            return batch
        free = np.flatnonzero(self._free_B)
        rows, new = self._take(len(free))
        taken = free[: len(rows)]
        self._rows_B[taken], self._steps_B[taken], self._free_B[taken] = rows, 0, False
        batch = self._carry.current
        if new is not None:
            slots = _on(self._carry.halted_B.device, taken)
            all_new = len(taken) == len(self._free_B)
            batch = new if all_new else {name: old.index_copy(0, slots, new[name]) for name, old in batch.items()}
        if self._model.is_compiled:
            self._empty_B = self._free_B
        elif self._free_B.any():
            stay = np.flatnonzero(~self._free_B)
            self._rows_B, self._steps_B = self._rows_B[stay], self._steps_B[stay]
            self._free_B, self._empty_B = self._free_B[stay], self._empty_B[stay]
            slots = _on(self._carry.halted_B.device, stay)
            self._carry = Carry.from_tensors({name: tensor[slots] for name, tensor in self._carry.tensors().items()})
            self._halted_B, self._answers_BS = self._halted_B[slots], self._answers_BS[slots]
            self._kept = {name: tensor[slots] for name, tensor in self._kept.items()}
            batch = {name: tensor[slots] for name, tensor in batch.items()}
        return batch

    def _take(self, most: int) -> tuple[np.ndarray, Batch | None]:
        pieces: list[Examples] = []
        missing = most
        while missing and self._waiting is not None:
            rows, batch = self._waiting
            pieces.append((rows[:missing], {name: tensor[:missing] for name, tensor in batch.items()}))
            rest = rows[missing:], {name: tensor[missing:] for name, tensor in batch.items()}
            missing -= len(pieces[-1][0])
            self._waiting = rest if len(rest[0]) else next(self._examples, None)
        if not pieces:
            return np.zeros(0, np.int64), None
        rows, batches = np.concatenate([rows for rows, _ in pieces]), [batch for _, batch in pieces]
        return rows, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def _keep(self, answers_BS: Tensor, q_halt_B: Tensor) -> None:
        assert self._carry is not None
        later_BT = torch.arange(self._num_steps, device=self._halted_B.device) >= self._carry.steps_B[:, None] - 1
        predictions_B1S = answers_BS[:, None].to(self._kept["predictions"].dtype)
        self._kept["predictions"] = torch.where(later_BT[:, :, None], predictions_B1S, self._kept["predictions"])
        self._kept["q_halt"] = torch.where(later_BT, q_halt_B[:, None], self._kept["q_halt"])

    def _finished(self, outputs: Outputs, settled_B: Tensor) -> Finished | None:
        assert self._carry is not None
        leaving_B = self._free_B & ~self._empty_B
        if not leaving_B.any():
            return None
        slots = self._places(leaving_B)
        return Finished(
            self._rows_B[leaving_B],
            {name: tensor[slots] for name, tensor in self._carry.current.items()},
            _of_slots(outputs, slots),
            self._carry.steps_B[slots],
            settled_B[slots],
            self._kept["predictions"][slots] if self._keep_steps else None,
            self._kept["q_halt"][slots] if self._keep_steps else None,
        )

    def _places(self, chosen_B: np.ndarray) -> slice | Tensor:
        return slice(None) if chosen_B.all() else _on(self._halted_B.device, np.flatnonzero(chosen_B))


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    tensor = torch.tensor(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _of_slots(outputs: Outputs, slots: slice | Tensor) -> Outputs:
    return replace(
        outputs,
        logits_BSV=outputs.logits_BSV[slots],
        q_halt_B=outputs.q_halt_B[slots],
        q_continue_B=outputs.q_continue_B[slots],
        puzzle_rows_BE=None,
    )


def relative_change(before: State, after: State) -> Tensor:
    """Return ||after - before|| / ||after|| of each slot over all states, float32 (B,)."""

    def squares(state: State) -> Tensor:
        return torch.stack([z.float().flatten(1).square().sum(1) for z in state.values()]).sum(0)

    moved = {name: z.float() - before[name].float() for name, z in after.items()}
    return (squares(moved) / squares(after)).sqrt()


def idle_segment(model: RecursiveModel, seq_len: int, device: torch.device) -> None:
    """Run a segment of an empty puzzle, on a rank without sequences, for its collectives."""
    batch = empty_batch(1, seq_len, device)
    segment(model, initial_carry(model, batch), batch)


@dataclass
class Trace:
    """The answers of a model to N puzzles after each of T segments."""

    predictions_TNS: Tensor
    q_halt_TN: Tensor
    # The segment, counted from 1, after which adaptive evaluation would stop; T if it never would.
    settled_at_N: Tensor
    # Whether the last segment settled the answer: the Q head halts it, and it equals the answer of
    # the segment before.
    settled_N: Tensor

    @property
    def confidence_TN(self) -> Tensor:
        """How sure the model is that the answers are right, from 0 to 1."""
        return self.q_halt_TN.sigmoid()


@torch.no_grad()
def trace(
    model: RecursiveModel,
    batch: Batch,
    num_steps: int | None = None,
    *,
    trajectories: Trajectories | None = None,
    numbers_N: np.ndarray | None = None,
) -> Trace:
    """Run some segments of a batch, by default as many as in training, and keep all answers."""
    num_steps = num_steps or model.config.halt_max_steps
    carry = initial_carry(model, batch)
    predictions, q_halt, wants = [], [], []
    for number in range(1, num_steps + 1):
        before_segment = None
        if trajectories is not None and numbers_N is not None:
            before_segment = trajectories.at(model, numbers_N, np.full(len(numbers_N), number))
        carry, outputs = segment(model, carry, batch, before_segment=before_segment)
        carry.halted_B = torch.zeros_like(carry.halted_B)
        predictions.append(outputs.logits_BSV.argmax(-1))
        q_halt.append(outputs.q_halt_B)
        wants.append(wants_to_halt(model, outputs.q_halt_B, outputs.q_continue_B))
    predictions_TNS, settled_TN = torch.stack(predictions), torch.stack(wants)
    settled_TN[0] = False
    settled_TN[1:] &= (predictions_TNS[1:] == predictions_TNS[:-1]).all(-1)
    settled_N = settled_TN[-1].clone()
    settled_TN[-1] = True
    return Trace(predictions_TNS, torch.stack(q_halt), settled_TN.int().argmax(0) + 1, settled_N)
