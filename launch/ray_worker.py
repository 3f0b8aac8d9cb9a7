"""Actors for programs of Ray that drive a training themselves, step by step.

    workers = start_train_workers(["experiment=demo", "data_path=..."], num_workers=2, cpus=1)
    rows = ray.get([worker.train_step.remote() for worker in workers])
    workers.close()

Each method is a collective: call it on all workers of a group before you wait for any of them.
"""

import os
from typing import Any, Literal
from urllib.parse import urlsplit

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.ray_config import reserved
from launch.ray_rank import free_port, rank_environment
from launch.stepping import SteppedRun
from utils.errors import UserError
from utils.ranks.config import MeetingConfig
from utils.ranks.launch import Launch
from utils.ranks.setup import join_ranks


@ray.remote
class TrainWorker(SteppedRun):
    """A rank of a run, as an actor. Its mistakes are UserErrors."""

    def __init__(
        self, overrides: list[str], *, rank: int = 0, world_size: int = 1, init_method: str | None = None
    ) -> None:
        """Join the other ranks at tcp://host:port of rank 0, and begin the run or resume it."""
        meeting = urlsplit(init_method or ("tcp://127.0.0.1:0" if world_size == 1 else ""))
        if meeting.scheme != "tcp" or meeting.hostname is None or meeting.port is None:
            raise UserError(f"init_method is {init_method!r}; {world_size} ranks need tcp://host:port of rank 0")
        at, has_device = (meeting.hostname, meeting.port), bool(ray.get_gpu_ids())
        # Before anything looks for a CUDA device. Ray has set OMP_NUM_THREADS for this actor alone.
        os.environ.update(rank_environment(rank, world_size, rank, at, has_device=has_device))
        super().__init__(overrides, join_ranks(Launch.from_environment("torchrun"), MeetingConfig.typed(overrides)))


class TrainWorkers(list[Any]):
    """A group of workers in the order of ranks, and the place that Ray has reserved for them."""

    def __init__(self, workers: list[Any], group: PlacementGroup) -> None:
        super().__init__(workers)
        self._group = group

    def close(self) -> None:
        """End the run on all workers, and give the place back, also after an error."""
        try:
            ray.get([worker.close.remote() for worker in self])
        finally:
            remove_placement_group(self._group)


def start_train_workers(
    overrides: list[str],
    num_workers: int,
    *,
    cpus: float = 1,
    gpus: float = 0,
    memory_gb: float | None = None,
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK",
    placement_timeout_s: float = 60,
) -> TrainWorkers:
    """Start a group of workers that train together, and return them in the order of ranks.

    Args:
        overrides: as for pretrain.py. With gpus=0.5 give dist.backend=gloo as well, because NCCL
            refuses two ranks on one device.
        cpus, gpus, memory_gb, placement, placement_timeout_s: as in config/ray.yaml.

    Raises:
        UserError: The cluster has no place for all workers.
    """
    share = reserved(cpus, gpus, memory_gb)
    group = placement_group([share] * num_workers, strategy=placement)

    def at(rank: int) -> dict[str, Any]:
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        return {"num_cpus": cpus, "num_gpus": gpus, "memory": share.get("memory"), "scheduling_strategy": place}

    try:
        if not group.wait(placement_timeout_s):
            raise UserError(
                f"Ray found no place for {num_workers} workers of {share} each ({placement}) in "
                f"{placement_timeout_s:g} s; lower what they reserve, or raise placement_timeout_s"
            )
        init_method = ray.get(_meeting_point.options(**at(0)).remote())
        workers = [
            TrainWorker.options(**at(rank)).remote(  # type: ignore[attr-defined]
                overrides, rank=rank, world_size=num_workers, init_method=init_method
            )
            for rank in range(num_workers)
        ]
    except BaseException:
        remove_placement_group(group)
        raise
    return TrainWorkers(workers, group)


@ray.remote
def _meeting_point() -> str:
    return f"tcp://{get_node_ip_address()}:{free_port()}"
