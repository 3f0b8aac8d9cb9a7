"""The clock of steps, and the share of evaluation."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from utils.perf.clocks import Deadline, StepClock, TimeShare


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(s=50.0)
    monkeypatch.setattr("utils.perf.clocks.time.perf_counter", lambda: clock.s)
    return clock


def test_time_of_steps_without_pauses(now: SimpleNamespace) -> None:
    clock = StepClock()

    def batches() -> Iterator[int]:
        for batch in range(6):
            now.s += 0.25  # reading the batch
            yield batch

    rows = []
    for batch in clock.timing_data(batches()):
        now.s += 1.0  # the step
        if batch in (1, 5):
            rows.append(clock.read(8))
        with clock.paused():
            now.s += 100.0  # an evaluation, which the clock must not count
    expected = {"perf/examples_per_second": 8 / 1.25, "perf/step_ms": 1250.0, "perf/data_ms": 250.0}
    assert rows == [pytest.approx(expected), pytest.approx(expected)]


def test_evaluations_get_their_share_of_the_time(now: SimpleNamespace) -> None:
    """The share is a fifth of all time: 20 s after 80 s of training."""
    share = TimeShare(0.2)
    now.s += 80
    with share.taking(limited=True) as deadline:
        assert deadline.is_set and not deadline.is_over
        now.s += 19.9
        assert not deadline.is_over
        now.s += 5.1
        assert deadline.is_over
    assert share.share == pytest.approx(25 / 105) and share.last_s == pytest.approx(25)
    now.s += 15
    with share.taking(limited=True) as deadline:
        assert deadline.is_over, "25 of 120 s are already more than a fifth"
    now.s += 80
    with share.taking(limited=True) as deadline:  # it may take 18.75 s: 25 + 18.75 is a fifth of 200 + 18.75
        now.s += 18.7
        assert not deadline.is_over
        now.s += 0.1
        assert deadline.is_over
    for largest, limited in ((None, True), (0.1, False)):  # then the share is only measured
        share = TimeShare(largest)
        now.s += 1
        with share.taking(limited=limited) as deadline:
            now.s += 1e6
            assert not (deadline.is_set or deadline.is_over or deadline.is_near)
        assert share.share == pytest.approx(1e6 / (1e6 + 1))


def test_a_deadline_is_near_if_the_longest_lap_would_miss_it(now: SimpleNamespace) -> None:
    """The next evaluation knows the longest lap from its start."""
    share = TimeShare(0.5)
    now.s += 10
    with share.taking(limited=True) as deadline:  # the deadline is in 10 s
        assert not deadline.is_near  # the length of a lap is not known yet
        for seconds in (3.0, 1.0):
            deadline.begin_lap()
            now.s += seconds
            deadline.end_lap()
            now.s += 0.5
        assert not deadline.is_near  # 5 s have passed
        now.s += 2.1
        assert deadline.is_near and not deadline.is_over
    now.s += 2.0
    with share.taking(limited=True) as deadline:
        now.s += 1.0
        assert deadline.lap_s == 3.0 and not deadline.is_over
        now.s += 1.0
        assert deadline.is_near


def test_sets_share_the_remaining_time(now: SimpleNamespace) -> None:
    seen, laps = [], []
    deadline = Deadline(9.0, lap_s=0.5)
    for name, part in deadline.shared_by(["a", "b", "c"]):
        part.was_met = name != "b"
        laps.append(part.lap_s)
        part.lap_s += 0.25
        now.s += {"a": 2.9, "b": 2.0, "c": 3.6}[name]
        seen.append(part.is_over)
        now.s += 0.2
        seen.append(part.is_over)
    assert seen == [False, True, False, False, False, True]  # b may take 2.95 s, and c the remaining 3.7 s
    assert not deadline.was_met
    assert laps == [0.5, 0.75, 1.0] and deadline.lap_s == 1.25, "a set does not know the laps of those before"
