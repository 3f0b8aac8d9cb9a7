"""Lay the modules of this repository under one package, whose name no other package has.

A clone has top-level modules with names that others use too, such as `utils`. In the package,
`from utils.files import plain` becomes `from hrm_trainer.utils.files import plain`. Messages, pages
of --help and comments name the commands: `python pretrain.py` becomes `hrm-train`.
"""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

from release.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
NAME = "hrm_trainer"
DISTRIBUTION = "hrm-trainer"
_NOT_SHIPPED = ("benchmarks", "release", "tests")
_DATA = ("config/**/*.yaml", "launch/*job.yaml", "launch/pod.sh", "sharing/*.jinja", "viewer/page/*")


def shipped(root: Path = ROOT) -> dict[Path, Path]:
    """Return {file in the package: file of the repository}, both relative."""
    packages = {
        file.parent.name for file in root.glob("*/__init__.py") if file.parent.name not in (*_NOT_SHIPPED, NAME)
    }
    modules = [file for file in root.glob("*.py") if file.name != "setup.py"]
    modules += [file for package in packages for file in (root / package).rglob("*.py")]
    files = sorted(
        file.relative_to(root) for file in (*modules, *(found for glob in _DATA for found in root.glob(glob)))
    )
    return {file: file for file in files} | {
        Path("__init__.py"): Path("release/package.py"),
        Path("commands.py"): Path("release/commands.py"),
    }


def own_modules(root: Path = ROOT) -> set[str]:
    """Return the names of the top-level modules that the package holds."""
    return {Path(file.parts[0]).stem for file in shipped(root).values() if file.suffix == ".py"} - {"release"}


def write_package(folder: Path, root: Path = ROOT) -> list[Path]:
    """Write the package into a folder in place of what is there, and return its files."""
    shutil.rmtree(folder, ignore_errors=True)
    own = own_modules(root)
    for to, file in shipped(root).items():
        text = (root / file).read_text(encoding="utf-8")
        (folder / to).parent.mkdir(parents=True, exist_ok=True)
        (folder / to).write_text(converted(text, own) if to.suffix == ".py" else with_commands(text), encoding="utf-8")
    (folder / "py.typed").touch()
    return sorted(path for path in folder.rglob("*") if path.is_file())


def requirements(file: str, root: Path = ROOT) -> list[str]:
    """Return the requirements of a file and its own `-r` files, but for requirements.txt."""
    found: list[str] = []
    for line in (root / file).read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            other = line.removeprefix("-r ").strip()
            found += [] if other == "requirements.txt" else requirements(other, root)
        elif line:
            found.append(line)
    return list(dict.fromkeys(found))


# ---- what changes in a module --------------------------------------------------------------------


def converted(source: str, own: set[str]) -> str:
    """Return a module as it stands in the package.

    Raises:
        ValueError: An import has a form that this function does not know, or the names of commands
            would change more than texts and comments.
    """
    if found := re.search(rf'/ "(?:{_PATHS})"', source):
        raise ValueError(f"{found[0]} is a path: take it from utils/programs.py")
    moved = _with_package(source, own)
    named = with_commands(moved)
    if _without_texts(named) != _without_texts(moved):
        raise ValueError("naming the commands changes the code, not only texts")
    return named


def _with_package(source: str, own: set[str]) -> str:
    """Return a module whose imports of own modules name the package."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _top(node.module) in own:
            written, package = f"from {node.module} ", f"from {NAME}.{node.module} "
        elif isinstance(node, ast.Import) and any(_top(alias.name) in own for alias in node.names):
            written = ast.unparse(node)
            if len(node.names) > 1 or ("." in node.names[0].name and node.names[0].asname is None):
                raise ValueError(f"line {node.lineno}: {written}: write from ... import ... for modules of our own")
            is_plain = node.names[0].asname is None
            package = f"from {NAME} {written}" if is_plain else written.replace("import ", f"import {NAME}.", 1)
        else:
            continue
        before, after = lines[node.lineno - 1][: node.col_offset], lines[node.lineno - 1][node.col_offset :]
        if before.strip() or not after.startswith(written):
            raise ValueError(f"line {node.lineno}: {ast.unparse(node)}: begin a line with each import")
        lines[node.lineno - 1] = before + package + after.removeprefix(written)
    return "".join(lines)


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _without_texts(source: str) -> str:
    """Return the syntax tree of a module with every text replaced by an empty one."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


# ---- the names of commands -----------------------------------------------------------------------

_FILES = {f"{module.replace('.', '/')}.py": (command, module) for command, module in COMMANDS.items()}
_PATHS = "|".join(map(re.escape, _FILES))
_MODULES = {module: command for command, module in COMMANDS.items()}
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
    line = re.sub(rf"\bpython -m ({'|'.join(map(re.escape, _MODULES))})\b", lambda found: _MODULES[found[1]], line)
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
        return [str(path) for path in self._outputs()]

    def _outputs(self) -> Iterator[Path]:
        yield from (path for path in (Path(self.build_lib) / NAME).rglob("*") if path.is_file())


class NoEditableWheel(editable_wheel):
    """Say that a clone needs no editable install."""

    def run(self) -> None:
        raise SystemExit("error: a clone runs as it stands (python pretrain.py); install it without -e")
