"""A checkpoint is whole or absent, whichever process dies. Training continues during a save."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from records.checkpoint import storage
from records.checkpoint import weights as weights_module
from records.checkpoint import writer as writer_module
from records.checkpoint.format import read_name, step_folders
from records.checkpoint.reader import Checkpoint, find_checkpoint, put_back
from records.checkpoint.writer import Checkpointer
from tests import runs
from tests.records.checkpoint.helpers import CONFIG, SLOTS, carry_of, placed, save_step, snapshot_at, weights_at
from tests.spawn import run_ranks
from tests.utils.ranks.helpers import devices_of_threads
from utils import files
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

# pytest resets the filter that records/checkpoint/storage.py sets.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# ---- what is written ---------------------------------------------------------------------------


def test_the_umask_decides_who_may_read_a_checkpoint(tmp_path: Path) -> None:
    for umask in (0o022, 0o077):
        run, before = tmp_path / oct(umask), os.umask(umask)
        try:
            save_step(run, 1, World.single())
        finally:
            os.umask(before)
        found = {file.name: oct(file.stat().st_mode & 0o777) for file in run.rglob("*") if file.is_file()}
        assert found.keys() >= {"model.safetensors", "rank_0000.safetensors", "manifest.json", "latest"}
        assert set(found.values()) == {oct(0o666 & ~umask)}, found


def test_the_newest_steps_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_step(tmp_path / "run", step, World.single(), keep_last_k=2, is_best=step == 2)
    assert [path.name for path in step_folders(tmp_path / "run")] == [f"step_{step:08d}" for step in (2, 4, 5)]


def _saves_weights_that_are_not_finite(world: World, run: Path) -> list[str]:
    checkpointer = Checkpointer(run, connect_devices(world, "cpu"), None)
    checkpointer.save(snapshot_at(8, world), is_best=False)  # integers pass the check, too
    messages = []
    for value in (float("nan"), float("inf"), -float("inf")):
        weights = {"fine": torch.arange(3), "w": torch.tensor([1.0, value])} if world.is_main else {}
        with pytest.raises(UserError) as caught:
            checkpointer.save(snapshot_at(9, world, weights=weights), is_best=False)
        messages.append(str(caught.value))
    checkpointer.wait()
    return messages


def test_weights_must_be_finite(tmp_path: Path) -> None:
    """Only rank 0 has the weights, but all ranks raise the error."""
    for messages in run_ranks(_saves_weights_that_are_not_finite, 2, tmp_path):
        for message in messages:
            assert message.startswith("w is not finite at step 9; the last good checkpoint is ")
            assert message.endswith("step_00000008; go on with a lower lr")
    assert [folder.name[-1] for folder in step_folders(tmp_path)] == ["8"]


# ---- in the background -------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the writer back until the test opens the gate."""
    write, opened = storage.write_tensors, threading.Event()  # type: ignore[attr-defined]

    def gated(*args: Any) -> Any:
        assert opened.wait(30)
        return write(*args)

    monkeypatch.setattr(storage, "write_tensors", gated)
    return opened


def test_training_goes_on_while_a_step_is_written(tmp_path: Path, gate: threading.Event) -> None:
    """The writer stores the values from the moment of the call. `latest` waits for the writer."""
    snapshot = snapshot_at(1, World.single())
    checkpointer = Checkpointer(tmp_path, World.single(), None)
    checkpointer.save(snapshot, is_best=True)
    for tensors in (snapshot.weights, snapshot.shared, snapshot.by_slot):
        for tensor in tensors.values():
            tensor.zero_()
    assert not (tmp_path / "latest").exists() and not step_folders(tmp_path)
    assert checkpointer.last_good == "there is no checkpoint yet"
    gate.set()
    checkpointer.wait()
    checkpoint = Checkpoint.open(tmp_path / "step_00000001")
    assert torch.equal(checkpoint.weights()["a"], weights_at(1)["a"])
    assert torch.equal(checkpoint.load("optimizer")["exp_avg.a"], torch.ones(2, 3))
    assert torch.equal(checkpoint.load_slots(slice(0, SLOTS))["steps"], carry_of(slice(0, SLOTS))["steps"])
    checkpointer.wait()  # a second wait has no error to raise


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    checkpointer = Checkpointer(tmp_path, World.single(), None)
    checkpointer.save(snapshot_at(1, World.single()), is_best=False)
    threading.Timer(0.2, gate.set).start()
    # The dtype, the shape and the names differ, so that values of the first save would be noticed.
    shared = {"ema.a": torch.full((5,), 2.0, dtype=torch.float64)}
    checkpointer.save(snapshot_at(2, World.single(), shared=shared), is_best=False)
    assert [folder.name[-1] for folder in step_folders(tmp_path)][:1] == ["1"]
    checkpointer.wait()
    first, second = (Checkpoint.open(folder) for folder in step_folders(tmp_path))
    assert torch.equal(first.load("ema")["a"], weights_at(1)["a"] / 2)
    assert torch.equal(second.load("ema")["a"], shared["ema.a"]) and not second.sizes("optimizer")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_save_copies_before_later_work_of_the_stream(tmp_path: Path) -> None:
    """This holds for whole and sharded tensors, and when a second save reuses the pinned memory."""
    world = connect_devices(World.single(), "cuda", CONFIG, axes=Axes())
    checkpointer = Checkpointer(tmp_path, world, None)
    for step in (1, 2):
        plain = torch.full((10_000_000,), float(step), device="cuda")
        sharded = placed(world, torch.full((1000, 1000), float(step), device="cuda"))
        shared: dict[str, Tensor] = {"ema.plain": plain, "ema.sharded": sharded}
        checkpointer.save(snapshot_at(step, world, weights={"w": plain}, shared=shared), is_best=False)
        plain.zero_()
        sharded.to_local().zero_()
    checkpointer.wait()
    for step in (1, 2):
        checkpoint = Checkpoint.open(tmp_path / f"step_{step:08d}")
        assert all((tensor == step).all() for tensor in [*checkpoint.load("ema").values(), checkpoint.weights()["w"]])
    sharded = placed(world, torch.zeros(1000, 1000, device="cuda"))
    checkpoint.load_into({"ema.sharded": sharded})
    assert (sharded.to_local() == 2).all()
    world.close()


