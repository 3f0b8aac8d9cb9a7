"""How programs are started: files in a clone, commands where the package is installed.

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
# The name stands in two parts, since release/build.py makes a command of a name in one part.
PRETRAIN = ROOT.joinpath("pretrain").with_suffix(".py")


def started(module: str) -> list[str]:
    """Return the words with which this program starts another one in a process of its own."""
    return [sys.executable, *(["-P"] if PACKAGE else []), str(ROOT / f"{module}.py")]


def under_torchrun(module: str) -> list[str]:
    """Return the words that name a program of this folder behind the options of torchrun."""
    return ["-m", f"{PACKAGE}.{module}"] if PACKAGE else [f"{module}.py"]
