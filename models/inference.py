"""Evaluation and solving: any number of sequences through a fixed number of slots, without gradients.

A sequence stays for as many segments as it is given or, adaptively, until it is settled: the Q head halts it, and its
answer is that of the segment before. Then it leaves and the next one takes its slot, so that a batch costs what its
sequences need. Why not as soon as the Q head says so: halting is trained to stop where an answer is more likely right
than not, and going on would have mended a good part of the others (docs/log.md has the figures).
"""

# N = sequences, B = slots, T = segments of a sequence, S = tokens, V = vocabulary

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from models.act import Batch, Carry, empty_batch, initial_carry, segment, wants_to_halt
from models.base import RecursiveModel
from models.losses import Outputs

Examples = tuple[np.ndarray, Batch]
"""Rows of a dataset (N,), and the batch of them on the model's device."""


@dataclass
class Segment:
    """What one segment said of every slot."""

    outputs: Outputs
    labels_BS: Tensor
    steps_B: Tensor  # segments of each sequence so far, this one included
    halted_before_B: Tensor  # by the Q head, had it a say
    finished: "Finished | None"


@dataclass
class Finished:
    """Sequences that left, with what their last segment said and, if asked for, all of them.

    From where a sequence left, predictions_NTS and q_halt_NT repeat its last segment.
    """

    rows_N: np.ndarray
    batch: Batch
    outputs: Outputs
    steps_N: Tensor
    predictions_NTS: Tensor | None
    q_halt_NT: Tensor | None


class Slots:
    """Runs the sequences of a stream, one segment of every slot at a time.

    Args:
        examples: pieces of the stream, of any sizes; the first says how many slots there are.
        num_steps: segments of a sequence.
        adaptive: a sequence leaves when it is settled, for which the host waits for the device.
        keep_steps: also keep what every segment predicts.
    """

    def __init__(
        self,
        model: RecursiveModel,
        examples: Iterator[Examples],
        *,
        num_steps: int,
        adaptive: bool = False,
        keep_steps: bool = False,
    ) -> None:
        self._model, self._examples = model, examples
        self._num_steps, self._adaptive, self._keep_steps = num_steps, adaptive, keep_steps
        self._waiting: Examples | None = next(examples, None)
        self._carry: Carry | None = None
        # By slot. On the host, so that nobody waits for the device to know them:
        self._rows_B, self._steps_B, self._free_B = np.zeros(0, np.int64), np.zeros(0, np.int64), np.ones(0, bool)
        # and on the device:
        self._halted_B = torch.empty(0)
        self._answers_BS = torch.empty(0)
        self._kept: dict[str, Tensor] = {}

    @property
    def busy(self) -> bool:
        """Whether a sequence is under way or waits."""
        return self._waiting is not None or not bool(self._free_B.all())

    @torch.no_grad()
    def advance(self) -> Segment:
        """One more segment of every sequence under way, after those that wait have taken the free slots."""
        assert self.busy
        batch = self._refill()
        assert self._carry is not None
        fresh_B = self._carry.halted_B
        before_B = self._halted_B & ~fresh_B
        self._carry, outputs = segment(self._model, self._carry, batch, training=False)
        wants_B = wants_to_halt(self._model, outputs.q_halt_B, outputs.q_continue_B)
        self._halted_B = before_B | wants_B
        self._steps_B += 1
        self._free_B = self._steps_B >= self._num_steps
        if self._adaptive:
            answers_BS = outputs.logits_BSV.argmax(-1)
            settled_B = wants_B & ~fresh_B & (answers_BS == self._answers_BS).all(-1)
            self._free_B = self._free_B | settled_B.cpu().numpy()
            self._answers_BS = answers_BS
        # Which slots begin anew is for us to say, whatever number of segments the model was trained with.
        self._carry.halted_B = torch.tensor(self._free_B, device=fresh_B.device)
        if self._keep_steps:
            self._keep(outputs)
        return Segment(outputs, self._carry.current["labels"], self._carry.steps_B, before_B, self._finished(outputs))

    def _refill(self) -> Batch:
        """Gives free slots to those who wait, and closes what nobody takes. The batch holds the new sequences in their
        slots, and in the others what is there already.
        """
        if self._carry is None:
            assert self._waiting is not None
            rows_B, batch = self._waiting
            self._waiting = next(self._examples, None)
            self._carry = initial_carry(self._model, batch)
            self._rows_B, self._steps_B = rows_B.astype(np.int64), np.zeros(len(rows_B), np.int64)
            self._free_B = np.zeros(len(rows_B), bool)
            self._halted_B = torch.zeros_like(self._carry.halted_B)
            self._answers_BS = torch.zeros_like(batch["inputs"], dtype=torch.int64)
            if self._keep_steps:
                self._kept = _room(batch["inputs"], self._num_steps, self._model.vocab_size)
            return batch
        free = np.flatnonzero(self._free_B)
        rows, new = self._take(len(free))
        taken = free[: len(rows)]
        self._rows_B[taken], self._steps_B[taken], self._free_B[taken] = rows, 0, False
        batch = self._carry.current
        if new is not None:
            slots = torch.from_numpy(taken).to(self._carry.halted_B.device, non_blocking=True)
            all_new = len(taken) == len(self._free_B)
            batch = new if all_new else {name: old.index_copy(0, slots, new[name]) for name, old in batch.items()}
        if self._free_B.any():
            batch = self._close_free(batch)
        return batch

    def _take(self, most: int) -> tuple[np.ndarray, Batch | None]:
        """The next sequences of the stream, at most so many."""
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

    def _close_free(self, batch: Batch) -> Batch:
        assert self._carry is not None
        stay = np.flatnonzero(~self._free_B)
        self._rows_B, self._steps_B, self._free_B = self._rows_B[stay], self._steps_B[stay], self._free_B[stay]
        slots = torch.from_numpy(stay).to(self._carry.halted_B.device, non_blocking=True)
        self._carry = Carry.from_tensors({name: tensor[slots] for name, tensor in self._carry.tensors().items()})
        self._halted_B, self._answers_BS = self._halted_B[slots], self._answers_BS[slots]
        self._kept = {name: tensor[slots] for name, tensor in self._kept.items()}
        return {name: tensor[slots] for name, tensor in batch.items()}

    def _keep(self, outputs: Outputs) -> None:
        """Writes this segment's answer at its place and all later ones, which later segments write over."""
        assert self._carry is not None
        later_BT = torch.arange(self._num_steps, device=self._halted_B.device) >= self._carry.steps_B[:, None] - 1
        predictions_B1S = outputs.logits_BSV.argmax(-1)[:, None].to(self._kept["predictions"].dtype)
        self._kept["predictions"] = torch.where(later_BT[:, :, None], predictions_B1S, self._kept["predictions"])
        self._kept["q_halt"] = torch.where(later_BT, outputs.q_halt_B[:, None], self._kept["q_halt"])

    def _finished(self, outputs: Outputs) -> Finished | None:
        assert self._carry is not None
        leaving = np.flatnonzero(self._free_B)
        if len(leaving) == 0:
            return None
        every = len(leaving) == len(self._free_B)
        slots = torch.from_numpy(leaving).to(self._halted_B.device, non_blocking=True)

        def of(tensor: Tensor) -> Tensor:
            return tensor if every else tensor[slots]

        return Finished(
            self._rows_B[leaving],
            {name: of(tensor) for name, tensor in self._carry.current.items()},
            replace(
                outputs,
                logits_BSV=of(outputs.logits_BSV),
                q_halt_B=of(outputs.q_halt_B),
                q_continue_B=of(outputs.q_continue_B),
                puzzle_rows_BE=None,
            ),
            of(self._carry.steps_B),
            of(self._kept["predictions"]) if self._keep_steps else None,
            of(self._kept["q_halt"]) if self._keep_steps else None,
        )


