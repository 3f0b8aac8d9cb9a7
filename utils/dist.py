"""The world: who takes part in a run, and every way in which ranks talk to one another.

Each collective is a no-op in a world of one, so that callers never branch on the number of ranks. Methods marked
"every rank" hang the run when one rank leaves them out. This is also the only module that reads the launcher's
environment.
"""

import faulthandler
import os
import re
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, field_validator
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

from utils.config import Float, Int, StrictModel
from utils.terminal import leave, tell

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
T = TypeVar("T")

# Rank 0 reads YAML and imports what it needs before it broadcasts the config; the config's own timeout is not known
# until then.
_START_TIMEOUT = timedelta(minutes=5)
_THREAD_TIMEOUT = timedelta(minutes=30)
_LONGEST_MISTAKE = 2000
INIT_METHODS = ("env", "tcp://", "file://")
_BEGUN = "begun"  # in torchrun's store: how many attempts of the launch have begun to train
# Names of what is secret end so, perhaps with a number: API_KEY, HF_TOKEN, SECRET_1, not KEYBOARD or TOKENIZER_DIR.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|_PWD|_PAT|CREDENTIALS?)(_\w{1,2})?$", re.IGNORECASE)
# How long a rank that lost its peers waits for them to say so too. Where one was killed, the others notice when they
# next talk to it, and give a save that is under way a second; where one hangs, each gives up so long after it began to
# wait, and they did not all begin at the same moment.
_ROLL_CALL_S = {"gone": 3.0, "late": 5.0}


class UserError(ValueError):
    """A mistake that a person can mend, already agreed on by all ranks: one line, exit status 2, no traceback."""


class DistConfig(StrictModel):
    """How ranks find and hear one another; config/pretrain.yaml explains each."""

    backend: Literal["auto", "nccl", "gloo", "mpi"]
    init_method: str
    timeout_s: Float = Field(gt=0, le=10**7)
    num_threads: Int | None = Field(gt=0)
    rank_weights: list[Float]

    @field_validator("init_method")
    @classmethod
    def known_init_method(cls, value: str) -> str:
        if not value.startswith(INIT_METHODS):
            raise ValueError(
                f"dist.init_method is {value!r}; give env, tcp://host:port or file:///path/on/all/machines"
            )
        return value

    @field_validator("rank_weights")
    @classmethod
    def _weights_are_positive(cls, values: list[float]) -> list[float]:
        if any(not 0 < value < float("inf") for value in values):
            raise ValueError(f"rank_weights is {values}; give a positive number for each rank")
        return values


