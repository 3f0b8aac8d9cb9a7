"""Fixtures that many tests share: one small dataset, and undisturbed runs."""

import gc
import getpass
import os
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings as hypothesis_settings

from dataset import build_sudoku_dataset
from tests import runs
from tests.dataset.text.samples import random_dataset
from utils.ranks.launch import without_launcher
from utils.ranks.world import World

# The tests may be started in a job of Slurm. Runs that they start are not ranks of that job.
for name in os.environ.keys() - without_launcher(os.environ).keys():
    del os.environ[name]

# On a few cores, threads slow several processes down. Results are also equal bit for bit only with
# the same number of threads.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

# Tests leave the user's cache of compiled code alone.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"compiled-by-tests-{getpass.getuser()}")

# Without a deadline, tests don't fail on a busy machine.
hypothesis_settings.register_profile("calm", deadline=None)
hypothesis_settings.load_profile("calm")


# pytest gives whole files to its processes (--dist loadfile), in the order of collection
# (--no-loadscope-reorder). A file that takes long must not start last.
LONG_FILES = [
    Path(__file__).parent / name
    for name in (
        "test_readme.py",
        "test_parallel.py",
        "test_parallel_text.py",
        "test_interrupted.py",
        "launch/test_kubernetes.py",
        "models/test_parallel.py",
        "test_lost_ranks.py",
        "test_sweep.py",
        "training/test_recovery.py",
        "test_compiled.py",
    )
]


def pytest_collection_finish() -> None:
    """Leave out of each collection of garbage what stays: PyTorch and thousands of tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.build_data(tmp_path_factory.mktemp("data") / "s4")


@pytest.fixture(scope="session")
def boards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return small datasets of Sudokus of sides 4 and 6, by their boxes."""
    folder = tmp_path_factory.mktemp("boards")
    paths = {box: folder / f"s{box}" for box in ("2x2", "2x3")}
    for box, path in paths.items():
        options = ["--output-dir", str(path), "--generate", "20", "--generate-test", "8", "--box", box]
        assert build_sudoku_dataset.main(options) == 0
    return paths


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_dataset(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def quiet(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run of one rank, made with a user's command."""
    run = tmp_path_factory.mktemp("quiet") / "run"
    command = ["python", str(runs.REPOSITORY / "pretrain.py"), *runs.settings(data, run)]
    done = runs.command(shlex.join(command), run.parent)
    assert done.status == 0, done.stderr
    return run


@pytest.fixture(scope="session")
def quiet_2(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("quiet_2")
    runs.train(runs.settings(data, folder / "run"), folder / "log", ranks=2).ok()
    return folder / "run"


@pytest.fixture
def copied(quiet: Path, tmp_path: Path) -> Path:
    """Return a copy of the quiet run that a test may damage."""
    return Path(shutil.copytree(quiet, tmp_path / "run"))


@pytest.fixture
def evaluate_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> runs.Evaluate:
    """Return a function that runs evaluate.py in this process, and returns the printed lines."""
    import evaluate

    def run(*typed: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["evaluate.py", "device=cpu", *typed])
        capsys.readouterr()
        evaluate.main(World.single())
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"
