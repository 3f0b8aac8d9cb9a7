"""The weights of a model are written tensor by tensor, into one file or several with an index."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from records.checkpoint.reader import Checkpoint
from records.checkpoint.weights import own_parts, plan_of
from records.checkpoint.writer import Checkpointer
from tests.records.checkpoint.helpers import CONFIG, WHOLE_RC, fix_manifest, placed, snapshot_at
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MOST_BYTES = 128  # WHOLE_RC has 120


def _whole_model() -> dict[str, Tensor]:
    return {
        "a.weight": WHOLE_RC,
        "b.half": WHOLE_RC.bfloat16() / 3,
        "c.flag": torch.tensor(True),
        "d.odd": torch.arange(3, dtype=torch.uint8),
        "e.empty": torch.zeros(0, 3),
        "f.weight": -WHOLE_RC,
    }


def _save(world: World, run: Path, axes: Axes, most_file_bytes: float = MOST_BYTES) -> None:
    world = connect_devices(world, "cpu", CONFIG, axes=axes)
    sharded = ("a.weight", "b.half", "f.weight")
    weights = {name: placed(world, of) if name in sharded else of for name, of in _whole_model().items()}
    weights |= {f"stage.{world.rank}": torch.tensor([world.rank])}  # a pipeline has tensors on one rank only
    checkpointer = Checkpointer(run, world, None, most_file_bytes=most_file_bytes)
    checkpointer.save(snapshot_at(1, world, weights=weights), is_best=False)
    checkpointer.wait()


LAYOUTS = {
    "one process": Axes(shard=1),
    "hsdp 2x2": Axes(replicate=2, shard=2),
    "fsdp 2 x tp 2": Axes(shard=2, model=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_model_gets_several_files_and_an_index(tmp_path: Path, layout: str) -> None:
    axes = LAYOUTS[layout]
    num_ranks = axes.replicate * axes.shard * axes.model
    run_ranks(_save, num_ranks, tmp_path, axes)
    folder = tmp_path / "step_00000001"
    weights = Checkpoint.open(folder).weights()
    expected = _whole_model() | {f"stage.{rank}": torch.tensor([rank]) for rank in range(num_ranks)}
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor), name
    files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    for name in files:
        length, contents = (folder / name).read_bytes()[:8], (folder / name).read_bytes()[8:]
        assert (size := int.from_bytes(length, "little")) % 8 == 0, "the tensors are not aligned"
        assert json.loads(contents[:size])["__metadata__"] == {"format": "pt"}, "other programs ask for it"
    assert len(files) in (3, 4)  # by the number of stages
    assert [*files] == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for tensors in files.values():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= MOST_BYTES


def _parts(world: World) -> dict[str, Any]:
    world = connect_devices(world, "cpu", CONFIG, axes=Axes(replicate=2, shard=2))
    weights = {"whole": torch.ones(2), "sharded": placed(world, WHOLE_RC)}
    return {name: tuple(of.shape) for name, of in own_parts(plan_of(weights, world), weights, world.rank).items()}


def test_of_equal_tensors_the_first_rank_writes_its_own() -> None:
    """Other ranks neither copy nor send what the first one has."""
    assert run_ranks(_parts, 4) == [{"whole": (2,), "sharded": (3, 6)}, {"sharded": (2, 6)}, {}, {}]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no JSON"),
        ({"weight_map": []}, "has no weight_map"),
        ({"weight_map": {"a": "../../etc/passwd.safetensors"}}, "no safetensors file beside it; refused"),
        ({"weight_map": {"a": "model-9.safetensors"}}, "manifest.json lists no model-9.safetensors"),
        ({"weight_map": {"a": "model-00001-of-00003.safetensors"}}, "and its files differ in "),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: dict[str, Any] | str, message: str) -> None:
    _save(connect_devices(World.single(), "cpu"), tmp_path, Axes())
    file = tmp_path / "step_00000001" / "model.safetensors.index.json"
    file.write_text(index if isinstance(index, str) else json.dumps(json.loads(file.read_text()) | index))
    fix_manifest(file.parent)
    with pytest.raises(UserError, match=message):
        Checkpoint.open(file.parent).weights()
    file.unlink()
    with pytest.raises(UserError, match=r"model.safetensors.index.json is missing"):
        Checkpoint.open(file.parent).weights()