@dataclass(frozen=True)
class Axes:
    """How ranks are laid out, outermost axis first. Their product is the number of ranks.

    Ranks of one `replicate` x `shard` position hold different slots of the global batch. Those of one `model` position
    (the parts of a tensor or the stages of a pipeline) hold the same ones: they are neighbours, on one machine if
    possible, since they talk the most.
    """

    replicate: int = 1
    shard: int = 1
    model: int = 1


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    pid: int
    host: str
    pid_namespace: str  # containers of one host name have their own, and don't see one another's processes

    @staticmethod
    def here() -> "Place":
        namespace = Path("/proc/self/ns/pid")
        return Place(os.getpid(), socket.gethostname(), os.readlink(namespace) if namespace.is_symlink() else "")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_near(self) -> bool:
        """Whether its process can be seen from here."""
        here = Place.here()
        return (self.host, self.pid_namespace) == (here.host, here.pid_namespace)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False where that can't be seen."""
        if self.is_near:
            try:
                with suppress(PermissionError):  # of somebody else's, which is there
                    os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
        return False


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this attempt."""

    restarts: int = 0  # attempts before this one that there is something to go on from
    identity: str | None = None  # the same for all attempts of one launch; None where nothing restarts us

    @staticmethod
    def from_environment() -> "Launch":
        if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
            return Launch()
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        # Static rendezvous names no run. Its rank 0 stays on one node, under the same agent, through all restarts.
        identity = run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"
        return Launch(restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), identity=identity)


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
    timeout: timedelta = _START_TIMEOUT  # after which a rank that hears nothing gives up
    attempt: Launch = Launch()  # of rank 0, who alone looks for what to go on from
    launch_store: Store | None = None  # torchrun's own, which all attempts of a launch share
    mesh: DeviceMesh | None = None  # named as the fields of Axes; None where no strategy needs one

    @staticmethod
    def single(device: str = "cpu") -> "World":
        return World(device=torch.device(device))

    @staticmethod
    def launch(init_method: str = "env") -> "World":
        """Join the other ranks, on the host only: the device follows with `use_device`.

        Rank and number of ranks are the environment's, as torchrun sets it; where to meet is too (MASTER_ADDR and
        MASTER_PORT), unless `init_method` is a tcp:// address or a file:// that all see.
        """
        size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        launch_store = _agents_store() if init_method == "env" else None
        attempt = Launch.from_environment()
        if launch_store is not None and rank == 0:
            # Each host's agent counts only the restarts that its own workers caused, and also those of attempts that
            # were refused: what another run left in the folder is nothing for the next attempt to go on from.
            attempt = replace(attempt, restarts=launch_store.add(_BEGUN, 0))
        if size == 1:
            return World(attempt=attempt, launch_store=launch_store)
        if not torch.cuda.is_available():
            # PyTorch keeps the call stacks of the last 2,000 collectives: small blocks among the large ones of tensors,
            # which glibc then can't use again. Two ranks on a CPU grew by 0.7 MB a step for ever (docs/log.md).
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        if launch_store is not None:
            store = _part_of_this_attempt(launch_store, rank, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_START_TIMEOUT)
        else:
            where = "env://" if init_method == "env" else init_method
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=_START_TIMEOUT)
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

    def note_beginning(self) -> None:
        """An attempt of torchrun's that comes after this one goes on with what it has begun. Rank 0."""
        if self.launch_store is not None:
            self.launch_store.add(_BEGUN, 1)

    def use_device(
        self,
        name: DeviceName,
        config: DistConfig | None = None,
        *,
        axes: Axes | None = None,
        deterministic: bool = False,
    ) -> "World":
        """This world on a device, with process groups that give up after `timeout_s` seconds. Every rank.

        Args:
            config: None for programs of one process.
            axes: how the ranks are laid out, for strategies that need a mesh; None: every rank holds slots of its own.

        Raises UserError where the device or backend that was asked for is not there, or the weights don't fit.
        """
        config = config or DistConfig(
            backend="auto", init_method="env", timeout_s=600, num_threads=None, rank_weights=[]
        )
        with self.agree():
            if self.size > 1 and config.init_method != (typed_init_method() or "env"):
                raise ValueError(
                    f"dist.init_method={config.init_method}, but ranks have to meet before any YAML is read; type it "
                    "on the command line of every rank, or dist.init_method=env"
                )
            device = _pick_device(name, self.local_rank)
            backend = _pick_backend(config.backend, device)
            weights = _pick_weights(config.rank_weights, self.size // (axes or Axes()).model)
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
        if self.size == 1 and axes is None:
            return replace(self, device=device, weights=weights)
        if not dist.is_initialized():  # one process, whose strategy needs a group nevertheless
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=_START_TIMEOUT)
        timeout = timedelta(seconds=config.timeout_s)
        # NCCL's watchdog ends a process without a word; the host's votes, which can say who is missing, come first.
        device_timeout = timeout + timedelta(seconds=60 if device.type == "cuda" else 0)
        axes = axes or Axes(replicate=self.size)
        groups = {
            "host": dist.new_group(backend="gloo", timeout=timeout),
            "device": dist.new_group(backend=backend, timeout=device_timeout),
            "thread": dist.new_group(backend="gloo", timeout=timeout),
        }
        # What a thread waits for may take longer than any rank's next word, as a disk does.
        dist.distributed_c10d._set_pg_timeout(_THREAD_TIMEOUT, groups["thread"])
        ranks_RSM = torch.arange(self.size).view(axes.replicate, axes.shard, axes.model)
        data_ranks = list(ranks_RSM.flatten(0, 1).unbind(1))
        return replace(
            self,
            device=device,
            timeout=timeout,
            host_group=groups["host"],
            device_group=groups["device"],
            thread_group=groups["thread"],
            data_group=self._own_group(data_ranks, backend, device_timeout),
            host_data_group=self._own_group(data_ranks, "gloo", timeout),
            data_rank=self.rank // axes.model,
            data_size=self.size // axes.model,
            weights=weights,
            mesh=DeviceMesh.from_group(
                [
                    self._own_group(list(lines.flatten(0, 1)), backend, device_timeout)
                    for lines in (ranks_RSM.permute(1, 2, 0), ranks_RSM.permute(0, 2, 1), ranks_RSM)
                ],
                device.type,
                mesh=ranks_RSM,
                mesh_dim_names=("replicate", "shard", "model"),
            ),
        )

    def _own_group(self, lines: list[Tensor], backend: str, timeout: timedelta) -> dist.ProcessGroup:
        """Of groups that part the ranks, this rank's. Every rank, for which the others' groups are no concern."""
        (ranks,) = (line.tolist() for line in lines if self.rank in line)
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)

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
        """Inside, ValueError and OSError are the user's to mend: when one rank meets one, all leave with it as a
        UserError. Every rank.

        No collective may stand inside, since a rank that failed never reaches it.
        """
        mistake = cause = None
        try:
            yield
        except (ValueError, OSError) as error:
            mistake, cause = _for_a_terminal(str(error)) or type(error).__name__, error
        for first in filter(None, self.gather_objects(mistake)):
            raise UserError(first) from cause

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _agents_store() -> Store | None:
    """Where torchrun's workers meet, if torchrun itself keeps it: the same for all attempts of a launch."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=_START_TIMEOUT)


def _part_of_this_attempt(store: Store, rank: int, size: int) -> Store:
    """A part of torchrun's store in which no earlier attempt has written. Every rank.

    Under bare keys a restarted rank finds there the addresses of ranks that are gone, and waits for them. Nothing in
    the environment names the attempt on all hosts, so rank 0 draws a name and tells it to each rank that asks with a
    ticket of its own. A ticket that lies there may be of a rank that is gone: rank 0 answers until all have come.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"ticket/{rank}", own)
        try:
            store.wait([f"attempt/{own}"], _START_TIMEOUT)
        except dist.DistStoreError as error:
            raise TimeoutError(f"rank 0 did not come within {_START_TIMEOUT.total_seconds():g} s") from error
        name = store.get(f"attempt/{own}").decode()
        store.set(f"{name}/arrived/{own}", "")
        return PrefixStore(name, store)

    answered: dict[int, str] = {}

    def has_come(other: int) -> bool:
        if not store.check([f"ticket/{other}"]):
            return False
        ticket = store.get(f"ticket/{other}").decode()
        if ticket != answered.get(other):
            store.set(f"attempt/{ticket}", own)
            answered[other] = ticket
        return bool(store.check([f"{own}/arrived/{ticket}"]))

    end = time.monotonic() + _START_TIMEOUT.total_seconds()
    while missing := [f"rank {other}" for other in range(1, size) if not has_come(other)]:
        if time.monotonic() > end:
            raise TimeoutError(
                f"{', '.join(missing)} of {size} did not come within {_START_TIMEOUT.total_seconds():g} s"
            )
        time.sleep(0.02)
    return PrefixStore(own, store)


