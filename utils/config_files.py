"""The YAML files of config/, and files of the user that take a place among them."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from yaml import MarkedYAMLError, YAMLError

from utils.errors import UserError
from utils.files import file_errors, read_plain_yaml
from utils.text import one_line

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"

_SUFFIXES = (".yaml", ".yml")
# The files of these groups set keys of the whole config, which their first line has to say.
_GLOBAL_GROUPS = ("experiment", "debug")
_GLOBAL = "# @package _global_"


def is_group(name: str) -> bool:
    """Return whether config/ has such a group."""
    return bool(name) and (CONFIG_DIR / name).is_dir()


def choices(group: str) -> list[str]:
    """Return the names in a group. Files that start with an underscore are parts of other files."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("[!_]*.yaml"))


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
    """Return a text as Hydra reads it in an override."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def from_folder(folder: str, overrides: list[str]) -> list[str]:
    """Return the overrides with the path of each chosen file that lies in a folder like config/.

    Args:
        folder: a folder that holds experiment/, arch/ and so on, as config/ does.

    Raises:
        UserError: The folder is missing, or holds none of the chosen configs.
    """
    root, found = Path(folder), []
    with file_errors():
        for typed in overrides:
            group, _, name = typed.lstrip("+").partition("=")
            file = root / group / f"{name}.yaml"
            found.append(f"{group}={file}" if is_group(group) and name and file.is_file() else typed)
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

    A file in a folder that is called like its group may refer to the files around it.

    Raises:
        UserError: A file is missing or no YAML, or can't be used under its name or in its group.
    """
    with TemporaryDirectory(prefix="config_") as temporary:
        by_name, folders = [], list[Path]()
        for typed in overrides:
            if not names_file(typed):
                by_name.append(typed)
                continue
            override = OverridesParser.create().parse_override(typed.lstrip("+"))
            group, file = override.key_or_group, Path(str(override.value())).absolute()
            with file_errors():
                _require_use(group, file)
                if file.parent.name == group and file.suffix == ".yaml":
                    folders.append(file.parent.parent)
                else:
                    folders.append(Path(temporary))
                    (folders[-1] / group).mkdir(exist_ok=True)
                    shutil.copyfile(file, folders[-1] / group / f"{file.stem}.yaml")
            by_name.append(f"{group}='{file.stem}'")
        yield by_name, folders


def _require_use(group: str, file: Path) -> None:
    if not file.is_file():
        raise UserError(f"{group}={file}: there is no such file; correct the path")
    if file.stem in choices(group) or file.stem.startswith("_") or "'" in file.stem:
        raise UserError(
            f"{group}={file}: config/{group} has a {file.stem}.yaml, or no file may be called so; rename the file"
        )
    try:
        text = read_plain_yaml(file)  # a mistake is named by this file, and not by a copy of it
        keys = yaml.safe_load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise UserError(
            f"{file}:{line}: this is no YAML ({error.problem}); correct the line, or the one before it"
        ) from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} can't be read as YAML ({one_line(error)}); correct the file") from error
    if not isinstance(keys, dict | None):
        raise UserError(f"{file} holds no keys; write lines such as lr: 1e-4")
    if group in _GLOBAL_GROUPS and _GLOBAL not in text:
        raise UserError(f"{group}={file}: the first line has to be '{_GLOBAL}', as in config/{group}/; add it")
