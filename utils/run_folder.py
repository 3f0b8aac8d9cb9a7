"""The folder of a run: how it gets its name, how an attempt after a crash finds it again, and who may write into it."""

import re
from pathlib import Path

import coolname

from utils.checkpoint import step_folders, write_atomically
from utils.dist import Launch

CHECKPOINTS = Path("checkpoints")


def name_run(project: str, launch: Launch) -> str:
    """A name of two words. Attempts of one torchrun launch get the same: the first one notes it, restarted ones read
    the note.
    """
    if launch.identity is None:
        return coolname.generate_slug(2)
    note = CHECKPOINTS / project / ".launches" / re.sub(r"[^\w.-]", "_", launch.identity)
    if launch.restarts > 0 and note.is_file():
        return note.read_text().strip()
    name = coolname.generate_slug(2)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(note, name + "\n")
    return name


def run_folder_of(checkpoint_path: Path) -> Path:
    """The run that a path names: itself, or the folder above a step folder."""
    return checkpoint_path.parent if step_folders(checkpoint_path.parent).count(checkpoint_path) else checkpoint_path


def claim_fresh(run: Path) -> None:
    """Raises ValueError where a new run would overwrite another's checkpoints."""
    if steps := step_folders(run):
        raise ValueError(
            f"{run} already holds checkpoints (newest {steps[-1].name}); resume=auto continues that run, "
            "another run_name or checkpoint_path starts a new one"
        )


def prepare(run: Path, config_yaml: str) -> None:
    """Create the folder, say in config.yaml what runs there, and clear the marker of an earlier graceful stop.

    Raises ValueError where the folder can't be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_atomically(run / "config.yaml", config_yaml)
        (run / "stopped").unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"can't write to {run}: {error.strerror}; free it, or give another checkpoint_path") from error


def mark_stopped(run: Path, reason: str) -> None:
    """Leave the file by which a scheduler tells a graceful stop from a failure (torchrun exits 1 after both)."""
    write_atomically(run / "stopped", reason + "\n")
