"""Connect the ranks that a launcher started, and choose the device on which they compute."""

import os
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from utils.errors import UserError
from utils.ranks.config import DEFAULT_MEETING, Axes, DeviceName, DistConfig, MeetingConfig
from utils.ranks.launch import Launch
from utils.ranks.rendezvous import Patience, agents_store, open_store, store_of_this_attempt
from utils.ranks.world import BEGUN, Place, World


def join_ranks(launch: Launch | None = None, config: MeetingConfig = DEFAULT_MEETING) -> World:
    """Connect to the other ranks on the host. `connect_devices` connects the devices afterwards.

    Raises:
        UserError: The ranks can't meet where they are to meet.
        MissingRank: A rank did not come. The message names it.
    """
    launch = launch or Launch.from_environment(config.launcher)
    timeout = timedelta(seconds=config.start_timeout_s)
    launch_store = agents_store(timeout) if launch.launcher == "torchrun" and config.init_method == "env" else None
    if launch_store is not None and launch.rank == 0:
        # torchrun's own count is of no use: each host counts the restarts that its own workers
        # caused, and refused attempts count too. Only an attempt that began to train left
        # something to resume from (docs/reliability.md).
        launch = replace(launch, restarts=launch_store.add(BEGUN, 0))
    if launch.size == 1:
        return World(launch=launch, launch_store=launch_store, meeting=config)
    if not torch.cuda.is_available():
        # PyTorch keeps the call stacks of the last 2,000 collectives. These small blocks fragment
        # the heap: two ranks on a CPU grew by 0.7 MB a step without end (docs/lab/log.md).
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    rank, size = launch.rank, launch.size
    patience = Patience(config.start_timeout_s)
    store = launch_store or open_store(launch, config, patience)
    store = store_of_this_attempt(store, rank, size, patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    places = [Place.here()] * size
    dist.all_gather_object(places, Place.here())
    if launch.local_rank is None:
        own = places[rank]
        launch = replace(launch, local_rank=sum(own.shares_host_with(other) for other in places[:rank]))
    return World(
        rank=rank,
        size=size,
        places=tuple(places),
        host_group=dist.group.WORLD,
        device_group=dist.group.WORLD,
        data_group=dist.group.WORLD,
        data_rank=rank,
        data_size=size,
        share_weights=(Fraction(1),) * size,
        timeout=timeout,
        launch=launch,
        launch_store=launch_store,
        meeting=config,
    )


def connect_devices(
    world: World,
    name: DeviceName,
    config: DistConfig | None = None,
    *,
    axes: Axes | None = None,
    deterministic: bool = False,
) -> World:
    """Return this world on a device, with all its process groups. Every rank.

    Without `axes`, the layout of the ranks on a mesh, each rank has its own slots.
    """
    config = config or DistConfig(
        **world.meeting.model_dump(), backend="auto", timeout_s=600, num_threads=None, rank_weights=[]
    )
    with world.shared_errors():
        for key in MeetingConfig.model_fields:
            value, used = getattr(config, key), getattr(world.meeting, key)
            if value != used and (world.size > 1 or key == "launcher"):
                raise UserError(
                    f"dist.{key}={value}, but ranks have to meet before any YAML is read, and met with {used}; type it "
                    f"on the command line of every rank, or leave dist.{key}={used}"
                )
        device = _pick_device(name, world.launch.local_rank or 0)
    cards = world.gather_objects(str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None)
    with world.shared_errors():
        sharing = [rank for rank, card in enumerate(cards) if card is not None and cards.index(card) < rank]
        if sharing and config.backend != "gloo":
            first = cards.index(cards[sharing[0]])
            raise UserError(
                f"ranks {first} and {sharing[0]} share a CUDA device on {world.places[first].host}, which NCCL "
                "refuses; start fewer ranks there (torchrun --nproc-per-node), or take dist.backend=gloo to share"
            )
        backend = _pick_backend(config.backend, device)
        weights = pick_weights(config.rank_weights, world.size // (axes or Axes()).model)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:  # by default each rank would use all of its cores
        torch.set_num_threads(max(1, torch.get_num_threads() // world.ranks_on_my_cores))
    if deterministic:
        # Deterministic algorithms need this variable, which cuBLAS reads once, at its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise each trace of a step prints two lines
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size == 1 and axes is None:
        return replace(world, device=device, share_weights=weights)
    if not dist.is_initialized():  # a single process whose strategy needs a group
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    world = replace(world, device=device, share_weights=weights, timeout=timedelta(seconds=config.timeout_s))
    return _with_groups(world, backend, axes or Axes(replicate=world.size))


def _with_groups(world: World, backend: str, axes: Axes) -> World:
    """Return this world with all its process groups. Every rank."""
    timeout, device, is_nccl = world.timeout, world.device, "nccl" in backend
    # NCCL ends a process without a message, by its watchdog or because nothing was heard of its
    # watchdog. The votes of the host can name the missing rank, so they time out first.
    device_timeout = timeout + timedelta(seconds=60 if is_nccl else 0)
    if is_nccl:
        heartbeat_s = max(480, int(device_timeout.total_seconds()) + 60)  # 480 is PyTorch's own value
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(heartbeat_s))
    host_group = dist.new_group(backend="gloo", timeout=timeout)
    # With a device, NCCL connects all ranks here, where a missing rank is noticed, and not in the
    # first step. Its other groups connect when they are used, since some never are.
    device_group = dist.new_group(backend=backend, timeout=device_timeout, device_id=device if is_nccl else None)
    thread_group = dist.new_group(backend="gloo", timeout=timeout)
    # The thread waits for disks, which may take longer.
    dist.distributed_c10d._set_pg_timeout(3 * timeout, thread_group)
    ranks_RSM = torch.arange(world.size).view(axes.replicate, axes.shard, axes.model)

    def own_group(lines: Tensor) -> dist.ProcessGroup:
        """Make one group for each line of ranks, and return the group of this rank."""
        (ranks,) = (line for line in lines.tolist() if world.rank in line)
        return dist.new_group(ranks, device_timeout, backend, use_local_synchronization=True)

    return replace(
        world,
        backend=backend,
        host_group=host_group,
        device_group=device_group,
        thread_group=thread_group,
        data_group=own_group(ranks_RSM.flatten(0, 1).T),
        data_rank=world.rank // axes.model,
        data_size=world.size // axes.model,
        mesh=DeviceMesh.from_group(
            [
                own_group(lines.flatten(0, 1))
                for lines in (ranks_RSM.permute(1, 2, 0), ranks_RSM.permute(0, 2, 1), ranks_RSM)
            ],
            device.type,
            mesh=ranks_RSM,
            mesh_dim_names=("replicate", "shard", "model"),
        ),
    )


def _pick_device(name: DeviceName, local_rank: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if count else "mps" if has_mps else "cpu"
    if (name == "cuda" and count == 0) or (name == "mps" and not has_mps):
        raise UserError(
            f"device={name}, but PyTorch finds no {name.upper()} device here; use device=cpu or device=auto"
        )
    # A launcher may show each rank a card of its own, which then is the only one.
    return torch.device("cuda", local_rank % count) if name == "cuda" else torch.device(name)


def _pick_backend(name: str, device: torch.device) -> str:
    if name == "nccl" and device.type != "cuda":
        raise UserError(f"dist.backend=nccl needs CUDA devices, but this run is on {device.type}; use gloo")
    if name in ("mpi", "nccl") and not dist.is_backend_available(name):
        raise UserError(f"dist.backend={name}, but this PyTorch was built without {name.upper()}; use auto")
    if device.type == "cuda":
        on_device = name if name != "auto" else "nccl" if dist.is_nccl_available() else "gloo"
        return f"cpu:gloo,cuda:{on_device}"
    return "gloo" if name == "auto" else name


def pick_weights(weights: list[float], num_shares: int) -> tuple[Fraction, ...]:
    if weights and len(weights) != num_shares:
        raise UserError(
            f"dist.rank_weights has {len(weights)} weights, but {num_shares} ranks hold slots of their own; give one "
            "weight for each of these ranks"
        )
    return tuple(map(Fraction, weights)) or (Fraction(1),) * num_shares
