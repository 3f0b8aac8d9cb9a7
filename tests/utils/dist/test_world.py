"""World: what ranks say to one another, on real gloo processes."""

import json
import multiprocessing as mp
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.spawn import free_port, run_ranks
from utils.dist.config import Axes, DistConfig
from utils.dist.launch import Launch, Place
from utils.dist.rendezvous import store_of_this_attempt, typed_init_method
from utils.dist.setup import join_ranks, use_device
from utils.dist.world import World, shares
from utils.errors import UserError

SIZES = [1, 2, 4]


@given(num_slots=st.integers(0, 1000), size=st.integers(1, 16))
def test_slices_cover_every_slot_once(num_slots: int, size: int) -> None:
    parts = [list(range(num_slots))[shares((Fraction(1),) * size, num_slots)[rank]] for rank in range(size)]
    assert [slot for part in parts for slot in part] == list(range(num_slots))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def _collectives(world: World) -> None:
    rank, size = world.rank, world.size
    ranks = torch.arange(size)
    rows = torch.tensor([[rank, 10 * rank], [rank, -rank]])
    expected = torch.cat([torch.tensor([[r, 10 * r], [r, -r]]) for r in range(size)])
    torch.testing.assert_close(world.gather_rows(rows), expected, rtol=0, atol=0)
    # A transposed view has the same rows, and the wire wants contiguous memory.
    torch.testing.assert_close(world.gather_rows(rows.T.contiguous().T), expected, rtol=0, atol=0)
    assert world.gather_rows(rows > 0).dtype == torch.bool

    total = world.sum_(torch.tensor([1.0, float(rank)], dtype=torch.float64))
    assert total.tolist() == [size, float(ranks.sum())]
    to_main = world.sum_to_main_(torch.tensor([float(rank + 1)]))
    assert not world.is_main or to_main.item() == float((ranks + 1).sum())

    ours = [torch.full((3,), float(rank)), torch.tensor(rank)]
    world.broadcast_(ours)
    assert ours[0].tolist() == [0, 0, 0] and ours[1].item() == 0

    assert world.broadcast_object({"rank": rank}) == {"rank": 0}
    assert world.gather_objects(f"rank {rank}") == [f"rank {r}" for r in range(size)]
    assert not world.any(False)
    assert world.any(rank == size - 1)


@pytest.mark.parametrize("world_size", SIZES)
def test_collectives(world_size: int) -> None:
    run_ranks(_collectives, world_size)


@given(
    num_slots=st.integers(0, 1000),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=9),
)
def test_weighted_shares_cover_every_slot_once_in_proportion(num_slots: int, weights: list[float]) -> None:
    parts = shares(tuple(map(Fraction, weights)), num_slots)
    assert [slot for part in parts for slot in range(num_slots)[part]] == list(range(num_slots))
    for part, weight in zip(parts, weights, strict=True):
        assert abs((part.stop - part.start) - num_slots * weight / sum(weights)) <= 1 + 1e-9


def test_equal_weights_are_no_weights() -> None:
    assert shares((Fraction(0.3),) * 4, 10) == shares((Fraction(1),) * 4, 10)


def _config(**changes: object) -> DistConfig:
    values = {"backend": "auto", "init_method": "env", "timeout_s": 30.0, "num_threads": None, "rank_weights": []}
    return DistConfig.model_validate(values | changes)


def _uneven(world: World) -> list[list[int]]:
    world = use_device(world, "cpu", _config(rank_weights=[3.0, 1.0, 2.0, 1.0][: world.size]))
    mine = torch.arange(10)[world.slice_of(10)]
    torch.testing.assert_close(world.gather_rows(mine, 10), torch.arange(10), rtol=0, atol=0)
    rows = torch.stack([mine, -mine], 1).bfloat16()
    torch.testing.assert_close(world.gather_rows(rows, 10)[:, 1], -torch.arange(10).bfloat16(), rtol=0, atol=0)
    return [mine.tolist()]


