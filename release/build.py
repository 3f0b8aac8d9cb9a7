"""Lay the modules of this repository under one package, whose name no other package has.

A clone has top-level modules with names that others use too, such as `utils`. In the package,
`from utils.files import plain` becomes `from hrm_trainer.utils.files import plain`. Messages, pages
of --help and comments name the commands: `python pretrain.py` becomes `hrm-train`.
"""

import re
import shutil
from functools import cache
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

from release.commands import COMMANDS
from utils.programs import ROOT

NAME = "hrm_trainer"
DISTRIBUTION = "hrm-trainer"
_NOT_SHIPPED = ("benchmarks", "release", "tests")
_DATA = ("config/**/*.yaml", "launch/*job.yaml", "launch/pod.sh", "sharing/*.jinja", "sharing/*.yaml", "viewer/page/*")


def shipped() -> dict[Path, Path]:
    """Return {file in the package: file of the repository}, both relative."""
    packages = sorted({file.parent.name for file in ROOT.glob("*/__init__.py")} - {*_NOT_SHIPPED, NAME})
    globs = ("*.py", *(f"{package}/**/*.py" for package in packages), *_DATA)
    files = {file.relative_to(ROOT) for glob in globs for file in ROOT.glob(glob)} - {Path("setup.py")}
    return {file: file for file in sorted(files)} | {
        Path("__init__.py"): Path("release/package.py"),
        Path("commands.py"): Path("release/commands.py"),
    }


@cache
def own_modules() -> frozenset[str]:
    """Return the names of the top-level modules that the package holds."""
    return frozenset(Path(file.parts[0]).stem for file in shipped().values() if file.suffix == ".py") - {"release"}


def write_package(folder: Path) -> list[Path]:
    """Write the package into a folder in place of what is there, and return its files."""
    shutil.rmtree(folder, ignore_errors=True)
    for to, file in shipped().items():
        text = (ROOT / file).read_text(encoding="utf-8")
        (folder / to).parent.mkdir(parents=True, exist_ok=True)
        (folder / to).write_text(with_commands(with_package(text)), encoding="utf-8")
    (folder / "py.typed").touch()
    return sorted(path for path in folder.rglob("*") if path.is_file())


def requirements(file: str) -> list[str]:
    """Return the requirements of a file. Its `-r requirements-<name>.txt` is an extra by name."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    return [re.sub(r"-r requirements-(\w+)\.txt", rf"{DISTRIBUTION}[\1]", line) for line in lines if line]


def with_package(source: str) -> str:
    """Return a module whose imports of own modules name the package.

    Raises:
        ValueError: An import has a form that this function does not convert.
    """
    own = "|".join(own_modules())
    if found := re.search(rf"^\s*import (?:{own})\b.*", source, flags=re.MULTILINE):
        raise ValueError(f"{found[0].strip()}: write from ... import ... for modules of our own")
    return re.sub(rf"^(\s*from )((?:{own})(?:\.\w+)* import )", rf"\1{NAME}.\2", source, flags=re.MULTILINE)


# ---- the names of commands -----------------------------------------------------------------------

_FILES = {f"{module.replace('.', '/')}.py": (command, module) for command, module in COMMANDS.items()}
_PATHS = "|".join(map(re.escape, _FILES))
_MODULES = {module: command for command, module in COMMANDS.items()}
_MODULE_NAMES = "|".join(map(re.escape, _MODULES))
# pretrain.py, but not what only ends so or goes on: path/pretrain.py, pretrain.pyc.
_WORD = rf"(?<![\w./-])(?:{_PATHS})\b(?!\.\w)"
_BASENAMES = {file.rpartition("/")[2]: command for file, (command, _) in _FILES.items() if "/build_" in file}


def with_commands(text: str) -> str:
    """Return a text that names the commands of the package instead of files of the clone."""
    return "".join(_aligned(line, _line_with_commands(line)) for line in text.splitlines(keepends=True))


def _line_with_commands(line: str) -> str:
    line = re.sub(r"\bfrom solve import Solver\b", f"from {NAME} import Solver", line)
    line = re.sub(r"pip install -r requirements-(\w+)\.txt", rf"pip install '{DISTRIBUTION}[\1]'", line)
    line = re.sub(r"\brequirements-(\w+)\.txt", rf"{DISTRIBUTION}[\1]", line)
    line = re.sub(
        rf"(\btorchrun\b.*? )({_PATHS})\b", lambda found: f"{found[1]}-m {NAME}.{_FILES[found[2]][1]}", line, count=1
    )
    line = re.sub(rf"\bpython -m ({_MODULE_NAMES})\b", lambda found: _MODULES[found[1]], line)
    line = re.sub(rf"(?:\bpython )?({_WORD})", lambda found: _FILES[found[1]][0], line)
    line = re.sub(rf"(?<![\w./-])({'|'.join(_BASENAMES)})\b", lambda found: _BASENAMES[found[1]], line)
    line = re.sub(r"(?<![\w./-])docs/[\w/]+\.md\b", r"\g<0> of the repository", line)  # the package has no pages
    return line.replace("python dataset/build_...", "hrm-build-...")


def _aligned(before: str, after: str) -> str:
    """Return a changed line whose second column begins where it did before, as far as possible."""
    old, new = (re.fullmatch(r"(\s*\S.*?)( {2,})(\S.*\n?)", line) for line in (before, after))
    if before == after or old is None or new is None:
        return after
    return new[1] + " " * max(2, len(old[1] + old[2]) - len(new[1])) + new[3]


# ---- what setuptools calls -----------------------------------------------------------------------


class BuildPackage(build_py):
    """Write the package where setuptools expects it."""

    def run(self) -> None:
        write_package(Path(self.build_lib) / NAME)

    def get_source_files(self) -> list[str]:
        """Return the files that a source distribution needs."""
        return [*map(str, shipped().values()), "release/__init__.py", "release/build.py"]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [str(path) for path in (Path(self.build_lib) / NAME).rglob("*") if path.is_file()]


class NoEditableWheel(editable_wheel):
    """Say that a clone needs no editable install."""

    def run(self) -> None:
        raise SystemExit("error: a clone runs as it stands (python pretrain.py); install it without -e")
