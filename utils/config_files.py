"""The YAML files of config/, and files of the user that take a place among them."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from utils.errors import UserError
from utils.files import file_errors, read_plain_yaml
from utils.text import for_shell, one_line

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
_LONGEST_LIST = 400  # characters of a list in a message

_SUFFIXES = (".yaml", ".yml")
# The files of these groups set keys of the whole config, which their first line has to say.
_GLOBAL_GROUPS = ("experiment", "debug")
_GLOBAL = "# @package _global_"
# What to do about a problem of the YAML reader, by a part of its message.
_FIXES = {
    r"'\t'": "replace the tab in this line by blanks",
    "mapping values are not allowed": "indent this line as the one above it, and put one colon in it",
    "but found '<block mapping start>'": "indent this line as the keys beside it",
    "found duplicate key": "keep one of the two lines",
    "could not find expected ':'": "write key: value, with a blank after the colon",
}


@dataclass(frozen=True)
class Place:
    """A line of a YAML file."""

    file: Path
    line: int

    def __str__(self) -> str:
        shown = self.file.relative_to(Path.cwd()) if self.file.is_relative_to(Path.cwd()) else self.file
        return f"{shown}:{self.line}"


def is_group(name: str) -> bool:
    """Return whether config/ has such a group."""
    return re.fullmatch(r"\w+", name) is not None and (CONFIG_DIR / name).is_dir()


def choices(group: str) -> list[str]:
    """Return the names in a group. Files that start with an underscore are parts of other files."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("[!_]*.yaml"))


def listed_choices(group: str) -> str:
    """Return the names in a group for a message: as many as fit, and how many more there are."""
    names = choices(group)
    line = ", ".join(names)
    if len(line) <= _LONGEST_LIST:
        return line
    shown = line[:_LONGEST_LIST].split(", ")[:-1]
    return f"{', '.join(shown)} and {len(names) - len(shown)} more, which --help lists"


def default_groups(config_name: str) -> list[tuple[str, str]]:
    """Return the groups in the config's defaults with their choices, in order; "null": none."""
    page = (CONFIG_DIR / f"{config_name}.yaml").read_text(encoding="utf-8")
    return re.findall(r"^  - (?:optional )?(\w+): ?(\w+)", page, flags=re.MULTILINE)


def sets_whole_config(group: str) -> bool:
    """Return whether the files of a group set keys of the whole config; "": config/<name>.yaml."""
    return group in ("", *_GLOBAL_GROUPS)


def names_file(override: str) -> bool:
    """Return whether an override chooses a file by its path, as experiment=path/to/my.yaml does."""
    group, _, value = override.lstrip("+").partition("=")
    return is_group(group) and value.strip("'\"").endswith(_SUFFIXES)


def in_quotes(override: str) -> str:
    """Return an override that names a file with quotes around its path.

    Hydra could not read a path with blanks or commas otherwise.
    """
    group, _, value = override.partition("=")
    if not names_file(override) or value[0] in "'\"":
        return override
    return f"{group}={quoted(value)}"


def quoted(text: str) -> str:
    """Return a text in the quotes of an override, where only backslashes before a quote count."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


def typed_override(key: str, value: str) -> str:
    """Return the override of a text as a shell takes it."""
    return for_shell([f"{key}={as_override(value)}"])


def as_override(value: Any) -> str:
    """Return a value as it is typed after the equals sign of an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_override(inner)}" for key, inner in value.items()) + "}"
    text = str(value)
    if not isinstance(value, str):
        return text
    try:
        read = OverridesParser.create().parse_override(f"key={text}").value()
    except (HydraException, ValueError):
        return quoted(text)
    # A sweep keeps a list among the values of a parameter as text.
    return text if read == text or isinstance(read, list | dict) else quoted(text)


def malformed(error: MarkedYAMLError, file: str | None = None) -> str:
    """Return a message with the file and the line; None: the file that the error itself names."""
    problem = error.problem or "malformed"
    # Of a line without a colon, the problem is noticed later.
    mark = error.context_mark if "could not find expected ':'" in problem else error.problem_mark
    file, line = file or (mark.name if mark is not None else "a file of the config"), mark.line + 1 if mark else 1
    place = Place(Path(file), line)
    fix = next((fix for part, fix in _FIXES.items() if part in problem), "correct this line or the one before")
    return f"{place}: can't be read as YAML ({problem}); {fix}"


