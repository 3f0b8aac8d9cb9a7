"""Print lines for a person. If nobody can read them any more, the program goes on."""

import atexit
import gc
import os
import sys
from contextlib import suppress
from typing import NoReturn, TextIO

from utils.errors import UserError


def tell(text: str) -> None:
    """Print a line on stderr. It is lost if nobody can read it."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print a page on stdout. A reader that leaves early, such as `head`, is no fault."""
    try:
        write(text)
    except BrokenPipeError:
        _close(sys.stdout)


def write(text: str, end: str = "\n") -> None:
    """Print a part of the output on stdout, at once.

    Raises UserError where the disk is full, and BrokenPipeError where the reader has left.
    """
    if sys.stdout is None:  # it was closed before the program started
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:  # a character that stdout lacks becomes a question mark
        print(text.encode(encoding, errors="replace").decode(encoding), end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _close(sys.stdout)
        raise UserError(
            f"the output can't be written ({error.strerror}); free its disk, or send it elsewhere"
        ) from error


def leave(status: int, *, finalize: bool = True) -> NoReturn:
    """Exit, even if the rest of the output can't be written.

    Without `finalize` Python frees no objects; only the functions registered with `atexit` run.
    With it, Python frees all but objects that refer to one another in a circle.
    """
    if not finalize:
        atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a stream that is closed from the start is None
        try:
            stream.flush()
        except OSError:
            _close(stream)
    if not finalize:
        os._exit(status)
    gc.freeze()  # the last collections of garbage would go through all of PyTorch, for half a second
    sys.exit(status)


def _close(stream: TextIO) -> None:
    """Lead the rest of a stream nowhere, where Python can flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
