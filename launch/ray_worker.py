"""Actors for programs of Ray that drive a training themselves, step by step.

    workers = start_train_workers(["experiment=demo", "data_path=..."], num_workers=2, cpus=1)
    rows = ray.get([worker.train_step.remote() for worker in workers])

Each method is a collective: call it on all workers of a group before you wait for any of them.
"""

import os
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.ray_job import free_port, rank_environment
from launch.stepping import SteppedRun
from training.state import HostCopy
from utils.dist.setup import join_ranks
from utils.errors import UserError
from utils.metrics import Row


@ray.remote
class TrainWorker:
    """A rank of a run, which takes a step, evaluates and saves when it is told to.

    launch/stepping.py says what the methods do. Their mistakes are UserErrors.
    """

    def __init__(
        self, overrides: list[str], *, rank: int = 0, world_size: int = 1, init_method: str | None = None
    ) -> None:
        """Join the other ranks, and begin the run or resume it.

        Args:
            overrides: as for pretrain.py, the same for all ranks. Paths that are not absolute refer
                to the working directory of the actor.
            init_method: tcp://host:port, where host is that of rank 0 and the port is free there;
                None for one rank.
        """
        meeting = urlsplit(init_method or ("tcp://127.0.0.1:0" if world_size == 1 else ""))
        if meeting.scheme != "tcp" or meeting.hostname is None or meeting.port is None:
            raise UserError(f"init_method is {init_method!r}; {world_size} ranks need tcp://host:port of rank 0")
        environment = rank_environment(
            rank=rank,
            size=world_size,
            local_rank=rank,
            local_size=1,  # Ray has set OMP_NUM_THREADS for this actor alone
            meeting=(meeting.hostname, meeting.port),
            has_device=bool(ray.get_gpu_ids()),
        )
        os.environ.update(environment)
        self._run = SteppedRun(overrides, join_ranks())

    def train_step(self) -> Row:
        return self._run.train_step()

    def evaluate(self) -> Row:
        return self._run.evaluate()

    def get_state(self) -> HostCopy:
        return self._run.get_state()

    def set_state(self, copy: HostCopy) -> None:
        self._run.set_state(copy)

    def save(self) -> Path:
        return self._run.save()

    def close(self) -> None:
        self._run.close()


def start_train_workers(
    overrides: list[str],
    num_workers: int,
    *,
    cpus: float = 1,
    gpus: float = 0,
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK",
) -> list[Any]:
    """Start a group of workers that train together, and return them in the order of ranks.

    Args:
        overrides: as for pretrain.py. With gpus=0.5 give dist.backend=gloo as well, because NCCL
            refuses two ranks on one device.
        cpus: cores that each worker reserves.
        gpus: CUDA devices that each worker reserves, at most 1.
    """
    share = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    group = placement_group([share] * num_workers, strategy=placement)

    def at(rank: int) -> dict[str, Any]:
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": place}

    init_method = ray.get(_meeting_point.options(**at(0)).remote())
    return [
        TrainWorker.options(**at(rank)).remote(  # type: ignore[attr-defined]
            overrides, rank=rank, world_size=num_workers, init_method=init_method
        )
        for rank in range(num_workers)
    ]


@ray.remote
def _meeting_point() -> str:
    """Return an address of the node on which this runs."""
    return f"tcp://{get_node_ip_address()}:{free_port()}"
