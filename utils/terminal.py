"""Lines for a person while a program runs. That nobody can read them any more is no reason for it to end."""

import os
import sys
from contextlib import suppress
from typing import NoReturn


def tell(text: str) -> None:
    """A line on stderr: lost where that is a closed terminal, a pipe without a reader or a file on a full disk."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def leave(status: int) -> NoReturn:
    """sys.exit. Python ends with status 120 where it can't write what is left of its output."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)
