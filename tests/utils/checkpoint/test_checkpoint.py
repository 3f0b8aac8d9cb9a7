"""Checkpoints: whole or not there, whoever dies when; written while the training goes on; read by any number of ranks
under any layout, without running anything.
"""

import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import runs
from tests.spawn import run_ranks, world_of
from utils import files
from utils.checkpoint import writer as checkpoint_module
from utils.checkpoint.format import RunState, step_folders
from utils.checkpoint.reader import Checkpoint, find_checkpoint, put_back
from utils.checkpoint.writer import Checkpointer, Snapshot
from utils.dist.config import Axes, DistConfig
from utils.dist.setup import use_device
from utils.dist.world import World
from utils.errors import UserError

# pytest resets the filter that utils/checkpoint/reader.py sets.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SLOTS = 7
STATE_FILE = "state/rank_0000.safetensors"


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


def _snapshot(step: int, world: World, **changes: Any) -> Snapshot:
    slots = world.slice_of(SLOTS)
    values: dict[str, Any] = {
        "weights": _weights(step) if world.is_main else {},
        "shared": {"optimizer.exp_avg.a": torch.ones(2, 3) * step, "ema.a": _weights(step)["a"] / 2},
        "slots": slots,
        "by_slot": _carry(slots),
        "by_rank": {"error": torch.tensor([world.rank])},
    }
    return Snapshot(**(values | changes), state=_state(step))


def _save(run: Path, step: int, world: World, *, keep_last_k: int | None = None, is_best: bool = False) -> None:
    run.mkdir(exist_ok=True, parents=True)
    checkpointer = Checkpointer(run, use_device(world, "cpu"), keep_last_k)
    checkpointer.save(_snapshot(step, world), is_best=is_best)
    checkpointer.wait()


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
        (checkpoint.weights(), _weights(6)),
        (checkpoint.load("optimizer"), {"exp_avg.a": torch.full((2, 3), 6.0)}),
        (checkpoint.trained_weights(), _weights(6) | {"a": _weights(6)["a"] / 2}),
        (checkpoint.load_slots(slice(0, SLOTS)), _carry(slice(0, SLOTS))),
        (checkpoint.load_by_rank(0, 1), {"error": torch.tensor([0])}),
    ):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) and loaded[name].dtype == saved[name].dtype for name in saved)
    assert checkpoint.sizes("optimizer") == {"exp_avg.a": (2, 3)} and checkpoint.sizes("optim") == {}
    assert checkpoint.has("ema") and not checkpoint.has("em")


def test_weights_are_plain_safetensors(quiet: Path) -> None:
    weights = load_file(quiet / "step_00000012" / "model.safetensors")
    assert {"embed_tokens.weight", "lm_head.weight", "q_head.bias", "H_init", "puzzle_embedding.weight"} <= set(weights)
    assert not any("_orig_mod" in name for name in weights)
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_manifest_lists_every_file(quiet: Path) -> None:
    for folder in step_folders(quiet):
        listed = json.loads((folder / "manifest.json").read_text())["files"]
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert found == {*listed, "manifest.json"}


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_slots_are_put_together_for_any_number_of_ranks(tmp_path: Path, writers: int) -> None:
    run_ranks(_save_in_world, writers, tmp_path / "run")
    checkpoint = find_checkpoint(tmp_path / "run", _silent)
    assert checkpoint is not None
    for readers in (1, 2, 3, 4):
        for rank in range(readers):
            slots = world_of(rank, readers).slice_of(SLOTS)
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


def _saves_what_is_not_finite(world: World, run: Path) -> list[str]:
    checkpointer = Checkpointer(run, use_device(world, "cpu"), None)
    checkpointer.save(_snapshot(8, world), is_best=False)  # of whole numbers too, and they pass
    messages = []
    for value in (float("nan"), float("inf"), -float("inf")):
        weights = {"fine": torch.arange(3), "w": torch.tensor([1.0, value])} if world.is_main else {}
        with pytest.raises(UserError) as caught:
            checkpointer.save(_snapshot(9, world, weights=weights), is_best=False)
        messages.append(str(caught.value))
    checkpointer.wait()
    return messages


