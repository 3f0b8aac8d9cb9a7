"""The world: who takes part in a run, and every way in which ranks talk to one another.

Each collective is a no-op in a world of one, so that callers never branch on the number of ranks. Methods marked
"every rank" hang the run
when one rank leaves them out. This is also the only module that reads the launcher's environment.
"""

import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from utils.config import Float, StrictModel

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
T = TypeVar("T")

# Rank 0 reads YAML and imports what it needs before it broadcasts the config; the config's own timeout is not known
# until then.
_START_TIMEOUT = timedelta(minutes=5)
_BUCKET_BYTES = 32 * 2**20


class UserError(ValueError):
    """A mistake that a person can mend, already agreed on by all ranks: one line, exit status 2, no traceback."""


class DistConfig(StrictModel):
    timeout_s: Float = Field(gt=0)


@dataclass(frozen=True)
class World:
    """The processes of one run. `host_group` (gloo) carries objects and flags, `device_group` (nccl or gloo) carries
    tensors.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host_group: dist.ProcessGroup | None = None
    device_group: dist.ProcessGroup | None = None

    @staticmethod
    def single(device: str = "cpu") -> "World":
        return World(device=torch.device(device))

    @staticmethod
    def launch() -> "World":
        """Join the other ranks as torchrun's environment names them, on the host only: the device follows with
        `use_device`.
        """
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size == 1:
            return World()
        dist.init_process_group("gloo", timeout=_START_TIMEOUT)
        return World(
            rank=dist.get_rank(),
            size=size,
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            host_group=dist.group.WORLD,
            device_group=dist.group.WORLD,
        )

    def use_device(self, name: DeviceName, *, timeout_s: float, deterministic: bool = False) -> "World":
        """This world on a device, with process groups that give up after `timeout_s` seconds. Every rank.

        Raises UserError where the device that was asked for is not there.
        """
        with self.agree():
            device = _pick_device(name, self.local_rank)
        if deterministic:
            # cuBLAS reads it once, at its first call; without it deterministic algorithms refuse to run.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.size == 1:
            return replace(self, device=device)
        timeout = timedelta(seconds=timeout_s)
        host_group = dist.new_group(backend="gloo", timeout=timeout)
        device_group = dist.new_group(backend="nccl", timeout=timeout) if device.type == "cuda" else host_group
        return replace(self, device=device, host_group=host_group, device_group=device_group)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def slice_of(self, num_slots: int) -> slice:
        """This rank's contiguous share of `num_slots`; shares differ by one at most, and rank order is slot order."""
        return slice(self.rank * num_slots // self.size, (self.rank + 1) * num_slots // self.size)

    def to_device(self, tensor: Tensor) -> Tensor:
        """From host memory, without waiting: pinned first on CUDA, where a copy from pageable memory may wait."""
        pinned = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return pinned.to(self.device, non_blocking=True)

    def wait_for_device(self) -> None:
        """For a clock: elsewhere the host runs ahead of the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    # ---- tensors ------------------------------------------------------------------------------------------------

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place. Every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def sum_to_main_(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place and on rank 0 only (what the others hold afterwards is undefined). Every rank."""
        if self.size > 1:
            dist.reduce(tensor, dst=0, group=self.device_group)
        return tensor

    def sum_gradients_(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum every parameter's gradient over ranks, in place, in a few flat buckets. Every rank.

        One collective per parameter costs a latency each, and these models have many small ones.
        """
        if self.size == 1:
            return
        pending = []
        for gradients in _buckets([_gradient(p) for p in parameters]):
            flat = torch.cat([g.reshape(-1) for g in gradients])
            pending.append((gradients, flat, dist.all_reduce(flat, group=self.device_group, async_op=True)))
        for gradients, flat, work in pending:
            work.wait()
            sums = flat.split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [s.view_as(g) for s, g in zip(sums, gradients, strict=True)])

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite with rank 0's values. Every rank."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self.device_group)

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Every rank's rows, concatenated in rank order, which is slot order; ranks hold the same number of rows.
        Every rank.
        """
        if self.size == 1:
            return tensor
        shares = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(shares, tensor.contiguous(), group=self.device_group)
        return torch.cat(shares)

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
        """Every rank's value in rank order, on rank 0 only: what is too large to lie everywhere. Every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.host_group)
        return values

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
        """Inside, ValueError and OSError are the user's to mend: when one rank meets one, all leave with it as a
        UserError. Every rank.

        No collective may stand inside, since a rank that failed never reaches it.
        """
        mistake = cause = None
        try:
            yield
        except (ValueError, OSError) as error:
            mistake, cause = " ".join(str(error).split()) or type(error).__name__, error
        for first in filter(None, self.gather_objects(mistake)):
            raise UserError(first) from cause

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this attempt."""

    restarts: int  # how often torchrun has restarted the workers
    identity: str | None  # the same for all attempts of one launch; None where nothing restarts us

    @staticmethod
    def from_environment() -> "Launch":
        if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
            return Launch(restarts=0, identity=None)
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        # Static rendezvous names no run. Its rank 0 stays on one node, under the same agent, through all restarts.
        identity = run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"
        return Launch(restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), identity=identity)


def run(main: Callable[[World], None]) -> NoReturn:
    """Run `main(world)` as a program: mistakes are one line and status 2, faults a traceback that names the rank and
    status 1.
    """
    world = World()

    @record  # leaves faults, not mistakes, for torchrun's report, which quotes them with their tracebacks
    def attempt() -> UserError | None:
        try:
            main(world)
        except UserError as error:
            return error
        return None

    try:
        world = World.launch()
        mistake = attempt()
        if mistake is not None:
            if world.is_main:
                print(f"error: {mistake}", file=sys.stderr, flush=True)
            world.barrier()  # torchrun ends the others once one has exited: not before the line is out
        world.close()
    except KeyboardInterrupt:  # of programs without a graceful stop
        print("error: interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    except Exception as error:
        traceback.print_exc()
        print(f"fault on rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Not sys.exit: leaving the process groups in order would wait for peers that wait for us.
        os._exit(1)
    sys.exit(0 if mistake is None else 2)


def _pick_device(name: DeviceName, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ValueError("device=cuda, but PyTorch finds no CUDA device here; use device=cpu or device=auto")
        if local_rank >= count:
            raise ValueError(
                f"{local_rank + 1} or more ranks here, but {count} CUDA devices; lower --nproc-per-node to {count}"
            )
        return torch.device("cuda", local_rank)
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device=mps, but PyTorch finds no Apple GPU here; use device=cpu or device=auto")
    return torch.device(name)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a parameter without a gradient would shift the buckets against other ranks"
    return parameter.grad


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and num_bytes + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket
