"""The clock counts training, not what stands between steps; the profiler leaves a trace and a table."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from utils.profiling import Deadline, StepClock, StepProfiler, TimeShare, max_memory_gb


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(s=50.0)
    monkeypatch.setattr("utils.profiling.time.perf_counter", lambda: clock.s)
    return clock


def test_time_of_steps_without_pauses(now: SimpleNamespace) -> None:
    clock = StepClock()

    def batches() -> Iterator[int]:
        for batch in range(6):
            now.s += 0.25  # reading
            yield batch

    rows = []
    for batch in clock.timing_data(batches()):
        now.s += 1.0  # training
        if batch in (1, 5):
            rows.append(clock.read(8))
        with clock.paused():
            now.s += 100.0  # evaluation
    expected = {"perf/examples_per_second": 8 / 1.25, "perf/step_ms": 1250.0, "perf/data_ms": 250.0}
    assert rows == [pytest.approx(expected), pytest.approx(expected)]


def test_a_failure_in_a_pause_is_passed_on(now: SimpleNamespace) -> None:
    clock = StepClock()
    with pytest.raises(KeyError), clock.paused():
        raise KeyError


def test_batches_pass_unchanged() -> None:
    assert list(StepClock().timing_data(iter("abc"))) == ["a", "b", "c"]


def test_memory_is_that_of_this_process() -> None:
    before = max_memory_gb(torch.device("cpu"))
    assert 0.05 < before < 64
    block = bytearray(300_000_000)
    assert max_memory_gb(torch.device("cpu")) >= before
    assert len(block) == 300_000_000


def test_evaluation_has_its_share_and_no_more(now: SimpleNamespace) -> None:
    """A fifth of all time: 20 s after 80 s, and later what has come up since, less what it took too much."""
    share = TimeShare(0.2)
    now.s += 80
    with share.taking(limited=True) as deadline:
        assert deadline.is_set and not deadline.is_over
        now.s += 19.9
        assert not deadline.is_over
        now.s += 5.1
        assert deadline.is_over
    assert share.share == pytest.approx(25 / 105)
    now.s += 15
    with share.taking(limited=True) as deadline:
        assert deadline.is_over, "25 of 120 s are more than a fifth already"
    now.s += 80
    with share.taking(limited=True) as deadline:  # 25 + 18.75 of 200 + 18.75 s
        now.s += 18.7
        assert not deadline.is_over
        now.s += 0.1
        assert deadline.is_over


def test_without_a_largest_share_it_is_only_counted(now: SimpleNamespace) -> None:
    share = TimeShare(None)
    now.s += 1
    with share.taking(limited=True) as deadline:
        now.s += 1e6
        assert not (deadline.is_set or deadline.is_over or deadline.is_near)
    assert share.share == pytest.approx(1e6 / (1e6 + 1))


def test_a_put_off_evaluation_has_all_the_time(now: SimpleNamespace) -> None:
    with TimeShare(0.1).taking(limited=False) as deadline:
        now.s += 1e6
        assert not deadline.is_over


def test_laps_that_would_end_behind_the_deadline(now: SimpleNamespace) -> None:
    """The longest counts; and the next evaluation knows it from the start."""
    share = TimeShare(0.5)
    now.s += 10
    with share.taking(limited=True) as deadline:  # 10 s
        assert not deadline.is_near  # nobody knows yet how long one takes
        for seconds in (3.0, 1.0):
            deadline.begin_lap()
            now.s += seconds
            deadline.end_lap()
            now.s += 0.5
        assert not deadline.is_near  # 5 s are over
        now.s += 2.1
        assert deadline.is_near and not deadline.is_over
    now.s += 2.0
    with share.taking(limited=True) as deadline:
        now.s += 1.0
        assert deadline.lap_s == 3.0 and not deadline.is_over
        now.s += 1.0
        assert deadline.is_near


def test_sets_share_the_time_that_is_left(now: SimpleNamespace) -> None:
    seen = []
    deadline = Deadline(9.0)
    for name, part in deadline.shared_by(["a", "b", "c"]):
        part.was_met = name != "b"
        now.s += {"a": 2.9, "b": 2.0, "c": 3.6}[name]
        seen.append(part.is_over)
        now.s += 0.2
        seen.append(part.is_over)
    assert seen == [False, True, False, False, False, True]  # b had 2.95 s, c the 3.7 s left
    assert not deadline.was_met


def _work() -> torch.Tensor:
    x = torch.ones(64, 64)
    return (x @ x).relu().sum() + x.sin().cos().exp().log().sqrt().tanh().abs().neg().sigmoid().sum()


def test_a_trace_and_a_table_of_ten(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = StepProfiler(True, tmp_path, said.append)
    for _ in range(8):
        _work()
        profiler.step()
    profiler.close()
    table, where = said
    assert str(tmp_path / "trace.json") in where
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rule = [index for index, line in enumerate(table.splitlines()) if set(line.strip()) == {"-", " "}]
    assert len(rule) == 3 and rule[2] - rule[1] - 1 == 10


def test_switched_off_it_does_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(False, tmp_path, lambda text: pytest.fail(text))
    for _ in range(8):
        profiler.step()
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_before_the_trace_is_whole(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = StepProfiler(True, tmp_path, said.append)
    for _ in range(2):
        _work()
        profiler.step()
    profiler.close()
