"""The package is built and installed, and its commands are typed beside modules of the user.

The environment is new, but finds PyTorch and the other requirements in the environment of the test.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import REPOSITORY
from utils.programs import VERSION
from utils.ranks.launch import without_launcher

# tests/release/test_build.py reads at every change what the package holds.
pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(600)]

TINY = "debug=tiny device=cpu data_path=data/sudoku-6x6 eval_every_n_steps=null arch=trm_mlp checkpoint_path=run"
# Modules of the user with the names of ours.
MINE = ("utils", "models", "dataset", "config", "solve")
BUILD = "hrm-build-sudoku --output-dir data/sudoku-6x6 --generate 20 --generate-test 8 --box 2x3"
# Runs scripts of commands in forks, which find PyTorch imported, and nothing of the package.
FORKS = """
import os, runpy, shlex, shutil, sys
import torch, torch._dynamo, hydra
for number, line in enumerate(sys.argv[1:]):
    if (child := os.fork()) == 0:
        command, *sys.argv[1:] = shlex.split(line)
        sys.argv[0] = shutil.which(command)
        os.dup2(os.open(f"{number}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.exit(runpy.run_path(sys.argv[0], run_name="__main__") and 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Typed = Callable[..., "subprocess.CompletedProcess[str]"]
InForks = Callable[[dict[str, int]], list[str]]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    hook = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", hook], cwd=REPOSITORY, check=True, capture_output=True, timeout=300)
    (source,) = folder.glob("*.tar.gz")
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*wheel, "-w", str(folder), str(source)], check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def typed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Typed:
    """Return a function that types a command in a folder, where the package is installed."""
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("mine")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=300)
    (wheel,) = dist.glob("*.whl")
    python = str(environment / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=300)
    (site_packages,) = environment.glob("lib/*/site-packages")
    (site_packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    for name in MINE:
        (folder / f"{name}.py").write_text("MINE = True\n")
    variables = {name: value for name, value in without_launcher(os.environ).items() if name != "PYTHONPATH"}
    variables |= {"PATH": f"{environment}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def typed(command: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == status, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    (environment / "bin/forks.py").write_text(FORKS)
    typed(BUILD)
    return typed


@pytest.fixture(scope="module")
def typed_in_forks(typed: Typed) -> InForks:
    """Return a function that types commands, each with its status, and returns their outputs."""

    def typed_in_forks(commands: dict[str, int]) -> list[str]:
        done = typed(f"python $(dirname $(which hrm-train))/forks.py {shlex.join(commands)}; pwd")
        *statuses, folder = done.stdout.split()
        outputs = [(Path(folder) / f"{number}.out").read_text() for number in range(len(commands))]
        assert [*map(int, statuses)] == [*commands.values()], "\n".join(outputs)
        return outputs

    return typed_in_forks


def test_the_wheel_holds_one_package_and_the_license(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = [Path(name) for name in file.namelist()]
        metadata = file.read(f"hrm_trainer-{VERSION}.dist-info/METADATA").decode()
    assert {name.parts[0] for name in names} == {"hrm_trainer", f"hrm_trainer-{VERSION}.dist-info"}
    assert Path(f"hrm_trainer-{VERSION}.dist-info/licenses/LICENSE") in names
    assert {name.suffix for name in names if name.parts[0] == "hrm_trainer"} <= {
        *(".py", ".typed", ".yaml", ".sh", ".jinja", ".html", ".css", ".mjs")
    }
    assert not [name for name in names if {"tests", "benchmarks", "data", "checkpoints"} & {*name.parts}]
    for line in (REPOSITORY / "requirements.txt").read_text().splitlines():
        if requirement := line.partition("#")[0].strip():
            assert f"Requires-Dist: {requirement}\n" in metadata
    assert "Provides-Extra: sweep\n" in metadata and 'optuna==5.0.0; extra == "sweep"' in metadata


def test_a_source_distribution_holds_what_a_package_needs(dist: Path) -> None:
    """The wheel was built from it. It leaves nothing in the clone."""
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as file:
        names = {Path(*Path(name).parts[1:]) for name in file.getnames()}
    assert {Path("LICENSE"), Path("CHANGELOG.md"), Path("requirements-sweep.txt")} <= names
    assert not [name for name in names if name.parts and name.parts[0] in ("tests", "data", "checkpoints")]
    assert not (REPOSITORY / "build").exists() and not [*REPOSITORY.glob("*.egg-info")]
    assert f"## {VERSION}" in (REPOSITORY / "CHANGELOG.md").read_text(), "CHANGELOG.md has no section of this version"


def test_an_installed_package_trains_resumes_evaluates_and_shows(typed: Typed, typed_in_forks: InForks) -> None:
    told = typed(f"hrm-train {TINY} max_steps=5")
    assert f"code: hrm_trainer {VERSION}" in told.stdout + told.stderr
    typed("hrm-torchrun --nproc-per-node 2 -m hrm_trainer.pretrain resume=auto checkpoint_path=run max_steps=7")
    evaluate, solve = "hrm-evaluate checkpoint=run save_outputs=[inputs,labels]", "hrm-solve checkpoint=run puzzle="
    evaluated, _, shown = typed_in_forks({evaluate: 0, solve + "." * 36: 1, "hrm-view run": 0})
    assert "exact_accuracy=" in evaluated and "wrote view.html" in shown
    program = f"""
import importlib, pkgutil, sys
import hrm_trainer
from hrm_trainer import Solver, __version__
(solution,) = Solver.from_checkpoint("run").solve(["." * 36])
print(__version__, len(solution.answer))
for module in pkgutil.walk_packages(hrm_trainer.__path__, "hrm_trainer."):
    if "ray_" not in module.name:  # these need Ray
        importlib.import_module(module.name)
assert not {set(MINE)} & set(sys.modules), "a module of the package imports one by its name in a clone"
import utils, models, solve
assert utils.MINE and models.MINE and solve.MINE, "the package hides modules of the user"
"""
    assert typed(f"python -c {shlex.quote(program)}").stdout.split() == [VERSION, "36"]


def test_help_mistakes_and_sweeps_name_the_commands(typed: Typed, typed_in_forks: InForks) -> None:
    pytest.importorskip("optuna")
    options = "lr=1e-3,2e-3 sweep.trials=1 debug=tiny device=cpu data_path=data/sudoku-6x6"  # one trial: no timing
    sweep = f"hrm-sweep {options} max_steps=1 eval_every_n_steps=1"
    on_ranks = f"hrm-sweep --dry-run {options} sweep.launcher.name=torchrun sweep.launcher.ranks=2"
    kubernetes = "hrm-kubernetes data_path=/mnt/run/data"
    page, manifest, mistake, plain, torchrun = typed_in_forks(
        {"hrm-train --help": 0, kubernetes: 0, "hrm-train lrr=1": 2, sweep: 0, on_ranks: 0}
    )
    assert "hrm-train: train" in page and "hrm-train resume=auto" in page and "pretrain.py" not in page
    assert "torchrun --nproc-per-node 8 -m hrm_trainer.pretrain " in page
    assert typed("hrm-view --version").stdout == f"hrm-view {VERSION}\n"
    assert "hrm-torchrun " in manifest and '"-m", "hrm_trainer.pretrain"' in manifest
    (line,) = mistake.splitlines()
    assert line.startswith("error: unknown key 'lrr'") and "lr?" in line
    assert "OMP_NUM_THREADS=1 hrm-train " in plain
    assert "torchrun --standalone --nproc-per-node 2 -m hrm_trainer.pretrain " in torchrun
