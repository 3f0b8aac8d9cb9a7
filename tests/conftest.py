"""Fixtures that many tests share: one small dataset, and the runs that nobody disturbs."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import settings as hypothesis_settings

from tests import runs

# Threads of several processes on a few cores are slower than none, and results are bitwise at an equal number only.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

# A busy machine is no failure.
hypothesis_settings.register_profile("calm", deadline=None)
hypothesis_settings.load_profile("calm")


# Whole files go to a process each (--dist loadfile, in this order by --no-loadscope-reorder): one that takes minutes
# must not be the last to begin.
TESTS = Path(__file__).resolve().parent
LONG_FILES = [
    TESTS / name
    for name in (
        "utils/checkpoint/test_writer.py",
        "utils/checkpoint/test_reader.py",
        "test_readme.py",
        "test_resume.py",
        "models/parallel/test_pipeline.py",
    )
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG_FILES.index(item.path) if item.path in LONG_FILES else len(LONG_FILES))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.build_data(tmp_path_factory.mktemp("data") / "s4")


@pytest.fixture(scope="session")
def quiet(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one rank, made by the command that a user types."""
    run = tmp_path_factory.mktemp("quiet") / "run"
    command = ["python", str(runs.REPOSITORY / "pretrain.py"), *runs.settings(data, run)]
    done = runs.command(shlex.join(command), run.parent)
    assert done.status == 0, done.stderr
    return run


@pytest.fixture(scope="session")
def quiet_2(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two ranks."""
    folder = tmp_path_factory.mktemp("quiet_2")
    runs.train(runs.settings(data, folder / "run"), folder / "log", ranks=2).ok()
    return folder / "run"


@pytest.fixture
def copied(quiet: Path, tmp_path: Path) -> Path:
    """A copy of the quiet run, to be damaged."""
    return Path(shutil.copytree(quiet, tmp_path / "run"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a run's output goes."""
    return tmp_path / "log"
