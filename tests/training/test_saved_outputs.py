"""Outputs are written completely, in pieces. A full disk is one mistake on all ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.spawn import run_ranks
from training import saved_outputs
from training.saved_outputs import OutputWriter
from utils.errors import UserError
from utils.ranks.world import World

SINGLE = World.single()


def _outputs(first: int, num: int) -> dict[str, torch.Tensor]:
    rows = torch.arange(first, first + num)
    return {"rows": rows, "logits": rows[:, None].float().expand(num, 8).contiguous()}


def test_outputs_are_written_in_pieces_of_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_outputs, "_BYTES_PER_FILE", 200)  # an example has 40 bytes
    OutputWriter(tmp_path, "none", SINGLE).close(SINGLE)
    writer = OutputWriter(tmp_path, "all", SINGLE)
    first = 0
    for num in (3, 3, 1, 7, 1, 1):
        writer.add(_outputs(first, num))
        first += num
        assert len(writer._pending) < 5  # memory does not grow with the number of outputs
    writer.close(SINGLE)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"all_rank0_{n:04d}.safetensors" for n in range(3)]
    pieces = [load_file(file) for file in files]
    assert torch.cat([piece["rows"] for piece in pieces]).tolist() == list(range(16))
    assert torch.cat([piece["logits"] for piece in pieces])[:, 7].tolist() == list(range(16))


def test_only_files_of_an_earlier_attempt_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    OutputWriter.clear(folder, ["all"], SINGLE)
    assert not folder.exists()
    folder.mkdir(parents=True)
    others = ["mine.safetensors", "notes.txt", "other_rank0_0000.safetensors", "weights_rank0.safetensors"]
    for name in ("all_rank0_0000.safetensors", "all_rank3_0012.safetensors", "a+_rank0_0000.safetensors", *others):
        (folder / name).touch()
    OutputWriter.clear(folder, ["all", "a+"], SINGLE)
    assert sorted(path.name for path in folder.iterdir()) == others


def _one_rank_cannot_write(world: World, folder: str) -> str:
    (Path(folder) / "file").touch()
    writer = OutputWriter(Path(folder) / ("file" if world.rank == 1 else "."), "all", world)
    writer.add(_outputs(0, 3))
    with pytest.raises(UserError) as caught:
        writer.close(world)
    return str(caught.value)


def test_a_file_that_cannot_be_written_is_a_mistake_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(_one_rank_cannot_write, 2, str(tmp_path))
    assert len(set(said)) == 1 and "File exists" in said[0]
