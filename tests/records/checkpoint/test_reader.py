"""Any number of ranks under any layout reads a checkpoint. Damage is named, no code is executed."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import records.checkpoint.reader as reader
from records.checkpoint.reader import Checkpoint, find_checkpoint, put_back
from tests.records.checkpoint.helpers import (
    CONFIG,
    SLOTS,
    STATE_FILE,
    WHOLE_RC,
    Trap,
    carry_of,
    fix_manifest,
    placed,
    save_in_world,
    save_shards,
    state_at,
    weights_at,
)
from tests.spawn import run_ranks, world_of
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

# pytest resets the filter that records/checkpoint/reader.py sets.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# ---- what is read ------------------------------------------------------------------------------


def test_what_was_saved_is_loaded(run: Path) -> None:
    checkpoint = find_checkpoint(run, pytest.fail)
    assert checkpoint is not None
    assert checkpoint.state == state_at(6)
    for loaded, saved in (
        (checkpoint.weights(), weights_at(6)),
        (checkpoint.load("optimizer"), {"exp_avg.a": torch.full((2, 3), 6.0)}),
        (checkpoint.trained_weights(), weights_at(6) | {"a": weights_at(6)["a"] / 2}),
        (checkpoint.load_slots(slice(0, SLOTS)), carry_of(slice(0, SLOTS))),
    ):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) and loaded[name].dtype == saved[name].dtype for name in saved)
    assert checkpoint.sizes("optimizer") == {"exp_avg.a": (2, 3)} and checkpoint.sizes("optim") == {}
    assert checkpoint.sizes("ema") and not checkpoint.sizes("em")


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_any_number_of_ranks_can_load_the_slots(tmp_path: Path, writers: int) -> None:
    run_ranks(save_in_world, writers, tmp_path / "run")
    checkpoint = find_checkpoint(tmp_path / "run", pytest.fail)
    assert checkpoint is not None
    for readers in (1, 2, 3, 4):
        for rank in range(readers):
            slots = world_of(rank, readers).slice_of(SLOTS)
            loaded, expected = checkpoint.load_slots(slots), carry_of(slots)
            assert all(torch.equal(loaded[name], expected[name]) for name in expected), f"{rank} of {readers}"


def test_load_into_names_what_does_not_fit(run: Path) -> None:
    checkpoint = Checkpoint.open(run / "step_00000006")
    fitting = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"step_00000006 lacks ema\.b \(1 missing in all\)"):
        checkpoint.load_into({"optimizer.exp_avg.a": fitting, "ema.b": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"step_00000006 holds ema\.a of \(2, 3\), here it is \(3, 2\)"):
        checkpoint.load_into({"optimizer.exp_avg.a": fitting, "ema.a": torch.zeros(3, 2)})
    assert not fitting.any(), "a tensor was overwritten although another tensor does not fit"
    checkpoint.load_into({"optimizer.exp_avg.a": fitting})
    assert (fitting == 6).all()
    with pytest.raises(ValueError, match="its files hold no muon"):
        checkpoint.load("muon")


# ---- layouts -----------------------------------------------------------------------------------


def _loads_shards(world: World, folder: Path, axes: Axes, by_column: bool = False) -> None:
    world = connect_devices(world, "cpu", CONFIG, axes=axes)
    _assert_whole(folder)
    checkpoint = Checkpoint.open(folder)
    average, half = (
        placed(world, torch.zeros_like(WHOLE_RC, dtype=dtype), by_column=by_column)
        for dtype in (torch.float32, torch.bfloat16)
    )
    step = torch.zeros(())
    with world.shared_errors():
        checkpoint.load_into({"optimizer.avg": average, "ema.half": half, "optimizer.step": step})
    expected = placed(world, WHOLE_RC, by_column=by_column)
    assert torch.equal(average.to_local(), expected.to_local()) and step == 3
    assert torch.equal(half.to_local().float(), expected.to_local())


def _assert_whole(folder: Path) -> None:
    """Read the checkpoint in one process, without a process group."""
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.load("optimizer")["avg"], WHOLE_RC)
    assert checkpoint.load("optimizer")["step"] == 3
    assert torch.equal(checkpoint.load("ema")["half"], WHOLE_RC.bfloat16())
    assert torch.equal(checkpoint.load("progress")["sums"], WHOLE_RC.T)
    assert torch.equal(checkpoint.load_slots(slice(0, SLOTS))["steps"], torch.arange(SLOTS).int())


LAYOUTS = {
    "one process": Axes(),
    "ddp x2": Axes(replicate=2),
    "tp x2": Axes(model=2),
    "fsdp x4": Axes(shard=4),
    "hsdp 2x2": Axes(replicate=2, shard=2),
    "fsdp 2 x tp 2": Axes(shard=2, model=2),
}


@pytest.mark.invariance
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_can_read_any_other(tmp_path: Path, layout: str) -> None:
    """One process and other shards can read the tensors. No part of a tensor is stored twice."""
    axes = LAYOUTS[layout]
    run_ranks(save_shards, axes.replicate * axes.shard * axes.model, tmp_path, axes)
    folder = tmp_path / "step_00000001"
    _assert_whole(folder)
    assert Checkpoint.open(folder).load("stage").keys() == {str(stage) for stage in range(axes.model)}
    parts: list[tuple[str, str]] = []
    for file in (folder / "state").iterdir():
        with safe_open(file, framework="pt") as tensors:
            offsets = json.loads(tensors.metadata()["DCP_SHARDING_INFO"])
            parts += [(name, str(offsets[name])) for name in tensors.keys()]  # noqa: SIM118 (safe_open is no dict)
    assert len(parts) == len(set(parts))
    if axes.shard > 1:
        run_ranks(_loads_shards, 2, folder, Axes(shard=2), axes.shard == 4)
    elif layout == "one process":
        run_ranks(_loads_shards, 4, folder, Axes(shard=2, model=2))


# ---- the newest whole step ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "step_00000099\n", "../../etc", None, "step_00000004\n"])
def test_without_a_valid_latest_the_newest_step_is_taken(run: Path, text: str | None) -> None:
    """A process that is killed before it updates `latest` leaves a newer step behind."""
    (run / "latest").unlink()
    if text is not None:
        (run / "latest").write_text(text)
    found = find_checkpoint(run, pytest.fail)
    assert found is not None and found.state.step == (4 if text == "step_00000004\n" else 6)


def test_a_reader_changes_nothing(run: Path) -> None:
    """Beside a live run, a renamed step may be in the middle of its replacement."""
    (run / "step_00000006").rename(run / ".incomplete_replaced_step_00000006")
    before = sorted(run.rglob("*"))
    found = find_checkpoint(run, lambda _: None)
    assert found is not None and found.state.step == 4 and sorted(run.rglob("*")) == before
    put_back(run)
    found = find_checkpoint(run, pytest.fail)
    assert found is not None and found.state.step == 6


# ---- damage ------------------------------------------------------------------------------------


def _manifest(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "manifest.json").write_text(text)


def _state_file(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda folder: (folder / STATE_FILE).write_bytes(change((folder / STATE_FILE).read_bytes()))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (_state_file(lambda of: of[:-3]), r"state/rank_0000.safetensors has \d+ bytes, not \d+"),
    "flipped bit": (
        _state_file(lambda of: of[:-1] + bytes([of[-1] ^ 1])),
        "contents of state/rank_0000.safetensors were altered",
    ),
    "a file more": (
        lambda folder: shutil.copy(folder / STATE_FILE, folder / "state/rank_0001.safetensors"),
        "manifest.json doesn't list state/rank_0001.safetensors",
    ),
    "missing file": (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json can't be read"),
    "no files": (_manifest('{"files": {}}'), "manifest.json lists no"),
    "deep manifest": (_manifest('{"files":' + "[" * 100_000), "manifest.json can't be read"),
    "a path upwards": (_manifest('{"files": {"../../x": {"bytes": 1, "sha256": ""}}}'), "../../x is missing"),
    "an absolute path": (_manifest('{"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}'), "/etc/passwd is missing"),
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
    (run / "step_00000004" / "manifest.json").unlink()
    find_checkpoint(run, warnings.append)
    assert ["step_00000006 is" in line for line in warnings] == [True, True, False], "each damaged one is named"
    for step in (2, 4):
        shutil.rmtree(run / f"step_{step:08d}")
    with pytest.raises(ValueError, match=r"none of the 1 checkpoints in .* is whole .*; restore one or start another"):
        find_checkpoint(run, warnings.append)


def test_nothing_is_unpickled(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickled contents are refused even if the forger made the manifest agree with them."""
    monkeypatch.chdir(tmp_path)
    folder = run / "step_00000006"
    for name in ("model.safetensors", STATE_FILE):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    (folder / "state" / ".metadata").write_bytes(pickle.dumps(Trap()))  # other formats of DCP keep a pickle here
    fix_manifest(folder)
    checkpoint = Checkpoint.open(folder)
    loads: list[Callable[[], Any]] = [
        checkpoint.weights,
        checkpoint.trained_weights,
        lambda: checkpoint.load("optimizer"),
        lambda: checkpoint.load_into({"ema.a": torch.zeros(2, 3)}),
        lambda: checkpoint.load_slots(slice(0, SLOTS)),
    ]
    for load in loads:
        with pytest.raises(ValueError, match="can't be read as safetensors"):
            load()
    torch.save({"a": Trap()}, folder / "model.safetensors")
    fix_manifest(folder)
    with pytest.raises(ValueError, match="can't be read as safetensors"):
        Checkpoint.open(folder).weights()
    assert not (tmp_path / "the_trap_was_sprung").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "the_trap_was_sprung").exists(), "the trap does not work, so that this test proves nothing"


