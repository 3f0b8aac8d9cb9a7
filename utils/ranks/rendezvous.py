"""The store in which ranks meet."""

import os
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from utils.errors import UserError
from utils.files import file_errors
from utils.ranks.config import MeetingConfig
from utils.ranks.launch import Launch

_TO_READ_S = 1.0  # how long rank 0 leaves a message for the others before it ends
_LOOK_EVERY_S = 0.02


class Patience:
    """How long a rank waits for the others to start, from now on."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self._until = timeout_s, time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def __str__(self) -> str:
        return f"within {self.timeout_s:g} s; dist.start_timeout_s sets how long ranks wait"


class MissingRank(Exception):
    """A rank did not come to the meeting point in time. The message names the rank."""


TORCHRUN_ANSWERS = timedelta(seconds=30)


def agents_store(timeout: timedelta) -> Store | None:
    """Return the store that torchrun keeps for all attempts of a launch; None if it keeps none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun opened it before it started this process. If nobody answers, torchrun was killed at
    # once, before this process could know its launcher.
    store = TCPStore(host, port, is_master=False, timeout=min(timeout, TORCHRUN_ANSWERS))
    store.set_timeout(timeout)
    return store


def require_meeting_point(launch: Launch, config: MeetingConfig) -> None:
    if launch.size > 1 and config.init_method == "env" and not (launch.host and launch.port):
        how = " (Open MPI: mpirun -x MASTER_ADDR=...; MPICH: -genv MASTER_ADDR ...)" if launch.launcher == "mpi" else ""
        raise UserError(
            f"there are {launch.size} ranks, but nothing says where they meet; set MASTER_ADDR to the host of rank 0 "
            f"and MASTER_PORT to a free port there{how}, or type dist.init_method=tcp://host:port"
        )


def meeting_point(launch: Launch, config: MeetingConfig) -> str:
    """Return where the ranks of a launch meet: host:port, or the path of a file."""
    if config.init_method == "env":
        return f"{launch.host}:{launch.port}"
    return config.init_method.removeprefix("file://").removeprefix("tcp://")


def open_store(launch: Launch, config: MeetingConfig, patience: Patience) -> Store:
    """Open the store of the ranks: rank 0 serves it, and the others wait for it. Every rank."""
    where = meeting_point(launch, config)
    if config.init_method.startswith("file://"):
        with file_errors():
            Path(where).touch()
        return FileStore(where, launch.size)
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    if launch.rank > 0:
        _await_server(host, int(port), patience)
    else:  # others find out whether the address leads here
        host = "localhost"
    timeout, is_server = timedelta(seconds=patience.timeout_s), launch.rank == 0
    # In a thread, because a client never returns if another program answers at the port.
    opened = ThreadPoolExecutor(1).submit(
        TCPStore, host, int(port), is_master=is_server, timeout=timeout, wait_for_workers=False
    )
    try:
        store = opened.result(max(1.0, patience.left_s))
    except TimeoutError as error:
        raise MissingRank(
            f"rank 0 did not come within {patience.timeout_s:g} s: another program answers at {host}:{port}; set "
            "MASTER_PORT to a free port for all ranks"
        ) from error
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"rank 0 can't open port {port}, where the ranks are to meet: it is in use on {socket.gethostname()}; set "
            "MASTER_PORT to a free port for all ranks, or end the program that uses this one"
        ) from error
    return PrefixStore(launch.name, store) if launch.name else store


def _await_server(host: str, port: int, patience: Patience) -> None:
    """Wait until something answers. TCPStore's own wait does not let Ctrl-C through."""
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, patience.left_s))).close()
            return
        except socket.gaierror as error:
            raise UserError(
                f"the ranks are to meet at {host}, which is not known on {socket.gethostname()} "
                f"({error.strerror}); set MASTER_ADDR to a name or address of rank 0's host that all hosts know"
            ) from error
        except OSError as error:
            if patience.left_s < 0:
                said = f"rank 0 does not answer at {host}:{port} ({error.strerror or error})"
                raise MissingRank(f"{said}; it did not come {patience}") from error
        time.sleep(0.1)


def store_of_this_attempt(store: Store, rank: int, size: int, patience: Patience) -> Store:
    """Return a part of the store in which no earlier attempt has written. Every rank.

    torchrun keeps one store for all attempts, and a file outlives the run. There a restarted rank
    would find the addresses of ranks that are gone, and wait for them. No environment variable
    names the attempt on all hosts. So rank 0 draws a name, and each rank asks for the name with a
    ticket of its own. A ticket may come from a rank of an earlier attempt, so rank 0 answers
    tickets until all ranks have arrived. Then it lets all of them go on.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        _receive(store, own, size, patience)
        return PrefixStore(own, store)

    def answer(key: str, late: str, more_s: float = 0.0) -> str:
        """Poll, because a wait in the store does not let Ctrl-C through."""
        try:
            while not store.check([key]):
                if patience.left_s < -more_s:
                    raise MissingRank(f"{late} did not come {patience}")
                time.sleep(_LOOK_EVERY_S)
            return str(store.get(key).decode())
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise MissingRank("rank 0 ended while ranks met; its own message says why") from error

    store.set(f"ticket/{rank}", own)
    name = answer(f"attempt/{own}", "rank 0")
    store.set(f"{name}/arrived/{own}", "")
    if missing := answer(f"{name}/missing", "a rank", _TO_READ_S):
        raise MissingRank(missing)
    return PrefixStore(name, store)


def _receive(store: Store, own: str, size: int, patience: Patience) -> None:
    """Answer tickets with the name of this attempt until all ranks have arrived. For rank 0."""
    answered: dict[int, str] = {}

    def has_come(other: int) -> bool:
        if not store.check([f"ticket/{other}"]):
            return False
        ticket = store.get(f"ticket/{other}").decode()
        if ticket != answered.get(other):
            store.set(f"attempt/{ticket}", own)
            answered[other] = ticket
        return bool(store.check([f"{own}/arrived/{ticket}"]))

    while missing := [other for other in range(1, size) if not has_come(other)]:
        if patience.left_s < 0:
            said = f"{', '.join(f'rank {other}' for other in missing[:20])} of {size} did not come {patience}"
            store.set(f"{own}/missing", said)
            time.sleep(_TO_READ_S)  # the store may end together with this rank
            raise MissingRank(said)
        time.sleep(_LOOK_EVERY_S)
    store.set(f"{own}/missing", "")
