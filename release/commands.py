"""The functions that the commands of the package call: hrm_train for hrm-train, and so on."""

import sys
from collections.abc import Callable
from functools import partial
from runpy import run_module

from utils.programs import COMMANDS, PACKAGE, VERSION


def __getattr__(name: str) -> Callable[[], None]:
    command = name.replace("_", "-")
    if command not in COMMANDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_run, command)


def _run(command: str) -> None:
    """Run a program with the arguments of this process."""
    if sys.argv[1:] == ["--version"]:
        print(f"{command} {VERSION}")
    else:
        run_module(f"{PACKAGE}.{COMMANDS[command]}", run_name="__main__")
