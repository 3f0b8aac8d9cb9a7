"""Slots give each sequence the answer that it has alone, whoever its neighbours are."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from models.act import initial_carry, segment
from models.hrm import HRM
from models.inference import Finished, Slots, trace
from tests.models.helpers import SEQ_LEN, random_batch, seed_with, small_hrm
from utils.batch import Batch

# N = sequences, T = segments, S = tokens
NUM, STEPS = 17, 5


@pytest.fixture(scope="module")
def model(batch: Batch) -> HRM:
    """Return a model whose sequences halt after different numbers of segments, or never."""

    def differ(seed: int) -> bool:
        found = _alone(small_hrm(seed=seed, halt_max_steps=3), batch)
        settled_at = {one.settled_at for one in found}
        return len(settled_at) > 2 and settled_at != {one.halts_at for one in found}

    return small_hrm(seed=seed_with(differ, "sequences that settle at different segments"), halt_max_steps=3)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(NUM)


class Alone:
    """One sequence, run alone segment by segment."""

    def __init__(self, model: HRM, batch: Batch, n: int) -> None:
        one = {name: tensor[n : n + 1] for name, tensor in batch.items()}
        carry = initial_carry(model, one)
        self.answers: list[list[int]] = []
        self.q_halt: list[float] = []
        self.settled: list[bool] = []
        self.halts_at = self.settled_at = STEPS
        with torch.no_grad():
            for step in range(1, STEPS + 1):
                carry, outputs = segment(model, carry, one)
                carry.halted_B = torch.tensor([False])
                self.answers.append(outputs.logits_BSV.argmax(-1)[0].tolist())
                self.q_halt.append(float(outputs.q_halt_B))
                halts = bool(outputs.q_halt_B > outputs.q_continue_B)
                self.settled.append(halts and self.answers[-2:-1] == self.answers[-1:])
                if halts:
                    self.halts_at = min(self.halts_at, step)
                if self.settled[-1]:
                    self.settled_at = min(self.settled_at, step)


@pytest.fixture(scope="module")
def alone(model: HRM, batch: Batch) -> list[Alone]:
    return _alone(model, batch)


def _alone(model: HRM, batch: Batch) -> list[Alone]:
    return [Alone(model, batch, n) for n in range(NUM)]


def _pieces(batch: Batch, sizes: list[int]) -> Iterator[tuple[np.ndarray, Batch]]:
    start = 0
    for size in sizes:
        rows = np.arange(start, start + size)
        yield 100 + rows, {name: tensor[start : start + size] for name, tensor in batch.items()}
        start += size


def _run(slots: Slots) -> tuple[list[Finished], list[int]]:
    finished, sizes = [], []
    while slots.busy:
        said = slots.advance()
        sizes.append(len(said.steps_B))
        assert len(said.labels_BS) == len(said.halted_before_B) == len(said.outputs.q_halt_B) == sizes[-1]
        assert said.deltas_B is None or len(said.deltas_B) == sizes[-1]
        if said.finished is not None:
            finished.append(said.finished)
    return finished, sizes


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("sizes", [[17], [4, 4, 4, 4, 1], [3, 14], [1] * 17, [6, 0, 11]])
def test_every_sequence_is_answered_as_if_it_were_alone(
    model: HRM, batch: Batch, alone: list[Alone], adaptive: bool, sizes: list[int]
) -> None:
    slots = Slots(model, _pieces(batch, sizes), num_steps=STEPS, adaptive=adaptive, keep_steps=True)
    finished, num_slots = _run(slots)
    assert max(num_slots) == sizes[0]
    if sizes == [4, 4, 4, 4, 1]:  # no slot is ever empty before the last sequences
        needed = [one.settled_at if adaptive else STEPS for one in alone]
        assert sum(num_slots) == sum(needed) <= NUM * STEPS - adaptive
    rows = np.concatenate([done.rows_N for done in finished]) - 100
    assert sorted(rows.tolist()) == list(range(NUM))
    for done in finished:
        assert done.predictions_NTS is not None and done.q_halt_NT is not None
        answers = done.outputs.logits_BSV.argmax(-1).tolist()
        for i, n in enumerate((done.rows_N - 100).tolist()):
            steps = alone[n].settled_at if adaptive else STEPS
            assert int(done.steps_N[i]) == steps
            assert bool(done.settled_N[i]) == alone[n].settled[steps - 1]
            assert answers[i] == alone[n].answers[steps - 1]
            assert done.batch["inputs"][i].tolist() == batch["inputs"][n].tolist()
            assert int(done.batch["puzzle_identifiers"][i]) == int(batch["puzzle_identifiers"][n])
            last = [alone[n].answers[steps - 1]] * (STEPS - steps)
            assert done.predictions_NTS[i].tolist() == alone[n].answers[:steps] + last
            expected = alone[n].q_halt[:steps] + [alone[n].q_halt[steps - 1]] * (STEPS - steps)
            # Other batch sizes use other kernels, and untrained weights amplify their rounding. On
            # one CPU the fifth segment differed by 1.1e-4.
            assert done.q_halt_NT[i].tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_compiled_model_always_sees_the_same_number_of_slots(
    model: HRM, batch: Batch, adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be compiled anew for another number. Empty slots change no result."""
    seen = []
    hook = model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[1])))

    def run() -> tuple[list[Finished], list[int]]:
        pieces = _pieces(batch, [4] * 4 + [1])
        return _run(Slots(model, pieces, num_steps=STEPS, adaptive=adaptive, keep_steps=True, keep_deltas=True))

    expected, expected_sizes = run()
    seen.clear()
    monkeypatch.setattr(model, "is_compiled", True)
    finished, sizes = run()
    hook.remove()
    assert set(seen) == {4} and sizes == expected_sizes and min(sizes) < 4
    for one, other in zip(finished, expected, strict=True):
        assert (one.rows_N.tolist(), one.steps_N.tolist()) == (other.rows_N.tolist(), other.steps_N.tolist())
        assert one.predictions_NTS is not None and other.predictions_NTS is not None
        assert torch.equal(one.predictions_NTS, other.predictions_NTS)


def test_slots_tell_which_sequences_would_have_halted_before(model: HRM, batch: Batch, alone: list[Alone]) -> None:
    slots = Slots(model, _pieces(batch, [NUM]), num_steps=STEPS)
    for step in range(1, STEPS + 1):
        said = slots.advance()
        assert said.steps_B.tolist() == [step] * NUM
        assert said.halted_before_B.tolist() == [one.halts_at < step for one in alone]


def test_a_trace_has_the_answers_of_every_segment(model: HRM, batch: Batch, alone: list[Alone]) -> None:
    said = trace(model, batch, STEPS)
    for n, one in enumerate(alone):
        assert said.predictions_TNS[:, n].tolist() == one.answers
        assert said.confidence_TN[:, n].tolist() == pytest.approx(torch.tensor(one.q_halt).sigmoid().tolist(), abs=1e-4)
        assert int(said.settled_at_N[n]) == one.settled_at
        assert bool(said.settled_N[n]) == one.settled[-1]
    assert trace(model, batch).predictions_TNS.shape == (3, NUM, SEQ_LEN)  # 3 is the default, halt_max_steps
