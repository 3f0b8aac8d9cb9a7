"""A user's mistake gives one line with the value and the correction, and leaves no file behind."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import torch

from pretrain import build_state, train
from tests import runs
from tests.in_process import load_run
from tests.spawn import world_of
from training.config import PretrainConfig
from training.data import Sizes, require_same_sizes
from training.resume import read_start
from training.splits import open_data, sizes_of_checkpoint
from utils.errors import UserError
from utils.ranks.launch import Launch
from utils.ranks.setup import connect_devices
from utils.ranks.world import World
from utils.run.lock import RunLock
from utils.run.stop import StopSignal

SINGLE = World.single()


# ---- as the user meets it: real processes ------------------------------------------------------


# The arguments of a program, and the beginning of its error line.
MISTAKES = {
    "unknown key": ("pretrain.py data_path={data} epoch=3", "error: unknown key 'epoch'; did you mean epochs"),
    "unwritable": (
        "pretrain.py debug=tiny device=cpu data_path={data} checkpoint_path=a_file/run",
        "error: can't write to a_file/run: Not a directory; ",
    ),
    "text for weights": (
        "evaluate.py checkpoint=a_file data_path={data}",
        "error: a_file is no file of weights (safetensors, or written by torch.save); give one, or a run",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a_file").write_text("no weights")
    return tmp_path


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_with_status_2_and_leaves_no_file(data: Path, folder: Path, case: str) -> None:
    arguments, message = MISTAKES[case]
    line = f"CUDA_VISIBLE_DEVICES= python {runs.REPOSITORY}/{arguments.format(data=data)}"
    ended = runs.command(line, folder)
    assert ended.status == 2, ended.stderr
    assert ended.stderr.startswith(message)
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n")
    assert ended.stdout == ""
    assert [path.name for path in folder.rglob("*")] == ["a_file"]


def test_all_ranks_together_give_one_line(folder: Path) -> None:
    """torchrun adds its own report, without a traceback of this project, and exits with 1."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*torchrun, str(runs.REPOSITORY / "pretrain.py"), "data_path=data/nowhere", "device=cpu"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    (error,) = [line for line in lines if "no dataset" in line]
    assert error.startswith("error: no dataset at data/nowhere: ")
    assert "exitcode  : 2" in ended.stderr
    assert "agree" not in ended.stderr and "UserError" not in ended.stderr
    assert ended.stdout == ""
    assert [path.name for path in folder.rglob("*")] == ["a_file"]


