"""The store in which ranks meet."""

import os
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from utils.dist.config import MeetingConfig
from utils.dist.launch import Launch
from utils.errors import UserError
from utils.files import file_errors


class MissingRank(Exception):
    """A rank did not come to the meeting point in time. The message names the rank."""


def agents_store(timeout: timedelta) -> Store | None:
    """Return the store that torchrun keeps for all attempts of a launch; None if it keeps none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timeout)


def require_meeting_point(launch: Launch, config: MeetingConfig) -> None:
    """Raise UserError if there are several ranks, and nothing says where they meet."""
    needed = {"MASTER_ADDR": launch.host, "MASTER_PORT": launch.port}
    missing = [name for name, value in needed.items() if value in (None, "")]
    if launch.size > 1 and config.init_method == "env" and missing:
        raise UserError(
            f"there are {launch.size} ranks, but nothing says where they meet; set {' and '.join(missing)} to an "
            "address of rank 0's host and a free port there, or type dist.init_method=tcp://host:port"
        )


def meeting_point(launch: Launch, config: MeetingConfig) -> str:
    """Return where the ranks of a launch meet: host:port, or the path of a file."""
    if config.init_method == "env":
        return f"{launch.host}:{launch.port}"
    return config.init_method.removeprefix("file://").removeprefix("tcp://")


def open_store(launch: Launch, config: MeetingConfig) -> Store:
    """Open the store of the ranks: rank 0 serves it, and the others wait for it. Every rank.

    Raises:
        UserError: The port or the name of the host can't be used.
        MissingRank: Rank 0 did not come within `config.start_timeout_s`.
    """
    where = meeting_point(launch, config)
    if config.init_method.startswith("file://"):
        with file_errors():
            Path(where).touch()
        return FileStore(where, launch.size)
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    if launch.rank > 0:
        _await_server(host, int(port), config.start_timeout_s)
    try:
        store = _tcp_store(host, int(port), is_server=launch.rank == 0, timeout_s=config.start_timeout_s)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"rank 0 can't open port {port}, where the ranks are to meet: it is in use on {socket.gethostname()}; set "
            "MASTER_PORT to a free port for all ranks, or end the program that uses this one"
        ) from error
    return PrefixStore(launch.name, store) if launch.name else store


def _tcp_store(host: str, port: int, *, is_server: bool, timeout_s: float) -> TCPStore:
    """Open the store in a thread: if another program answers at the port, a client never returns.

    Raises:
        MissingRank: Something answers at the port, but not rank 0.
    """
    opened: Future[TCPStore] = Future()

    def open_it() -> None:
        try:
            timeout = timedelta(seconds=timeout_s)
            opened.set_result(TCPStore(host, port, is_master=is_server, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=open_it, name="meeting point", daemon=True).start()
    try:
        return opened.result(timeout_s)
    except TimeoutError as error:
        raise MissingRank(
            f"rank 0 did not come within {timeout_s:g} s: another program answers at {host}:{port}; set MASTER_PORT to "
            "a free port for all ranks"
        ) from error


def _await_server(host: str, port: int, timeout_s: float) -> None:
    """Wait until something answers at an address.

    TCPStore would wait, too, but it does not let Ctrl-C through, and prints each attempt.

    Raises:
        UserError: The host is not known here.
        MissingRank: Nothing answers.
    """
    end, last = time.monotonic() + timeout_s, ""
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, end - time.monotonic()))).close()
            return
        except socket.gaierror as error:
            raise UserError(
                f"the ranks are to meet at {host}, which is not known on {socket.gethostname()} "
                f"({error.strerror}); set MASTER_ADDR to a name or address of rank 0's host that all hosts know"
            ) from error
        except OSError as error:
            last = error.strerror or str(error)
        if time.monotonic() > end:
            raise MissingRank(
                f"rank 0 did not come within {timeout_s:g} s: {host}:{port} does not answer ({last}); "
                "dist.start_timeout_s sets how long ranks wait"
            )
        time.sleep(0.1)


def store_of_this_attempt(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """Return a part of the store in which no earlier attempt has written. Every rank.

    torchrun keeps one store for all attempts, and a file outlives the run. There a restarted rank
    would find the addresses of ranks that are gone, and wait for them. No environment variable
    names the attempt on all hosts. So rank 0 draws a name, and each rank asks for the name with a
    ticket of its own. A ticket may come from a rank of an earlier attempt, so rank 0 answers
    tickets until all ranks have arrived.

    Raises:
        MissingRank: Not all ranks arrived in time. The message names those that did not.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout_s
    hint = "dist.start_timeout_s sets how long ranks wait"
    if rank > 0:
        store.set(f"ticket/{rank}", own)
        while not store.check([f"attempt/{own}"]):
            if time.monotonic() > end:
                raise MissingRank(f"rank 0 did not come within {timeout_s:g} s; {hint}")
            time.sleep(0.02)
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

    while missing := [other for other in range(1, size) if not has_come(other)]:
        if time.monotonic() > end:
            named = ", ".join(f"rank {other}" for other in missing[:20]) + (" and others" if missing[20:] else "")
            raise MissingRank(f"{named} of {size} did not come within {timeout_s:g} s; {hint}")
        time.sleep(0.02)
    return PrefixStore(own, store)
