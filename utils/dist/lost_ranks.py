"""Find out after a fault which ranks are missing."""

import threading
import time
from contextlib import suppress

import torch.distributed as dist

from utils.dist.world import World

# How many seconds a rank waits for the other ranks to report the fault too. After a kill ("gone")
# the others notice at their next collective, and first give a running save one second. After a hang
# ("late") each rank gives up after a fixed time, and the ranks began to wait at different moments.
_ROLL_CALL_S = {"gone": 3.0, "late": 5.0}


def is_lost_peer(error: Exception) -> bool:
    """Return whether ranks lost contact; False if something failed on this rank.

    The message of the error decides, because the errors of gloo and NCCL have no class in common.
    """
    return any(word in str(error) for word in ("gloo", "Gloo", "NCCL", "nccl"))


def silent_ranks(world: World, error: Exception) -> list[str]:
    """Return a line for each rank that lost contact and does not report a fault itself.

    The error of a lost contact holds at most an address, so the ranks call a roll: each writes its
    fault into the store where the ranks met, and the ranks that write nothing are named. After a
    fault of another kind the list is empty. docs/reliability.md has more.
    """
    if world.size == 1:
        return []
    text, store = str(error), dist.distributed_c10d._get_default_store()
    others = [rank for rank in range(world.size) if rank != world.rank]
    late = "imed out" in text
    silent: list[int] | None = None

    def call_the_roll() -> None:
        nonlocal silent
        with suppress(RuntimeError):  # the store may have ended together with rank 0
            store.set(f"fault/{world.rank}", text[:200])
            if not is_lost_peer(error):
                silent = []
                return
            end, missing, gone = time.monotonic() + _ROLL_CALL_S["late" if late else "gone"], others, list[int]()
            while missing and not gone and time.monotonic() < end:
                time.sleep(0.1)
                # This comes before the look into the store: a rank may still report and then end.
                ended = [rank for rank in missing if world.places[rank].is_gone]
                missing = [rank for rank in missing if not store.check([f"fault/{rank}"])]
                gone = [rank for rank in ended if rank in missing]
                # When a connection breaks, a rank whose process still runs is not the cause. It may
                # be waiting for this rank, and notice the fault later.
                elsewhere = [] if late else [rank for rank in missing if not world.places[rank].is_near]
                # Kept up to date in each round, because rank 0 may leave and take the store along.
                silent = gone or elsewhere or missing

    # In a thread, because the store never answers if its process hangs.
    caller = threading.Thread(target=call_the_roll, name="roll call", daemon=True)
    caller.start()
    caller.join(_ROLL_CALL_S["late"] + 1)
    if silent is None:
        return [f"nobody answers where the ranks met, in or beside rank 0 ({world.places[0]}): it hangs or is gone"]
    return [
        f"rank {rank} ({world.places[rank]}) says nothing: it hangs, was killed, or can't be reached" for rank in silent
    ]
