"""The ranks of a run, and every way in which they talk to one another.

Each collective is a no-op in a world of one, so that callers never branch on the number of ranks.
Methods marked "every rank" hang the run when one rank leaves them out.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from utils.dist.launch import Launch, Place
from utils.dist.rendezvous import START_TIMEOUT
from utils.errors import UserError
from utils.text import for_a_terminal

T = TypeVar("T")

BEGUN = "begun"  # in torchrun's store: how many attempts of the launch have begun to train


@dataclass(frozen=True)
class World:
    """The processes of one run. `host_group` (gloo) carries objects and flags, `device_group` tensors; `data_group` is
    that of the ranks which together hold the global batch once, and `host_data_group` the same for objects.
    `thread_group` (gloo) is for one thread beside the main one: collectives of one group must come in one order.

    All groups are made before training begins. To make one, ranks wait for one another in the store, which doesn't
    notice when one is killed: the others would wait for all of the timeout. In a group whoever talks to it notices.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    places: tuple[Place, ...] = field(default_factory=lambda: (Place.here(),))  # of each rank
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host_group: dist.ProcessGroup | None = None
    device_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None
    host_data_group: dist.ProcessGroup | None = None
    thread_group: dist.ProcessGroup | None = None
    data_rank: int = 0  # which share of the slots is this rank's
    data_size: int = 1  # of how many shares
    weights: tuple[Fraction, ...] = (Fraction(1),)  # of the shares
    timeout: timedelta = START_TIMEOUT  # after which a rank that hears nothing gives up
    attempt: Launch = field(default_factory=Launch)  # of rank 0, who alone looks for what to go on from
    launch_store: Store | None = None  # torchrun's own, which all attempts of a launch share
    mesh: DeviceMesh | None = None  # named as the fields of Axes; None where no strategy needs one

    @staticmethod
    def single(device: str = "cpu") -> "World":
        return World(device=torch.device(device))

    def note_beginning(self) -> None:
        """An attempt of torchrun's that comes after this one goes on with what it has begun. Rank 0."""
        if self.launch_store is not None:
            self.launch_store.add(BEGUN, 1)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def num_copies(self) -> int:
        """How many ranks, which are neighbours, hold the same slots: parts of a tensor or stages of a pipeline."""
        return self.size // self.data_size

    @property
    def has_first_copy(self) -> bool:
        """Of the ranks that hold the same slots, one: the one to write what all of them know."""
        return self.rank % self.num_copies == 0

    def slice_of(self, num_slots: int) -> slice:
        """This rank's contiguous share of `num_slots`, in proportion to its weight; rank order is slot order.

        Ranks that hold parts of the same model have the same share.
        """
        return shares(self.weights, num_slots)[self.data_rank]

    def to_device(self, tensor: Tensor) -> Tensor:
        """From host memory, without waiting: pinned first on CUDA, where a copy from pageable memory may wait."""
        pinned = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return pinned.to(self.device, non_blocking=True)

    def wait_for_device(self) -> None:
        """For a clock: elsewhere the host runs ahead of the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def await_peers(self) -> None:
        """Before the host waits for what ranks do together on a device: NCCL's watchdog ends a process that waits there
        in vain without a word, while a vote on the host says who is missing. Every rank.
        """
        if self.device.type != "cpu":
            self.barrier()

    # ---- tensors ------------------------------------------------------------------------------------------------

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the shares of the slots, in place. Every rank."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor

    def sum_to_main_(self, tensor: Tensor) -> Tensor:
        """The same, but only rank 0 can rely on it (what the others hold afterwards is undefined). Every rank."""
        if self.data_size > 1:
            dist.reduce(tensor, group_dst=0, group=self.data_group)
        return tensor

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite with rank 0's values. Every rank."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self.device_group)

    def gather_rows(self, tensor: Tensor, num_rows: int | None = None) -> Tensor:
        """Every share's rows, concatenated in the order of slots. Every rank.

        Args:
            num_rows: how many there are, of which each rank holds its slice; None: all ranks hold the same number.
        """
        if self.data_size == 1:
            return tensor
        known = shares(self.weights, num_rows) if num_rows is not None else []
        counts = [share.stop - share.start for share in known]
        longest = max(counts, default=len(tensor))
        if len(tensor) < longest:  # a collective wants the same size of all
            tensor = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
        rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.data_size)]
        dist.all_gather(rows, tensor.contiguous(), group=self.data_group)
        return torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)] if counts else rows)

    # ---- host objects and agreement -------------------------------------------------------------------------------

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value, on every rank; what the others pass is not looked at. Every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value in rank order, on every rank. Every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather_to_main(self, value: T) -> list[T] | None:
        """What each share of the slots gave, in their order, on rank 0 only: what is too large to lie everywhere. Every
        rank.
        """
        if self.data_size == 1:
            return [value] if self.is_main else None
        values: list[Any] | None = [None] * self.data_size if self.data_rank == 0 else None
        dist.gather_object(value, values, group_dst=0, group=self.host_data_group)
        return values if self.is_main else None

    def any(self, flag: bool) -> bool:
        """Whether any rank raises the flag; over the host group, so that no device waits for it. Every rank."""
        (raised,) = self.any_of(flag)
        return raised

    def any_of(self, *flags: bool) -> list[bool]:
        """The same for several flags at once. Every rank."""
        if self.size == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.host_group)
        return [bool(vote) for vote in votes]

    def barrier(self) -> None:
        """Every rank."""
        if self.size > 1:
            dist.barrier(group=self.host_group)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Agree on the user's mistakes: if one rank raises a UserError inside, all ranks do. Every rank.

        Any other error is a fault. It leaves this rank alone, with its traceback, and the others
        find that they lost a peer.

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


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, of which a DTensor's `to_local` gives the storage itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@lru_cache(maxsize=64)  # asked for the same few numbers at every step
def shares(weights: tuple[Fraction, ...], num_slots: int) -> list[slice]:
    """Of so many slots one contiguous share per weight, in proportion; equal weights differ by one slot at most."""
    ends = [int(part * num_slots / sum(weights)) for part in accumulate(weights, initial=Fraction(0))]
    return [slice(first, end) for first, end in pairwise(ends)]
