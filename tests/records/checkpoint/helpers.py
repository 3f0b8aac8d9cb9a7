"""Save checkpoints of a run without a model, for tests of the writer and the reader."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from records.checkpoint.format import Progress, RunState
from records.checkpoint.writer import Checkpointer, Snapshot
from tests.utils.ranks.helpers import dist_config
from utils.ranks.config import Axes
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

SLOTS = 7
STATE_FILE = "state/rank_0000.safetensors"
# R = 5 rows, C = 6 columns. Over 2 and 4 ranks 5 rows give uneven shards, and over 4 ranks an empty
# one.
WHOLE_RC = torch.arange(30.0).view(5, 6)
CONFIG = dist_config(timeout_s=60.0)
# Each value differs from the field's default.
PROGRESS = Progress(
    step=7,
    draws=112,
    skipped_steps=[3, 6, 9],
    open_steps=2,
    open_slots=32,
    best=0.1 + 0.2,
    evaluations_since_best=4,
    failed_saves=2,
    pending_row={"train/lm_loss": 1 / 3},
    wandb_run_id="abc",
    spent_s={"steps": 1 / 7, "lost": 2.0},
    spent_until=1.7e9,
)


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder: str | Path = "the_trap_was_sprung") -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._folder,)


def weights_at(step: int) -> dict[str, Tensor]:
    # The writer must make a transposed view contiguous.
    return {"a": torch.full((3, 2), float(step)).T, "b": torch.arange(4, dtype=torch.bfloat16)}


def carry_of(slots: slice) -> dict[str, Tensor]:
    rows = torch.arange(SLOTS)[slots]
    return {"steps": rows.int(), "state.z": rows.view(-1, 1) * torch.ones(1, 2), "halted": rows % 2 == 0}


def state_at(step: int) -> RunState:
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


def snapshot_at(step: int, world: World, **changes: Any) -> Snapshot:
    slots = world.slice_of(SLOTS)
    values: dict[str, Any] = {
        "weights": weights_at(step) if world.is_main else {},
        "shared": {"optimizer.exp_avg.a": torch.ones(2, 3) * step, "ema.a": weights_at(step)["a"] / 2},
        "slots": slots,
        "by_slot": carry_of(slots),
    }
    return Snapshot(**(values | changes), state=state_at(step))


def save_step(run: Path, step: int, world: World, *, keep_last_k: int | None = None, is_best: bool = False) -> None:
    run.mkdir(exist_ok=True, parents=True)
    checkpointer = Checkpointer(run, connect_devices(world, "cpu"), keep_last_k)
    checkpointer.save(snapshot_at(step, world), is_best=is_best)
    checkpointer.wait()


def save_in_world(world: World, run: Path) -> None:
    save_step(run, 3, world)


def fix_manifest(step: Path) -> None:
    """Make the manifest agree with the files, as a forger would."""
    files = {
        str(file.relative_to(step)): {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
        for file in (*step.glob("model*"), step / "state.json", *step.glob("state/*.safetensors"))
        if file.is_file()
        for contents in [file.read_bytes()]
    }
    (step / "manifest.json").write_text(json.dumps({"files": files}))


def placed(world: World, tensor: Tensor, *, by_column: bool = False) -> DTensor:
    """Shard a tensor like FSDP, HSDP or their combinations with tensor parallelism."""
    assert world.mesh is not None
    names = [name for name in ("replicate", "shard", "model") if world.mesh[name].size() > 1] or ["shard"]
    placements = {"replicate": Replicate(), "shard": Shard(0), "model": Shard(1)}
    mesh = world.mesh[tuple(names)] if len(names) > 1 else world.mesh[names[0]]
    return distribute_tensor(tensor, mesh, [Shard(1) if by_column else placements[name] for name in names])


def save_shards(world: World, run: Path, axes: Axes) -> None:
    world = connect_devices(world, "cpu", CONFIG, axes=axes)
    stage = world.rank % axes.model
    shared = {
        "optimizer.avg": placed(world, WHOLE_RC),
        "optimizer.step": torch.tensor(3.0),
        "ema.half": placed(world, WHOLE_RC.bfloat16()),
        "progress.sums": WHOLE_RC.T,
        f"stage.{stage}": torch.tensor([stage]),
    }
    checkpointer = Checkpointer(run, world, None)
    checkpointer.save(snapshot_at(1, world, shared=shared), is_best=False)
    checkpointer.wait()
