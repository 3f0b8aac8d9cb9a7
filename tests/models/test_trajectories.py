"""The noise of a trajectory depends on its number alone, and trajectory 0 has none."""

# N = trajectories of all examples, T = segments, S = tokens

import numpy as np
import pytest
import torch

from models.act import initial_carry, segment
from models.base import RecursiveModel
from models.carry import State
from models.inference import Slots, trace
from models.trajectories import Trajectories
from tests.models.helpers import fresh_state, random_batch, run, small_model
from utils.batch import Batch

NUM, STEPS, COUNT, NOISE = 7, 4, 3, 0.8
TRAJECTORIES = Trajectories(COUNT, NOISE, seed=11)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(NUM)


@torch.no_grad()
def _by_hand(model: RecursiveModel, one: Batch, row: int, k: int, noise: float) -> list[tuple[list[int], float]]:
    """Return the answer and q_halt after each segment of a trajectory: the definition."""
    state = fresh_state(model, 1)
    last = list(state)[-1]
    state[last] = model.starts()[k % model.config.num_states].expand_as(state[last])
    said = []
    for t in range(1, STEPS + 1):
        if k > 0:
            (drawn,) = np.random.SeedSequence([0x2605, TRAJECTORIES.seed, row, k, t]).generate_state(1, np.uint64)
            generator = torch.Generator().manual_seed(int(drawn) >> 1)
            state = {name: z + noise * torch.randn(z.shape[1:], generator=generator) for name, z in state.items()}
        state, logits_1SV, q_halt_1, _ = run(model, one, state=state)
        said.append((logits_1SV[0].argmax(-1).tolist(), float(q_halt_1)))
    return said


@pytest.mark.parametrize(
    ("name", "num_states", "noise"),
    [("hrm", 1, NOISE), ("trm", 1, NOISE), ("urm", 1, NOISE), ("trm", 2, 0.0), ("urm", 2, 0.0)],
)
def test_a_trajectory_has_its_start_and_adds_its_own_noise_before_each_segment(
    name: str, num_states: int, noise: float, batch: Batch
) -> None:
    model, trajectories = small_model(name, num_states=num_states), Trajectories(COUNT, noise, TRAJECTORIES.seed)
    confidences = set()
    for row, k in ((0, 0), (0, 1), (0, 2), (5, 1)):
        one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        ((numbers_N, spread),) = trajectories.spread(iter([(np.array([100 + row]), one)]), range(k, k + 1))
        seen = trace(model, spread, STEPS, trajectories=trajectories, numbers_N=numbers_N)
        expected = _by_hand(model, one, 100 + row, k, noise)
        assert seen.predictions_TNS[:, 0].tolist() == [answer for answer, _ in expected]
        q_halt = torch.tensor([q for _, q in expected])
        assert seen.confidence_TN[:, 0].tolist() == pytest.approx(q_halt.sigmoid().tolist(), abs=1e-5)
        confidences.add(tuple(seen.confidence_TN[:, 0].tolist()))
    assert len(confidences) == (4 if noise else 3), "without noise, trajectory 2 begins as trajectory 0"


def test_noise_depends_on_seed_example_trajectory_and_segment() -> None:
    model, zeros = small_model(), {"z_H": torch.zeros(1, 5, 200), "z_L": torch.zeros(1, 5, 200)}

    def noise(seed: int, row: int, k: int, t: int) -> State:
        trajectories = Trajectories(COUNT, NOISE, seed)
        return trajectories.at(model, np.array([row * COUNT + k]), np.array([t]))(zeros)

    first = noise(1, 2, 1, 1)
    drawn = [
        z
        for each in (first, noise(2, 2, 1, 1), noise(1, 3, 1, 1), noise(1, 2, 2, 1), noise(1, 2, 1, 2))
        for z in each.values()
    ]
    for n, z in enumerate(drawn):
        assert float(z.mean()) == pytest.approx(0, abs=0.1) and float(z.std()) == pytest.approx(NOISE, abs=0.07)
        assert all(abs(float((z * other).mean())) < 0.1 for other in drawn[:n]), "two draws are correlated"
    assert all(torch.equal(z, first[name]) for name, z in noise(1, 2, 1, 1).items())


def test_the_changes_of_a_slot_are_those_of_its_segments(batch: Batch) -> None:
    model = small_model("trm", halt_max_steps=3)
    slots = Slots(model, iter([(np.arange(NUM), batch)]), num_steps=STEPS, keep_deltas=True)
    carry = initial_carry(model, batch)
    before = model.reset(carry.state, carry.halted_B)
    with torch.no_grad():
        for _ in range(STEPS):
            carry, _ = segment(model, carry, batch)
            carry.halted_B = torch.zeros_like(carry.halted_B)
            deltas_B = slots.advance().deltas_B
            assert deltas_B is not None
            for slot in range(NUM):
                moved = sum(float((carry.state[n][slot] - before[n][slot]).square().sum()) for n in before)
                size = sum(float(carry.state[n][slot].square().sum()) for n in before)
                assert float(deltas_B[slot]) == pytest.approx((moved / size) ** 0.5, rel=1e-5)
            before = carry.state
