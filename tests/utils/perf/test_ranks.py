"""The sampler of what ranks do in a step, on real ranks."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.runs import settings, train
from tests.spawn import run_ranks
from utils.perf.ranks import _BYTES, RankSampler
from utils.perf.recording import union
from utils.ranks.world import World

MEMORY = {"perf/max_memory_gb"}
OF_RANKS = {f"perf/{name}/rank_{rank}" for name in ("memory_gb", "examples_per_second") for rank in (0, 1)}
OF_COMM = ("ms", "ms_min", "ms_max", "total_s", "share", "mb", "gb_per_s")
SAMPLED = MEMORY | OF_RANKS | {f"perf/comm_{name}" for name in OF_COMM} | {"perf/imbalance"}


def test_overlapping_spans_count_once() -> None:
    assert union([]) == 0
    assert union([(30, 40), (10, 20), (15, 18), (19, 25), (40, 41)]) == 26


def _check_rows(world: World) -> None:
    """Only rows of sampled steps have figures of communication. Every rank gets the same row.

    A sample stands for the steps since the sample before it.
    """
    sampler, totals = RankSampler(3, world), {}
    for step in range(11, 19):  # a resumed run
        with sampler.step(step):
            dist.all_reduce(torch.ones(8))
        row = sampler.row()
        assert row.keys() == (SAMPLED if step in (12, 15, 18) else MEMORY)
        if "perf/comm_ms" in row:
            assert row["perf/comm_ms_min"] <= row["perf/comm_ms"] <= row["perf/comm_ms_max"]
            totals[step] = row["perf/comm_total_s"] / row["perf/comm_ms"] * 1e3
            del row["perf/max_memory_gb"]  # each rank measures its own memory
            assert world.gather_objects(row) == [row] * world.size
    assert totals == {12: pytest.approx(2), 15: pytest.approx(3), 18: pytest.approx(3)}
    never = RankSampler(None, world)
    with never.step(100):
        dist.all_reduce(torch.ones(8))
    assert never.row().keys() == MEMORY


def _check_a_late_rank(world: World) -> None:
    """Rank 0 waits for rank 1: communication for rank 0, work for rank 1, and imbalance.

    The late rank does not lower the bandwidth, because the rank that waited does not count.
    """
    x, sampler = torch.ones(5_000_000), RankSampler(1, world)
    world.barrier()
    with sampler.step(1):
        time.sleep(0.5 * world.rank)
        dist.all_reduce(x)
    assert sampler._sample is not None
    comm_ms = world.gather_objects(sampler._sample.comm_ms)
    row = sampler.row()
    assert comm_ms[0] > comm_ms[1] + 400
    assert (row["perf/comm_ms_min"], row["perf/comm_ms_max"]) == (comm_ms[1], comm_ms[0])
    assert row["perf/comm_ms"] == pytest.approx(sum(comm_ms) / 2)
    assert 0.4 < row["perf/comm_share"] < 0.7
    assert 1.6 < row["perf/imbalance"] <= 2
    assert row["perf/comm_gb_per_s"] == pytest.approx(0.02 / (comm_ms[1] / 1e3), rel=0.05)


def _check_a_straggler(world: World) -> None:
    """It is named once, after it was slower for minutes in every sample."""
    said, clock = list[str](), [0.0]
    sampler = RankSampler(1, world, say=said.append)
    found = list[float | None]()
    with pytest.MonkeyPatch.context() as patch:
        for rest_ms in ([100, 100], [100, 160], [100, 160], [100, 90], [100, 160], [100, 160], [100, 170], [100, 170]):
            patch.setattr("utils.perf.ranks.time.monotonic", lambda: clock[0])
            found.append(sampler._stragglers([float(ms) for ms in rest_ms]).get("perf/slow_rank"))
            clock[0] += 100
    assert found == [None] * 6 + [1.0, 1.0]
    assert len(said) == 1 and "rank 1 (process" in said[0] and "1.7 times" in said[0]


def _check_bytes(world: World) -> None:
    """The bytes are those of the tensors that a rank hands over, whatever their dtype."""
    half, whole = torch.ones(30, dtype=torch.bfloat16), torch.ones(500)
    parts = [torch.empty(70, dtype=torch.float64) for _ in range(world.size)]
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all-gather of doubles": (lambda: dist.all_gather(parts, torch.ones(70, dtype=torch.float64)), 560),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(torch.empty(250), whole), 2000),
        "sum of bfloat16": (lambda: dist.all_reduce(half), 60),
        "broadcast of int64": (lambda: dist.broadcast(torch.arange(9), 0), 72),
        "flags": (lambda: world.any_of(True, False), 8),
        "sum of a graph": (lambda: functional.all_reduce(half, "sum", [0, 1]).sum(), 60),
        "a message counts at its sender": (lambda: dist.recv(whole, 1) if world.is_main else dist.send(whole, 0), 1000),
        "asynchronous": (lambda: [work.wait() for work in [dist.all_reduce(whole, async_op=True)]], 2000),
        "none": (lambda: None, 0),
    }
    for name, (call, num_bytes) in calls.items():
        sampler = RankSampler(1, world)
        with sampler.step(1):
            call()
        row = sampler.row()
        assert row["perf/comm_mb"] == pytest.approx(num_bytes / 1e6), name
        assert ("perf/comm_gb_per_s" in row) == (row["perf/comm_ms_min"] > 0) == (num_bytes > 0), name
    sampler = RankSampler(1, world)
    with pytest.MonkeyPatch.context() as patch, sampler.step(1):
        patch.delitem(_BYTES, "float")  # a dtype whose size is not known
        dist.all_reduce(whole)
    row = sampler.row()
    assert "perf/comm_ms" in row and not {"perf/comm_mb", "perf/comm_gb_per_s"} & row.keys()


def _check_the_share(world: World) -> None:
    """Samples are rarer where traces would take more than their share of the time."""

    def sampled(max_share: float | None, step_s: float) -> list[int]:
        sampler, steps = RankSampler(2, world, max_share=max_share), []
        for step in range(1, 9):
            with sampler.step(step):
                time.sleep(step_s)
            if "perf/comm_ms" in sampler.row():
                steps.append(step)
        assert world.gather_objects(steps) == [steps] * world.size
        return steps

    assert sampled(None, 0.0) == [2, 4, 6, 8]
    assert sampled(1e-6, 0.0) == [2]
    assert sampled(0.9, 0.1) == [2, 4, 6, 8]


def _check_each_rank(world: World) -> None:
    """The speed of a rank is its own slots over its own time, not over the time of the step."""
    monkeypatch = pytest.MonkeyPatch()  # this process ends with the test
    monkeypatch.setattr("utils.perf.ranks.gpu_utilization", lambda device: 0.25 * (1 + world.rank))
    held = bytearray(400_000_000) if world.rank == 1 else b""
    sampler = RankSampler(1, world, num_examples=10 if world.rank == 0 else 30)
    assert sampler.row()["perf/gpu_utilization"] == 0.25 * (1 + world.rank)
    world.barrier()
    with sampler.step(1):
        time.sleep(0.3 + 0.6 * world.rank)  # a machine that is busy takes longer
        dist.all_reduce(torch.ones(8))
    row = sampler.row()
    assert 20 < row["perf/examples_per_second/rank_0"] < 34
    assert 20 < row["perf/examples_per_second/rank_1"] < 34
    assert (row["perf/gpu_utilization/rank_0"], row["perf/gpu_utilization/rank_1"]) == (0.25, 0.5)
    assert row["perf/memory_gb/rank_1"] > row["perf/memory_gb/rank_0"] + 0.3
    assert row["perf/max_memory_gb"] >= row["perf/memory_gb/rank_1"]
    assert len(held) == 400_000_000 * world.rank


def _check_all(world: World) -> None:
    for check in (
        _check_rows,
        _check_a_late_rank,
        _check_a_straggler,
        _check_bytes,
        _check_the_share,
        _check_each_rank,
    ):
        check(world)


def test_communication_between_ranks_is_measured() -> None:
    run_ranks(_check_all, 2)


def test_a_single_process_is_not_sampled() -> None:
    sampler = RankSampler(1, World.single())
    with sampler.step(1):
        pass
    assert sampler.row().keys() == MEMORY


def test_a_run_logs_what_its_ranks_do(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, perf_every_n_steps=4, perf_max_share="null", dist__rank_weights="[3,1]")
    head = train(typed, log, ranks=2).ok()
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    by_step = {row["step"]: row for row in rows}
    assert [step for step, row in by_step.items() if "perf/comm_ms" in row] == [5, 10]
    row = by_step[10]
    measured = {name for name in row if name.startswith("perf/") and "/spent_s/" not in name}
    assert measured == SAMPLED | {
        *("perf/examples_per_second", "perf/step_ms", "perf/data_ms", "perf/goodput", "perf/eval_share")
    }
    # Gradients of 4 bytes a parameter, and the puzzle rows and votes, which are small here.
    gradients = 4 * int(re.search(r"([\d,]+) parameters", head)[1].replace(",", ""))  # type: ignore[index]
    assert gradients <= 1e6 * row["perf/comm_mb"] < 1.1 * gradients + 10_000
    assert row["perf/comm_gb_per_s"] > 0 and row["perf/comm_total_s"] == pytest.approx(4 * row["perf/comm_ms"] / 1e3)
