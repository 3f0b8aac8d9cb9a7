"""Ranks meet and choose a device, a backend and threads, or say why they can't."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tests import runs
from tests.spawn import free_port, run_ranks
from tests.utils.ranks.helpers import dist_config
from utils.errors import UserError
from utils.ranks.config import DEFAULT_MEETING
from utils.ranks.setup import connect_devices, join_ranks
from utils.ranks.world import World


def _meets(rank: int, where: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    world = join_ranks(config=DEFAULT_MEETING.model_copy(update={"init_method": where}))
    assert world.launch.local_rank == rank, "without LOCAL_RANK, ranks are counted on their host"
    assert world.gather_objects(rank) == [0, 1]
    world.barrier()
    world.close()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_meet_at_the_given_address(kind: str, tmp_path: Path) -> None:
    """There is no launcher: only RANK and WORLD_SIZE are set."""
    where = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meet"
    if kind == "file":  # the file of a run that was killed while its ranks met
        stale = FileStore(f"{tmp_path}/meet", 2)
        stale.set("ticket/1", "of a rank that is gone")
    processes = [runs.fork(_meets, rank, where) for rank in range(2)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


def _refused(world: World) -> list[str]:
    said = []
    with pytest.raises(UserError, match=r"device=cuda, but PyTorch finds no CUDA device.*device=cpu"):
        connect_devices(world, "cuda")
    for changes in (
        *({"backend": "nccl"}, {"backend": "mpi"}, {"rank_weights": [1.0, 1.0, 1.0]}),
        *({"init_method": "tcp://10.0.0.1:1"}, {"launcher": "slurm"}, {"start_timeout_s": 7.0}),
    ):
        with pytest.raises(UserError) as caught:
            connect_devices(world, "cpu", dist_config(**changes))
        said.append(str(caught.value))
    ready = connect_devices(world, "cpu")
    assert ready.sum_(torch.ones(1)).item() == world.size
    return said


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="PyTorch was built with MPI")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_is_impossible_is_refused() -> None:
    """The ranks have met before they read the YAML, which can't tell them where to meet."""
    nccl, mpi, weights, *elsewhere = run_ranks(_refused, 2)[0]
    assert "dist.backend=nccl" in nccl and "on cpu" in nccl
    assert "dist.backend=mpi" in mpi and "without MPI" in mpi
    assert "dist.rank_weights has 3 weights, but 2 ranks" in weights
    for said in elsewhere:
        assert "type it on the command line of every rank" in said


def _num_threads(world: World) -> list[int]:
    """Return the number of threads with num_threads, with OMP_NUM_THREADS and without both."""
    numbers = []
    for environment, num_threads in (({"OMP_NUM_THREADS": "1"}, 3), ({"OMP_NUM_THREADS": "1"}, None), ({}, None)):
        torch.set_num_threads(4)
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ |= environment
        connect_devices(world, "cpu", dist_config(num_threads=num_threads))
        numbers.append(torch.get_num_threads())
    return numbers


def test_the_number_of_threads() -> None:
    """num_threads decides, then OMP_NUM_THREADS."""
    assert run_ranks(_num_threads, 1) == [[3, 4, 4]]
    assert run_ranks(_num_threads, 2) == [[3, 4, 2]] * 2


class _CUDA:
    """What connect_devices asks of a host with one GPU, for a test without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[dict[str, object]] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a"))
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        real = dist.new_group

        def new_group(ranks: list[int] | None = None, *_: object, **options: object) -> object:
            self.groups.append(options)
            return real(ranks, backend="gloo", use_local_synchronization=ranks is not None)

        monkeypatch.setattr(dist, "new_group", new_group)


def _on_one_card(world: World) -> tuple[str, list[dict[str, object]], str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda = _CUDA(monkeypatch)
        with pytest.raises(UserError) as caught:
            connect_devices(world, "cuda", dist_config())
        shared = connect_devices(world, "cuda", dist_config(backend="gloo"))
        assert shared.device == torch.device("cuda", 0)
        assert all(group.get("device_id") is None for group in cuda.groups)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=f"GPU-{world.rank}"))
        cuda.groups.clear()
        own = connect_devices(world, "cuda", dist_config(timeout_s=1000.0))
        return str(caught.value), cuda.groups, f"{own.device} {os.environ['TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC']}"


def test_ranks_on_cuda() -> None:
    """Ranks on one card are refused without gloo; a launcher may show each rank only its own card.

    NCCL gets the device of the group of all ranks, so that it connects at once.
    """
    for mistake, groups, own in run_ranks(_on_one_card, 2):
        assert "ranks 0 and 1 share a CUDA device" in mistake
        assert [group.get("device_id") for group in groups[:3]] == [None, torch.device("cuda", 0), None]
        assert own == "cuda:0 1120", "NCCL's heartbeat must not end a rank before the vote on the host"


def _num_recorded_collectives(world: World) -> int:
    world.any(False)
    dumped = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return len(json.loads(dumped).get("entries", []))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the flight recorder is left on where there is CUDA")
def test_the_flight_recorder_is_off_on_cpus() -> None:
    """Its call stacks would fragment memory: a run would grow by gigabytes an hour."""
    assert run_ranks(_num_recorded_collectives, 2) == [0, 0]
