"""The shell of a program of one process: exit status and one-line errors. utils/program.py is that of ranks."""

import os
import traceback
from collections.abc import Callable

from utils.errors import UserError
from utils.terminal import tell
from utils.text import one_line


def tell_mistake(error: UserError) -> None:
    """Say in one line what the user got wrong. With DEBUG=1 in the environment the traceback comes first."""
    if wants_traceback():
        tell("".join(traceback.format_exception(error)).rstrip())
    tell(f"error: {one_line(error)}")


def wants_traceback() -> bool:
    """Return whether the environment asks for the tracebacks of the user's mistakes too (DEBUG=1)."""
    return os.environ.get("DEBUG", "") not in ("", "0")


def run_command(
    program: Callable[[list[str] | None], str | tuple[str, int]],
    argv: list[str] | None,
    *,
    interrupted: str = "interrupted; nothing was written",
) -> int:
    """Run a program and print what it returns.

    Args:
        program: takes the arguments and returns its summary, perhaps with an exit status.
        argv: the arguments; None for those of the process.
        interrupted: what to say after Ctrl-C.

    Returns:
        The exit status: that of the program or 0, 2 after a mistake of the user, 130 after Ctrl-C.
    """
    try:
        done = program(argv)
    except UserError as error:
        tell_mistake(error)
        return 2
    except KeyboardInterrupt:
        tell(f"error: {interrupted}")
        return 130
    summary, status = (done, 0) if isinstance(done, str) else done
    print(summary)
    return status
