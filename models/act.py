"""Adaptive computation time (HRM, arXiv 2506.21734, section 2): segments, and halting by Q values.

The carry is the state of training between segments. No function makes the host wait for the device.
"""

# B = slots of the batch, S = tokens, V = vocabulary, E = puzzle embedding size

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from models import noise
from models.base import RecursiveModel
from models.carry import NOISY, Carry, Outputs, SegmentOutput, State
from models.depth import Depth
from models.dropout import derived
from models.losses import ACT_SUMS, TokenLossConfig, act_loss, probabilities
from models.objective import Objective, PartResult
from models.winner import spread_states, winner_takes_all
from utils.batch import Batch

# Tells the exploration's random stream from other streams made of (seed, step).
_EXPLORATION_STREAM = 0xE7
# The same for halting at random, for the seeds of dropout and noise, and for pseudo-targets.
_HALTING_STREAM, _SEED_STREAM, _OWN_ANSWER_STREAM = 0xE8, 0xE9, 0xEA


def empty_batch(num_slots: int, seq_len: int, device: torch.device) -> Batch:
    """Return a batch that holds only zeros."""
    shapes = {"inputs": (num_slots, seq_len), "labels": (num_slots, seq_len), "puzzle_identifiers": (num_slots,)}
    return {name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in shapes.items()}


def initial_carry(model: RecursiveModel, batch: Batch, *, training: bool = False) -> Carry:
    """Return a carry whose slots have all halted: the first segment takes the whole batch.

    Args:
        training: with num_states > 1, a slot has the states of so many trajectories.
    """
    ids_B = batch["puzzle_identifiers"]
    state = model.initial_state(len(ids_B), ids_B.device)
    if training and model.config.num_states > 1:
        state = spread_states(state, model.config.num_states)
    current = {name: torch.zeros_like(tensor) for name, tensor in batch.items()}
    if training and model.config.noise == "annealed":
        current["noise_seeds"] = torch.zeros_like(ids_B, dtype=torch.int64)
        current["answers"] = torch.zeros(*batch["labels"].shape, model.vocab_size, device=ids_B.device)
    return Carry(
        state=state,
        steps_B=torch.zeros_like(ids_B, dtype=torch.int32),
        halted_B=torch.ones_like(ids_B, dtype=torch.bool),
        current=current,
    )


@dataclass(frozen=True)
class ActSettings:
    """What the config and the number of a training step decide about its segment.

    Attributes:
        depth: how deep the segment recurses.
        global_batch_size: the number of slots over all ranks and parts.
        min_halt_steps_B: exploration: a slot can't halt before this many steps; 0: no minimum. With
            `halts_at_random`, it halts as soon as it may.
        seeds_B: what the model draws of each slot follows from these, int64; None: it draws
            nothing.
        own_answers_B: which slots read a noisy copy of their last answer and not of the label,
            bool; needed with annealed noise (models/noise.py).
    """

    depth: Depth
    global_batch_size: int
    min_halt_steps_B: torch.Tensor | None = None
    seeds_B: torch.Tensor | None = None
    own_answers_B: torch.Tensor | None = None

    def of_slots(self, part: slice) -> "ActSettings":
        """Return the settings of some of the slots."""

        def of_part(drawn_B: torch.Tensor | None) -> torch.Tensor | None:
            return None if drawn_B is None else drawn_B[part]

        return replace(
            self,
            min_halt_steps_B=of_part(self.min_halt_steps_B),
            seeds_B=of_part(self.seeds_B),
            own_answers_B=of_part(self.own_answers_B),
        )