@pytest.mark.parametrize("offsets", ["{}", '{"optimizer.a": {"saved_offsets": [100]}}'])
def test_forged_offsets_are_damage(run: Path, offsets: str) -> None:
    folder = run / "step_00000006"
    save_file({"optimizer.a": torch.ones(3)}, folder / STATE_FILE, {"DCP_SHARDING_INFO": offsets})
    fix_manifest(folder)
    checkpoint = Checkpoint.open(folder)
    for load in (lambda: checkpoint.load("optimizer"), lambda: checkpoint.load_into({"optimizer.a": torch.ones(3)})):
        with pytest.raises(ValueError, match=r"can't be read as safetensors|hold not all of optimizer\.a|holds optim"):
            load()


def test_a_manifest_that_lost_a_file_is_damage(tmp_path: Path) -> None:
    """The loss of a file is noticed even if the manifest does not list the file.

    Only the parts of tensors that are missing reveal such a loss.
    """
    run_ranks(save_shards, 2, tmp_path, Axes(shard=2))
    folder = tmp_path / "step_00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][STATE_FILE]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / STATE_FILE).unlink()
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(ValueError, match=r"its files hold not all of (optimizer\.avg|ema\.half)"):
        checkpoint.load("optimizer")
    with pytest.raises(ValueError, match="hold not all of slots 0 to 6"):
        checkpoint.load_slots(slice(0, SLOTS))


@pytest.mark.parametrize("text", ['{"step": 6}', "\xff"])
def test_a_state_file_without_a_state_is_damage(run: Path, text: str) -> None:
    folder = run / "step_00000006"
    (folder / "state.json").write_bytes(text.encode("latin1"))
    fix_manifest(folder)
    with pytest.raises(ValueError, match=r"step_00000006 is damaged: state\.json isn't the state of a run"):
        Checkpoint.open(folder)


def test_a_read_error_is_not_taken_for_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error of a moment must not send the run back to an older checkpoint."""

    def failing(path: Path) -> str:
        if "step_00000006" in str(path):
            raise OSError(5, "Input/output error")
        return str(path)

    monkeypatch.setattr(reader, "sha256_of_file", failing)
    with pytest.raises(UserError, match="Input/output error"):
        find_checkpoint(run, pytest.fail)
