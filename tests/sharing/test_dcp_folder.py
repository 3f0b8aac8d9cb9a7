"""Folders of torch.distributed.checkpoint: read as PyTorch reads them, and no code of them runs."""

import builtins
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from sharing.dcp_folder import DCPFolder
from utils.errors import UserError

CODE_RAN = "a file ran code"


class Runs:
    """Runs code when Python's own reader loads it."""

    def __reduce__(self) -> Any:
        return builtins.exec, (f"raise SystemExit({CODE_RAN!r})",)


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight, average = torch.randn(2, 6, 3, generator=generator)
    return {
        "model": {"layer.weight": weight, "state": torch.randn(5, generator=generator).bfloat16()},
        "optim": {
            "state": {"layer.weight": {"step": torch.tensor(3.0), "param_ema": average}},
            "param_groups": [{"params": ["layer.weight"], "betas": (0.9, 0.95), "lr": torch.tensor(0.1)}],
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state_dict_saver.save(_state(), checkpoint_id=tmp_path / "epoch", no_dist=True)
    return tmp_path / "epoch"


@pytest.fixture
def in_two_parts(folder: Path) -> Path:
    """Return the folder with a weight in two files, as two ranks write it."""
    metadata = _metadata(folder)
    of = metadata.state_dict_metadata["model.layer.weight"]
    (whole,) = of.chunks  # type: ignore[union-attr]
    old = next(index for index in metadata.storage_data if index.fqn == "model.layer.weight")
    info = metadata.storage_data.pop(old)
    weight = _state()["model"]["layer.weight"]
    chunks = []
    for rank, rows in enumerate((slice(0, 4), slice(4, 6))):
        with (folder / f"__{rank}_0.distcp").open("ab") as file:
            start = file.tell()
            torch.save(weight[rows].clone(), file)
            length = file.tell() - start
        offset = torch.Size([rows.start, 0])
        metadata.storage_data[MetadataIndex("model.layer.weight", offset)] = type(info)(
            f"__{rank}_0.distcp", start, length
        )
        chunks.append(type(whole)(offset, torch.Size([rows.stop - rows.start, 3])))
    of.chunks = chunks  # type: ignore[union-attr]
    _write(folder, metadata)
    return folder


def _metadata(folder: Path) -> Metadata:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def _write(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _read(folder: Path) -> dict[str, Tensor]:
    opened = DCPFolder(folder)
    return opened.read(opened.names)


def _mistake(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        _read(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_tensors_are_those_that_pytorch_reads(folder: Path) -> None:
    tensors = _read(folder)
    expected = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    state_dict_loader.load(expected, checkpoint_id=folder, no_dist=True)
    assert {"model.layer.weight", "model.state", "optim.state.layer.weight.param_ema"} <= tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    assert tensors["model.state"].dtype == torch.bfloat16


def test_parts_in_several_files_are_joined(in_two_parts: Path) -> None:
    assert torch.equal(_read(in_two_parts)["model.layer.weight"], _state()["model"]["layer.weight"])


@pytest.mark.parametrize("payload", [{"a": Runs()}, torch.load, getattr])
def test_no_code_runs_that_a_file_names(folder: Path, payload: object) -> None:
    metadata = _metadata(folder)
    metadata.planner_data = payload
    for contents in (metadata, payload):
        _write(folder, contents)
        assert re.search(r"it names [\w.]+: refused", _mistake(folder))


def test_no_code_runs_that_stands_in_place_of_a_tensor(folder: Path) -> None:
    metadata = _metadata(folder)
    info = metadata.storage_data[MetadataIndex("model.state", [0])]
    with (folder / "__0_0.distcp").open("ab") as file:
        info.offset = file.tell()
        torch.save(Runs(), file)
        info.length = file.tell() - info.offset
    _write(folder, metadata)
    assert "loading it would run code: refused" in _mistake(folder)


def _place(change: Callable[[Any], object]) -> Callable[[Metadata], object]:
    return lambda metadata: change(metadata.storage_data[MetadataIndex("model.layer.weight", [0, 0])])


def _sizes(whole: tuple[int, ...], part: tuple[int, ...]) -> Callable[[Metadata], None]:

    def forge(metadata: Metadata) -> None:
        of: Any = metadata.state_dict_metadata["model.layer.weight"]
        of.size, of.chunks[0].sizes = torch.Size(whole), torch.Size(part)

    return forge


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (_place(lambda info: setattr(info, "relative_path", "../../secret")), "lies at no place of a file"),
        (_place(lambda info: setattr(info, "offset", info.offset + 7)), "copy or download it again|refused"),
        (_place(lambda info: setattr(info, "offset", -7)), "has fewer bytes than elements"),
        (_place(lambda info: setattr(info, "transform_descriptors", ["zstd"])), "is compressed"),
        (_sizes((1 << 40, 3), (1 << 40, 3)), "has fewer bytes than elements"),
        (_sizes((6, 3), (3, 6)), "lies outside of it"),
        (_sizes((3, 6), (3, 6)), "is not as .metadata says"),
        (lambda metadata: metadata.state_dict_metadata["model.layer.weight"].chunks.clear(), "parts of .* are missing"),
    ],
)
def test_a_forged_folder_is_named(folder: Path, forge: Callable[[Metadata], object], message: str) -> None:
    metadata = _metadata(folder)
    forge(metadata)
    _write(folder, metadata)
    assert re.search(message, _mistake(folder))


def test_a_file_that_was_cut_is_named(folder: Path) -> None:
    for name, kept, message in (
        ("__0_0.distcp", -9, "is missing or was cut short"),
        *((".metadata", kept, "is no index of a checkpoint") for kept in (-1, 300, 0)),
    ):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:kept])
        assert message in _mistake(folder)
        (folder / name).write_bytes(whole)


def test_parts_that_lie_on_one_another_are_named(in_two_parts: Path) -> None:
    metadata = _metadata(in_two_parts)
    of: Any = metadata.state_dict_metadata["model.layer.weight"]
    second = of.chunks[1]
    info = metadata.storage_data.pop(MetadataIndex("model.layer.weight", second.offsets))
    second.offsets = torch.Size([1, 0])
    metadata.storage_data[MetadataIndex("model.layer.weight", second.offsets)] = info
    _write(in_two_parts, metadata)
    assert "lie on one another" in _mistake(in_two_parts)


def test_damaged_bytes_never_end_in_another_error(folder: Path) -> None:
    file = folder / ".metadata"
    whole = file.read_bytes()
    for place in range(0, len(whole), 41):
        for byte in (0x00, 0x28, 0x52, 0x62, 0x85, 0xFF):
            file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                _read(folder)
            except UserError as error:
                assert "\n" not in str(error)
