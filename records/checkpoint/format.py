"""The format of checkpoints on disk.

<run>/latest, <run>/best            text files that name a step folder
<run>/step_00001000/
    model.safetensors               weights and puzzle table of the whole model; if they are larger
                                    than checkpoint_file_gb, model-00001-of-00002.safetensors ...
                                    and model.safetensors.index.json
    state/rank_0000.safetensors ... all other tensors, as torch.distributed.checkpoint divides them:
                                    optimizer.*, ema.*, progress.*, slots.<first>_<end>.* (rows of
                                    the carry); others, which older versions wrote, are ignored
    state.json                      step, draws, config, fingerprints, W&B run, best, other counters
    manifest.json                   size and sha256 of each file; written last

This module does not import PyTorch, so that programs that only look at runs start at once.
"""

import difflib
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from utils.errors import UserError
from utils.files import INCOMPLETE, file_errors, plain

STEP_FOLDER = re.compile(r"step_(\d{8,})")

FILE_OF_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")

FILE_OF_A_STEP = re.compile(
    rf"{FILE_OF_WEIGHTS.pattern}|model\.safetensors\.index\.json|state\.json|state/rank_\d{{4,}}\.safetensors"
)

SLOTS = re.compile(r"slots\.(\d+)_(\d+)\.(.+)")

# A stranger's file may be large, and a file of weights may be called best.
_MOST_NAME_BYTES = 64

REPLACED = f"{INCOMPLETE}replaced_"

_MOST_RUNS = 10  # in a message


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class File(_Strict):
    bytes: int
    sha256: str


class Manifest(_Strict):
    files: dict[str, File]


class Progress(_Strict):
    """How far a run has come. A checkpoint stores it. A new counter is a field with a default."""

    step: int = 0
    draws: int = 0  # examples that the stream has offered; a resumed run continues with the next
    skipped_steps: list[int] = []  # went wrong, and are left out after the run went back
    open_steps: int = 0  # steps and slots that the open metric sums cover
    open_slots: int = 0
    best: float | None = None
    evaluations_since_best: int = 0
    failed_saves: int = 0  # checkpoints that the disk refused (on_save_error=continue)
    pending_row: dict[str, float] | None = None  # metrics of this step if its evaluation was interrupted
    wandb_run_id: str = ""
    spent_s: dict[str, float] = {}  # where the time went until this step (utils/perf/clocks.py)
    spent_until: float = 0.0  # the time of day of that account, in seconds since the epoch

    def of_branch(self, wandb_run_id: str) -> "Progress":
        """Return the progress of a run that branches off here, and skips the same steps ahead."""
        fresh: dict[str, Any] = {"best": None, "evaluations_since_best": 0, "failed_saves": 0}
        # The time from the step to the begin of the branch is nobody's.
        fresh |= {"wandb_run_id": wandb_run_id, "spent_until": 0.0}
        ahead = [step for step in self.skipped_steps if step > self.step]
        return self.model_copy(update=fresh | {"skipped_steps": ahead})


class RunState(Progress):
    """The contents of state.json: everything in a checkpoint that is not a tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # No file without these was ever written, so a file that lacks one is not the state of a run.
    step: int
    draws: int
    wandb_run_id: str
    fingerprint: dict[str, str]
    task: dict[str, int | str | dict[str, int] | None]  # the sizes of the data
    config: dict[str, Any]

    def progress(self) -> Progress:
        return Progress.model_validate(self.model_dump(include=set(Progress.model_fields)))


def step_folders(run: Path) -> list[Path]:
    """Return the step folders of a run, oldest first."""
    found = run.iterdir() if run.is_dir() else ()
    return sorted((path for path in found if STEP_FOLDER.fullmatch(path.name)), key=lambda path: int(path.name[5:]))


def newest_first(run: Path) -> list[Path]:
    """Return the step folders of a run, first the one that `latest` names, then the newest."""
    named = run / read_name(run / "latest")
    return sorted(reversed(step_folders(run)), key=lambda step: step != named)


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@file_errors()
def read_name(path: Path) -> str:
    """Return the step folder that the file `latest` or `best` names; "" if it names none."""
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        name = file.read(_MOST_NAME_BYTES).decode(errors="replace").strip()
    return name if STEP_FOLDER.fullmatch(name) else ""


@file_errors()
def read_state(step_folder: Path) -> RunState:
    """Return the state.json of a step folder, whose other files are not looked at."""
    try:
        return RunState.model_validate_json(plain(step_folder / "state.json").read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise UserError(f"checkpoint {step_folder} is damaged: state.json isn't the state of a run") from error


# ---- what a typed path names ---------------------------------------------------------------------


@file_errors()
def step_named(path: Path) -> Path | None:
    """Return the step folder that a path names: itself, or that of <run>/best or <run>/latest.

    None for any other path, such as the folder of a run.
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
    by_name = {run.name: run for run in filter(has_steps, folders_in(path.parent))}
    nearest = difflib.get_close_matches(path.name, by_name, n=1)
    return by_name[nearest[0]] if nearest else None


def _newest_first(folder: Path) -> list[Path]:
    """Return the runs in a folder of runs and in its folders, by their newest step."""
    if is_run(folder):
        return []
    below = [each for one in folders_in(folder) for each in ([one] if has_steps(one) else folders_in(one))]
    runs = filter(has_steps, below)
    return sorted(runs, key=lambda run: os.stat(step_folders(run)[-1]).st_mtime, reverse=True)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name, without hidden ones."""
    with suppress(OSError):  # the folder is missing or may not be read
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return []