def idle_segment(model: RecursiveModel, seq_len: int, device: torch.device) -> None:
    """A segment of an empty puzzle: for the sake of other ranks, whose segments are collectives."""
    batch = empty_batch(1, seq_len, device)
    segment(model, initial_carry(model, batch), batch, training=False)


def _room(inputs_BS: Tensor, num_steps: int, vocab_size: int) -> dict[str, Tensor]:
    dtype = torch.uint8 if vocab_size <= 256 else torch.int32
    num_slots, seq_len = inputs_BS.shape
    return {
        "predictions": torch.zeros(num_slots, num_steps, seq_len, dtype=dtype, device=inputs_BS.device),
        "q_halt": torch.zeros(num_slots, num_steps, device=inputs_BS.device),
    }


@dataclass
class Trace:
    """What a model says of N puzzles after each of T segments."""

    predictions_TNS: Tensor
    confidence_TN: Tensor  # of halting: sigmoid of its Q value, which is trained to say whether the answer is right
    settled_at_N: Tensor  # the segment, counted from 1, after which adaptive evaluation would stop; T if it never would


@torch.no_grad()
def trace(model: RecursiveModel, batch: Batch, num_steps: int | None = None) -> Trace:
    """Every segment of every sequence of a batch; None: as many as the model was trained with."""
    num_steps = num_steps or model.config.halt_max_steps
    carry = initial_carry(model, batch)
    predictions, confidence, wants = [], [], []
    for _ in range(num_steps):
        carry, outputs = segment(model, carry, batch, training=False)
        carry.halted_B = torch.zeros_like(carry.halted_B)
        predictions.append(outputs.logits_BSV.argmax(-1))
        confidence.append(outputs.q_halt_B.sigmoid())
        wants.append(wants_to_halt(model, outputs.q_halt_B, outputs.q_continue_B))
    predictions_TNS, settled_TN = torch.stack(predictions), torch.stack(wants)
    settled_TN[0] = False
    settled_TN[1:] &= (predictions_TNS[1:] == predictions_TNS[:-1]).all(-1)
    settled_TN[-1] = True
    return Trace(predictions_TNS, torch.stack(confidence), settled_TN.int().argmax(0) + 1)
