"""The ranks of a run, and all collectives by which they communicate.

Each collective does nothing in a world of one. All ranks must call a method marked "Every rank": if
one rank leaves it out, the run hangs.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from utils.errors import UserError
from utils.ranks.config import DEFAULT_MEETING, MeetingConfig
from utils.ranks.launch import Launch
from utils.text import for_a_terminal

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

BEGUN = "begun"  # key in torchrun's store: how often ranks have begun to train in this launch


@dataclass(frozen=True)
class Place:
    pid: int
    host: str
    pid_namespace: str  # containers may share a host name without seeing each other's processes
    cores: frozenset[int] = frozenset()  # empty if the system does not tell

    @staticmethod
    def here() -> "Place":
        namespace = Path("/proc/self/ns/pid")
        return Place(
            os.getpid(),
            socket.gethostname(),
            os.readlink(namespace) if namespace.is_symlink() else "",
            frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def shares_host_with(self, other: "Place") -> bool:
        """Return whether both processes are on one host, and see each other there."""
        return (self.host, self.pid_namespace) == (other.host, other.pid_namespace)

    @property
    def is_near(self) -> bool:
        return self.shares_host_with(Place.here())

    @property
    def is_gone(self) -> bool:
        try:
            if self.is_near:
                os.kill(self.pid, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)  # another user's process exists, too
        return False


@dataclass(frozen=True)
class World:
    """The processes of one run.

    All groups are made before training begins: a rank that is killed while ranks make a group is
    not noticed (docs/reliability.md).
    """

    rank: int = 0
    size: int = 1
    places: tuple[Place, ...] = field(default_factory=lambda: (Place.here(),))  # of each rank
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = ""  # what carries tensors between devices; empty without process groups
    host_group: dist.ProcessGroup | None = None  # carries objects and flags (gloo)
    device_group: dist.ProcessGroup | None = None  # carries tensors
    data_group: dist.ProcessGroup | None = None  # the ranks that together hold the global batch once
    # For one thread beside the main thread (gloo), because the order of collectives must be the
    # same on all ranks.
    thread_group: dist.ProcessGroup | None = None
    data_rank: int = 0  # the number of this rank's share of the slots
    data_size: int = 1  # the number of shares
    share_weights: tuple[Fraction, ...] = (Fraction(1),)  # one for each share; see `shares`
    timeout: timedelta = timedelta(minutes=10)  # how long a rank waits for the others before it gives up
    launch: Launch = field(default_factory=Launch)  # what the launcher says about this process
    launch_store: Store | None = None  # torchrun's own, which all attempts of a launch share
    meeting: MeetingConfig = DEFAULT_MEETING  # how the ranks found one another
    mesh: DeviceMesh | None = None  # its axes are those of Axes; None if no strategy needs a mesh

    @staticmethod
    def single(device: str = "cpu") -> "World":
        return World(device=torch.device(device))

    def note_beginning(self) -> None:
        """Let a later attempt of the same launch resume the run. For rank 0."""
        if self.launch_store is not None:
            self.launch_store.add(BEGUN, 1)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def ranks_per_share(self) -> int:
        """How many consecutive ranks hold the same slots (tensor parallelism, pipelines)."""
        return self.size // self.data_size

    @property
    def is_first_of_share(self) -> bool:
        """Whether this rank is the first with its slots, which writes for all of them."""
        return self.rank % self.ranks_per_share == 0

    @property
    def ranks_on_my_cores(self) -> int:
        """How many ranks share the cores of this rank. mpirun binds each rank to its own."""
        own = self.places[self.rank]
        return sum(own.shares_host_with(other) and own.cores == other.cores for other in self.places)

    def slice_of(self, num_slots: int) -> slice:
        """Return this rank's contiguous share of `num_slots`, in proportion to its weight."""
        return shares(self.share_weights, num_slots)[self.data_rank]

    def to_device(self, tensor: Tensor) -> Tensor:
        # A copy from pageable memory may wait.
        pinned = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return pinned.to(self.device, non_blocking=True)

    def enter_thread(self) -> None:
        """Let a new thread use this rank's card. Otherwise it opens a context on the first card."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def wait_for_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def await_peers(self) -> None:
        """Wait on the host, which can name a missing rank, before the device. Every rank."""
        if self.device.type != "cpu":
            self.barrier()

    # ---- tensors ----

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the shares of the slots, in place, and return it. Every rank."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor

    def gather_rows(self, tensor: Tensor, num_rows: int | None = None) -> Tensor:
        """Return the rows of all shares, concatenated in the order of slots. Every rank.

        Each rank holds its `slice_of` of `num_rows`, or equally many rows for None.
        """
        if self.data_size == 1:
            return tensor
        known = shares(self.share_weights, num_rows) if num_rows is not None else []
        counts = [share.stop - share.start for share in known]
        longest = max(counts, default=len(tensor))
        if len(tensor) < longest:  # all_gather needs the same size on each rank
            tensor = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
        rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.data_size)]
        dist.all_gather(rows, tensor.contiguous(), group=self.data_group)
        return torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)] if counts else rows)

    def one_by_one(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors of rank 0, one after another, in host memory. Every rank."""
        of_main = iter(tensors)
        while True:
            name, tensor = next(of_main, ("", None)) if self.is_main else ("", None)
            described = None if tensor is None else (name, tensor.shape, tensor.dtype)
            if (described := self.broadcast_object(described)) is None:
                return
            name, shape, dtype = described
            whole = torch.empty(shape, dtype=dtype) if tensor is None else tensor.contiguous()
            if self.size > 1:
                dist.broadcast(whole, src=0, group=self.device_group)
            yield name, whole

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor in host memory to a rank, which must `receive` it."""
        dist.send(tensor.contiguous().flatten().view(torch.uint8), group=self.host_group, group_dst=rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Overwrite a contiguous tensor in host memory with the tensor that a rank sends."""
        dist.recv(tensor.flatten().view(torch.uint8), group=self.host_group, group_src=rank)

    # ---- host objects and agreement ----

    def broadcast_object(self, value: T) -> T:
        """Return the value of rank 0; the values of other ranks are ignored. Every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def from_main(self, compute: Callable[[], T]) -> T:
        """Return what rank 0 computes, or raise its UserError. Every rank."""
        value: Any = None
        with self.shared_errors():
            if self.is_main:
                value = compute()
        return self.broadcast_object(value)

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks in the order of ranks. Every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather_to_main(self, value: T) -> list[T] | None:
        """Return the value of each share, in order, on rank 0; None on other ranks. Every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, group_dst=0, group=self.host_group)
        return None if values is None else values[:: self.ranks_per_share]

    def any(self, flag: bool) -> bool:
        """Return whether any rank raises the flag, without waiting for the device. Every rank."""
        return self.any_of(flag)[0]

    def any_of(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any rank raises it. Every rank."""
        if self.size == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.host_group)
        return [bool(vote) for vote in votes]

    def barrier(self) -> None:
        """Wait until all ranks have arrived here. Every rank."""
        if self.size > 1:
            dist.barrier(group=self.host_group)

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raise a UserError on all ranks if one rank raises it inside. Every rank.

        No collective may stand inside, because a rank that failed never reaches it.
        """
        mistake = cause = None
        try:
            yield
        except UserError as error:
            mistake, cause = for_a_terminal(str(error)) or type(error).__name__, error
        for first in filter(None, self.gather_objects(mistake)):
            raise UserError(first) from cause

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether each rank holds only a part of the tensor."""
    # Importing DTensor takes half as long as importing torch, and few runs need it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


@lru_cache(maxsize=64)  # each step asks for the same few numbers
def shares(weights: tuple[Fraction, ...], num_slots: int) -> list[slice]:
    """Divide slots into one contiguous share for each weight, in proportion to the weights."""
    ends = [int(part * num_slots / sum(weights)) for part in accumulate(weights, initial=Fraction(0))]
    return [slice(first, end) for first, end in pairwise(ends)]
