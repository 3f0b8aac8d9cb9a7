"""The clock of a run, and the share of evaluation."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from utils.perf.clocks import ACTIVITIES, Deadline, RunClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(s=50.0)
    for name in ("perf_counter", "time"):
        monkeypatch.setattr(f"utils.perf.clocks.time.{name}", lambda: clock.s)
    return clock


def test_each_second_of_a_run_has_an_activity(now: SimpleNamespace) -> None:
    """Also those of an earlier process, and of the compiling in the first step."""
    clock = RunClock({"steps": 10.0, "lost": 3.0, "down": 2.0}, since=40.0)

    def batches() -> Iterator[int]:
        for batch in range(6):
            now.s += 0.25  # reading the batch
            yield batch

    rows = []
    for batch in clock.timing(batches()):
        now.s += 31.0 if batch == 0 else 1.0  # the step; the first one compiles
        if batch in (1, 5):
            rows.append(clock.row(8))
        with clock.doing("other"):
            now.s += 0.5
            with clock.evaluating(limited=False):
                now.s += 100.0
            with clock.doing("save"):
                now.s += 2.0
    perf = [{name: row[name] for name in row if "spent_s" not in name and "goodput" not in name} for row in rows]
    assert perf[0] == pytest.approx({"perf/examples_per_second": 16 / 32.5, "perf/step_ms": 16250, "perf/data_ms": 250})
    assert perf[1] == pytest.approx({"perf/examples_per_second": 8 / 1.25, "perf/step_ms": 1250, "perf/data_ms": 250})
    expected = {"steps": 16.0, "lost": 3.0, "down": 2.0, "start": 10 + 30.0, "data": 6 * 0.25}
    expected |= {"other": 6 * 0.5, "evaluation": 600.0, "save": 12.0}
    assert expected.keys() == ACTIVITIES.keys()
    assert clock.spent_s() == pytest.approx(expected)
    assert sum(expected.values()) == pytest.approx(now.s - 40 + 15), "no second is missing, and none is there twice"
    assert clock.shares()["steps"] == pytest.approx(16 / sum(expected.values()))
    all_s = sum(expected.values()) - 102.5
    assert rows[1]["perf/goodput"] == pytest.approx(16 / all_s)
    assert rows[1]["perf/spent_s/evaluation"] == pytest.approx(500)


def test_evaluations_get_their_share_of_the_time(now: SimpleNamespace) -> None:
    """The share is a fifth of all time: 20 s after 80 s of training."""
    clock = RunClock({"steps": 30.0}, now.s, largest_eval_share=0.2)
    now.s += 50
    with clock.evaluating(limited=True) as deadline:
        assert deadline.is_set and not deadline.is_over
        now.s += 19.9
        assert not deadline.is_over
        now.s += 5.1
        assert deadline.is_over
    assert clock.shares()["evaluation"] == pytest.approx(25 / 105) and clock.last_evaluation_s == pytest.approx(25)
    now.s += 15
    with clock.evaluating(limited=True) as deadline:
        assert deadline.is_over, "25 of 120 s are already more than a fifth"
    now.s += 80
    with clock.evaluating(limited=True) as deadline:  # it may take 18.75 s: 25 + 18.75 is a fifth of 200 + 18.75
        now.s += 18.7
        assert not deadline.is_over
        now.s += 0.1
        assert deadline.is_over
    for largest, limited in ((None, True), (0.1, False)):  # then the share is only measured
        clock = RunClock({}, now.s, largest)
        now.s += 1
        with clock.evaluating(limited=limited) as deadline:
            now.s += 1e6
            assert not (deadline.is_set or deadline.is_over or deadline.is_near)
        assert clock.shares()["evaluation"] == pytest.approx(1e6 / (1e6 + 1))


def test_a_deadline_is_near_if_the_longest_lap_would_miss_it(now: SimpleNamespace) -> None:
    """The next evaluation knows the longest lap from its start."""
    clock = RunClock({}, now.s, largest_eval_share=0.5)
    now.s += 10
    with clock.evaluating(limited=True) as deadline:  # the deadline is in 10 s
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
    with clock.evaluating(limited=True) as deadline:
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
