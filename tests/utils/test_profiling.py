"""The clock, the share of evaluation, the sampler of communication, and the profiler."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.spawn import run_ranks
from utils.dist.world import World
from utils.profiling import CommSampler, Deadline, StepClock, StepProfiler, TimeShare, _union, max_memory_gb

CPU = torch.device("cpu")
MEMORY = {"perf/max_memory_gb"}
SAMPLED = MEMORY | {
    "perf/comm_ms",
    "perf/comm_share",
    "perf/imbalance",
    "perf/memory_gb/rank_0",
    "perf/memory_gb/rank_1",
}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(s=50.0)
    monkeypatch.setattr("utils.profiling.time.perf_counter", lambda: clock.s)
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


def test_an_exception_in_a_pause_is_passed_on(now: SimpleNamespace) -> None:
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


def test_evaluations_get_their_share_of_the_time(now: SimpleNamespace) -> None:
    """The share is a fifth of all time: 20 s after 80 s of training.

    A later evaluation gets a fifth of the time since, less the time that earlier evaluations took
    too much.
    """
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
        assert deadline.is_over, "25 of 120 s are already more than a fifth"
    now.s += 80
    with share.taking(limited=True) as deadline:  # it may take 18.75 s: 25 + 18.75 is a fifth of 200 + 18.75
        now.s += 18.7
        assert not deadline.is_over
        now.s += 0.1
        assert deadline.is_over


def test_without_a_limit_the_share_is_only_measured(now: SimpleNamespace) -> None:
    share = TimeShare(None)
    now.s += 1
    with share.taking(limited=True) as deadline:
        now.s += 1e6
        assert not (deadline.is_set or deadline.is_over or deadline.is_near)
    assert share.share == pytest.approx(1e6 / (1e6 + 1))


def test_an_unlimited_evaluation_has_no_deadline(now: SimpleNamespace) -> None:
    with TimeShare(0.1).taking(limited=False) as deadline:
        now.s += 1e6
        assert not deadline.is_over


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
    seen = []
    deadline = Deadline(9.0)
    for name, part in deadline.shared_by(["a", "b", "c"]):
        part.was_met = name != "b"
        now.s += {"a": 2.9, "b": 2.0, "c": 3.6}[name]
        seen.append(part.is_over)
        now.s += 0.2
        seen.append(part.is_over)
    assert seen == [False, True, False, False, False, True]  # b may take 2.95 s, and c the remaining 3.7 s
    assert not deadline.was_met


def test_overlapping_spans_count_once() -> None:
    assert _union([]) == 0
    assert _union([(30, 40), (10, 20), (15, 18), (19, 25), (40, 41)]) == 26


def _check_rows(world: World) -> None:
    """Only rows of sampled steps have figures of communication. Every rank gets the same row."""
    sampler = CommSampler(2, world)
    keys = []
    for step in range(1, 5):
        with sampler.step(step):
            dist.all_reduce(torch.ones(8))
        row = sampler.row()
        if "perf/comm_ms" in row:
            del row["perf/max_memory_gb"]  # each rank measures its own memory
            assert world.gather_objects(row) == [row] * world.size
            row["perf/max_memory_gb"] = 0.0
        keys.append(row.keys())
    assert keys == [MEMORY, SAMPLED, MEMORY, SAMPLED]
    never = CommSampler(None, world)
    with never.step(100):
        dist.all_reduce(torch.ones(8))
    assert never.row().keys() == MEMORY
    with pytest.raises(KeyError), sampler.step(6):
        raise KeyError


def _check_against_a_stopwatch(world: World) -> None:
    x = torch.ones(10_000_000)
    sampler = CommSampler(1, world)
    world.barrier()
    with sampler.step(1):
        time.sleep(0.1)  # this is not communication
        began = time.perf_counter()
        dist.all_reduce(x)
        expected_ms = 1e3 * (time.perf_counter() - began)
    assert sampler.row()["perf/comm_ms"] == pytest.approx(sum(world.gather_objects(expected_ms)) / 2, rel=0.2, abs=3)


def _check_a_late_rank(world: World) -> None:
    """Rank 0 waits for rank 1: communication for rank 0, work for rank 1, and imbalance."""
    x, sampler = torch.ones(1000), CommSampler(1, world)
    world.barrier()
    with sampler.step(1):
        work = dist.all_reduce(torch.ones(1000), async_op=True) if world.rank == 0 else None
        time.sleep(0.5 * world.rank)
        (work or dist.all_reduce(x, async_op=True)).wait()
    row = sampler.row()
    assert 250 * 0.9 < row["perf/comm_ms"] < 400
    assert 0.4 < row["perf/comm_share"] < 0.7
    assert 1.6 < row["perf/imbalance"] <= 2


def _check_it_sees_everything(world: World) -> None:
    """The sampler sees the communication of every strategy.

    In each call a late rank keeps the other rank waiting, and the sampler must measure that time.
    """
    x, like = torch.ones(1000), nn.Linear(8, 8)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    sharded = nn.Sequential(nn.Linear(8, 8))
    fully_shard(sharded)
    inputs = torch.ones(4, 8)
    first_outputs = {"ddp": ddp(inputs).sum()}  # DDP communicates only in the backward pass
    calls: dict[str, Callable[[], object]] = {
        "ddp": lambda: first_outputs["ddp"].backward(),
        "fsdp": lambda: sharded(inputs),
        "tensor parallel": lambda: functional.all_reduce(x, "sum", list(range(world.size))).sum(),
        "pipeline": lambda: dist.recv(x, 1) if world.rank == 0 else dist.send(x, 0),
        "broadcast": lambda: dist.broadcast(x, 1),
        "flags of the host": lambda: world.any(False),
        "objects": lambda: world.gather_objects(like.weight.shape),
    }
    for name, call in calls.items():
        sampler = CommSampler(1, world)
        world.barrier()
        with sampler.step(1):
            time.sleep(0.1 * world.rank)
            call()
        assert 50 * 0.8 < sampler.row()["perf/comm_ms"] < 200, name


def _check_memory_of_each_rank(world: World) -> None:
    held = bytearray(400_000_000) if world.rank == 1 else b""
    sampler = CommSampler(1, world)
    with sampler.step(1):
        pass
    row = sampler.row()
    assert row["perf/memory_gb/rank_1"] > row["perf/memory_gb/rank_0"] + 0.3
    assert row["perf/max_memory_gb"] >= row["perf/memory_gb/rank_1"]
    assert len(held) == 400_000_000 * world.rank


def _check_all(world: World) -> None:
    _check_rows(world)
    _check_against_a_stopwatch(world)
    _check_a_late_rank(world)
    _check_it_sees_everything(world)
    _check_memory_of_each_rank(world)


def test_communication_between_ranks_is_measured() -> None:
    run_ranks(_check_all, 2)


def test_a_single_process_is_not_sampled() -> None:
    sampler = CommSampler(1, World.single())
    with sampler.step(1):
        pass
    assert sampler.row().keys() == MEMORY


def _work() -> torch.Tensor:
    x = torch.ones(64, 64)
    return (x @ x).relu().sum() + x.sin().cos().exp().log().sqrt().tanh().abs().neg().sigmoid().sum()


def test_a_profile_has_a_trace_and_the_ten_largest_operations(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = StepProfiler(True, tmp_path, said.append, CPU)
    for _ in range(8):
        _work()
        profiler.step()
    profiler.close()
    times, memory, where = said
    assert str(tmp_path / "trace.json") in where and str(tmp_path / "memory.txt") in where
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "memory.txt").read_text() == memory + "\n"
    for table in (times, memory):
        _, columns, *lines = table.splitlines()
        assert len(lines) == 10 and all(len(line) <= len(columns) for line in lines), table
        figures = [float(line.split()[-2]) for line in lines]
        assert figures == sorted(figures, reverse=True)
        assert sum(float(line.split()[-1].rstrip("%")) for line in lines) <= 100.5
    mm = next(line.split() for line in memory.splitlines() if line.startswith("aten::mm "))
    assert mm[1:3] == ["1", "0.02"]  # one call in each step, with an output of 64 x 64 floats
    assert "(Python, between operations)" in times


def test_a_disabled_profiler_writes_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(False, tmp_path, lambda text: pytest.fail(text), CPU)
    for _ in range(8):
        profiler.step()
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_before_its_trace_reports_that(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = StepProfiler(True, tmp_path, said.append, CPU)
    for _ in range(2):
        _work()
        profiler.step()
    profiler.close()
    assert said == ["no trace: the run ended before step 6"]


def test_a_resumed_run_keeps_its_earlier_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{}")
    profiler = StepProfiler(True, tmp_path, lambda text: pytest.fail(text), CPU)
    _work()
    profiler.step()
    profiler.close()
    assert (tmp_path / "trace.json").read_text() == "{}", "the trace of the first part of the run was overwritten"
