"""Run a program of one process, with its exit status and one-line errors.

utils/program.py does the same for programs of several ranks.
"""

import os
import sys
import traceback
from collections.abc import Callable

from utils.errors import UserError
from utils.files import not_utf8, require_utf8
from utils.out_of_memory import LESS_AT_A_TIME, OutOfMemory, advising
from utils.terminal import show, tell
from utils.text import for_a_terminal, one_line


def tell_mistake(error: UserError) -> None:
    """Print the user's mistake in one line, after its traceback if DEBUG=1 is set."""
    if wants_traceback():
        tell("".join(traceback.format_exception(error)).rstrip())
    tell(f"error: {for_a_terminal(one_line(error))}")  # it may quote names and files of a stranger


def wants_traceback() -> bool:
    """Return whether the environment asks for the tracebacks of mistakes too (DEBUG=1)."""
    return os.environ.get("DEBUG", "") not in ("", "0")


def run_command(
    program: Callable[[list[str] | None], str | tuple[str, int]],
    argv: list[str] | None,
    *,
    interrupted: str = "interrupted; nothing was written",
    less_memory: str = LESS_AT_A_TIME,
) -> int:
    """Run a program and print what it returns.

    Args:
        program: takes the arguments and returns a summary to print, perhaps with an exit status; an
            empty summary is not printed.
        argv: the arguments; None: those of the process.
        interrupted: the message after Ctrl-C.
        less_memory: the second line where memory runs out: what needs less.

    Returns:
        The exit status: the program's or 0; 2 after a mistake of the user, 1 where memory ran out,
        130 after Ctrl-C.
    """
    try:
        require_utf8(sys.argv[1:] if argv is None else argv)
        with advising(lambda: less_memory):
            done = program(argv)
        summary, status = (done, 0) if isinstance(done, str) else done
        if summary:
            show(summary)
    except UnicodeEncodeError as error:  # of a path in a stored config, in another locale
        tell_mistake(not_utf8(error.object))
        return 2
    except UserError as error:
        tell_mistake(error)
        return 2
    except OutOfMemory as error:
        if wants_traceback():
            tell("".join(traceback.format_exception(error)).rstrip())
        what, change = error.lines()
        tell(f"fault: {what}\n{change}")
        return 1
    except KeyboardInterrupt:
        tell(f"error: {interrupted}")
        return 130
    return status