def segment(
    model: RecursiveModel,
    carry: Carry,
    batch: Batch,
    settings: ActSettings | None = None,
    *,
    before_segment: Callable[[State], State] | None = None,
    forward: Callable[..., SegmentOutput] | None = None,
) -> tuple[Carry, Outputs]:
    """Run one segment for every slot.

    Slots that halted take their example of `batch` and start anew; the others go on.

    Args:
        settings: of training, which halts early by the Q values, computes the target of q_continue,
            and may let trajectories of a slot compete (models/winner.py). None: evaluation, of the
            whole depth, where `halted_B` of the new carry says only which slots have run
            halt_max_steps segments.
        before_segment: what changes the state before the segment, after slots that halted were
            reset; None: nothing. Of evaluation.
        forward: what runs the segment instead of `model`, such as the model that a parallel
            strategy has wrapped.

    Returns:
        The new carry, and the outputs of the segment.
    """
    config = model.config
    depth = config.depth if settings is None else settings.depth
    forward = model if forward is None else forward  # compiled modules have no truth value

    fresh_B = carry.halted_B
    steps_B = torch.where(fresh_B, 0, carry.steps_B) + 1
    seeds_B = None if settings is None else settings.seeds_B
    is_annealed = "answers" in carry.current
    if is_annealed:
        assert seeds_B is not None
        batch = {**batch, "noise_seeds": seeds_B, "answers": carry.current["answers"]}
    current = {
        name: torch.where(fresh_B.view(-1, *[1] * (old.ndim - 1)), batch[name], old)
        for name, old in carry.current.items()
    }

    table = model.puzzle_embedding
    rows_BE = None if table is None else table.rows(current["puzzle_identifiers"])

    def run(state: State, inputs_NS: torch.Tensor, rows_NE: torch.Tensor | None) -> SegmentOutput:
        if seeds_B is None or not config.is_random:
            return forward(state, inputs_NS, rows_NE, depth)
        # The trajectories of a slot drop the same, but read different noise.
        seeds_N = seeds_B.repeat_interleave(len(inputs_NS) // len(seeds_B))
        return forward(state, inputs_NS, rows_NE, depth, seeds_B=seeds_N)

    num_trajectories = 1 if settings is None else config.num_states
    noisy = _noisy_copies(model, current, steps_B, settings, num_trajectories)
    if num_trajectories == 1:
        state = model.reset(carry.state, fresh_B)
        if before_segment is not None:
            state = before_segment(state)
        state, logits_BSV, q_halt_B, q_continue_B = run(noisy | state, current["inputs"], rows_BE)
        handed_on = state
    else:
        handed_on, (state, logits_BSV, q_halt_B, q_continue_B) = winner_takes_all(
            *(model, carry.state, fresh_B, noisy, current["inputs"], current["labels"], rows_BE), forward=run
        )
    if is_annealed:
        current["answers"] = probabilities(logits_BSV.detach(), config.loss)

    last_B = steps_B >= config.halt_max_steps
    halted_B = last_B
    target_B = None
    if settings is not None:
        minimum_B = settings.min_halt_steps_B
        early_B = None if minimum_B is None else steps_B >= minimum_B  # with halts_at_random never without a minimum
        if not config.halts_at_random:
            wants_B = wants_to_halt(model, q_halt_B, q_continue_B)
            early_B = wants_B if early_B is None else wants_B & early_B
        halted_B = last_B if early_B is None else last_B | early_B
        if config.has_target_pass:
            # Q-learning without a replay buffer: one more segment of the same example says what
            # going on is worth, whether or not the slot halts here.
            with torch.no_grad():
                q_values = replace(depth, q_values_only=True)
                noisy = _noisy_copies(model, current, steps_B + 1, settings, 1)
                _, _, next_halt_B, next_continue_B = forward(noisy | state, current["inputs"], rows_BE, q_values)
                best_next_B = torch.maximum(next_halt_B, next_continue_B)
                target_B = torch.where(last_B, next_halt_B, best_next_B).sigmoid()

    return Carry(handed_on, steps_B, halted_B, current), Outputs(logits_BSV, q_halt_B, q_continue_B, target_B, rows_BE)


def _noisy_copies(
    model: RecursiveModel, current: Batch, steps_B: torch.Tensor, settings: ActSettings | None, num_trajectories: int
) -> State:
    """Return what the segments of all trajectories read of the answer, (N, S, V), as NOISY."""
    if model.config.noise == "none":
        return {}
    seeds_B = current.get("noise_seeds", None if settings is None else settings.seeds_B)
    if seeds_B is None:  # in an evaluation all sequences have the same noise, so that their order does not count
        seeds_B = torch.zeros_like(steps_B, dtype=torch.int64)

    def repeated(tensor_B: torch.Tensor) -> torch.Tensor:
        return tensor_B.repeat_interleave(num_trajectories, 0)

    seeds_N = derived(seeds_B[:, None], torch.arange(num_trajectories, device=seeds_B.device)).flatten()
    if "answers" in current:
        assert settings is not None and settings.own_answers_B is not None
        slots = steps_B, current["labels"], current["answers"], settings.own_answers_B
        return {NOISY: noise.annealed(seeds_N, *map(repeated, slots), num_steps=model.config.halt_max_steps)}
    seeds_N = derived(seeds_N, repeated(steps_B))
    return {NOISY: noise.full_strength(model.config.noise, seeds_N, current["inputs"].shape[1], model.vocab_size)}


class ActObjective(Objective[Carry, Batch, ActSettings]):
    """One segment of every slot. Each slot counts the same, however many a part holds."""

    sums = ACT_SUMS

    def __init__(self, model: RecursiveModel) -> None:
        self._model = model
        self._loss_of_slots = loss_of_slots

    def compile(self) -> None:
        self._loss_of_slots = torch.compile(loss_of_slots)

    def fresh_carry(self, num_slots: int, device: torch.device) -> Carry:
        """Return slots that have all halted, so that the first batch fills them."""
        return initial_carry(self._model, empty_batch(num_slots, self._model.seq_len, device), training=True)

    def split(
        self, carry: Carry, batch: Batch, settings: ActSettings, num_parts: int
    ) -> list[tuple[Carry, Batch, ActSettings]]:
        num_slots = len(carry.steps_B)
        assert num_slots % num_parts == 0, "the config asks for whole parts"
        size = num_slots // num_parts
        return [
            (
                Carry.from_tensors({name: tensor[part] for name, tensor in carry.tensors().items()}),
                {name: tensor[part] for name, tensor in batch.items()},
                settings.of_slots(part),
            )
            for part in (slice(first, first + size) for first in range(0, num_slots, size))
        ]

    def run(
        self,
        carry: Carry,
        batch: Batch,
        settings: ActSettings,
        forward: Callable[..., SegmentOutput] | None = None,
    ) -> PartResult[Carry]:
        carry, outputs = segment(self._model, carry, batch, settings, forward=forward)
        loss, sums = self._loss_of_slots(outputs, carry, settings, self._model.config.loss)
        detached = replace(
            outputs,
            logits_BSV=outputs.logits_BSV.detach(),
            q_halt_B=outputs.q_halt_B.detach(),
            q_continue_B=outputs.q_continue_B.detach(),
        )
        return PartResult(carry, detached, loss, sums)

    def smallest_loss(self, forward: Callable[..., SegmentOutput], device: torch.device) -> torch.Tensor:
        """As in the base class, from one slot. The loss has no value of its own."""
        model = self._model
        ids_1 = torch.zeros(1, dtype=torch.int32, device=device)
        state = model.reset(model.initial_state(1, device), ids_1 == 0)
        if model.config.noise != "none":
            state[NOISY] = torch.zeros(1, model.seq_len, model.vocab_size, device=device)
        inputs_1S = ids_1.expand(1, model.seq_len)
        rows_1E = None
        if model.puzzle_embedding is not None:
            rows_1E = torch.zeros(1, model.puzzle_embedding.weight.shape[1], device=device)
        _, logits_1SV, q_halt_1, q_continue_1 = forward(state, inputs_1S, rows_1E, model.config.depth)
        return logits_1SV.float().sum() + q_halt_1.sum() + q_continue_1.sum()

    def join(self, carries: Sequence[Carry]) -> Carry:
        parts = [carry.tensors() for carry in carries]
        if len(parts) == 1:
            return Carry.from_tensors(parts[0])
        return Carry.from_tensors({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def divisor(self, batch: Batch, settings: ActSettings) -> int:
        return settings.global_batch_size


def loss_of_slots(
    outputs: Outputs, carry: Carry, settings: ActSettings, config: TokenLossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of a step's loss that belongs to some slots, and their sums of METRICS.

    Args:
        outputs, carry: what `segment` returned for these slots.
    """
    loss_sum, sums = act_loss(
        outputs, carry.current["labels"], halted_B=carry.halted_B, steps_B=carry.steps_B, config=config
    )
    return loss_sum / settings.global_batch_size, sums


def wants_to_halt(model: RecursiveModel, q_halt_B: torch.Tensor, q_continue_B: torch.Tensor) -> torch.Tensor:
    """Return for each slot whether the Q head would halt here, bool (B,).

    It halts where halting is worth more than going on. Without a value of going on (TRM, arXiv
    2510.04871, section 4.6), it halts where the answer is more likely right than wrong.
    """
    return q_halt_B > q_continue_B if model.config.values_going_on else q_halt_B > 0


def draw_min_halt_steps(seed: int, step: int, batch_size: int, prob: float, halt_max_steps: int) -> torch.Tensor:
    """Draw the earliest halt of each slot of the *global* batch for one training step.

    With probability `prob` a slot's earliest halt is drawn from 2..halt_max_steps. The result
    depends on the arguments alone. So each rank can take its slice of the result, and a resumed run
    draws the same numbers as an uninterrupted one.

    Returns:
        int32 (B,) on the CPU; 0 for a slot without exploration.
    """
    if halt_max_steps < 2:  # every slot halts after its only segment, so there is nothing to delay
        return torch.zeros(batch_size, dtype=torch.int32)
    rng = np.random.default_rng([_EXPLORATION_STREAM, seed, step])
    explores_B = rng.random(batch_size) < prob
    steps_B = rng.integers(2, halt_max_steps, size=batch_size, endpoint=True, dtype=np.int32)
    return torch.from_numpy(np.where(explores_B, steps_B, np.int32(0)))


def draw_random_halts(seed: int, step: int, batch_size: int, prob: float, halt_max_steps: int) -> torch.Tensor:
    """Draw which slots of the *global* batch halt by chance in one training step.

    Each slot halts with probability `prob` (arXiv 2603.02193, and its published code). As with
    `draw_min_halt_steps`, the result depends on the arguments alone.

    Returns:
        The earliest halt of each slot, int32 (B,) on the CPU: 0 for a slot that halts now, and
        halt_max_steps for one that goes on.
    """
    rng = np.random.default_rng([_HALTING_STREAM, seed, step])
    halts_B = rng.random(batch_size) < prob
    return torch.from_numpy(np.where(halts_B, np.int32(0), np.int32(halt_max_steps)))


def draw_own_answers(seed: int, step: int, batch_size: int, growing_steps: int) -> torch.Tensor:
    """Draw which slots of the *global* batch read a noisy copy of their own last answer.

    The probability grows from 0 to 1 over growing_steps steps; with none of them it stays 0. The
    result depends on the arguments alone.

    Returns:
        bool (B,) on the CPU.
    """
    rng = np.random.default_rng([_OWN_ANSWER_STREAM, seed, step])
    return torch.from_numpy(
        rng.random(batch_size) * growing_steps < step if growing_steps else np.zeros(batch_size, bool)
    )


def draw_seeds(seed: int, step: int, batch_size: int) -> torch.Tensor:
    """Draw a seed for each slot of the *global* batch for one training step.

    The result depends on the arguments alone.

    Returns:
        int64 (B,) on the CPU, from 0 to 2^32 - 1.
    """
    rng = np.random.default_rng([_SEED_STREAM, seed, step])
    return torch.from_numpy(rng.integers(2**32, size=batch_size, dtype=np.int64))
