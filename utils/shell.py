"""Run a program of one process, with its exit status and one-line errors."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from utils.errors import UserError
from utils.files import not_utf8, require_utf8
from utils.out_of_memory import LESS_AT_A_TIME, OutOfMemory, advising
from utils.terminal import show, tell
from utils.text import for_a_terminal, one_line


def tell_mistake(error: UserError) -> None:
    """Print the user's mistake in one line, after its traceback if DEBUG=1 is set."""
    # The message may quote names and files of a stranger.
    tell(f"{wanted_traceback(error)}error: {for_a_terminal(one_line(error))}")


def memory_report(error: OutOfMemory, where: str = "") -> str:
    """Return the two lines about a lack of memory, after the traceback if DEBUG=1 is set."""
    traceback_lines = wanted_traceback(error)  # the advice frees the frames
    what, change = error.lines()
    return f"{traceback_lines}fault{where}: {what}\n{change}"


def wanted_traceback(error: Exception) -> str:
    """Return the traceback of an error, if the environment asks for it (DEBUG=1)."""
    return "" if os.environ.get("DEBUG", "") in ("", "0") else "".join(traceback.format_exception(error))


@contextmanager
def known_errors(less_memory: str = LESS_AT_A_TIME) -> Iterator[None]:
    """Raise UserError or OutOfMemory for what is no fault of the program."""
    try:
        with advising(lambda: less_memory):
            yield
    except UnicodeEncodeError as error:
        raise not_utf8(error.object) from error


def run_command(
    program: Callable[[list[str] | None], str | tuple[str, int]],
    argv: list[str] | None,
    *,
    interrupted: str = "interrupted; nothing was written",
    less_memory: str = LESS_AT_A_TIME,
) -> int:
    """Run a program, print the summary that it returns, and return its exit status.

    The status is 2 after a mistake of the user, 1 where memory ran out, and 130 after Ctrl-C.
    SIGTERM ends the program like Ctrl-C, so that it removes what it had begun to write.

    Args:
        argv: None: those of the process.
        less_memory: what to change where memory runs out.
    """
    ends_tidily = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if ends_tidily else None
    try:
        require_utf8(sys.argv[1:] if argv is None else argv)
        with known_errors(less_memory):
            done = program(argv)
        summary, status = (done, 0) if isinstance(done, str) else done
        if summary:
            show(summary)
    except UserError as error:
        tell_mistake(error)
        return 2
    except OutOfMemory as error:
        tell(memory_report(error))
        return 1
    except KeyboardInterrupt:
        tell(f"error: {interrupted}")
        return 130
    finally:
        if ends_tidily:
            signal.signal(signal.SIGTERM, before)
    return status
