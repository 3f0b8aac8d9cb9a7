"""A run ends with a reason on every rank if its dataset is deleted, rebuilt or truncated."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset import loader
from dataset.loader import EvalLoader, TrainLoader
from dataset.sampler import Sampler
from dataset.schema import MappedFile, open_split, unchanged
from dataset.tasks.maze import MazeTask
from tests import runs
from utils.errors import UserError
from utils.ranks.world import World

pytestmark = pytest.mark.faults


def _replaced(file: Path) -> None:
    """Replace the file by an equal copy with the same date, as builders and copy programs do."""
    copy = file.with_suffix(".copy")
    shutil.copy2(file, copy)
    copy.rename(file)


def _rewritten(file: Path) -> None:
    """Rewrite the file in place, with the same size."""
    array = np.load(file)
    np.save(file, array[::-1])


# What happens to the file, and the reason in the message.
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "emptied": (lambda file: os.truncate(file, 0), "was written to or replaced (0 bytes, not {size})"),
    "deleted": (Path.unlink, "can't be found any more (No such file or directory)"),
    "replaced": (_replaced, "was written to or replaced ({size} bytes, not {size})"),
    "rewritten": (_rewritten, "was written to or replaced ({size} bytes, not {size})"),
}


def _message(file: Path, what: str) -> str:
    what = what.format(size=file.stat().st_size)
    return f"{file} {what}: it was changed while the run reads it; restore it, then resume"


@pytest.fixture
def own_data(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "own"))


# ---- real runs, real files ---------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_changed_file_is_noticed(own_data: Path, tmp_path: Path, case: str) -> None:
    """To read, copy and back up a file does not change it."""
    puzzles = open_split(own_data, "train").sets["all"]
    change, what = CASES[case]
    file = puzzles.files[0].path
    shutil.copy2(file, tmp_path / file.name)
    os.link(file, tmp_path / f"{file.name}.backup")
    file.chmod(0o644)
    with unchanged(puzzles.files):
        pass
    message = f"{file} {what.format(size=file.stat().st_size)}"
    with pytest.raises(UserError, match=re.escape(message)), unchanged(puzzles.files):
        change(file)
    with pytest.raises(UserError), unchanged(puzzles.files):
        pytest.fail("the change is noticed before the file is read")


def _reads_slowly(rank: int) -> None:
    """Make the loop wait for every batch, so that a missing file is noticed late."""
    host_part = TrainLoader._host_part

    def slowly(*args: Any) -> Any:
        time.sleep(0.1)
        return host_part(*args)

    TrainLoader._host_part = slowly  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("case", "name", "ranks", "hook"),
    [
        ("deleted", "train/all__inputs.npy", 1, runs.slowly),
        ("emptied", "train/all__inputs.npy", 2, runs.slowly),
        ("emptied", "train/all__inputs.npy", 2, _reads_slowly),
        ("emptied", "test/all__labels.npy", 2, runs.slowly),
    ],
)
def test_every_rank_ends_with_the_reason(
    own_data: Path, tmp_path: Path, log: Path, case: str, name: str, ranks: int, hook: runs.Hook
) -> None:
    change, what = CASES[case]
    file, run = own_data / name, tmp_path / "run"
    message = _message(file, what)
    often = {"eval_every_n_steps": 5 if "test" in name else None}
    running = runs.start(runs.settings(own_data, run, max_steps=10_000, **often), log, ranks=ranks, hook=hook)
    runs.until(lambda: runs.latest(run) >= 6, running)  # an evaluation at step 5 has ended
    change(file)
    assert running.wait(timeout_s=30).error() == f"error: {message}"


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_run_saves_its_steps_before_it_ends(
    own_data: Path, data: Path, quiet_2: Path, tmp_path: Path, log: Path, split: str
) -> None:
    """Only the end of the run saves a checkpoint here."""
    file, run = own_data / split / "all__labels.npy", tmp_path / "run"
    arguments = runs.settings(own_data, run, checkpoint_every_n_steps=None, checkpoint_every_eval="false")
    running = runs.start(arguments, log, ranks=2, hook=runs.slowly)
    runs.until(lambda: (run / "metrics.jsonl").exists() and len(runs.rows(run)) > 0, running)
    file.unlink()
    assert str(file) in running.wait(timeout_s=30).error()
    assert runs.latest(run) == 5 if split == "test" else 1 <= runs.latest(run) <= 7
    again = [f"checkpoint_path={run}", "resume=auto"]
    assert str(file) in runs.train(again, log, ranks=2).error()
    shutil.copy(data / split / "all__labels.npy", file)
    runs.train(again, log, ranks=2).ok()
    runs.assert_same_run(run, quiet_2)


def _one_rank_finds_other_data(rank: int) -> None:
    """Make one rank find other data in its first batch, as if a file server had told it first."""

    def unchanged(files: Any) -> Any:
        raise UserError("the file is another one")

    if rank == 1:
        loader.unchanged = unchanged  # type: ignore[attr-defined]


def test_data_that_vanish_before_the_first_step_end_the_run(own_data: Path, tmp_path: Path, log: Path) -> None:
    ended = runs.train(runs.settings(own_data, tmp_path / "run"), log, ranks=2, hook=_one_rank_finds_other_data)
    assert ended.error() == "error: the file is another one"


def test_data_that_are_read_whole_must_be_unchanged(own_data: Path) -> None:
    """Data are read whole for the device and for a maze's symmetries."""
    split = open_split(own_data, "train")
    sets = list(split.sets.values())
    sampler = Sampler(sets, seed=0, epochs=1, global_batch_size=2)
    _rewritten(own_data / "train" / "all__labels.npy")
    with pytest.raises(UserError, match=r"all__labels.npy was written to or replaced"):
        TrainLoader(split, sampler, World.single(), data_on="device")
    with pytest.raises(UserError, match=r"all__labels.npy was written to or replaced"):
        MazeTask(4).symmetries(sets)