def test_the_writing_thread_uses_the_card_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first card, where it would open a context of half a gigabyte."""
    devices = devices_of_threads(monkeypatch)
    world = World(device=torch.device("cuda", 1))
    checkpointer = Checkpointer(tmp_path, world, None)
    cloned = partial(tree_map_only, Tensor, partial(torch.clone, memory_format=torch.contiguous_format))
    monkeypatch.setattr(checkpointer, "_stage", cloned)  # the original needs a card
    checkpointer.save(snapshot_at(1, world), is_best=False)
    checkpointer.wait()
    assert devices == {"checkpoint_0": torch.device("cuda", 1)}


def test_a_step_is_on_the_disk_before_it_has_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut could keep the folder's name and lose its files.

    `best` is written before `latest`, so that a kill in between does not lose the best step. Half
    written files of an earlier save do not enter the step.
    """
    synced: list[tuple[str, bool, str, str]] = []

    def sync(folder: Path) -> None:
        name, is_there = str(folder.relative_to(run)), (run / "step_00000008").exists()
        synced.append((name, is_there, read_name(run / "best"), read_name(run / "latest")))

    monkeypatch.setattr(writer_module, "sync_folder", sync)
    checkpointer = Checkpointer(run, World.single(), None)
    checkpointer._writer_id = "mine"
    incomplete = ".incomplete_step_00000008_mine"
    left = run / incomplete / "state" / "rank_0007.safetensors"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    checkpointer.save(snapshot_at(8, World.single()), is_best=True)
    checkpointer.wait()
    old, new = "step_00000006", "step_00000008"
    before = [(f"{incomplete}/state", False, "", old), (incomplete, False, "", old)]
    assert synced == [*before, (".", True, new, old), (".", True, new, new)]
    Checkpoint.open(run / new)
    assert [path.name for path in (run / new / "state").iterdir()] == ["rank_0000.safetensors"]


# ---- death at any moment -----------------------------------------------------------------------


def _save_and_die(run: str, step: int, moment: int) -> None:
    runs.killed_at_file_event(run, moment, 0)
    save_step(Path(run), step, World.single(), keep_last_k=1, is_best=True)


@pytest.mark.faults
@pytest.mark.parametrize("step", [6, 8], ids=["a step that is there already", "a new step"])
def test_killed_at_every_moment_of_a_save(tmp_path: Path, step: int) -> None:
    for moment in range(1, 100):
        run = tmp_path / f"run_{moment}"
        save_step(run, 6, World.single(), keep_last_k=1)
        process = runs.fork(_save_and_die, str(run), step, moment)
        process.join(30)
        put_back(run)
        found = find_checkpoint(run, pytest.fail)
        assert found is not None and found.state.step in (6, step), f"killed at change {moment}"
        assert torch.equal(found.weights()["a"], weights_at(found.state.step)["a"])
        if best := read_name(run / "best"):
            Checkpoint.open(run / best)
        elif step == 8:
            assert found.state.step == 6, f"killed at change {moment}, `latest` names a best step that `best` does not"
        if process.exitcode == 0:
            assert moment > 10, f"a save made only {moment} changes: the test no longer sees all changes"
            return
        assert process.exitcode == -9
        save_step(run, step, World.single(), keep_last_k=1)
        # If `best` was written before the kill, it keeps its step.
        assert {path.name for path in run.iterdir()} <= {f"step_{step:08d}", "latest", "best"}, f"at change {moment}"
    raise AssertionError("no save was finished")