def test_a_reader_that_leaves_early_is_no_fault() -> None:
    """As in `python pretrain.py --help | head -1`, where the rest of the page finds no reader."""
    command = [sys.executable, "pretrain.py", "--help"]
    process = subprocess.Popen(command, cwd=runs.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr.read() == ""


def test_a_reader_of_everything_that_leaves_early_is_no_fault(data: Path) -> None:
    """As in `python dataset/validate.py DATASET 2>&1 | head -1`, also for lines of progress."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "dataset/validate.py", f"data_path={data}"]
    process = subprocess.Popen(command, cwd=runs.REPOSITORY, stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(timeout=120) == 0


@pytest.mark.parametrize(("redirected", "status"), [(">&-", 0), (">/dev/full", 2)])
def test_a_page_that_cannot_be_printed(tmp_path: Path, redirected: str, status: int) -> None:
    command = f"{shlex.quote(sys.executable)} pretrain.py --help {redirected}"
    ended = subprocess.run(["bash", "-c", command], cwd=runs.REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ended.returncode == status, ended.stderr
    expected = "error: the output can't be written (No space left on device); free its disk, or send it elsewhere\n"
    assert ended.stderr == (expected if status else "")


class _SlowTerminal:
    """A stderr that takes half a second for each write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        time.sleep(0.5)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def _rank_0_speaks_slowly(rank: int) -> None:
    if rank == 0:
        sys.stderr = _SlowTerminal(sys.stderr)


def test_no_rank_exits_before_the_line_is_printed(log: Path) -> None:
    """torchrun kills the other ranks as soon as one rank has exited."""
    typed = ["data_path=data/nowhere", "device=cpu"]
    running = runs.start(typed, log, ranks=2, hook=_rank_0_speaks_slowly)
    running.processes[1].join(60)
    said = running.output
    assert running.wait().error().startswith("error: no dataset at data/nowhere")
    assert said.startswith("error: no dataset"), "rank 1 exited before rank 0 had printed the error"


# ---- in this process ---------------------------------------------------------------------------


def _start(data: Path, run: Path, **changes: object) -> PretrainConfig:
    return read_start(runs.settings(data, run, **changes), RunLock(), Launch()).config


def _run(data: Path, run: Path, world: World = SINGLE, **changes: object) -> None:
    """Run what main() does after reading the command line."""
    with RunLock() as lock:
        start = read_start(runs.settings(data, run, **changes), lock, Launch())
        opened = open_data(start.config, world)
        train(start, opened, build_state(start, opened, world), StopSignal(), lock, world)


def _mistake(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:  # a plain ValueError would count as a fault
        call()
    message = str(caught.value)
    assert "\n" not in message and 20 < len(message) < 600
    return message


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"lr": -1e-4}, "lr: input should be greater than or equal to 0, but it is -0.0001"),
        ({"arch__hidden_size": 30, "arch__num_heads": 4}, "hidden_size 30 is not divisible by num_heads 4"),
        ({"arch__hidden_size": 6, "arch__num_heads": 2}, "hidden_size / num_heads is 3, but rope positions"),
        ({"optim": "muon", "optim__rest": "sgd"}, "optim.rest: "),
    ],
)
def test_an_option_out_of_range_is_refused(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    message = _mistake(lambda: _start(tmp_path / "no data needed", tmp_path / "run", **changes))
    assert message.count(expected) == 1, message


def test_a_batch_that_the_ranks_do_not_divide_is_refused(data: Path, tmp_path: Path) -> None:
    config = _start(data, tmp_path / "run", global_batch_size=16)
    # The other ranks of this world do not exist, because the check comes before the first
    # collective.
    world = world_of(1, 3)
    object.__setattr__(world, "gather_objects", lambda value: [value])
    message = _mistake(lambda: open_data(config, world))
    assert message == "global_batch_size=16 can't be split over 3 ranks; take 18, or another number of ranks"


def test_a_folder_with_another_run_is_refused(data: Path, quiet: Path) -> None:
    message = _mistake(lambda: _start(data, quiet))
    assert message.startswith(f"{quiet} already holds checkpoints (newest step_00000012); resume=auto continues")


def test_too_few_examples_for_one_batch_are_refused(data: Path, tmp_path: Path) -> None:
    message = _mistake(lambda: _run(data, tmp_path / "run", epochs=2, global_batch_size=64))
    assert message == ("2 epochs don't fill one global batch of 64 examples; raise epochs or lower global_batch_size")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("metric", ["eval/all/exact", "eval/test/exact_accuracy", "eval/all/exact_accuracy_at_step/9"])
def test_a_best_metric_that_no_evaluation_has_is_refused(data: Path, tmp_path: Path, metric: str) -> None:
    message = _mistake(lambda: _run(data, tmp_path / "run", best_metric=metric))
    before, _, choices = message.partition("; take one of ")
    assert before == f"best_metric={metric} is no metric of this data"
    assert "eval/all/exact_accuracy" in choices.split(", ")
    assert not (tmp_path / "run").exists()


# ---- data that disagrees with dataset.json -----------------------------------------------------


@pytest.fixture
def copied_data(data: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(data, tmp_path / "data"))
    (copy / "fingerprint.json").unlink(missing_ok=True)
    return copy


def _edit(folder: Path, split: str, array: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    file = folder / split / f"all__{array}.npy"
    np.save(file, change(np.load(file)))


def _set_json(folder: Path, split: str, **values: object) -> None:
    file = folder / split / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _with(index: tuple[int, ...], value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.astype(np.int32)
        array[index] = value
        return array

    return change


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "token out of range": (lambda d: _edit(d, "train", "inputs", _with((3, 5), 6)), "row 3 has token 6, but 0 to 5"),
    "identifier": (
        lambda d: _edit(d, "train", "puzzle_identifiers", _with((2,), 5)),
        "row 2 has puzzle identifier 5, but 0 to 0",
    ),
    "row length": (lambda d: _edit(d, "train", "inputs", lambda a: a[:, :-1]), "rows have 15 tokens, but seq_len"),
    "floats": (lambda d: _edit(d, "train", "inputs", lambda a: a.astype(np.float32)), "holds float32"),
    "pickle": (
        lambda d: np.save(d / "train" / "all__inputs.npy", np.array([{}] * 3), allow_pickle=True),
        "needs pickle: rebuild the dataset",
    ),
    "truncated": (lambda d: _truncate(d / "train" / "all__labels.npy"), "it is truncated, damaged or needs pickle"),
    "no split": (lambda d: shutil.rmtree(d / "test"), "dataset.json is missing; build"),
    "no JSON": (lambda d: (d / "train" / "dataset.json").write_text("{"), "dataset.json: is no JSON"),
    "groups": (lambda d: _set_json(d, "train", total_groups=1), "total_groups is 1, but the sets hold"),
    "seq_len": (lambda d: _set_json(d, "test", seq_len=81), "but seq_len is 81; rebuild"),
    "vocabulary": (
        lambda d: _set_json(d, "test", vocab_size=9),
        "and a vocabulary of 9, but the model was trained on ",
    ),
    "identifiers": (lambda d: _set_json(d, "test", num_puzzle_identifiers=9), "has 9 puzzle identifiers, but"),
    "text for a number": (lambda d: _set_json(d, "train", seq_len="16"), "dataset.json: seq_len: "),
    "order of indices": (lambda d: _edit(d, "train", "puzzle_indices", lambda a: a[::-1]), "does not rise"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_data_that_contradict_their_description_are_refused(copied_data: Path, tmp_path: Path, case: str) -> None:
    damage, expected = DAMAGE[case]
    config = _start(copied_data, tmp_path / "run")
    damage(copied_data)
    message = _mistake(lambda: open_data(config, SINGLE))
    assert expected in message
    assert str(copied_data) in message


def test_only_evaluation_needs_a_test_split(copied_data: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied_data / "test")
    opened = open_data(_start(copied_data, tmp_path / "run", eval_every_n_steps=None), SINGLE)
    assert opened.test is None and list(opened.fingerprint) == ["train"]


# ---- checkpoints of something else -------------------------------------------------------------


def test_scoring_data_of_another_task_is_refused(quiet: Path, data: Path, copied_data: Path, tmp_path: Path) -> None:
    config, _, checkpoint = load_run(quiet, SINGLE)
    sizes = sizes_of_checkpoint(checkpoint, config.arch)
    assert isinstance(sizes, Sizes)
    for split in ("train", "test"):
        _set_json(copied_data, split, vocab_size=9)
    other = open_data(_start(copied_data, tmp_path / "run"), SINGLE).puzzles("test")
    message = _mistake(lambda: require_same_sizes(sizes, other, config.puzzle_arch, "data/own"))
    assert "a vocabulary of 9, but the model was trained on data/own, with" in message and message.endswith(
        "take data of the same task"
    )
    own = open_data(_start(data, tmp_path / "run2"), SINGLE).puzzles("test")
    require_same_sizes(sizes, own, config.puzzle_arch, "data/own")
    assert Sizes.of(own) == sizes


def test_resuming_with_another_architecture_is_refused(copied: Path, data: Path) -> None:
    message = _mistake(lambda: _run(data, copied, resume="auto", arch__hidden_size=64))
    assert "doesn't fit this model: " in message
    assert "arch differs in hidden_size: 32 -> 64" in message


def test_resuming_with_other_data_is_refused(copied: Path, copied_data: Path) -> None:
    _edit(copied_data, "train", "inputs", lambda a: a[::-1].copy())
    message = _mistake(lambda: _run(copied_data, copied, resume="auto"))
    assert (
        f"was trained on other data than {copied_data} holds now (train changed); give the data_path of that" in message
    )


def test_evaluating_a_path_without_a_checkpoint_is_refused(data: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        assert _mistake(partial(load_run, path, SINGLE)).startswith(f"there is no checkpoint at {path}; give")
    assert f"{data} is a dataset, which data_path takes" in _mistake(lambda: load_run(data, SINGLE))


def test_evaluating_a_damaged_checkpoint_is_refused(copied: Path) -> None:
    weights = copied / "step_00000012" / "model.safetensors"
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1
    weights.write_bytes(contents)
    message = _mistake(lambda: load_run(copied / "step_00000012", SINGLE))
    assert "is damaged: the contents of model.safetensors were altered" in message


def test_a_missing_device_is_refused() -> None:
    if not torch.cuda.is_available():
        assert _mistake(lambda: connect_devices(SINGLE, "cuda")).startswith("device=cuda, but PyTorch finds no")
    if not torch.backends.mps.is_available():
        assert _mistake(lambda: connect_devices(SINGLE, "mps")).startswith("device=mps, but PyTorch finds no")
