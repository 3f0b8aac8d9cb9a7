"""Checkpoints: whole or not there, whoever dies when; read by any number of ranks, without running anything."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import runs
from tests.spawn import run_ranks
from utils import checkpoint as checkpoint_module
from utils.checkpoint import (
    Checkpoint,
    Checkpointer,
    RunState,
    Snapshot,
    find_checkpoint,
    put_back,
    require_finite_weights,
    step_folders,
)
from utils.dist import UserError, World

SLOTS = 7


def _silent(text: str) -> None:
    raise AssertionError(f"no warning was due: {text}")


def _weights(step: int) -> dict[str, Tensor]:
    # A transposed view: what is saved has to be made contiguous.
    return {"a": torch.full((3, 2), float(step)).T, "b": torch.arange(4, dtype=torch.bfloat16)}


def _carry(slots: slice) -> dict[str, Tensor]:
    rows = torch.arange(SLOTS)[slots]
    return {"steps": rows.int(), "state.z": rows.view(-1, 1) * torch.ones(1, 2), "halted": rows % 2 == 0}


def _state(step: int) -> RunState:
    return RunState(
        step=step,
        draws=8 * step,
        open_steps=1,
        open_slots=8,
        best=0.1 + 0.2,
        evaluations_since_best=2,
        pending_row=None,
        wandb_run_id="abc",
        fingerprint={"train": "f"},
        task={"seq_len": 16},
        config={"lr": 0.1},
    )


def _save(run: Path, step: int, world: World, *, keep_last_k: int | None = None, is_best: bool = False) -> None:
    run.mkdir(exist_ok=True, parents=True)
    slots = world.slice_of(SLOTS)
    shared = {"model": _weights(step), "optimizer": {"exp_avg.a": torch.ones(2, 3)}}
    snapshot = Snapshot(shared=shared, slots=slots, by_slot=_carry(slots), state=_state(step))
    Checkpointer(run, world, keep_last_k).save(snapshot, is_best=is_best)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with steps 2, 4 and 6."""
    for step in (2, 4, 6):
        _save(tmp_path / "run", step, World.single())
    return tmp_path / "run"


