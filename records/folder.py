"""The folder of a run: its name, where its paths lead, and the marker of a graceful stop."""

import os
from collections.abc import Iterable
from pathlib import Path

from utils.files import write_atomically, writing

CHECKPOINTS = Path("checkpoints")


def require_folder_name(name: str | None, key_of_path: str) -> str | None:
    """Return the name. Raise ValueError if no folder can have it."""
    if name is not None and (name in ("", ".", "..") or "/" in name or "\0" in name or len(name) > 200):
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


def clear_stopped(run: Path) -> None:
    (run / "stopped").unlink(missing_ok=True)


def mark_stopped(run: Path, reason: str) -> None:
    """Write the marker of a graceful stop, after which torchrun exits with 1 as after a failure."""
    with writing(run / "stopped"):
        write_atomically(run / "stopped", reason + "\n")
