"""Tell what a typed path names: a step of a run, a run, weights, or something else.

All commands ask `kind_of`, and say with `no_checkpoint` what they found instead.

This module does not import PyTorch, so that programs that only look at runs start at once.
"""

import difflib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from utils.checkpoint.format import STEP_FOLDER, read_name, step_folders
from utils.errors import UserError
from utils.files import file_errors
from utils.safetensors_files import weights_in

MARKERS = ("best", "latest")
Kind = Literal["step", "run", "weights", "other"]
# A message lists so many runs at most.
_MOST_RUNS = 10
# Names that other programs give to files of weights. Those of HRM and TRM write step_<n>.
_FILE_OF_WEIGHTS = re.compile(r"step_\d+|checkpoint|.+\.(safetensors|bin|pt|pth|ckpt)")


@file_errors()
def step_named(path: Path) -> Path | None:
    """Return the step folder that a path names.

    A step folder names itself. <run>/best and <run>/latest name the step that stands in these
    files.

    Returns:
        None for any other path, such as the folder of a run.

    Raises:
        UserError: The path is <run>/best or <run>/latest, and there is no such step.
    """
    if path.name not in MARKERS:
        return path if STEP_FOLDER.fullmatch(path.name) and os.path.isdir(path) else None
    if os.path.isdir(path):  # a run may have this name
        return None
    run, name = path.parent, read_name(path)
    if name and os.path.isdir(run / name):
        return run / name
    if name:
        raise UserError(f"{path} names {name}, which is gone; give {run} for its newest step")
    if step_folders(run) and not os.path.exists(path):
        raise UserError(f"{run} has no {path.name} step yet; give {run} for its newest step")
    return None


def run_folder_of(path: Path) -> Path:
    """Return the run folder of a path: the folder of the step that it names, or the path itself."""
    step = step_named(path)
    return path if step is None else step.parent


@file_errors()
def kind_of(typed: str | Path) -> Kind:
    """Tell what a text names, here or on the Hugging Face Hub.

    Returns:
        step: a step folder, <run>/best or <run>/latest.
        run: a folder with steps, or of a run that has none yet.
        weights: a file, an address of the Hub, a folder with model.safetensors or the index of
            several files, or a folder of HRM-Text's training.
        other: anything else, which `no_checkpoint` names, or nothing.

    Raises:
        UserError: The path is <run>/best or <run>/latest, and there is no such step.
    """
    path = Path(typed)
    if str(typed).startswith("hf://"):
        return "weights"
    if step_named(path) is not None:
        return "step"
    if _is_run(path):
        return "run"
    # os.path, because Path.is_file raises an OSError for a folder that may not be read.
    return "weights" if os.path.isfile(path) or weights_in(path) is not None or _is_hrm_text(path) else "other"


def _is_hrm_text(folder: Path) -> bool:
    """Return whether a folder is one that sharing/published_text_files.py describes."""
    return os.path.isfile(folder / ".metadata") or any(folder.glob("fsdp2_epoch_*"))


def folder_around(file: str) -> str | None:
    """Return a line that names the step or the run whose folder holds a file; None if none does."""
    folder = Path(file).parent
    if not os.path.isfile(file):
        return None
    if STEP_FOLDER.fullmatch(folder.name) and os.path.isfile(folder / "state.json"):
        return f"{file} is a part of a checkpoint; give the step folder above it, {folder}"
    if _has_steps(folder):
        return f"{file} is a file in the folder of a run; give that folder, {folder}"
    return None


def no_checkpoint(path: Path) -> str:
    """Return a line that says what a path names that is neither a run nor weights, and what to give
    instead.
    """
    if runs := _newest_first(path):
        listed = ", ".join(f"{run} (step {int(step_folders(run)[-1].name[5:])})" for run in runs[:_MOST_RUNS])
        more = f" and {len(runs) - _MOST_RUNS} more" if len(runs) > _MOST_RUNS else ""
        return f"{path} is a folder of runs; give one of them: {listed}{more}"
    if weights := foreign_weights(path):
        return (
            f"{path} is no run, but a folder with weights of another program; give {weights}, and with it arch=... and "
            "data_path=... as in its training"
        )
    if any(os.path.isfile(path / split / "dataset.json") for split in ("train", "test")):
        return f"{path} is a dataset, which data_path takes; give the folder of a run or of one of its steps here"
    nearest = nearest_run(path)
    similar = f", but there is {nearest}" if nearest else ""
    or_file = ", or a file of weights that is there" if _FILE_OF_WEIGHTS.fullmatch(path.name) else ""
    return f"there is no checkpoint at {path}{similar}; give the folder of a run or of one of its steps{or_file}"


def foreign_weights(folder: Path) -> Path | None:
    """Return the file of weights that another program left in a folder last; None without one."""
    with suppress(OSError, ValueError):  # ValueError: there is none
        names = [each.name for each in os.scandir(folder) if _FILE_OF_WEIGHTS.fullmatch(each.name) and each.is_file()]
        return folder / max(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return None


def refuse_folder_of_runs(path: Path) -> None:
    """Raise UserError if a path that should be a run is a folder of runs. It lists them."""
    if _newest_first(path):
        raise UserError(no_checkpoint(path))


def nearest_run(path: Path) -> Path | None:
    """Return the run whose name is most similar to that of a missing one; None if none is similar.

    It is looked for in the folder around the path. If that is missing too, it is looked for in the
    folder whose name is most similar.
    """
    around: Path | None = path.parent
    if not os.path.isdir(path.parent):
        around = _most_similar(path.parent, _folders_in(path.parent.parent))
    return None if around is None else _most_similar(path, filter(_has_steps, _folders_in(around)))


def _most_similar(path: Path, others: Iterable[Path]) -> Path | None:
    by_name = {other.name: other for other in others}
    nearest = difflib.get_close_matches(path.name, by_name, n=1)
    return by_name[nearest[0]] if nearest else None


def _newest_first(folder: Path) -> list[Path]:
    """Return the runs with checkpoints in a folder and in its folders, by their newest step.

    Returns:
        Nothing if the folder is a run itself.
    """
    if _is_run(folder):
        return []
    runs: list[Path] = []
    for below in _folders_in(folder):
        runs.extend(each for each in ([below] if _has_steps(below) else _folders_in(below)) if _has_steps(each))
    return sorted(runs, key=lambda run: os.stat(step_folders(run)[-1]).st_mtime, reverse=True)


def _folders_in(folder: Path) -> list[Path]:
    with suppress(OSError):  # the folder is missing or may not be read
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return []


def _is_run(folder: Path) -> bool:
    names = ("config.yaml", "metrics.jsonl", "latest")
    return _has_steps(folder) or any(os.path.exists(folder / name) for name in names)


def _has_steps(folder: Path) -> bool:
    """Return whether a folder holds steps. Those in eval_outputs have the same names."""
    with suppress(OSError):
        return folder.name != "eval_outputs" and bool(step_folders(folder))
    return False
