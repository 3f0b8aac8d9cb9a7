"""Find the run or the step that a typed path names.

This module does not import PyTorch, so that programs that only look at runs start at once.
"""

import difflib
import os
from contextlib import suppress
from pathlib import Path

from records.checkpoint.format import STEP_FOLDER, read_name, step_folders
from utils.errors import UserError
from utils.files import file_errors

_MOST_RUNS = 10  # in a message


@file_errors()
def step_named(path: Path) -> Path | None:
    """Return the step folder that a path names: itself, or that of <run>/best or <run>/latest.

    Returns:
        None for any other path, such as the folder of a run.

    Raises:
        UserError: <run>/best or <run>/latest names no step that is there.
    """
    if path.name not in ("best", "latest"):
        return path if STEP_FOLDER.fullmatch(path.name) and os.path.isdir(path) else None
    if os.path.isdir(path):  # a run may have this name
        return None
    run, name = path.parent, read_name(path)
    if name and os.path.isdir(run / name):
        return run / name
    if name or (step_folders(run) and not os.path.exists(path)):
        raise UserError(f"{run} has no {path.name} step{f' ({name} is gone)' * bool(name)}; give {run} for its newest")
    return None


def run_folder_of(path: Path) -> Path:
    """Return the run of the step that a path names, or the path itself."""
    step = step_named(path)
    return path if step is None else step.parent


def is_run(folder: Path) -> bool:
    """Return whether a folder holds steps, or a run has begun there."""
    names = ("config.yaml", "metrics.jsonl", "latest")
    return has_steps(folder) or any(os.path.exists(folder / name) for name in names)


def has_steps(folder: Path) -> bool:
    """Return whether a folder holds steps. Those in eval_outputs have the same names."""
    with suppress(OSError):
        return folder.name != "eval_outputs" and bool(step_folders(folder))
    return False


def no_run(path: Path) -> str:
    """Return a message that a path names no run, and what to give instead."""
    if runs := _newest_first(path):
        listed = ", ".join(f"{run} (step {int(step_folders(run)[-1].name[5:])})" for run in runs[:_MOST_RUNS])
        return f"{path} is a folder of runs; give one of them: {listed}"
    nearest = nearest_run(path)
    similar = f", but there is {nearest}" if nearest else ""
    return f"there is no checkpoint at {path}{similar}; give the folder of a run or of one of its steps"


def refuse_folder_of_runs(path: Path) -> None:
    """Raise UserError if a path that should be a run is a folder of runs. It lists them."""
    if _newest_first(path):
        raise UserError(no_run(path))


def nearest_run(path: Path) -> Path | None:
    """Return the run beside a missing one whose name is similar."""
    by_name = {run.name: run for run in filter(has_steps, _folders_in(path.parent))}
    nearest = difflib.get_close_matches(path.name, by_name, n=1)
    return by_name[nearest[0]] if nearest else None


def _newest_first(folder: Path) -> list[Path]:
    """Return the runs in a folder of runs and in its folders, by their newest step."""
    if is_run(folder):
        return []
    below = [each for one in _folders_in(folder) for each in ([one] if has_steps(one) else _folders_in(one))]
    runs = filter(has_steps, below)
    return sorted(runs, key=lambda run: os.stat(step_folders(run)[-1]).st_mtime, reverse=True)


def _folders_in(folder: Path) -> list[Path]:
    with suppress(OSError):  # the folder is missing or may not be read
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return []