def test_shares_in_proportion_are_gathered_in_the_order_of_slots() -> None:
    assert [len(mine[0]) for mine in run_ranks(_uneven, 4)] == [4, 1, 3, 2]


def _axes(world: World) -> tuple[int, list[int], int, list[int] | None, list[list[int]]]:
    world = use_device(world, "cpu", _config(), axes=Axes(replicate=1, shard=2, model=2))
    assert world.mesh is not None and world.mesh.mesh_dim_names == ("replicate", "shard", "model")
    shape = [world.mesh[name].mesh.tolist() for name in ("replicate", "shard", "model")]
    total = world.sum_(torch.tensor(10**world.rank))
    return world.data_rank, list(range(6))[world.slice_of(6)], int(total), world.gather_to_main(world.rank), shape


def test_ranks_of_one_model_hold_the_same_slots() -> None:
    """Sums and gatherings over the slots count each share once, whoever computes it."""
    assert run_ranks(_axes, 4) == [
        (0, [0, 1, 2], 101, [0, 2], [[0], [0, 2], [0, 1]]),
        (0, [0, 1, 2], 1010, None, [[1], [1, 3], [0, 1]]),
        (1, [3, 4, 5], 101, None, [[2], [0, 2], [2, 3]]),
        (1, [3, 4, 5], 1010, None, [[3], [1, 3], [2, 3]]),
    ]