def test_weights_must_be_finite(tmp_path: Path) -> None:
    """Rank 0 alone has them, and all ranks leave."""
    for messages in run_ranks(_saves_what_is_not_finite, 2, tmp_path):
        for message in messages:
            assert message.startswith("w is not finite at step 9; the last good checkpoint is ")
            assert message.endswith("step_00000008; go on with a lower lr")
    assert [folder.name[-1] for folder in step_folders(tmp_path)] == ["8"]


# ---- layouts -------------------------------------------------------------------------------------------
# R = 5 rows over up to 4 ranks, so that shards are uneven and one is empty

WHOLE_RC = torch.arange(30.0).view(5, 6)
CONFIG = DistConfig(backend="auto", init_method="env", timeout_s=60.0, num_threads=None, rank_weights=[])


def _placed(world: World, tensor: Tensor, *, by_column: bool = False) -> DTensor:
    """As FSDP, HSDP or both with tensor parallelism would lay it."""
    assert world.mesh is not None
    names = [name for name in ("replicate", "shard", "model") if world.mesh[name].size() > 1] or ["shard"]
    placements = {"replicate": Replicate(), "shard": Shard(0), "model": Shard(1)}
    mesh = world.mesh[tuple(names)] if len(names) > 1 else world.mesh[names[0]]
    return distribute_tensor(tensor, mesh, [Shard(1) if by_column else placements[name] for name in names])


def _saves_shards(world: World, run: Path, axes: Axes) -> None:
    world = use_device(world, "cpu", CONFIG, axes=axes)
    stage = world.rank % axes.model
    shared = {
        "optimizer.avg": _placed(world, WHOLE_RC),
        "optimizer.step": torch.tensor(3.0),
        "ema.half": _placed(world, WHOLE_RC.bfloat16()),
        "progress.sums": WHOLE_RC.T,
        f"stage.{stage}": torch.tensor([stage]),
    }
    checkpointer = Checkpointer(run, world, None)
    checkpointer.save(_snapshot(1, world, shared=shared), is_best=False)
    checkpointer.wait()


def _loads_shards(world: World, folder: Path, axes: Axes, by_column: bool = False) -> None:
    world = use_device(world, "cpu", CONFIG, axes=axes)
    _assert_whole(folder)
    checkpoint = Checkpoint.open(folder)
    average, half = (
        _placed(world, torch.zeros_like(WHOLE_RC, dtype=dtype), by_column=by_column)
        for dtype in (torch.float32, torch.bfloat16)
    )
    step = torch.zeros(())
    with world.agree():
        checkpoint.load_into({"optimizer.avg": average, "ema.half": half, "optimizer.step": step})
    expected = _placed(world, WHOLE_RC, by_column=by_column)
    assert torch.equal(average.to_local(), expected.to_local()) and step == 3
    assert torch.equal(half.to_local().float(), expected.to_local())


def _assert_whole(folder: Path) -> None:
    """Read in one process, without a group."""
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_read_by_any_other(tmp_path: Path, layout: str) -> None:
    """By one process without a group, and by shards that were cut elsewhere; nothing is written twice."""
    axes = LAYOUTS[layout]
    run_ranks(_saves_shards, axes.replicate * axes.shard * axes.model, tmp_path, axes)
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


def test_what_a_rank_alone_had_goes_to_as_many_ranks_only(tmp_path: Path) -> None:
    run_ranks(_save_in_world, 2, tmp_path)
    checkpoint = Checkpoint.open(tmp_path / "step_00000003")
    assert [checkpoint.load_by_rank(rank, 2)["error"].item() for rank in range(2)] == [0, 1]
    assert checkpoint.load_by_rank(0, 1) == {} and checkpoint.load_by_rank(0, 4) == {}


