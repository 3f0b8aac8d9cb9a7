"""The folder of a run: its name, its markers, and who may write into it."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import coolname
from pydantic import field_validator

from utils.checkpoint.format import step_folders
from utils.config import Bool, StrictModel
from utils.errors import UserError
from utils.files import file_errors, write_atomically, writing
from utils.overrides import typed_override
from utils.ranks.launch import Launch

CHECKPOINTS = Path("checkpoints")


def require_folder_name(name: str | None, key_of_path: str) -> str | None:
    """Return the name.

    Raises:
        ValueError: No folder can have this name. The message names the key that takes paths.
    """
    if name is not None and (name in ("", ".", "..") or "/" in name or "\0" in name or len(name) > 200):
        raise ValueError(f"{name[:80]!r} can't name a folder; give a name without / ({key_of_path} is for paths)")
    return name


class RunConfig(StrictModel):
    """The keys that name a run, its data and the checkpoint that it resumes."""

    data_path: str
    data_paths: list[str]
    project_name: str | None
    run_name: str | None
    checkpoint_path: str | None
    resume: str | None
    allow_changed_data: Bool
    started_in: str | None

    @field_validator("project_name", "run_name")
    @classmethod
    def _names_one_folder(cls, name: str | None) -> str | None:
        return require_folder_name(name, "checkpoint_path")

    @property
    def train_paths(self) -> list[str]:
        return [self.located(path) for path in self.data_paths or [self.data_path]]

    @property
    def run_path(self) -> Path:
        assert self.checkpoint_path is not None, "names are filled in before anything else looks at them"
        return Path(self.checkpoint_path)

    def located(self, path: str) -> str:
        """Return where a path of this config leads (see the function of this name)."""
        return located(path, self.started_in)


def located(path: str, started_in: str | None) -> str:
    """Return where a path of a run's config leads from the current directory.

    A relative path is relative to where the run was started. If nothing is there, because the run
    or its data were moved, the path is relative to the current directory.

    Args:
        started_in: None for a run of an older version, which did not store it.
    """
    if started_in is None or "://" in path or os.path.isabs(path) or started_in == os.getcwd():
        return path
    there = os.path.join(started_in, path)
    return there if os.path.exists(there) else path


def located_paths(config: Mapping[str, object], paths: Iterable[object]) -> list[str]:
    """Return where paths lead that stand in the stored config of a run. Empty paths are left out.

    Args:
        config: as it was read from a file, which may be damaged or of an older version.
    """
    started_in = config.get("started_in")
    return [located(str(path), started_in if isinstance(started_in, str) else None) for path in paths if path]


C = TypeVar("C", bound=RunConfig)


def with_names(config: C, launch: Launch) -> C:
    project = config.project_name or Path(config.train_paths[0]).name
    if config.checkpoint_path:
        run_name = config.run_name or Path(config.checkpoint_path).name
    else:
        run_name = config.run_name or _draw_name(project, launch)
    path = config.checkpoint_path or str(CHECKPOINTS / project / run_name)
    return config.model_copy(update={"project_name": project, "run_name": run_name, "checkpoint_path": path})


@file_errors()
def _draw_name(project: str, launch: Launch) -> str:
    """Return a name of two random words.

    A restarted attempt of a torchrun launch gets the name that the earlier attempt noted.
    """
    if launch.identity is not None:
        note = _note_of_launch(project, launch.identity)
        if not launch.is_later_attempt:
            # The note is from an earlier launch with the same identity, and names another run.
            note.unlink(missing_ok=True)
        elif note.is_file():
            return note.read_text(encoding="utf-8", errors="replace").strip()
    return coolname.generate_slug(2)


def _note_of_launch(project: str, identity: str) -> Path:
    return CHECKPOINTS / project / ".launches" / re.sub(r"[^\w.-]", "_", identity)


def same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths, relative or absolute, are the same folder."""
    return one.resolve() == other.resolve()


@file_errors()
def claim_fresh(run: Path, *, branches_off: bool = False) -> None:
    """Raise UserError if the folder holds checkpoints, which a new run would overwrite."""
    if steps := step_folders(run):
        goes_on, begins = "resume=auto", "starts a new one"
        if branches_off:
            goes_on, begins = typed_override("resume", str(run)), "branches off again"
        raise UserError(
            f"{run} already holds checkpoints (newest {steps[-1].name}); {goes_on} continues that run, "
            f"another run_name or checkpoint_path {begins}"
        )


def note_name(config: RunConfig, launch: Launch) -> None:
    """Note the run's name for later attempts of the same launch.

    Only called when the run's folder exists: without it a later attempt has nothing to resume.
    """
    assert config.project_name is not None and config.run_name is not None
    if launch.identity is not None and config.run_path == CHECKPOINTS / config.project_name / config.run_name:
        note = _note_of_launch(config.project_name, launch.identity)
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, config.run_name + "\n")


def clear_stopped(run: Path) -> None:
    """Remove the marker of a graceful stop: the run goes on or is finished."""
    (run / "stopped").unlink(missing_ok=True)


def mark_stopped(run: Path, reason: str) -> None:
    """Write the marker by which a scheduler tells a graceful stop from a failure.

    The exit status can't tell them apart: torchrun exits with 1 after both.
    """
    with writing(run / "stopped"):
        write_atomically(run / "stopped", reason + "\n")