def _fix_manifest(folder: Path, *, name: str | None = None) -> None:
    """Make the manifest agree with what lies there, as a forger would; `name` adds an entry."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for file in [*manifest["files"], *([name] if name else [])]:
        contents = (folder / file).read_bytes()
        manifest["files"][file] = {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


# ---- what is written -----------------------------------------------------------------------------------


def test_what_was_saved_is_loaded(run: Path) -> None:
    checkpoint = find_checkpoint(run, _silent)
    assert checkpoint is not None
    assert checkpoint.state == _state(6)
    for loaded, saved in (
        (checkpoint.load("model"), _weights(6)),
        (checkpoint.load_slots(slice(0, SLOTS)), _carry(slice(0, SLOTS))),
    ):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) and loaded[name].dtype == saved[name].dtype for name in saved)


def test_weights_are_plain_safetensors(quiet: Path) -> None:
    weights = load_file(quiet / "step_00000012" / "model.safetensors")
    assert {"embed_tokens.weight", "lm_head.weight", "q_head.bias", "H_init", "puzzle_embedding.weight"} <= set(weights)
    assert not any("_orig_mod" in name for name in weights)
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_manifest_lists_every_file(quiet: Path) -> None:
    for folder in step_folders(quiet):
        listed = json.loads((folder / "manifest.json").read_text())["files"]
        assert {path.name for path in folder.iterdir()} == {*listed, "manifest.json"}


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_slots_are_put_together_for_any_number_of_ranks(tmp_path: Path, writers: int) -> None:
    run_ranks(_save_in_world, writers, tmp_path / "run")
    checkpoint = find_checkpoint(tmp_path / "run", _silent)
    assert checkpoint is not None
    for readers in (1, 2, 3, 4):
        for rank in range(readers):
            slots = World(rank=rank, size=readers).slice_of(SLOTS)
            loaded, expected = checkpoint.load_slots(slots), _carry(slots)
            assert all(torch.equal(loaded[name], expected[name]) for name in expected), f"{rank} of {readers}"


def _save_in_world(world: World, run: Path) -> None:
    run.mkdir(exist_ok=True, parents=True)
    _save(run, 3, world)


def test_keep_last_k_and_best(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in range(1, 8):
        _save(run, step, World.single(), keep_last_k=2, is_best=step in (2, 3))
    assert [folder.name[-1] for folder in step_folders(run)] == ["3", "6", "7"]
    assert (run / "best").read_text() == "step_00000003\n" and (run / "latest").read_text() == "step_00000007\n"
    _save(run, 8, World.single(), keep_last_k=1, is_best=True)
    assert [folder.name[-1] for folder in step_folders(run)] == ["8"]


def test_keep_last_k_leaves_what_was_just_written(run: Path) -> None:
    """Though a later step of a lost future lies there: it may be damaged, and this one whole."""
    (run / "step_00000006" / "model.safetensors").write_bytes(b"")
    _save(run, 5, World.single(), keep_last_k=1)
    found = find_checkpoint(run, _silent)
    assert found is not None and found.state.step == 5


def test_steps_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    for name in ("step_100000000", "step_00000009", "step_99999999", "step_1", ".incomplete_step_00000001", "best"):
        (tmp_path / name).mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000009", "step_99999999", "step_100000000"]
    assert step_folders(tmp_path / "nowhere") == []


def test_weights_must_be_finite() -> None:
    def snapshot(value: float) -> Snapshot:
        tensors = {"fine": torch.arange(3), "w": torch.tensor([1.0, value])}
        return Snapshot(shared={"model": tensors}, slots=slice(0, 1), by_slot={}, state=_state(9))

    require_finite_weights(snapshot(2.0), "")
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(UserError, match=r"w is not finite at step 9; the last good"):
            require_finite_weights(snapshot(value), "the last good one is far away")


# ---- death at any moment -------------------------------------------------------------------------------


def _save_and_die(run: str, step: int, moment: int) -> None:
    runs.killed_at_file_event(run, moment, 0)
    _save(Path(run), step, World.single(), keep_last_k=1, is_best=True)


@pytest.mark.parametrize("step", [6, 8], ids=["a step that is there already", "a new step"])
def test_killed_at_every_moment_of_a_save(tmp_path: Path, step: int) -> None:
    """There is always a whole step, never an older one than before, and the next save succeeds and tidies up."""
    for moment in range(1, 100):
        run = tmp_path / f"run_{moment}"
        _save(run, 6, World.single(), keep_last_k=1)
        process = runs.fork(_save_and_die, str(run), step, moment)
        process.join(30)
        put_back(run)
        found = find_checkpoint(run, _silent)
        assert found is not None and found.state.step in (6, step), f"killed at change {moment}"
        assert torch.equal(found.load("model")["a"], _weights(found.state.step)["a"])
        if process.exitcode == 0:
            assert moment > 10, f"a save was through after {moment} changes: the test has lost sight of them"
            return
        assert process.exitcode == -9
        _save(run, step, World.single(), keep_last_k=1)
        # A `best` that was set before the kill keeps its step.
        assert {path.name for path in run.iterdir()} <= {f"step_{step:08d}", "latest", "best"}, f"at change {moment}"
    raise AssertionError("the save never got through")


# ---- damage --------------------------------------------------------------------------------------------


def _truncate(folder: Path) -> None:
    path = folder / "slots_000000_000007.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _flip(folder: Path) -> None:
    contents = bytearray((folder / "optimizer.safetensors").read_bytes())
    contents[-1] ^= 1
    (folder / "optimizer.safetensors").write_bytes(contents)


def _manifest(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "manifest.json").write_text(text)


class _Trap:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("the_trap_was_sprung",)


def _pickle_in_place(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(_Trap()))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (_truncate, r"slots_000000_000007.safetensors has \d+ bytes, not \d+"),
    "flipped bit": (_flip, "contents of optimizer.safetensors were altered"),
    "missing file": (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json can't be read"),
    "garbage": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00{"), "manifest.json can't be read"),
    "empty manifest": (_manifest(""), "manifest.json can't be read"),
    "no files": (_manifest('{"files": {}}'), "manifest.json lists no"),
    "deep manifest": (_manifest('{"files":' + "[" * 100_000), "manifest.json can't be read"),
    "a path upwards": (
        _manifest('{"files": {"../step_00000004/state.json": {"bytes": 1, "sha256": ""}}}'),
        "../step_00000004/state.json is missing",
    ),
    "an absolute path": (_manifest('{"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}'), "/etc/passwd is missing"),
    "dots": (_manifest('{"files": {"..": {"bytes": 1, "sha256": ""}}}'), "is missing"),
    "a folder for a file": (
        lambda folder: (folder / "state.json").rename(folder / "aside").with_name("state.json").mkdir(),
        "state.json is missing",
    ),
    "a pickle": (_pickle_in_place, "model.safetensors has"),
    "an empty folder": (
        lambda folder: folder.rename(folder.with_name("aside")).with_name(folder.name).mkdir(),
        "manifest.json can't be read",
    ),
    "a file": (
        lambda folder: folder.rename(folder.with_name("aside")).with_name(folder.name).touch(),
        "manifest.json can't be read",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_newest_whole_step_taken(run: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(run / "step_00000006")
    with pytest.raises(ValueError, match=rf"step_00000006 is damaged: .*{message}"):
        Checkpoint.open(run / "step_00000006")
    warnings: list[str] = []
    found = find_checkpoint(run, warnings.append)
    assert found is not None and found.state.step == 4
    assert len(warnings) == 1 and "step_00000006 is damaged" in warnings[0]
    assert warnings[0].endswith("going back to step_00000004")
    for step in (2, 4):
        shutil.rmtree(run / f"step_{step:08d}")
    with pytest.raises(ValueError, match=r"none of the 1 checkpoints in .* is whole .*; restore one or start another"):
        find_checkpoint(run, warnings.append)


@pytest.mark.parametrize("text", ["", "step_00000099\n", "../../etc", "step_00000006/..", "\x00\xff", None])
def test_latest_that_names_nothing(run: Path, text: str | None) -> None:
    (run / "latest").unlink()
    if text is not None:
        (run / "latest").write_text(text)
    found = find_checkpoint(run, _silent)
    assert found is not None and found.state.step == 6


def test_latest_decides_where_there_are_later_steps(run: Path) -> None:
    """Killed between the rename of a step and `latest`: the step before is as good, and it is the one promised."""
    (run / "latest").write_text("step_00000004\n")
    found = find_checkpoint(run, _silent)
    assert found is not None and found.state.step == 4


def test_no_steps_is_no_error(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, _silent) is None
    assert find_checkpoint(tmp_path / "nowhere", _silent) is None


def test_nothing_is_unpickled(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the forger made the manifest agree."""
    monkeypatch.chdir(tmp_path)
    folder = run / "step_00000006"
    for name in ("model", "optimizer", "slots_000000_000007"):
        (folder / f"{name}.safetensors").write_bytes(pickle.dumps(_Trap()))
    _fix_manifest(folder)
    checkpoint = Checkpoint.open(folder)
    for load in (lambda: checkpoint.load("model"), lambda: checkpoint.load_slots(slice(0, SLOTS))):
        with pytest.raises(ValueError, match="can't be read as safetensors"):
            load()
    torch.save({"a": _Trap()}, folder / "model.safetensors")
    _fix_manifest(folder)
    with pytest.raises(ValueError, match="can't be read as safetensors"):
        Checkpoint.open(folder).load("model")
    assert not (tmp_path / "the_trap_was_sprung").exists()
    pickle.loads(pickle.dumps(_Trap()))
    assert (tmp_path / "the_trap_was_sprung").exists(), "the trap doesn't work, so this test proves nothing"


