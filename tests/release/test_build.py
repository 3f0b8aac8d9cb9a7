"""The modules of the package import one another below one name, and name commands that exist."""

import ast
import re
from pathlib import Path

import pytest
from setuptools import Distribution

from release import commands, package
from release.build import BuildPackage, own_modules, requirements, shipped, with_commands, with_package, write_package
from release.commands import COMMANDS
from utils.programs import PACKAGE, ROOT, under_torchrun


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from models.x import y", "from hrm_trainer.models.x import y"),
        ("from models import x", "from hrm_trainer.models import x"),
        ("if True:\n    from utils.x import (\n", "if True:\n    from hrm_trainer.utils.x import (\n"),
        ("from modelsearch.utils import x", "from modelsearch.utils import x"),
        ("others take weights\nfrom models of other", "others take weights\nfrom models of other"),
    ],
)
def test_an_import_of_our_own_names_the_package(line: str, expected: str) -> None:
    assert with_package(line) == expected


@pytest.mark.parametrize("line", ["import models.x", "import pretrain as p", "if True:\n    import utils"])
def test_an_import_that_the_build_cannot_move_stops_it(line: str) -> None:
    with pytest.raises(ValueError, match="write from"):
        with_package(line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python pretrain.py resume=auto", "hrm-train resume=auto"),
        ("pretrain.py stops", "hrm-train stops"),
        ("python dataset/build_lights_out_dataset.py --seed 1", "hrm-build-lights-out --seed 1"),
        ("build_maze_dataset.py: write mazes", "hrm-build-maze: write mazes"),
        ("python -m sharing.export --format hrm", "hrm-export --format hrm"),
        ("torchrun --nproc-per-node 8 evaluate.py x", "torchrun --nproc-per-node 8 -m hrm_trainer.evaluate x"),
        ("pip install -r requirements-plot.txt", "pip install 'hrm-trainer[plot]'"),
        ("needs requirements-plot.txt", "needs hrm-trainer[plot]"),
        ("from solve import Solver", "from hrm_trainer import Solver"),
        ("  python view.py run        one page", "  hrm-view run              one page"),
        ("path/pretrain.py viewer/pages.py my_view.py", "path/pretrain.py viewer/pages.py my_view.py"),
    ],
)
def test_a_text_names_commands_that_exist(line: str, expected: str) -> None:
    assert with_commands(line) == expected


def test_every_program_has_a_command() -> None:
    programs = {
        ".".join(file.with_suffix("").parts)
        for file in set(shipped().values())
        if file.suffix == ".py" and 'if __name__ == "__main__":' in (ROOT / file).read_text()
    }
    assert programs == {*COMMANDS.values()}, "write each program into release/commands.py"


def test_a_command_runs_the_program_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[tuple[str, str]]()
    monkeypatch.setattr(commands, "run_module", lambda module, run_name: ran.append((module, run_name)))
    monkeypatch.setattr("sys.argv", ["hrm", "--help"])
    for command in COMMANDS:
        name = command.removeprefix("hrm-").replace("-", "_")
        getattr(commands, f"hrm_{name}")()
        module, run_name = ran.pop()
        assert name in module and run_name == "__main__", command


def test_what_the_package_requires() -> None:
    assert "hrm-trainer[plot]" in requirements("requirements-sweep.txt")
    assert not [line for line in requirements("requirements.txt") if "#" in line or not line]
    needed = {*BuildPackage(Distribution()).get_source_files()}
    assert {"release/__init__.py", "release/build.py", "release/commands.py", "release/package.py"} <= needed
    assert not hasattr(commands, "hrm_nothing") and not hasattr(package, "nothing")


# What a clone has and an installed package lacks. Words such as path/pretrain.py are of the user.
_OF_A_CLONE = re.compile(
    r'\bpython"?,? "?hrm-|'
    r"python (-m )?(dataset|models|sharing|launch|search|viewer)[./]|python \w+\.py|requirements-|\bpython( -m)?$|"
    r"docs/[\w/]+\.md(?! of the repository)|"
    rf"(?<![\w/.])({'|'.join(module for module in COMMANDS.values() if '.' not in module)})\.py"
)


def test_the_package_is_whole_and_names_nothing_that_only_a_clone_has(tmp_path: Path) -> None:
    """The import of every module is tried by tests/test_package.py."""
    (tmp_path / "hrm_trainer").mkdir()
    (tmp_path / "hrm_trainer" / "of_an_earlier_build.py").touch()
    files = write_package(tmp_path / "hrm_trainer")
    assert not (tmp_path / "hrm_trainer" / "of_an_earlier_build.py").exists()
    names = {str(path.relative_to(tmp_path / "hrm_trainer")) for path in files}
    assert {"__init__.py", "commands.py", "py.typed", "pretrain.py", "viewer/page/main.mjs"} <= names
    assert {"config/pretrain.yaml", "sharing/card.jinja", "sharing/published.yaml"} <= names
    assert {f"launch/{name}" for name in ("job.yaml", "trainjob.yaml", "pod.sh")} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"hrm_trainer"}
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "release", "viewer/lint", "docs"))]
    own = "|".join(own_modules())
    for path in files:
        if path.suffix == ".py":
            ast.parse(path.read_text())
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            place = f"{path.relative_to(tmp_path)}:{number}: {line.strip()}"
            assert not re.match(rf"\s*(from|import) ({own})\b", line), f"{place}: an import of a clone's module"
            assert not re.search(rf'/ "({"|".join(COMMANDS)})', line), f"{place}: this path is now that of a command"
            assert not _OF_A_CLONE.search(line), f"{place}: names a file of a clone; see release/build.py"


def test_a_clone_names_its_files() -> None:
    assert PACKAGE == "" and under_torchrun("evaluate") == ["evaluate.py"]
