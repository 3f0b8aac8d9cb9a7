"""Read and write files safely, even if they come from somebody else.

Pipes and devices have no end, and a few lines of YAML with anchors can expand to billions of nodes.
Reading follows links. Writing does not.
"""

import gzip
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import yaml

from utils.errors import UserError
from utils.terminal import tell
from utils.text import one_line

# The name of a file or folder starts with this prefix until it is whole.
INCOMPLETE = ".incomplete_"

# Generous limits: a config has a few thousand bytes and a handful of levels.
_MOST_YAML_BYTES = 1 << 18
_DEEPEST_YAML = 20
# The reader in C is seven times as fast, and not everywhere part of PyYAML.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def plain(file: Path) -> Path:
    """Return the path, or raise OSError if it is a pipe or a device, which may never end."""
    if file.exists() and stat.S_IFMT(file.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise OSError(f"{file} is no regular file")
    return file


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file to read its bytes, decompressed if its name ends with .gz, or raise UserError."""
    try:
        with gzip.open(plain(file)) if file.suffix.lower() == ".gz" else plain(file).open("rb") as stream:
            yield cast(IO[bytes], stream)
    except FileNotFoundError:
        raise UserError(f"there is no file {file}; correct the name") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)}); get the file again") from None


def read_plain_yaml(file: Path) -> str:
    """Read YAML as this program writes it: short, with few levels and without anchors.

    Raises:
        OSError, UnicodeDecodeError, yaml.YAMLError: It is no such file.
    """
    if plain(file).stat().st_size > _MOST_YAML_BYTES:
        raise yaml.YAMLError(f"has {file.stat().st_size:,} bytes, no config")
    text = file.read_text(encoding="utf-8")
    depth = 0
    for event in yaml.parse(text, Loader=YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML or getattr(event, "anchor", None):
            raise yaml.YAMLError("has anchors, or is nested deeper than any config")
    return text


def read_yaml(file: Path, fix: str) -> dict[str, Any]:
    """Return the keys of such a file, or raise UserError, which ends with what to do."""
    try:
        values = yaml.safe_load(read_plain_yaml(file))
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: an impossible date, or no UTF-8
        raise UserError(f"{file}: cannot be read as YAML ({one_line(error)}); {fix}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: has no keys; {fix}")
    return {str(key): value for key, value in values.items()}


def remove_replaced(path: Path) -> None:
    """Remove what nobody needs any more, or warn."""
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        tell(f"WARNING: {path} is no longer needed, but can't be removed ({error.strerror}); remove it")


def require_utf8(words: Iterable[str]) -> None:
    """Raise UserError if typed words or the current folder are no UTF-8, as configs have to be."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the current folder was removed; go to one that exists") from error
    for word in (here, *words):
        try:
            word.encode("utf-8")
        except UnicodeEncodeError as error:
            raise not_utf8(word) from error


def not_utf8(name: str) -> UserError:
    """Return the mistake of a name that is no UTF-8, or not in this locale."""
    return UserError(f"{name!r} is no UTF-8, or this locale is not; rename it, or set LC_ALL=C.UTF-8")


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise UserError if one of the paths is a link, which could lead writes to any place."""
    for path in paths:
        if path.is_symlink():
            raise UserError(
                f"{path} is a link, and in a run's folder none is followed; replace it by its target or remove it"
            )


def without_following(path: str, flags: int) -> int:
    """Open a path, but raise OSError if it is a link. For `open(..., opener=without_following)`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_atomically(path: Path, contents: str | bytes | memoryview) -> None:
    """Replace a file. If this fails or the process dies, the file holds the old or new contents."""
    beside = path.with_name(f"{INCOMPLETE}{path.name}")
    try:
        write_synced(beside, contents.encode() if isinstance(contents, str) else contents)
        beside.replace(path)
    except BaseException:  # KeyboardInterrupt too
        with suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


@contextmanager
def file_errors() -> Iterator[None]:
    """Turn an OSError, or a name that no file can have, into a UserError. For file access only."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            name = os.fsdecode(error.filename)
            raise UserError(f"{name} can't be used ({error.strerror}); check this path and its permissions") from error
        raise UserError(one_line(error)) from error
    except ValueError as error:
        if isinstance(error, UserError) or "null byte" not in str(error):
            raise
        raise UserError(f"{one_line(error)} in the name of a file; correct the name") from error


@file_errors()
def files_below(folder: Path) -> list[Path]:
    """Return every file in a folder and its subfolders, in order. Links are followed, each once."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        found += [Path(parent, name) for name in names]
    return sorted(found)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a UserError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {error.strerror or error}; free the disk, then resume"
        ) from error


def write_synced(path: Path, contents: bytes | memoryview) -> None:
    """Write a file and wait until it is on the disk. Raise OSError if the path is a link."""
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
