"""The store in which ranks meet."""

import os
import sys
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from utils.dist.config import DistConfig
from utils.errors import UserError

# The timeout until the config, which has a timeout of its own, is broadcast. Rank 0 imports its
# packages and reads the YAML before that.
START_TIMEOUT = timedelta(minutes=5)


def agents_store() -> Store | None:
    """Return the store that torchrun keeps for all attempts of a launch; None if it keeps none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=START_TIMEOUT)


def store_of_this_attempt(store: Store, rank: int, size: int) -> Store:
    """Return a part of torchrun's store in which no earlier attempt has written. Every rank.

    In the store itself a restarted rank would find the addresses of ranks that are gone, and wait
    for them. No environment variable names the attempt on all hosts. So rank 0 draws a name, and
    each rank asks for the name with a ticket of its own. A ticket may come from a rank of an
    earlier attempt, so rank 0 answers tickets until all ranks have arrived.

    Raises:
        TimeoutError: Not all ranks arrived within START_TIMEOUT.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"ticket/{rank}", own)
        try:
            store.wait([f"attempt/{own}"], START_TIMEOUT)
        except dist.DistStoreError as error:
            raise TimeoutError(f"rank 0 did not come within {START_TIMEOUT.total_seconds():g} s") from error
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

    end = time.monotonic() + START_TIMEOUT.total_seconds()
    while missing := [f"rank {other}" for other in range(1, size) if not has_come(other)]:
        if time.monotonic() > end:
            raise TimeoutError(
                f"{', '.join(missing)} of {size} did not come within {START_TIMEOUT.total_seconds():g} s"
            )
        time.sleep(0.02)
    return PrefixStore(own, store)


def typed_init_method() -> str | None:
    """Return dist.init_method as typed on the command line of this rank; None if it was not typed.

    Raises:
        UserError: The value is not one of the known methods.
    """
    typed = [word.split("=", 1)[1] for word in sys.argv[1:] if word.lstrip("+").startswith("dist.init_method=")]
    if not typed:
        return None
    try:
        return DistConfig.known_init_method(typed[-1].strip("'\""))
    except ValueError as error:
        raise UserError(str(error)) from error
