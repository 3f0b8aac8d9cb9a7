"""The folder of a run: its name, where its paths lead, and what its starts and stops note there."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from utils.files import plain, write_atomically, writing
from utils.ranks.launch import Launch

CHECKPOINTS = Path("checkpoints")
LAUNCH_FILE = "launch.json"


def require_folder_name(name: str, key_of_path: str) -> str:
    """Return the name. Raise ValueError if no folder can have it."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(name) > 200:
        raise ValueError(f"{name[:80]!r} can't name a folder; give a name without / ({key_of_path} is for paths)")
    return name


def located(path: str, started_in: object) -> str:
    """Return where a path of a run's config leads from the current directory.

    A relative path is relative to where the run was started, or to here if nothing is there.
    """
    if not isinstance(started_in, str) or "://" in path or os.path.isabs(path) or started_in == os.getcwd():
        return path
    there = os.path.join(started_in, path)
    return there if os.path.exists(there) else path


def located_paths(started_in: object, paths: Iterable[object]) -> list[str]:
    """Return where the paths of a stored config lead. Empty paths are left out."""
    return [located(str(path), started_in) for path in paths if path]


def same_folder(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def mark_stopped(run: Path, reason: str) -> None:
    """Write the marker of a graceful stop, after which torchrun exits with 1 as after a failure."""
    with writing(run / "stopped"):
        write_atomically(run / "stopped", reason + "\n")


def stopped_by(run: Path) -> str:
    """Return the reason of a graceful stop; "" if the run did not end that way."""
    with suppress(OSError), open(plain(run / "stopped"), "rb") as reason:
        return " ".join(reason.read(200).decode(errors="replace").split())[:40]
    return ""


class Launched(BaseModel):
    """launch.json: plan and machine of the last start. Keys of other versions are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)
    last_step: int = Field(ge=1, lt=2**53)  # the planned end; early_stop_patience may end the run before it
    finished_at: int | None = None  # a later start with a shorter plan found the run finished at this step
    ranks: int = Field(ge=1)
    device: str  # cuda, mps or cpu
    host: str  # of rank 0
    launch: str | None = None  # what all attempts of this launch have in common
    began_at: float = 0.0  # when the run began, in seconds since the epoch
    faults: int = Field(default=0, ge=0)  # starts after a process that did not end by itself
    since: float = 0.0  # when this start began, and what the run had spent by then (training/goodput.py)
    spent_s: dict[str, float] = {}
    has_ended: bool = False  # by itself, and not by a stop or a fault

    def write(self, run: Path) -> None:
        with writing(run / LAUNCH_FILE):
            write_atomically(run / LAUNCH_FILE, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def read(run: Path) -> "Launched | None":
        """Return what the run noted; None if the file is missing or holds something else."""
        try:
            return Launched.model_validate_json(plain(run / LAUNCH_FILE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError):
            return None

    @staticmethod
    def began(run: Path, launch: Launch) -> bool:
        """Return whether an earlier attempt of this launch began to train in the folder.

        A job of Slurm that was requeued before may find another run there.
        """
        before = Launched.read(run) if launch.requeues else None
        return launch.restarts > 0 or (before is not None and before.launch == launch.identity)

    @staticmethod
    def note_end(run: Path) -> None:
        """Note that the run has ended by itself."""
        if (before := Launched.read(run)) is not None:
            before.model_copy(update={"has_ended": True}).write(run)

    @staticmethod
    def note_finished(run: Path, step: int, last_step: int) -> None:
        """Note that a run is finished at this step, if its file plans another last step."""
        before = Launched.read(run)  # the plan stays: the depths of the steps that were done follow it
        if before is not None and before.last_step != last_step:
            before.model_copy(update={"finished_at": step}).write(run)
