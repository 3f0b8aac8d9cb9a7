"""Ranks meet and choose a device, a backend and threads, or say why they can't."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests import runs
from tests.spawn import free_port, run_ranks
from tests.utils.dist.helpers import dist_config
from utils.dist.setup import connect_devices, join_ranks
from utils.dist.world import World
from utils.errors import UserError


def _meets(rank: int, where: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    world = join_ranks(where)
    assert world.gather_objects(rank) == [0, 1]
    world.barrier()
    world.close()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_meet_at_the_given_address(kind: str, tmp_path: Path) -> None:
    """There is no launcher: only RANK and WORLD_SIZE are set."""
    where = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meet"
    processes = [runs.fork(_meets, rank, where) for rank in range(2)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


def _elsewhere(world: World) -> str:
    with pytest.raises(UserError) as caught:
        connect_devices(world, "cpu", dist_config(init_method="tcp://10.0.0.1:1"))
    return str(caught.value)


def test_a_meeting_point_in_yaml_is_refused() -> None:
    """The ranks have met before they read the YAML."""
    assert "type it on the command line of every rank" in run_ranks(_elsewhere, 2)[0]


def _use_device(world: World) -> str:
    with pytest.raises(UserError, match=r"device=cuda, but PyTorch finds no CUDA device.*device=cpu"):
        connect_devices(world, "cuda")
    ready = connect_devices(world, "cpu")
    assert ready.sum_(torch.ones(1)).item() == world.size
    return str(ready.device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_missing_device_is_refused(world_size: int) -> None:
    assert run_ranks(_use_device, world_size) == ["cpu"] * world_size


def _backends(world: World) -> list[str]:
    said = []
    for changes in ({"backend": "nccl"}, {"backend": "mpi"}, {"rank_weights": [1.0, 1.0, 1.0]}):
        with pytest.raises(UserError) as caught:
            connect_devices(world, "cpu", dist_config(**changes))
        said.append(str(caught.value))
    return said


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="PyTorch was built with MPI")
def test_impossible_backends_and_weights_are_refused() -> None:
    nccl, mpi, weights = run_ranks(_backends, 2)[0]
    assert nccl == "dist.backend=nccl moves data between CUDA devices, but this run is on cpu; use gloo"
    assert mpi.startswith("dist.backend=mpi, but this PyTorch was built without MPI; use auto")
    assert weights == (
        "dist.rank_weights has 3 weights, but 2 ranks hold slots of their own; give one weight for each of these ranks"
    )


def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """num_threads decides, then OMP_NUM_THREADS.

    Otherwise the ranks of a machine share its cores.
    """
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        connect_devices(World.single(), "cpu", dist_config(num_threads=3))
        assert torch.get_num_threads() == 3
        torch.set_num_threads(4)
        connect_devices(World.single(), "cpu", dist_config())
        assert torch.get_num_threads() == 4, "with OMP_NUM_THREADS set, PyTorch's number of threads must stay"
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        connect_devices(World.single(), "cpu", dist_config())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _num_recorded_collectives(world: World) -> int:
    world.any(False)
    dumped = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return len(json.loads(dumped).get("entries", []))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the flight recorder is left on where there is CUDA")
def test_the_flight_recorder_is_off_on_cpus() -> None:
    """Its call stacks would fragment memory: a run would grow by gigabytes an hour."""
    assert run_ranks(_num_recorded_collectives, 2) == [0, 0]
