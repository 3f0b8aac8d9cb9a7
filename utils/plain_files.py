"""Files that may be a stranger's, before anything reads them: pipes and devices have no end, and a few lines of YAML
can mean billions. Links are followed in reading, and nowhere in writing.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import yaml

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
    """Raises ValueError that names the first of the paths that is a link: what is written or removed there would be so
    elsewhere, wherever the one who made it wanted.
    """
    for path in paths:
        if path.is_symlink():
            raise ValueError(
                f"{path} is a link, and in a run's folder none is followed; put what it names in its place or remove it"
            )


def without_following(path: str, flags: int) -> int:
    """For `open(..., opener=without_following)`: OSError where the path itself is a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
