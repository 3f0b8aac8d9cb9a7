"""The functions that the commands of the package call: hrm_train for hrm-train, and so on."""

import sys
from collections.abc import Callable
from functools import partial
from runpy import run_module

from utils.programs import PACKAGE, VERSION

# The module of each command of the package.
COMMANDS = {
    "hrm-train": "pretrain",
    "hrm-evaluate": "evaluate",
    "hrm-solve": "solve",
    "hrm-view": "view",
    "hrm-watch": "watch",
    "hrm-sweep": "sweep",
    "hrm-export": "sharing.export",
    "hrm-validate": "dataset.validate",
    "hrm-show": "dataset.show",
    "hrm-build-sudoku": "dataset.build_sudoku_dataset",
    "hrm-build-maze": "dataset.build_maze_dataset",
    "hrm-build-arc": "dataset.build_arc_dataset",
    "hrm-build-lights-out": "dataset.build_lights_out_dataset",
    "hrm-build-text": "dataset.build_text_dataset",
    "hrm-kubernetes": "launch.kubernetes",
    "hrm-ray": "launch.ray_train",
    "hrm-torchrun": "launch.torchrun",
}


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
