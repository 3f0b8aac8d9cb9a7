"""NumberWatch finds the bad steps of the definitions, for any number of ranks (CPU, gloo)."""

import math
import pickle
from statistics import median

import pytest
import torch
from torch import Tensor

from models.losses import ACT_SUMS, METRICS
from tests.spawn import run_ranks
from training.number_watch import BadStep, NumberWatch
from utils.ranks.world import World

SINGLE = World.single()
LM_LOSS = METRICS.index("lm_loss")


def _with_loss(loss: float) -> Tensor:
    values = torch.zeros(len(METRICS), dtype=torch.float64)
    values[LM_LOSS] = loss
    return values


def test_good_steps_pass_and_the_first_bad_step_is_named() -> None:
    """Without loss_spike, no losses are kept and none is judged."""
    watch = NumberWatch(ACT_SUMS, SINGLE)
    for step, norm in enumerate([1.0, 0.0, 2.0], start=1):
        watch.add(step, 1, _with_loss(10.0**step), torch.tensor(norm))
    watch.require_no_bad_step(pytest.fail)
    assert watch.tensors() == {}
    for step, norm in enumerate([1.0, math.inf, math.nan, 1.0], start=4):
        watch.add(step, 1, _with_loss(10.0**step), torch.tensor(norm))
    with pytest.raises(BadStep, match=r"since step 5; the last one; go on with a lower lr") as caught:
        watch.require_no_bad_step(lambda: "the last one")
    sent = pickle.loads(pickle.dumps(caught.value))  # as Ray sends it from an actor to its caller
    assert isinstance(sent, BadStep) and (sent.step, str(sent)) == (5, str(caught.value))


def test_the_earlier_step_of_a_spike_and_bad_gradients_is_named() -> None:
    for spike_at, bad_at in [(12, 14), (14, 12)]:
        watch = NumberWatch(ACT_SUMS, SINGLE, 3.0)
        for step in range(1, 16):
            loss, norm = (9.0 if step == spike_at else 1.0), (math.nan if step == bad_at else 1.0)
            watch.add(step, 1, _with_loss(loss), torch.tensor(norm))
        with pytest.raises(BadStep, match="lm_loss is 9" if spike_at < bad_at else "not finite") as caught:
            watch.require_no_bad_step(lambda: "nothing")
        assert caught.value.step == min(spike_at, bad_at)


def _differs_by_rank(world: World) -> int:
    """Give each rank another first bad step, as failing memory would. Rank 0 has no bad step."""
    watch = NumberWatch(ACT_SUMS, world)
    for step in range(1, 9):
        is_bad = world.rank > 0 and step >= 7 - world.rank
        watch.add(step, 1, _with_loss(1.0), torch.tensor(math.nan if is_bad else 1.0))
    with pytest.raises(BadStep, match="since step 5") as caught:
        watch.require_no_bad_step(lambda: "nothing")
    return caught.value.step


def test_ranks_agree_on_the_first_bad_step() -> None:
    assert run_ranks(_differs_by_rank, 3) == [5, 5, 5]


def _first_spike(losses: list[float], factor: float) -> int | None:
    """Return the first loss above `factor` times the median of the 10 to 100 before it."""
    for index, loss in enumerate(losses):
        before = losses[max(0, index - 100) : index]
        if len(before) >= 10 and loss > factor * median(before):
            return index + 1
    return None


def _found_spike(losses: list[float], factor: float, *, look_every: int) -> int | None:
    watch = NumberWatch(ACT_SUMS, SINGLE, factor)
    for step, loss in enumerate(losses, start=1):
        watch.add(step, 2, _with_loss(2 * loss), torch.tensor(1.0))
        if step % look_every == 0 or step == len(losses):
            try:
                watch.require_no_bad_step(lambda: "nothing")
            except BadStep as found:
                return found.step
    return None


LOSSES = {
    "none": [1.0] * 30,
    "too early": [1.0] * 9 + [50.0] + [1.0] * 10,
    "as early as can be": [1.0] * 10 + [50.0, 1.0],
    "as much as is allowed": [1.0] * 20 + [3.0] + [1.0] * 5,
    "of two the first": [1.0] * 20 + [4.0, 1.0, 9.0],
    "a rise that becomes usual": [1.0] * 12 + [2.5] * 30 + [7.0] + [2.5] * 3 + [8.0],
    "what lies 100 steps back is forgotten": [9.0] * 60 + [1.0] * 100 + [4.0],
    "and what lies less far back is not": [9.0] * 60 + [1.0] * 40 + [4.0],
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_spike_is_compared_with_the_median_before_it(case: str) -> None:
    """The result does not depend on when the host looks."""
    expected = _first_spike(LOSSES[case], 3.0)
    assert [_found_spike(LOSSES[case], 3.0, look_every=n) for n in (1, 7, 1000)] == [expected] * 3


def test_a_restored_window_judges_the_next_step() -> None:
    watch = NumberWatch(ACT_SUMS, SINGLE, 3.0)
    for step in range(1, 111):
        watch.add(step, 1, _with_loss(float(step)), torch.tensor(1.0))
    watch.require_no_bad_step(pytest.fail)
    saved = watch.tensors()
    assert saved["losses"].tolist() == [float(step) for step in range(11, 111)]
    resumed = NumberWatch(ACT_SUMS, SINGLE, 3.0)
    resumed.restore(saved)
    resumed.add(111, 1, _with_loss(3.01 * 60.5), torch.tensor(1.0))
    with pytest.raises(BadStep, match=r"at step 111, 3.01 times the 60.5 of the steps before it \(loss_spike=3\)"):
        resumed.require_no_bad_step(lambda: "nothing")


def test_a_loss_that_overflows_is_no_spike() -> None:
    """In float16 the loss scale skips that step. Otherwise the gradients are not finite either."""
    watch = NumberWatch(ACT_SUMS, SINGLE, 2.0)
    for step, loss in enumerate([1.0] * 12 + [math.inf, math.nan, 1.0, 3.0], start=1):
        watch.add(step, 1, _with_loss(loss), torch.zeros(()))
    with pytest.raises(BadStep, match="lm_loss is 3 at step 16, 3 times the 1 of the steps before it"):
        watch.require_no_bad_step(lambda: "nothing")


def _sees_a_part(world: World) -> int:
    """Raise the loss of the last rank only, so that the global mean is four times the usual."""
    watch = NumberWatch(ACT_SUMS, world, 3.0)
    for step in range(1, 14):
        own = 2 * world.size if step == 12 and world.rank == world.size - 1 else 0
        watch.add(step, world.size, _with_loss(1.0 + own * 1.5), torch.tensor(1.0))
    with pytest.raises(BadStep, match="lm_loss is 4 at step 12, 4 times the 1 of the steps") as caught:
        watch.require_no_bad_step(lambda: "nothing")
    return caught.value.step


def test_a_spike_on_one_rank_is_judged_by_the_global_mean() -> None:
    assert run_ranks(_sees_a_part, 2) == [12, 12]
