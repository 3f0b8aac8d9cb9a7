"""Find out after a fault which ranks are missing, and where one hangs."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from utils.ranks.world import World

# How long a rank waits for the others to report the fault too. After a kill they notice at their
# next collective, and first give a running save one second. After a hang each rank gives up after a
# fixed time, and the ranks began to wait at different moments.
_AFTER_A_KILL_S, _AFTER_A_HANG_S = 3.0, 5.0
_TO_SHOW_STACKS_S = 0.5

T = TypeVar("T")


def is_lost_peer(error: Exception) -> bool:
    """Return whether ranks lost contact; the errors of gloo and NCCL have no class in common."""
    return any(word in str(error) for word in ("gloo", "Gloo", "NCCL", "nccl"))


def report_first(what: str, world: World) -> bool:
    """Tell the other ranks what ends this rank, and return whether no other rank told it before."""
    return world.size == 1 or _asked(lambda store: store.add(what, 1)) in (1, None)


def is_reported(what: str, world: World) -> bool:
    return world.size > 1 and _asked(lambda store: store.check([what])) is True


def _asked(question: Callable[[Store], T], limit_s: float = 2.0) -> T | None:
    """Ask the store where the ranks met; None: nobody answers in time.

    The question is asked in a thread, because the store never answers if its process hangs.
    """
    store, answers = dist.distributed_c10d._get_default_store(), list[T]()

    def ask() -> None:
        with suppress(RuntimeError):  # the store may have ended together with rank 0
            answers.append(question(store))

    asker = threading.Thread(target=ask, name="question", daemon=True)
    asker.start()
    asker.join(limit_s)
    return answers[0] if answers else None


def show_stacks_when_asked() -> None:
    """Let SIGUSR2 print the stacks of all threads, even while this process hangs."""
    faulthandler.register(signal.SIGUSR2)


def _end_with_stacks(pid: int) -> None:
    """Let a process that hangs print its stacks, and kill it. A frozen one prints nothing.

    torchrun would wait for it for half a minute.
    """
    with suppress(OSError):
        os.kill(pid, signal.SIGUSR2)
        time.sleep(_TO_SHOW_STACKS_S)
        os.kill(pid, signal.SIGKILL)


def silent_ranks(world: World, error: Exception) -> list[str]:
    """Return a line for each rank that lost contact and does not report a fault itself.

    Each rank writes its fault into the store where the ranks met (docs/reliability.md). A rank that
    hangs on a host with others shows its stacks, and is killed.
    """
    if world.size == 1:
        return []
    late = "imed out" in str(error)
    silent: list[int] | None = None

    def call_the_roll(store: Store) -> None:
        nonlocal silent
        store.set(f"fault/{world.rank}", str(error)[:200])
        if not is_lost_peer(error):
            silent = []
            return
        end = time.monotonic() + (min(_AFTER_A_HANG_S, world.timeout.total_seconds()) if late else _AFTER_A_KILL_S)
        missing, gone = [rank for rank in range(world.size) if rank != world.rank], list[int]()
        while missing and not gone and time.monotonic() < end:
            time.sleep(0.1)
            # This comes before the look into the store: a rank may still report and then end.
            ended = [rank for rank in missing if world.places[rank].is_gone]
            missing = [rank for rank in missing if not store.check([f"fault/{rank}"])]
            gone = [rank for rank in ended if rank in missing]
            # When a connection breaks, a rank whose process still runs is not the cause. It may be
            # waiting for this rank, and notice the fault later.
            elsewhere = [] if late else [rank for rank in missing if not world.places[rank].is_near]
            # Kept up to date in each round, because rank 0 may leave and take the store along.
            silent = gone or elsewhere or missing

    _asked(call_the_roll, _AFTER_A_HANG_S + 1)
    if silent is None:
        return [f"nobody answers where the ranks met, in or beside rank 0 ({world.places[0]}): it hangs or is gone"]
    # Of several, some may only have begun to wait later.
    for rank in silent if late and len(silent) == 1 else ():
        neighbours = (each for each in range(world.size) if world.places[each].shares_host_with(world.places[rank]))
        if world.rank == next((each for each in neighbours if each not in silent), None):
            _end_with_stacks(world.places[rank].pid)
    return [
        f"rank {rank} ({world.places[rank]}) says nothing: it hangs, was killed, or can't be reached" for rank in silent
    ]