def _backends(world: World) -> list[str]:
    said = []
    for changes in ({"backend": "nccl"}, {"backend": "mpi"}, {"rank_weights": [1.0, 1.0, 1.0]}):
        with pytest.raises(UserError) as caught:
            use_device(world, "cpu", _config(**changes))
        said.append(str(caught.value))
    return said


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="PyTorch was built with MPI")
def test_backends_and_weights_that_cannot_be() -> None:
    nccl, mpi, weights = run_ranks(_backends, 2)[0]
    assert nccl == "dist.backend=nccl moves data between CUDA devices, but this run is on cpu; take gloo"
    assert mpi.startswith("dist.backend=mpi, but this PyTorch was built without MPI; take auto")
    assert weights == (
        "dist.rank_weights has 3 weights, but 2 ranks hold slots of their own; give one for each of these"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"init_method": "udp://here"}, "give env, tcp://host:port or file:///path"),
        ({"rank_weights": [1.0, 0.0]}, "give a positive number for each rank"),
    ],
)
def test_config_says_what_fits(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        _config(**changes)


def _meets(rank: int, where: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    world = join_ranks(where)
    assert world.gather_objects(rank) == [0, 1]
    world.barrier()
    world.close()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_meet_where_they_are_told(kind: str, tmp_path: Path) -> None:
    """Without a launcher: only RANK and WORLD_SIZE are set."""
    where = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meet"
    processes = [mp.get_context("spawn").Process(target=_meets, args=(rank, where)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as asked for; else OMP_NUM_THREADS has the say, and without it the ranks of a machine share its cores."""
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        use_device(World.single(), "cpu", _config(num_threads=3))
        assert torch.get_num_threads() == 3
        torch.set_num_threads(4)
        use_device(World.single(), "cpu", _config())
        assert torch.get_num_threads() == 4, "as PyTorch has understood OMP_NUM_THREADS"
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        use_device(World.single(), "cpu", _config())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _elsewhere(world: World) -> str:
    with pytest.raises(UserError) as caught:
        use_device(world, "cpu", _config(init_method="tcp://10.0.0.1:1"))
    return str(caught.value)


def test_a_meeting_point_in_yaml_is_refused() -> None:
    """Where it could do nothing."""
    assert "type it on the command line of every rank" in run_ranks(_elsewhere, 2)[0]


@pytest.mark.parametrize("typed", ["dist.init_method=foo", "++dist.init_method=foo"])
def test_what_is_no_meeting_point_is_refused_before_anybody_waits(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain.py", typed])
    with pytest.raises(UserError, match=r"dist\.init_method is 'foo'; give env, tcp://host:port or file:///path"):
        typed_init_method()


def _agreement(world: World) -> list[str]:
    said = []
    mistakes: list[dict[int, Exception]] = [
        {1: ValueError("a value\nover two lines; mend it")},
        {0: OSError(28, "No space left on device"), 1: ValueError("the second to fail is not heard")},
        {1: ValueError()},
        {},
    ]
    for mistake in mistakes:
        try:
            with world.agree():
                if world.rank in mistake:
                    raise mistake[world.rank]
            said.append("")
        except UserError as error:
            said.append(str(error))
            assert (error.__cause__ is not None) == (world.rank in mistake)
    return said


def test_a_mistake_on_one_rank_is_everybodys() -> None:
    expected = ["a value over two lines; mend it", "[Errno 28] No space left on device", "ValueError", ""]
    assert run_ranks(_agreement, 2) == [expected, expected]


def test_agree_leaves_faults_alone() -> None:
    with pytest.raises(KeyError, match="ours"), World.single().agree():
        raise KeyError("ours")


def _dies_or_waits(world: World) -> None:
    if world.rank == 1:
        raise RuntimeError("rank 1 gave up")
    world.barrier()


def test_helper_reports_the_rank_that_fails() -> None:
    with pytest.raises(AssertionError, match=r"rank [01]:"):
        run_ranks(_dies_or_waits, 2)


def _use_device(world: World) -> str:
    with pytest.raises(UserError, match=r"device=cuda, but PyTorch finds no CUDA device.*device=cpu"):
        use_device(world, "cuda")
    ready = use_device(world, "cpu")
    assert ready.sum_(torch.ones(1)).item() == world.size
    return str(ready.device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("world_size", [1, 2])
def test_device_that_is_not_there(world_size: int) -> None:
    assert run_ranks(_use_device, world_size) == ["cpu"] * world_size


def test_launch_is_the_same_for_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert Launch.from_environment() == Launch(restarts=0, identity=None)
    for run_id in ("job-7", "none"):  # torchrun says "none" where no rendezvous id was given
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        identities = []
        for restarts in range(2):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
            assert Launch.from_environment().restarts == restarts
            identities.append(Launch.from_environment().identity)
        assert identities[0] == identities[1] not in (None, "", "none")


def _collectives_that_are_remembered(world: World) -> int:
    world.any(False)
    dumped = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return len(json.loads(dumped).get("entries", []))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the flight recorder is left on where there is CUDA")
def test_no_call_stacks_are_kept() -> None:
    """They pin memory between that of tensors, and a run on CPUs would grow by gigabytes an hour."""
    assert run_ranks(_collectives_that_are_remembered, 2) == [0, 0]


def test_only_what_can_be_seen_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        place = replace(Place.here(), pid=process.pid)
    assert place.is_gone and not Place.here().is_gone and not replace(place, pid=1).is_gone
    assert not replace(place, host="another").is_gone
    assert not replace(place, pid_namespace="of a container").is_gone


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.dist.rendezvous.START_TIMEOUT", timedelta(seconds=1))
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # as often as rank 1 comes, it isn't rank 2
            pool.submit(store_of_this_attempt, store, 1, 3)
        with pytest.raises(TimeoutError, match=r"^rank 2 of 3 did not come within 1 s"):
            store_of_this_attempt(store, 0, 3)
    with pytest.raises(TimeoutError, match="rank 0 did not come within 1 s"):
        store_of_this_attempt(store, 1, 3)


def test_a_fault_before_the_ranks_meet_names_its_rank() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "no port"}
    code = "from utils.program import run; run(lambda world: None)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | place, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "fault on rank 1: ValueError" in done.stderr, done.stderr