def test_load_into_names_what_does_not_fit(run: Path) -> None:
    checkpoint = Checkpoint.open(run / "step_00000006")
    fitting = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"step_00000006 lacks ema\.b \(1 missing in all\)"):
        checkpoint.load_into({"optimizer.exp_avg.a": fitting, "ema.b": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"step_00000006 holds ema\.a of \(2, 3\), here it is \(3, 2\)"):
        checkpoint.load_into({"optimizer.exp_avg.a": fitting, "ema.a": torch.zeros(3, 2)})
    assert not fitting.any(), "overwritten before the mistake was found"
    checkpoint.load_into({"optimizer.exp_avg.a": fitting})
    assert (fitting == 6).all()
    with pytest.raises(ValueError, match="its files hold no muon"):
        checkpoint.load("muon")


# ---- in the background ---------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No tensors are written before it is opened."""
    write, opened = checkpoint_module._write_tensors, threading.Event()

    def gated(*args: Any) -> Any:
        assert opened.wait(30)
        return write(*args)

    monkeypatch.setattr(checkpoint_module, "_write_tensors", gated)
    return opened


def test_training_goes_on_while_a_step_is_written(tmp_path: Path, gate: threading.Event) -> None:
    """What is written is what was there when save was called; `latest` waits for it."""
    snapshot = _snapshot(1, World.single())
    checkpointer = Checkpointer(tmp_path, World.single(), None)
    checkpointer.save(snapshot, is_best=True)
    for tensors in (snapshot.weights, snapshot.shared, snapshot.by_slot, snapshot.by_rank):
        for tensor in tensors.values():
            tensor.zero_()
    assert not (tmp_path / "latest").exists() and not step_folders(tmp_path)
    assert checkpointer.last_good == "there is no checkpoint yet"
    gate.set()
    checkpointer.wait()
    checkpoint = Checkpoint.open(tmp_path / "step_00000001")
    assert torch.equal(checkpoint.weights()["a"], _weights(1)["a"])
    assert torch.equal(checkpoint.load("optimizer")["exp_avg.a"], torch.ones(2, 3))
    assert torch.equal(checkpoint.load_slots(slice(0, SLOTS))["steps"], _carry(slice(0, SLOTS))["steps"])
    checkpointer.wait()  # has nothing to say


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    checkpointer = Checkpointer(tmp_path, World.single(), None)
    checkpointer.save(_snapshot(1, World.single()), is_best=False)
    threading.Timer(0.2, gate.set).start()
    # Another dtype, another shape, a name less: nothing of the first may shine through.
    shared = {"ema.a": torch.full((5,), 2.0, dtype=torch.float64)}
    checkpointer.save(_snapshot(2, World.single(), shared=shared), is_best=False)
    assert [folder.name[-1] for folder in step_folders(tmp_path)][:1] == ["1"]
    checkpointer.wait()
    first, second = (Checkpoint.open(folder) for folder in step_folders(tmp_path))
    assert torch.equal(first.load("ema")["a"], _weights(1)["a"] / 2)
    assert torch.equal(second.load("ema")["a"], shared["ema.a"]) and not second.has("optimizer")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_copy_comes_before_what_follows_on_the_stream(tmp_path: Path) -> None:
    """Plain and sharded, and again into the same pinned memory."""
    world = use_device(World.single(), "cuda", CONFIG, axes=Axes())
    checkpointer = Checkpointer(tmp_path, world, None)
    for step in (1, 2):
        plain = torch.full((10_000_000,), float(step), device="cuda")
        sharded = _placed(world, torch.full((1000, 1000), float(step), device="cuda"))
        shared: dict[str, Tensor] = {"ema.plain": plain, "ema.sharded": sharded}
        checkpointer.save(_snapshot(step, world, weights={"w": plain}, shared=shared), is_best=False)
        plain.zero_()
        sharded.to_local().zero_()
    checkpointer.wait()
    for step in (1, 2):
        checkpoint = Checkpoint.open(tmp_path / f"step_{step:08d}")
        assert all((tensor == step).all() for tensor in [*checkpoint.load("ema").values(), checkpoint.weights()["w"]])
    sharded = _placed(world, torch.zeros(1000, 1000, device="cuda"))
    checkpoint.load_into({"ema.sharded": sharded})
    assert (sharded.to_local() == 2).all()
    world.close()


def _saves_and_ends(run: str) -> None:
    write = checkpoint_module._write_tensors

    def slow(*args: Any) -> Any:
        threading.Event().wait(0.2)
        return write(*args)

    checkpoint_module._write_tensors = slow  # type: ignore[assignment]
    Checkpointer(Path(run), World.single(), None).save(_snapshot(1, World.single()), is_best=False)


def test_a_process_that_ends_finishes_what_it_began(tmp_path: Path) -> None:
    process = runs.fork(_saves_and_ends, str(tmp_path))
    process.join(30)
    assert process.exitcode == 0
    found = find_checkpoint(tmp_path, _silent)
    assert found is not None and found.state.step == 1


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
        assert torch.equal(found.weights()["a"], _weights(found.state.step)["a"])
        if process.exitcode == 0:
            assert moment > 10, f"a save was through after {moment} changes: the test has lost sight of them"
            return
        assert process.exitcode == -9
        _save(run, step, World.single(), keep_last_k=1)
        # A `best` that was set before the kill keeps its step.
        assert {path.name for path in run.iterdir()} <= {f"step_{step:08d}", "latest", "best"}, f"at change {moment}"
    raise AssertionError("the save never got through")


def _dies_within_a_file(run: str, name: str) -> None:
    def half(tensors: dict[str, Tensor], path: Path, header: Any) -> None:
        save_file(tensors, path, header)
        if path.name == name:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_module.save_file = half  # type: ignore[attr-defined,assignment]
    _save(Path(run), 8, World.single(), keep_last_k=1)


@pytest.mark.parametrize("name", ["rank_0000.safetensors", "model.safetensors"])
def test_killed_within_a_file(run: Path, name: str) -> None:
    process = runs.fork(_dies_within_a_file, str(run), name)
    process.join(30)
    assert process.exitcode == -9
    found = find_checkpoint(run, _silent)
    assert found is not None and found.state.step == 6
    assert list(run.glob(f".incomplete_*/**/{name}"))
    _save(run, 8, World.single())
    assert not list(run.glob(".incomplete*")) and (run / "latest").read_text() == "step_00000008\n"


# ---- damage --------------------------------------------------------------------------------------------


def _truncate(folder: Path) -> None:
    path = folder / STATE_FILE
    path.write_bytes(path.read_bytes()[:-3])


def _flip(folder: Path) -> None:
    contents = bytearray((folder / STATE_FILE).read_bytes())
    contents[-1] ^= 1
    (folder / STATE_FILE).write_bytes(contents)


def _manifest(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "manifest.json").write_text(text)


class _Trap:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("the_trap_was_sprung",)


def _pickle_in_place(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(_Trap()))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (_truncate, r"state/rank_0000.safetensors has \d+ bytes, not \d+"),
    "flipped bit": (_flip, "contents of state/rank_0000.safetensors were altered"),
    "a file more": (
        lambda folder: shutil.copy(folder / STATE_FILE, folder / "state/rank_0001.safetensors"),
        "manifest.json doesn't list state/rank_0001.safetensors",
    ),
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
    for name in ("model.safetensors", STATE_FILE):
        (folder / name).write_bytes(pickle.dumps(_Trap()))
    (folder / "state" / ".metadata").write_bytes(pickle.dumps(_Trap()))  # where DCP's other formats keep a pickle
    _fix_manifest(folder)
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
    torch.save({"a": _Trap()}, folder / "model.safetensors")
    _fix_manifest(folder)
    with pytest.raises(ValueError, match="can't be read as safetensors"):
        Checkpoint.open(folder).weights()
    assert not (tmp_path / "the_trap_was_sprung").exists()
    pickle.loads(pickle.dumps(_Trap()))
    assert (tmp_path / "the_trap_was_sprung").exists(), "the trap doesn't work, so this test proves nothing"


@pytest.mark.parametrize(
    "header",
    [
        {"DCP_SHARDING_INFO": "{}"},
        {"DCP_SHARDING_INFO": "["},
        {"DCP_SHARDING_INFO": '{"optimizer.a": {"saved_offsets": "x"}}'},
        {"DCP_SHARDING_INFO": '{"optimizer.a": {"saved_offsets": [100]}}'},
        {"DCP_SHARDING_INFO": '{"optimizer.a": {"saved_offsets": [-1]}}'},
    ],
)
def test_forged_offsets(run: Path, header: dict[str, str]) -> None:
    folder = run / "step_00000006"
    save_file({"optimizer.a": torch.ones(3)}, folder / STATE_FILE, header)
    _fix_manifest(folder)
    checkpoint = Checkpoint.open(folder)
    for load in (lambda: checkpoint.load("optimizer"), lambda: checkpoint.load_into({"optimizer.a": torch.ones(3)})):
        with pytest.raises(ValueError, match=r"can't be read as safetensors|hold not all of optimizer\.a|holds optim"):
            load()


def test_overlapping_slots_are_damage(run: Path) -> None:
    folder = run / "step_00000006"
    names = {f"slots.000003_000007.{name}": rows for name, rows in _carry(slice(3, 7)).items()}
    save_file(names, folder / "state/rank_0001.safetensors")
    _fix_manifest(folder, name="state/rank_0001.safetensors")
    with pytest.raises(ValueError, match="hold not all of slots 0 to 6"):
        Checkpoint.open(folder).load_slots(slice(0, SLOTS))


def test_a_manifest_that_lost_a_file_is_damage(tmp_path: Path) -> None:
    """Once the file itself is gone too, only the parts that are missing tell."""
    run_ranks(_saves_shards, 2, tmp_path, Axes(shard=2))
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


def test_an_older_version_is_named(run: Path) -> None:
    folder = run / "step_00000006"
    save_file({"slots": torch.ones(1)}, folder / "slots_000000_000007.safetensors")
    save_file({"exp_avg": torch.ones(1)}, folder / "optimizer.safetensors")
    _fix_manifest(folder, name="slots_000000_000007.safetensors")
    _fix_manifest(folder, name="optimizer.safetensors")
    with pytest.raises(ValueError, match=r"was written by an older version; start another run with init_from=.*"):
        Checkpoint.open(folder)


# ---- a disk that refuses -------------------------------------------------------------------------------


def _fails_at(world: World, run: Path, fail_on: str) -> str:
    """The message: of the next save on one rank, of wait on the other."""
    write_synced, write_tensors = files.write_synced, checkpoint_module._write_tensors

    def refusing(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_half(path: Path, *args: Any) -> Any:
            done = write(path, *args)
            if path.name.startswith(fail_on):
                os.truncate(path, path.stat().st_size // 2)
                raise OSError(28, "No space left on device")
            return done

        return write_half

    checkpoint_module._write_tensors = refusing(write_tensors)
    checkpoint_module.write_synced = files.write_synced = refusing(write_synced)  # type: ignore[attr-defined]
    checkpointer = Checkpointer(run, use_device(world, "cpu"), None)
    checkpointer.save(_snapshot(6, world), is_best=False)
    with pytest.raises(UserError) as caught:
        if world.rank % 2:
            checkpointer.wait()
        else:
            checkpointer.save(_snapshot(8, world), is_best=False)
    checkpointer.wait()  # says it once
    return str(caught.value)


@pytest.mark.parametrize("fail_on", ["rank_0001", "rank_0000", "model", "state", "manifest", ".incomplete_latest"])
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


def _full_disk(world: World, run: Path) -> str:
    checkpointer = Checkpointer(run, use_device(world, "cpu"), None)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    checkpointer.save(_snapshot(6, world), is_best=False)
    with pytest.raises(UserError) as caught:
        checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpointer.save(_snapshot(6, world), is_best=False)  # goes on as if nothing had been
    checkpointer.wait()
    return str(caught.value)


def test_disk_that_is_really_full_on_one_rank(tmp_path: Path) -> None:
    for message in run_ranks(_full_disk, 2, tmp_path):
        assert message.startswith("the checkpoint of step 6 could not be written: ") and "File too large" in message
        assert message.endswith("there is no checkpoint yet; free the disk, then resume")
    assert Checkpoint.open(tmp_path / "step_00000006").load_by_rank(1, 2)["error"] == 1


def _breaks(world: World, run: Path) -> str:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug")

    if world.rank == 1:
        checkpoint_module._write_tensors = broken  # type: ignore[assignment]
    checkpointer = Checkpointer(run, use_device(world, "cpu"), None)
    checkpointer.save(_snapshot(6, world), is_best=False)
    with pytest.raises(Exception, match="a bug") as caught:
        checkpointer.wait()
    return type(caught.value).__name__


def test_a_fault_in_the_thread_is_a_fault_of_the_run(tmp_path: Path) -> None:
    assert run_ranks(_breaks, 2, tmp_path) == ["RuntimeError", "RuntimeError"]
    assert not step_folders(tmp_path)


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


def test_a_reader_changes_nothing(run: Path) -> None:
    """Beside a live run, a step that is set aside is being replaced."""
    (run / "step_00000006").rename(run / ".incomplete_replaced_step_00000006")
    before = sorted(run.rglob("*"))
    found = find_checkpoint(run, lambda _: None)
    assert found is not None and found.state.step == 4 and sorted(run.rglob("*")) == before
    put_back(run)
    found = find_checkpoint(run, _silent)
    assert found is not None and found.state.step == 6