def _emptied_amid_an_evaluation(file: str, rank: int) -> None:
    """Make rank 1 empty the file between two of its batches.

    Rank 0 waits for that before it reads on. A file that shrinks during a read kills the reader.
    """
    batches = EvalLoader.batches

    def emptied(*args: Any) -> Any:
        for index, batch in enumerate(batches(*args)):
            yield batch
            if index == 0 and rank == 1:
                os.truncate(file, 0)
            while os.path.getsize(file) > 0:
                time.sleep(0.001)

    EvalLoader.batches = emptied  # type: ignore[method-assign,assignment]


def test_test_data_that_vanish_amid_an_evaluation_end_the_run(own_data: Path, tmp_path: Path, log: Path) -> None:
    file, run = own_data / "test" / "all__labels.npy", tmp_path / "run"
    message = _message(file, CASES["emptied"][1])
    arguments = runs.settings(own_data, run, eval_batch_size=4)
    hook = runs.with_arguments(_emptied_amid_an_evaluation, str(file))
    assert runs.train(arguments, log, ranks=2, hook=hook).error() == f"error: {message}"
    assert runs.latest(run) == 5


def test_a_deleted_file_does_not_matter_once_the_data_are_on_the_device(
    own_data: Path, tmp_path: Path, log: Path
) -> None:
    file, run = own_data / "train" / "all__inputs.npy", tmp_path / "run"
    arguments = runs.settings(own_data, run, data_on="device", eval_every_n_steps=None)
    running = runs.start(arguments, log, hook=runs.slowly)
    runs.until(lambda: runs.latest(run) >= 2, running)
    file.unlink()
    running.wait().ok()


def _emptied_amid_a_read(file: str, rank: int) -> None:
    """Empty the file between its check and its read, once training has begun."""
    look, calls = MappedFile.require_unchanged, iter(range(20))

    def then_empty(mapped: MappedFile) -> None:
        look(mapped)
        if str(mapped.path) == file and next(calls, None) is None:
            os.truncate(file, 0)

    MappedFile.require_unchanged = then_empty  # type: ignore[method-assign,assignment]


def test_a_file_emptied_amid_a_read_ends_the_run_with_a_traceback(own_data: Path, tmp_path: Path, log: Path) -> None:
    # While a checkpoint is saved, Python prints the frames of a thread that runs on, and may crash.
    rare = {"eval_every_n_steps": None, "checkpoint_every_n_steps": 10_000}
    arguments = runs.settings(own_data, tmp_path / "run", max_steps=10_000, **rare)
    hook = runs.with_arguments(_emptied_amid_a_read, str(own_data / "train" / "all__labels.npy"))
    ended = runs.train(arguments, log, hook=hook)
    assert ended.status == -signal.SIGBUS, ended.output
    assert "Fatal Python error: Bus error" in ended.output and "loader.py" in ended.output
