"""Read and write files safely.

A file may come from a stranger. Pipes and devices have no end, and a few lines of YAML can expand
to billions of nodes, so these functions refuse both before anything reads them. Reading follows
links. Writing does not.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from utils.errors import UserError
from utils.text import one_line

# What is being written has this in front of its name until it is whole.
INCOMPLETE = ".incomplete_"

# A config has some thousand bytes, and its nesting a handful of levels.
_MOST_YAML_BYTES = 1 << 18
_DEEPEST_YAML = 20


def plain(file: Path) -> Path:
    """The file, which may be missing or a folder. Raises OSError for what may never end: a pipe, a device, a socket."""
    if file.exists() and stat.S_IFMT(file.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise OSError(f"{file} is no regular file")
    return file


def read_plain_yaml(file: Path) -> str:
    """The text of YAML as this program writes it: short, flat, and without anchors, by which a few lines multiply.

    Raises OSError, UnicodeDecodeError, yaml.YAMLError.
    """
    if plain(file).stat().st_size > _MOST_YAML_BYTES:
        raise yaml.YAMLError(f"has {file.stat().st_size:,} bytes, no config")
    text = file.read_text(encoding="utf-8")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML or getattr(event, "anchor", None):
            raise yaml.YAMLError("has anchors, or is nested deeper than any config")
    return text


def refuse_links(paths: Iterable[Path]) -> None:
    """Raises UserError that names the first of the paths that is a link: what is written or removed there would be so
    elsewhere, wherever the one who made it wanted.
    """
    for path in paths:
        if path.is_symlink():
            raise UserError(
                f"{path} is a link, and in a run's folder none is followed; put what it names in its place or remove it"
            )


def without_following(path: str, flags: int) -> int:
    """For `open(..., opener=without_following)`: OSError where the path itself is a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_atomically(path: Path, text: str) -> None:
    """The file holds the old text or the new, whenever the process dies."""
    beside = path.with_name(f"{INCOMPLETE}{path.name}")
    write_synced(beside, text.encode())
    beside.replace(path)
    sync_folder(path.parent)


@contextmanager
def file_errors() -> Iterator[None]:
    """Turn an OSError into a UserError of the same text. Only access to files may stand inside."""
    try:
        yield
    except OSError as error:
        raise UserError(one_line(error)) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write one file of a run inside. Raises a UserError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {error.strerror or error}; free the disk, then resume"
        ) from error


def write_synced(path: Path, contents: bytes) -> None:
    """Write a file and wait until the disk has it. A link at the path is an OSError."""
    with open(path, "wb", opener=without_following) as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
