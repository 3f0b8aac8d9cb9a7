"""The shell of a program of one process: exit status and one-line errors. utils/program.py is that of ranks."""

import sys
from collections.abc import Callable

from utils.text import one_line


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
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"error: {interrupted}", file=sys.stderr)
        return 130
    summary, status = (done, 0) if isinstance(done, str) else done
    print(summary)
    return status
