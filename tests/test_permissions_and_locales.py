"""Folders that may not be written, names that are no UTF-8, and a locale that knows ASCII alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

# root may write everywhere, so these capabilities are dropped.
_CAPABILITIES = "-dac_override,-dac_read_search"
_AS_USER = [] if os.getuid() else ["setpriv", f"--bounding-set={_CAPABILITIES}", f"--inh-caps={_CAPABILITIES}"]
_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def _run(cwd: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [*_AS_USER, sys.executable, str(runs.REPOSITORY / words[0]), *words[1:]]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, timeout=120)


def _build(cwd: Path, box: str) -> subprocess.CompletedProcess[bytes]:
    sizes = ["--generate", "20", "--generate-test", "5", "--box", box]
    return _run(cwd, "dataset/build_sudoku_dataset.py", *sizes, "--output-dir", "data")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose name is not ASCII."""
    folder = tmp_path_factory.mktemp("run") / "café"
    runs.train(runs.settings(data, folder, wandb__group="é"), folder.parent / "log").ok()
    return folder


def _made_read_only(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_dataset_replaces_one_that_cannot_be_removed(tmp_path: Path) -> None:
    assert _build(tmp_path, "2x2").returncode == 0
    before = (tmp_path / "data/train/all__inputs.npy").read_bytes()
    _made_read_only(tmp_path / "data")
    built = _build(tmp_path, "2x3")
    assert built.returncode == 0 and built.stderr.count(b"WARNING") == 1 and b".data.replaced" in built.stderr
    now = (tmp_path / "data/train/all__inputs.npy").read_bytes()
    assert now != before and (tmp_path / ".data.replaced/train/all__inputs.npy").read_bytes() == before
    again = _build(tmp_path, "2x2")
    assert again.returncode == 2 and b".data.replaced" in again.stderr
    assert (tmp_path / "data/train/all__inputs.npy").read_bytes() == now, "a refused build changed the dataset"


def test_a_run_goes_on_beside_steps_that_cannot_be_removed(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    newest, following = (copied / f"step_{number:08d}" for number in (runs.LAST_STEP, runs.LAST_STEP + 1))
    # The last two are what earlier saves have left.
    for name in (following.name, ".incomplete_removed_old", f".incomplete_replaced_{following.name}"):
        shutil.copytree(newest, copied / name)
    for folder in filter(Path.is_dir, [*copied.iterdir()]):
        _made_read_only(folder)
    (copied / "best").unlink(missing_ok=True)
    done = _run(tmp_path, "pretrain.py", "resume=run", f"max_steps={runs.LAST_STEP + 1}", "keep_last_k=1")
    assert done.returncode == 0, done.stderr.decode()
    assert [path.name for path in copied.glob("step_*")] == [following.name] and os.access(following, os.W_OK)
    left = [path.name for path in copied.glob(".incomplete_*")]
    assert len(left) >= 3 and all(done.stderr.count(name.encode()) for name in left), "a folder is left without a word"


def test_a_page_is_written_although_the_folder_of_its_answers_may_not_be(run: Path) -> None:
    outputs = run / "eval_outputs" / f"step_{runs.LAST_STEP:08d}"
    outputs.mkdir(parents=True)
    _made_read_only(outputs)
    try:
        viewed = _run(run.parent, "view.py", run.name)
    finally:
        outputs.chmod(0o755)
    assert viewed.returncode == 0 and (run.parent / "view.html").is_file()
    assert b"Traceback" not in viewed.stderr and b"Permission denied" in viewed.stdout + viewed.stderr


@pytest.mark.parametrize("program", ["pretrain.py", "view.py"])
def test_a_folder_whose_name_is_no_utf8_is_refused_before_any_work(program: str, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    refused = _run(folder, program, str(run))
    assert refused.returncode == 2 and refused.stderr.count(b"\n") == 1, refused.stderr.decode(errors="replace")
    assert b"is no UTF-8" in refused.stderr and not any(folder.iterdir())


@pytest.mark.parametrize(
    "words", ["evaluate.py checkpoint=latest", "pretrain.py resume=latest run_name=b max_steps=13"]
)
def test_a_checkpoint_is_whole_in_any_locale(words: str, run: Path, data: Path, tmp_path: Path) -> None:
    here = tmp_path / "ascii"
    here.symlink_to(run)
    program, *overrides = words.replace("latest", str(here / "latest")).split()
    done = _run(tmp_path, program, *overrides, **_ASCII)
    assert done.returncode == 0, done.stderr.decode(errors="replace")


def test_a_stored_path_that_the_locale_lacks_is_one_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "dätä").symlink_to(data)
    runs.train(runs.settings(tmp_path / "dätä", tmp_path / "run"), tmp_path / "log").ok()
    for words in ("evaluate.py checkpoint=run", "pretrain.py resume=run max_steps=13"):
        refused = _run(tmp_path, *words.split(), **_ASCII)
        assert refused.returncode == 2 and b"Traceback" not in refused.stderr, refused.stderr.decode(errors="replace")
        assert b"LC_ALL" in refused.stderr


def test_a_checkpoint_of_somebody_else_is_not_called_damaged(run: Path, tmp_path: Path) -> None:
    manifest = run / f"step_{runs.LAST_STEP:08d}" / "manifest.json"
    manifest.chmod(0)
    try:
        refused = _run(tmp_path, "evaluate.py", f"checkpoint={run}")
    finally:
        manifest.chmod(0o644)
    assert refused.returncode == 2 and b"Permission denied" in refused.stderr and b"damaged" not in refused.stderr