def _for_a_terminal(text: str) -> str:
    """One line, without the control characters and the length that names in a stranger's file can have."""
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    return line if len(line) <= _LONGEST_MISTAKE else f"{line[:_LONGEST_MISTAKE]}..."


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, of which a DTensor's `to_local` gives the storage itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@lru_cache(maxsize=64)  # asked for the same few numbers at every step
def shares(weights: tuple[Fraction, ...], num_slots: int) -> list[slice]:
    """Of so many slots one contiguous share per weight, in proportion; equal weights differ by one slot at most."""
    ends = [int(part * num_slots / sum(weights)) for part in accumulate(weights, initial=Fraction(0))]
    return [slice(first, end) for first, end in pairwise(ends)]


def run(main: Callable[[World], None]) -> NoReturn:
    """Run `main(world)` as a program: mistakes are one line and status 2, faults a traceback that names the rank and
    status 1. A worker ends with its launcher.
    """
    faulthandler.enable()  # what kills a process without an exception (SIGBUS, SIGSEGV) says where at least
    launcher_is_gone = _end_with_launcher()
    world = World(rank=int(os.environ.get("RANK", 0)))  # for faults before the ranks have met

    @record  # leaves faults, not mistakes, for torchrun's report, which quotes them with their tracebacks
    def attempt() -> UserError | None:
        try:
            main(world)
        except UserError as error:
            return error
        return None

    try:
        world = World.launch(typed_init_method() or "env")
        mistake = attempt()
        if mistake is not None:
            if world.is_main:
                tell(f"error: {mistake}")
            world.barrier()  # torchrun ends the others once one has exited: not before the line is out
        world.close()
    except UserError as error:  # before the ranks have met
        tell(f"error: {error}")
        leave(2)
    except KeyboardInterrupt:  # of programs without a graceful stop
        tell("error: interrupted")
        os._exit(130)
    except Exception as error:
        tell(traceback.format_exc().rstrip())
        reason = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        tell(f"fault on rank {world.rank}: {reason}")
        gone = [f"rank {world.rank}: its launcher is gone, and with it where the ranks met"] * launcher_is_gone()
        for line in gone or _silent_ranks(world, error):
            tell(line)
        with suppress(OSError):
            sys.stdout.flush()
        # Not sys.exit: leaving the process groups in order would wait for peers that wait for us.
        os._exit(1)
    leave(0 if mistake is None else 2)


