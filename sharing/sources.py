"""Tell what a typed path names: a run, weights of this or another program, or something else.

This module does not import PyTorch, so that programs that only look at runs start at once.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from records.checkpoint.format import is_run, no_run, step_named
from utils.errors import UserError
from utils.files import file_errors
from utils.hub import is_address
from utils.safetensors_files import weights_in

Kind = Literal["run", "weights", "other"]
# Names that other programs give to files of weights. Those of HRM and TRM write step_<n>.
_FILE_OF_WEIGHTS = re.compile(r"step_\d+|checkpoint|.+\.(safetensors|bin|pt|pth|ckpt)")


@file_errors()
def kind_of(typed: str | Path) -> Kind:
    """Tell what a text names: the folder of a run or a step, weights, also on the Hub, or neither.

    Raises:
        UserError: The path is <run>/best or <run>/latest, and there is no such step.
    """
    path = Path(typed)
    if is_address(str(typed)):
        return "weights"
    if step_named(path) is not None or is_run(path):
        return "run"
    # os.path, because Path.is_file raises an OSError for a folder that may not be read.
    is_file = os.path.isfile(path) or weights_in(path) is not None
    is_of_hrm_text = os.path.isfile(path / ".metadata") or any(path.glob("fsdp2_epoch_*"))
    return "weights" if is_file or is_of_hrm_text else "other"


def require_known(typed: str | Path) -> Kind:
    """Return the kind of a source of weights. Raise UserError if it is other."""
    if (kind := kind_of(typed)) == "other":
        raise UserError(no_checkpoint(Path(typed)))
    return kind


def step_around(file: str) -> str | None:
    """Return a line that names the step that a file is a part of; None if it is of no step."""
    folder = Path(file).parent
    if step_named(folder) is None or not os.path.isfile(folder / "state.json"):
        return None
    return f"{file} is a part of a checkpoint; give the step folder above it, {folder}"


def no_checkpoint(path: Path) -> str:
    """Return a line that says what a path names that is neither a run nor weights."""
    if any(os.path.isfile(path / split / "dataset.json") for split in ("train", "test")):
        return f"{path} is a dataset, which data_path takes; give the folder of a run or of one of its steps here"
    with suppress(OSError):
        names = [each.name for each in os.scandir(path) if _FILE_OF_WEIGHTS.fullmatch(each.name) and each.is_file()]
        if names:  # of another program, which writes the last file with the highest number
            last = max(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
            return (
                f"{path} is no run, but a folder with weights of another program; give {path / last}, and with it "
                "arch=... and data_path=... as in its training"
            )
    return no_run(path)
