"""The names of the programs: files in a clone, commands where the package is installed.

The package holds the modules of a clone below `hrm_trainer`. release/build.py makes it, and
names commands in all messages.
"""

import sys
from pathlib import Path

VERSION = "0.1.0"
# The installed package, or an empty text in a clone.
PACKAGE = __name__.rpartition("utils.")[0].rstrip(".")
ROOT = Path(__file__).resolve().parent.parent
# An installed program that is started by its file must not find modules beside it, such as `utils`.
ENVIRONMENT = {"PYTHONSAFEPATH": "1"} if PACKAGE else {}

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
"""The module of each command of the package."""

PRETRAIN = ROOT / f"{COMMANDS['hrm-train']}.py"


def command_words(command: str) -> list[str]:
    """Return the words with which a user starts a program of COMMANDS."""
    if PACKAGE:
        return [command]
    module = COMMANDS[command]
    if "." in module and not command.startswith("hrm-build-"):  # builders are named as in the published code
        return ["python", "-m", module]
    return ["python", f"{module.replace('.', '/')}.py"]


def started(command: str) -> list[str]:
    """Return the words with which this program starts another one in a process of its own."""
    file = ROOT / f"{COMMANDS[command].replace('.', '/')}.py"
    return [sys.executable, *(["-P"] if PACKAGE else []), str(file)]


def under_torchrun(command: str) -> list[str]:
    """Return the words that name a program of this folder behind the options of torchrun."""
    return ["-m", f"{PACKAGE}.{COMMANDS[command]}"] if PACKAGE else [f"{COMMANDS[command]}.py"]
