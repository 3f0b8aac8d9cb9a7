"""Start programs that end together with the process that started them."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ending_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return the `preexec_fn` of a program to which Linux sends a signal when its parent is gone.

    The parent is gone when the thread that started the program ends, also by SIGKILL. Other systems
    can't do this, and get None.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)

    return ask
