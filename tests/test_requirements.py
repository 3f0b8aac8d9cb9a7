"""Every package that the sources import is in a requirements file, pinned to one version."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OWN = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/*.py")}
# Some sources need more than requirements.txt.
PICTURES, SWEEPS, CHECKS = "requirements-plot.txt", "requirements-sweep.txt", "requirements-dev.txt"
RAY, SLURM, TEXT = "requirements-ray.txt", "requirements-slurm.txt", "requirements-text.txt"
NEEDS = {"utils/drawing.py": PICTURES, "search": SWEEPS, "tests": CHECKS, "benchmarks": CHECKS}
NEEDS |= {"setup.py": CHECKS, "release": CHECKS} | {
    path: RAY for path in ("launch/ray_train.py", "launch/ray_rank.py", "launch/ray_worker.py", "tests/test_ray.py")
}
NEEDS["search/slurm.py"] = SLURM
NEEDS |= {"dataset/text/tokenizer.py": TEXT, "dataset/text/generated.py": TEXT}


def _required(file: str) -> dict[str, str]:
    """Return {package: what follows its name}, including files that the file names."""
    found: dict[str, str] = {}
    for line in (ROOT / file).read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            found |= _required(line.removeprefix("-r ").strip())
        elif line:
            # A package with a part that is optional in it has that in brackets: ray[train].
            name, version = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", line).groups()  # type: ignore[union-attr]
            found[_normal(name)] = version
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imported(path: Path) -> set[str]:
    """Return top-level names, also of imports inside functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(), filename=str(path))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - OWN


def _sources() -> list[Path]:
    hidden = (path for path in ROOT.rglob("*.py") if any(part.startswith(".") for part in path.relative_to(ROOT).parts))
    return sorted({*ROOT.rglob("*.py")} - {*hidden} - {*(ROOT / "data").rglob("*")})


@pytest.mark.parametrize("file", sorted(path.name for path in ROOT.glob("requirements*.txt")))
def test_every_requirement_is_pinned(file: str) -> None:
    loose = {name: version for name, version in _required(file).items() if not re.fullmatch(r"==\d+(\.\d+)+", version)}
    assert not loose


def test_a_package_is_built_with_what_the_tests_build_it_with() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert build == [f"setuptools{_required(CHECKS)['setuptools']}"]


def test_every_import_is_required() -> None:
    distributions = packages_distributions()
    needed = {path.relative_to(ROOT): _imported(path) for path in _sources()}
    assert {"torch", "pydantic", "yaml", "wandb", "pytest"} <= set().union(*needed.values()), (
        "the list of imports is incomplete"
    )
    for path, names in needed.items():
        more = [file for place, file in NEEDS.items() if path.is_relative_to(place)]
        required = {name for file in ("requirements.txt", *more) for name in _required(file)}
        for name in names:
            packages = {_normal(package) for package in distributions.get(name, [name])}
            assert packages & required, f"{path} imports {name}, which is in none of its requirements files"