def from_folder(folder: str, overrides: list[str]) -> list[str]:
    """Return the overrides with the path of each chosen file that lies in a folder like config/.

    Args:
        folder: a folder that holds experiment/, arch/ and so on, as config/ does.

    Raises:
        UserError: The folder is missing, or holds none of the chosen configs.
    """
    root, found = Path(os.path.expanduser(folder)), []
    with file_errors():
        if not root.is_dir():
            raise UserError(f"--config-dir {folder!r} is no folder; give one that holds experiment/, arch/ or the like")
        for typed in overrides:
            group, _, names = typed.lstrip("+").partition("=")
            if not is_group(group) or "/" in names:
                found.append(typed)
                continue
            files = [(name, root / group / f"{name}.yaml") for name in names.split(",")]  # several: for sweep.py
            found.append(f"{group}={','.join(str(file) if file.is_file() else name for name, file in files)}")
        if found == overrides:
            held = sorted(
                f"{file.parent.name}={file.stem}" for file in root.glob("*/[!_]*.yaml") if is_group(file.parent.name)
            )
            raise UserError(
                f"--config-dir {folder} holds none of the configs on the command line; "
                + (
                    f"it has {', '.join(held)}"
                    if held
                    else "it needs folders like those of config/: experiment/, arch/"
                )
            )
    return found


@contextmanager
def placed(overrides: Iterable[str]) -> Iterator[tuple[list[str], list[Path]]]:
    """Give overrides that choose files by name, and the folders in which Hydra finds the files.

    Each file is copied under a name that no other file has. If its folder is named after its group,
    the file may refer to files beside it and in the folders of other groups.

    Raises:
        UserError: A file is missing or no YAML, or does not suit its group.
    """
    with TemporaryDirectory(prefix="config_") as temporary:
        by_name, folders = [], [Path(temporary)]
        for number, typed in enumerate(overrides):
            if not names_file(typed):
                by_name.append(typed)
                continue
            override = OverridesParser.create().parse_override(typed.lstrip("+"))
            group = override.key_or_group
            with file_errors():
                file = Path(os.path.expanduser(str(override.value()))).absolute()
                text = _contents(group, file)
                (folders[0] / group).mkdir(exist_ok=True)
                (folders[0] / group / f"file_{number}.yaml").write_text(text, encoding="utf-8")
                if file.parent.name == group:
                    folders.append(file.parent.parent)
            by_name.append(f"{group}=file_{number}")
        yield by_name, folders


def _contents(group: str, file: Path) -> str:
    """Return the text of a file that is to be read as a config of this group."""
    if not file.is_file():
        known = f"write {group}={file.stem}" if file.stem in choices(group) else "correct the path"
        raise UserError(f"{group}={file} is not there, or is no regular file; {known}")
    try:
        text = read_plain_yaml(file).removeprefix("\ufeff")  # which some editors put in front
        config = OmegaConf.load(StringIO(text))
    except MarkedYAMLError as error:
        raise UserError(malformed(error, str(file))) from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"{file} can't be read as YAML ({one_line(error)}); correct the file") from error
    except OSError:  # OmegaConf's answer to a text or a number
        config = None
    if not isinstance(config, DictConfig):
        raise UserError(f"{file} holds no keys; write lines such as lr: 1e-4")
    if "hydra" in config:
        raise UserError(f"{file} has settings of Hydra's own, which have no effect here; remove hydra: from it")
    if not isinstance(config.get("defaults", []), ListConfig | list):
        raise UserError(f"{file}: defaults is no list; write a line such as - override /arch: trm for each choice")
    _require_package(group, file, text)
    return text


def check_chosen(overrides: Iterable[str]) -> None:
    """Raise UserError if a chosen file of config/ does not say that it sets keys of all groups.

    Files that are chosen by their path are checked where they are read.
    """
    for typed in overrides:
        group, _, names = typed.lstrip("+").partition("=")
        for name in re.findall(r"[^][,'\"\s]+", names) if group in _GLOBAL_GROUPS and not names_file(typed) else ():
            file = CONFIG_DIR / group / f"{name}.yaml"
            if file.is_file():
                with file_errors():
                    _require_package(group, file, file.read_text(encoding="utf-8"))


def _require_package(group: str, file: Path, text: str) -> None:
    """Raise UserError if a file of this group does not begin as it has to."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    says_global = re.fullmatch(r"#\s*@package\s+_global_", first) is not None
    sets_own_group = re.search(rf"^{group}:", text, re.MULTILINE) is not None  # Hydra can read such a file
    if says_global and group not in _GLOBAL_GROUPS and (group == "sweep" or not sets_own_group):
        raise UserError(f"{Place(file, 1)}: the keys of this file belong to {group}; remove this line")
    if group in _GLOBAL_GROUPS and not says_global:
        raise UserError(f"{Place(file, 1)}: the first line has to be '{_GLOBAL}', as in config/{group}/; add it")