def test_only_what_the_manifest_lists_is_read(run: Path) -> None:
    """A stray file beside does not add slots; a listed one that holds too few is damage."""
    folder = run / "step_00000006"
    shutil.copy(folder / "slots_000000_000007.safetensors", folder / "slots_000003_000007.safetensors")
    assert torch.equal(Checkpoint.open(folder).load_slots(slice(0, SLOTS))["steps"], _carry(slice(0, SLOTS))["steps"])
    _fix_manifest(folder, name="slots_000003_000007.safetensors")
    with pytest.raises(ValueError, match="hold not all of slots 0 to 6"):
        Checkpoint.open(folder).load_slots(slice(0, SLOTS))


def test_missing_slots_are_damage(run: Path) -> None:
    folder = run / "step_00000006"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["slots_000000_000007.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="hold not all of slots 0 to 6"):
        Checkpoint.open(folder).load_slots(slice(0, SLOTS))


# ---- a disk that refuses -------------------------------------------------------------------------------


def _fails_at(world: World, run: Path, fail_on: str) -> str:
    import utils.checkpoint as module

    write = module._write

    def refusing(path: Path, contents: bytes) -> Any:
        if path.name.startswith(fail_on):
            write(path, contents[: len(contents) // 2])
            raise OSError(28, "No space left on device")
        return write(path, contents)

    module._write = refusing
    with pytest.raises(UserError) as caught:
        _save(run, 6, world)
    return str(caught.value)


@pytest.mark.parametrize("fail_on", ["slots_000003", "model", "state", "manifest", ".incomplete_latest"])
def test_disk_full_at_each_file(tmp_path: Path, fail_on: str) -> None:
    """On rank 1 alone, on rank 0 alone: both say it, and `latest` names a whole step."""
    run = tmp_path / "run"
    _save(run, 4, World.single())
    for message in run_ranks(_fails_at, 2, run, fail_on):
        assert "the checkpoint of step 6 could not be written: [Errno 28] No space left on device" in message
        assert f"the last good checkpoint is {run / 'step_00000004'}" in message
    assert (run / "latest").read_text() == "step_00000004\n"
    for folder in step_folders(run):
        Checkpoint.open(folder)
    assert not list(run.glob(".incomplete_step*"))


def test_killed_between_best_and_latest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed run finds again that the step is the best; the other way round it would never be named."""
    written = []
    monkeypatch.setattr(checkpoint_module, "write_atomically", lambda path, text: written.append(path.name))
    _save(run, 8, World.single(), is_best=True)
    assert written == ["best", "latest"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"step": 6}', "\xff"])
def test_state_that_is_none(run: Path, text: str) -> None:
    folder = run / "step_00000006"
    (folder / "state.json").write_bytes(text.encode("latin1"))
    _fix_manifest(folder)
    with pytest.raises(ValueError, match=r"step_00000006 is damaged: state\.json isn't the state of a run"):
        Checkpoint.open(folder)


def test_files_that_the_manifest_does_not_list_are_not_read(run: Path) -> None:
    folder = run / "step_00000006"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["optimizer.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"lists no optimizer\.safetensors"):
        Checkpoint.open(folder).load("optimizer")


def test_a_reader_changes_nothing(run: Path) -> None:
    """Beside a live run, a step that is set aside is being replaced."""
    (run / "step_00000006").rename(run / ".incomplete_replaced_step_00000006")
    before = sorted(run.rglob("*"))
    found = find_checkpoint(run, lambda _: None)
    assert found is not None and found.state.step == 4 and sorted(run.rglob("*")) == before
    put_back(run)
    found = find_checkpoint(run, _silent)
    assert found is not None and found.state.step == 6