def _dies_within_a_file(run: str, name: str) -> None:
    write_pieces = weights_module.write_pieces

    def half(path: Path, pieces: Any) -> Any:
        written = write_pieces(path, pieces)
        if path.name == name:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    weights_module.write_pieces = half
    save_step(Path(run), 8, World.single(), keep_last_k=1)


@pytest.mark.parametrize("name", ["rank_0000.safetensors", "model.safetensors"])
def test_killed_within_a_file(run: Path, name: str) -> None:
    """keep_last_k never removes the step just written."""
    process = runs.fork(_dies_within_a_file, str(run), name)
    process.join(30)
    assert process.exitcode == -9
    found = find_checkpoint(run, pytest.fail)
    assert found is not None and found.state.step == 6
    assert list(run.glob(f".incomplete_*/**/{name}"))
    save_step(run, 8, World.single())
    assert not list(run.glob(".incomplete*")) and (run / "latest").read_text() == "step_00000008\n"
    # A step with a higher number, left by an earlier part of the run, may be damaged.
    (run / "step_00000008" / "model.safetensors").write_bytes(b"")
    save_step(run, 7, World.single(), keep_last_k=1)
    found = find_checkpoint(run, pytest.fail)
    assert found is not None and found.state.step == 7


# ---- a disk that refuses -----------------------------------------------------------------------


def _fails_at(world: World, run: Path, fail_on: str) -> str:
    """Return the error message of the next save on one rank, and of wait on the other rank."""
    write_synced = files.write_synced

    def refusing(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_half(path: Path, *args: Any) -> Any:
            done = write(path, *args)
            if path.name.startswith(fail_on):
                os.truncate(path, path.stat().st_size // 2)
                raise OSError(28, "No space left on device")
            return done

        return write_half

    weights_module.write_pieces = writer_module.write_pieces = refusing(weights_module.write_pieces)  # type: ignore[attr-defined]
    writer_module.write_synced = files.write_synced = refusing(write_synced)  # type: ignore[attr-defined]
    checkpointer = Checkpointer(run, connect_devices(world, "cpu"), None)
    checkpointer.save(snapshot_at(6, world), is_best=False)
    with pytest.raises(UserError) as caught:
        if world.rank % 2:
            checkpointer.wait()
        else:
            checkpointer.save(snapshot_at(8, world), is_best=False)
    checkpointer.wait()  # the error is raised only once
    return str(caught.value)


@pytest.mark.parametrize("fail_on", ["rank_0001", "rank_0000", "model", "state", "manifest", ".incomplete_latest"])
def test_disk_full_at_each_file(tmp_path: Path, fail_on: str) -> None:
    """One rank has a full disk. Both ranks report it, and `latest` names a whole step."""
    run = tmp_path / "run"
    save_step(run, 4, World.single())
    for message in run_ranks(_fails_at, 2, run, fail_on):
        assert "the checkpoint of step 6 could not be written: [Errno 28] No space left on device" in message
        assert f"the last good checkpoint is {run / 'step_00000004'}" in message
    assert (run / "latest").read_text() == "step_00000004\n"
    for folder in step_folders(run):
        Checkpoint.open(folder)
    assert not list(run.glob(".incomplete_step*"))


def _breaks_before_it_writes(world: World, run: Path) -> str:
    checkpointer = Checkpointer(run, connect_devices(world, "cpu"), None)
    if world.rank == 1:
        checkpointer._write = Mock(side_effect=KeyError("a bug"))  # type: ignore[method-assign]
    checkpointer.save(snapshot_at(6, world), is_best=False)
    with pytest.raises((KeyError, RuntimeError)) as caught:
        checkpointer.wait()
    return str(caught.value)


def _saves_and_ends(run: str) -> None:
    write = writer_module.write_pieces  # type: ignore[attr-defined]

    def slow(*args: Any) -> Any:
        threading.Event().wait(0.2)
        return write(*args)

    writer_module.write_pieces = slow  # type: ignore[attr-defined,assignment]
    Checkpointer(Path(run), World.single(), None).save(snapshot_at(1, World.single()), is_best=False)


def test_a_process_finishes_its_save_before_it_ends(tmp_path: Path) -> None:
    process = runs.fork(_saves_and_ends, str(tmp_path))
    process.join(30)
    assert process.exitcode == 0
    found = find_checkpoint(tmp_path, pytest.fail)
    assert found is not None and found.state.step == 1


def test_no_rank_waits_for_a_thread_that_failed_on_another(tmp_path: Path) -> None:
    said = run_ranks(_breaks_before_it_writes, 2, tmp_path, timeout_s=30)
    assert said == ["the checkpoint that was under way failed on another rank", "'a bug'"]
