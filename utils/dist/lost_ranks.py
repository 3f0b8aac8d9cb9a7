"""After a fault: which ranks are missing."""

import threading
import time
from contextlib import suppress

import torch.distributed as dist

from utils.dist.world import World

# How long a rank that lost its peers waits for them to say so too. Where one was killed, the others notice when they
# next talk to it, and give a save that is under way a second; where one hangs, each gives up so long after it began to
# wait, and they did not all begin at the same moment.
_ROLL_CALL_S = {"gone": 3.0, "late": 5.0}


def is_lost_peer(error: Exception) -> bool:
    """Whether ranks didn't hear one another, as against what went wrong on this one. Such errors share no class."""
    return any(word in str(error) for word in ("gloo", "Gloo", "NCCL", "nccl"))


def silent_ranks(world: World, error: Exception) -> list[str]:
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
