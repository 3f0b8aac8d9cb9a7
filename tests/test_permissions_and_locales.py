"""Folders that may not be written, names that are no UTF-8, and a locale that knows ASCII alone."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

# Each runs in a fork of an interpreter that was started in a locale of ASCII alone.
_IN_ASCII = """
import os, sys
import evaluate, pretrain
from utils.program import run

for line in sys.argv[1:]:
    name, *overrides = line.split()
    if (child := os.fork()) == 0:
        sys.argv = [name, *overrides]
        run({"evaluate.py": evaluate.main, "pretrain.py": pretrain.main}[name])
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
"""


def _as_user(words: list[str], cwd: str, log: str) -> None:
    """Run a program and, as root, give up the right to read and write every file."""
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for index in range(3):
        sets[index] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, sets) == 0
    runs._script(words, cwd, [log, log], {})


def _run(cwd: Path, log: Path, name: str, *typed: str) -> runs.Finished:
    log.unlink(missing_ok=True)
    words = [str(runs.REPOSITORY / name), *typed]
    return runs.Running([runs.fork(_as_user, words, str(cwd), str(log))], log).wait()


def _build(log: Path, box: str) -> runs.Finished:
    sizes = ["--generate", "20", "--generate-test", "5", "--box", box]
    return _run(log.parent, log, "dataset/build_sudoku_dataset.py", *sizes, "--output-dir", "data")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "café"
    runs.train(runs.settings(data, folder, wandb__group="é"), folder.parent / "log").ok()
    return folder


def _made_read_only(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_dataset_replaces_one_that_cannot_be_removed(tmp_path: Path, log: Path) -> None:
    _build(log, "2x2").ok()
    before = (tmp_path / "data/train/all__inputs.npy").read_bytes()
    _made_read_only(tmp_path / "data")
    said = _build(log, "2x3").ok()
    assert said.count("WARNING") == 1 and ".data.replaced" in said
    now = (tmp_path / "data/train/all__inputs.npy").read_bytes()
    assert now != before and (tmp_path / ".data.replaced/train/all__inputs.npy").read_bytes() == before
    assert ".data.replaced" in _build(log, "2x2").error()
    assert (tmp_path / "data/train/all__inputs.npy").read_bytes() == now, "a refused build changed the dataset"


def test_a_run_goes_on_beside_steps_that_cannot_be_removed(run: Path, tmp_path: Path, log: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    newest, following = (copied / f"step_{number:08d}" for number in (runs.LAST_STEP, runs.LAST_STEP + 1))
    # The last two are what earlier saves have left.
    for name in (following.name, ".incomplete_removed_old", f".incomplete_replaced_{following.name}"):
        shutil.copytree(newest, copied / name)
    for folder in filter(Path.is_dir, [*copied.iterdir()]):
        _made_read_only(folder)
    (copied / "best").unlink(missing_ok=True)
    said = _run(tmp_path, log, "pretrain.py", "resume=run", f"max_steps={runs.LAST_STEP + 1}", "keep_last_k=1").ok()
    assert [path.name for path in copied.glob("step_*")] == [following.name] and os.access(following, os.W_OK)
    left = [path.name for path in copied.glob(".incomplete_*")]
    assert len(left) >= 3 and all(said.count(name) for name in left), "a folder is left without a word"


def test_a_page_is_written_although_the_folder_of_its_answers_may_not_be(run: Path, log: Path) -> None:
    outputs = run / "eval_outputs" / f"step_{runs.LAST_STEP:08d}"
    outputs.mkdir(parents=True)
    _made_read_only(outputs)
    try:
        said = _run(run.parent, log, "view.py", run.name).ok()
    finally:
        outputs.chmod(0o755)
    assert (run.parent / "view.html").is_file()
    assert "Traceback" not in said and "Permission denied" in said


@pytest.mark.parametrize("program", ["pretrain.py", "view.py"])
def test_a_folder_whose_name_is_no_utf8_is_refused_before_any_work(
    program: str, run: Path, tmp_path: Path, log: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    refused = _run(folder, log, program, str(run))
    assert "is no UTF-8" in refused.error() and refused.output.count("\n") == 1 and not any(folder.iterdir())


@pytest.mark.slow
def test_a_checkpoint_is_whole_in_any_locale(run: Path, data: Path, tmp_path: Path) -> None:
    """A stored path that the locale lacks is one line."""
    here, other = tmp_path / "ascii", tmp_path / "of_other_data"
    here.symlink_to(run)
    (tmp_path / "dätä").symlink_to(data)
    runs.train(runs.settings(tmp_path / "dätä", other, max_steps=1), tmp_path / "log").ok()
    lines = [f"evaluate.py checkpoint={here}/latest", f"pretrain.py resume={here}/latest run_name=b max_steps=13"]
    refused = [f"evaluate.py checkpoint={other}", f"pretrain.py resume={other} max_steps=2"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment["PYTHONPATH"] = str(runs.REPOSITORY)
    command = [sys.executable, "-c", _IN_ASCII, *lines, *refused]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    said = done.stderr.decode(errors="replace")
    assert [line for line in said.splitlines() if line.startswith("status")] == [*["status 0"] * 2, *["status 2"] * 2]
    assert "Traceback" not in said and "LC_ALL" not in (parts := said.split("status"))[1]
    assert all("LC_ALL" in part for part in parts[2:4]), said


def test_a_checkpoint_of_somebody_else_is_not_called_damaged(run: Path, tmp_path: Path, log: Path) -> None:
    manifest = run / f"step_{runs.LAST_STEP:08d}" / "manifest.json"
    manifest.chmod(0)
    try:
        error = _run(tmp_path, log, "evaluate.py", f"checkpoint={run}").error()
    finally:
        manifest.chmod(0o644)
    assert "Permission denied" in error and "damaged" not in error
