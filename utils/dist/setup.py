"""From a launcher's environment to ranks that can talk, on the device that they compute on."""

import os
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from utils.dist.config import Axes, DeviceName, DistConfig
from utils.dist.launch import Launch, Place
from utils.dist.rendezvous import START_TIMEOUT, agents_store, store_of_this_attempt, typed_init_method
from utils.dist.world import BEGUN, World
from utils.errors import UserError

_THREAD_TIMEOUT = timedelta(minutes=30)


def join_ranks(init_method: str = "env") -> World:
    """Join the other ranks, on the host only: the device follows with `use_device`.

    Rank and number of ranks are the environment's, as torchrun sets it; where to meet is too (MASTER_ADDR and
    MASTER_PORT), unless `init_method` is a tcp:// address or a file:// that all see.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    launch_store = agents_store() if init_method == "env" else None
    attempt = Launch.from_environment()
    if launch_store is not None and rank == 0:
        # Each host's agent counts only the restarts that its own workers caused, and also those of attempts that
        # were refused: what another run left in the folder is nothing for the next attempt to go on from.
        attempt = replace(attempt, restarts=launch_store.add(BEGUN, 0))
    if size == 1:
        return World(attempt=attempt, launch_store=launch_store)
    if not torch.cuda.is_available():
        # PyTorch keeps the call stacks of the last 2,000 collectives: small blocks among the large ones of tensors,
        # which glibc then can't use again. Two ranks on a CPU grew by 0.7 MB a step for ever (docs/log.md).
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    if launch_store is not None:
        store = store_of_this_attempt(launch_store, rank, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=START_TIMEOUT)
    else:
        where = "env://" if init_method == "env" else init_method
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=START_TIMEOUT)
    places = [Place.here()] * size
    dist.all_gather_object(places, Place.here())
    return World(
        rank=rank,
        size=size,
        places=tuple(places),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        host_group=dist.group.WORLD,
        device_group=dist.group.WORLD,
        data_group=dist.group.WORLD,
        host_data_group=dist.group.WORLD,
        data_rank=rank,
        data_size=size,
        weights=(Fraction(1),) * size,
        attempt=attempt,
        launch_store=launch_store,
    )


def use_device(
    world: World,
    name: DeviceName,
    config: DistConfig | None = None,
    *,
    axes: Axes | None = None,
    deterministic: bool = False,
) -> World:
    """This world on a device, with process groups that give up after `timeout_s` seconds. Every rank.

    Args:
        config: None for programs of one process.
        axes: how the ranks are laid out, for strategies that need a mesh; None: every rank holds slots of its own.

    Raises UserError where the device or backend that was asked for is not there, or the weights don't fit.
    """
    config = config or DistConfig(backend="auto", init_method="env", timeout_s=600, num_threads=None, rank_weights=[])
    with world.agree():
        if world.size > 1 and config.init_method != (typed_init_method() or "env"):
            raise UserError(
                f"dist.init_method={config.init_method}, but ranks have to meet before any YAML is read; type it "
                "on the command line of every rank, or dist.init_method=env"
            )
        device = _pick_device(name, world.local_rank)
        backend = _pick_backend(config.backend, device)
        weights = _pick_weights(config.rank_weights, world.size // (axes or Axes()).model)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:  # else every rank of a machine would take all of its cores
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
    if deterministic:
        # cuBLAS reads it once, at its first call; without it deterministic algorithms refuse to run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else every trace of a step prints two lines of its own
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size == 1 and axes is None:
        return replace(world, device=device, weights=weights)
    if not dist.is_initialized():  # one process, whose strategy needs a group nevertheless
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=START_TIMEOUT)
    timeout = timedelta(seconds=config.timeout_s)
    # NCCL's watchdog ends a process without a word; the host's votes, which can say who is missing, come first.
    device_timeout = timeout + timedelta(seconds=60 if device.type == "cuda" else 0)
    axes = axes or Axes(replicate=world.size)
    groups = {
        "host": dist.new_group(backend="gloo", timeout=timeout),
        "device": dist.new_group(backend=backend, timeout=device_timeout),
        "thread": dist.new_group(backend="gloo", timeout=timeout),
    }
    # What a thread waits for may take longer than any rank's next word, as a disk does.
    dist.distributed_c10d._set_pg_timeout(_THREAD_TIMEOUT, groups["thread"])
    ranks_RSM = torch.arange(world.size).view(axes.replicate, axes.shard, axes.model)
    data_ranks = list(ranks_RSM.flatten(0, 1).unbind(1))
    return replace(
        world,
        device=device,
        timeout=timeout,
        host_group=groups["host"],
        device_group=groups["device"],
        thread_group=groups["thread"],
        data_group=_own_group(world, data_ranks, backend, device_timeout),
        host_data_group=_own_group(world, data_ranks, "gloo", timeout),
        data_rank=world.rank // axes.model,
        data_size=world.size // axes.model,
        weights=weights,
        mesh=DeviceMesh.from_group(
            [
                _own_group(world, list(lines.flatten(0, 1)), backend, device_timeout)
                for lines in (ranks_RSM.permute(1, 2, 0), ranks_RSM.permute(0, 2, 1), ranks_RSM)
            ],
            device.type,
            mesh=ranks_RSM,
            mesh_dim_names=("replicate", "shard", "model"),
        ),
    )


def _own_group(world: World, lines: list[Tensor], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Of groups that part the ranks, this rank's. Every rank, for which the others' groups are no concern."""
    (ranks,) = (line.tolist() for line in lines if world.rank in line)
    return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)


def _pick_device(name: DeviceName, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UserError("device=cuda, but PyTorch finds no CUDA device here; use device=cpu or device=auto")
        if local_rank >= count:
            raise UserError(
                f"{local_rank + 1} or more ranks here, but {count} CUDA devices; lower --nproc-per-node to {count}"
            )
        return torch.device("cuda", local_rank)
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("device=mps, but PyTorch finds no Apple GPU here; use device=cpu or device=auto")
    return torch.device(name)


def _pick_backend(name: str, device: torch.device) -> str:
    """What carries tensors: of the device, and on CUDA of the host as well, where offloaded weights lie."""
    if name == "mpi" and not dist.is_mpi_available():
        raise UserError("dist.backend=mpi, but this PyTorch was built without MPI; take auto, or a build with it")
    if name == "nccl" and device.type != "cuda":
        raise UserError(
            f"dist.backend=nccl moves data between CUDA devices, but this run is on {device.type}; take gloo"
        )
    if name == "nccl" and not dist.is_nccl_available():
        raise UserError("dist.backend=nccl, but this PyTorch was built without NCCL; take gloo")
    if device.type == "cuda":
        on_device = name if name != "auto" else "nccl" if dist.is_nccl_available() else "gloo"
        return f"cpu:gloo,cuda:{on_device}"
    return "gloo" if name == "auto" else name


def _pick_weights(weights: list[float], num_shares: int) -> tuple[Fraction, ...]:
    if weights and len(weights) != num_shares:
        raise UserError(
            f"dist.rank_weights has {len(weights)} weights, but {num_shares} ranks hold slots of their own; give one "
            "for each of these"
        )
    return tuple(map(Fraction, weights)) or (Fraction(1),) * num_shares