def _end_with_launcher() -> Callable[[], bool]:
    """A worker whose torchrun was killed would go on beside the run that somebody starts in its place. Returns what
    tells whether that happened: some time in the last second, it is the reason of whatever else went wrong.
    """
    if Launch.from_environment().identity is None:
        return lambda: False
    launcher, rank = os.getppid(), os.environ.get("RANK", "0")

    def is_gone() -> bool:
        return os.getppid() != launcher

    def watch() -> None:
        while not is_gone():
            time.sleep(1)
        tell(f"rank {rank}: its launcher is gone; ending")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    return is_gone


def is_lost_peer(error: Exception) -> bool:
    """Whether ranks didn't hear one another, as against what went wrong on this one. Such errors share no class."""
    return any(word in str(error) for word in ("gloo", "Gloo", "NCCL", "nccl"))


def _silent_ranks(world: World, error: Exception) -> list[str]:
    """After a fault: a line for each rank that doesn't report one too, if what failed is that ranks didn't hear one
    another. Such an error says of the culprit an address at most.
    """
    if world.size == 1:
        return []
    text, store = str(error), dist.distributed_c10d._get_default_store()
    others = [rank for rank in range(world.size) if rank != world.rank]
    late = "imed out" in text
    silent: list[int] | None = None

    def call_the_roll() -> None:
        nonlocal silent
        with suppress(RuntimeError):  # of a store that went with rank 0
            store.set(f"fault/{world.rank}", text[:200])
            if not is_lost_peer(error):
                silent = []
                return
            end, missing, gone = time.monotonic() + _ROLL_CALL_S["late" if late else "gone"], others, list[int]()
            while missing and not gone and time.monotonic() < end:
                time.sleep(0.1)
                ended = [rank for rank in missing if world.places[rank].is_gone]  # asked first: it may speak, then end
                missing = [rank for rank in missing if not store.check([f"fault/{rank}"])]
                gone = [rank for rank in ended if rank in missing]
                # Who still runs when a connection breaks is no culprit: it may wait for this rank, and learn it later.
                elsewhere = [] if late else [rank for rank in missing if not world.places[rank].is_near]
                silent = gone or elsewhere or missing  # as far as is known when rank 0 leaves, and the store with it

    # In a thread, since a store that lies in a process which hangs never answers.
    caller = threading.Thread(target=call_the_roll, name="roll call", daemon=True)
    caller.start()
    caller.join(_ROLL_CALL_S["late"] + 1)
    if silent is None:
        return [f"nobody answers where the ranks met, beside or in rank 0 ({world.places[0]}): it hangs or is gone"]
    return [
        f"rank {rank} ({world.places[rank]}) says nothing: it hangs, was killed, or can't be reached" for rank in silent
    ]


def typed_init_method() -> str | None:
    """Where to meet, as each rank's own command line says. Raises UserError for what is no meeting point."""
    typed = [word.split("=", 1)[1] for word in sys.argv[1:] if word.lstrip("+").startswith("dist.init_method=")]
    if not typed:
        return None
    try:
        return DistConfig.known_init_method(typed[-1].strip("'\""))
    except ValueError as error:
        raise UserError(str(error)) from error


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


def _pick_backend(name: str, device: torch.device) -> str:
    """What carries tensors: of the device, and on CUDA of the host as well, where offloaded weights lie."""
    if name == "mpi" and not dist.is_mpi_available():
        raise ValueError("dist.backend=mpi, but this PyTorch was built without MPI; take auto, or a build with it")
    if name == "nccl" and device.type != "cuda":
        raise ValueError(
            f"dist.backend=nccl moves data between CUDA devices, but this run is on {device.type}; take gloo"
        )
    if name == "nccl" and not dist.is_nccl_available():
        raise ValueError("dist.backend=nccl, but this PyTorch was built without NCCL; take gloo")
    if device.type == "cuda":
        on_device = name if name != "auto" else "nccl" if dist.is_nccl_available() else "gloo"
        return f"cpu:gloo,cuda:{on_device}"
    return "gloo" if name == "auto" else name


def _pick_weights(weights: list[float], num_shares: int) -> tuple[Fraction, ...]:
    if weights and len(weights) != num_shares:
        raise ValueError(
            f"dist.rank_weights has {len(weights)} weights, but {num_shares} ranks hold slots of their own; give one "
            "for each of these"
        )
    return tuple(map(Fraction, weights)) or (Fraction(1),) * num_shares


def secret_in(text: str) -> str | None:
    """The name of the environment variable whose value stands in the text, if there is one whose name says that it is
    a secret. Shorter values than eight characters are words.
    """
    for name, value in os.environ.items():
        if len(value) >= 8 and value in text and _SECRET.search(name):
            return name
    return None
