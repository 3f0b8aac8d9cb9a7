"""Read tensors from a folder of torch.distributed.checkpoint (DCP), as other programs write it.

PyTorch's own reader runs the code that the pickle .metadata names. This module looks up only the
names of a short list, and reads the tensors with the same checks as any file of weights.
"""

import io
import math
import os
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharing.weights_file import read_tensor
from utils.errors import UserError
from utils.files import file_errors, plain

METADATA = ".metadata"
_FILE = re.compile(r"__\d+_\d+\.distcp")
_COPY = "copy or download it again"


class _Made:
    """An object of the index: only its state, whatever its class would do with that."""

    state: Any = ()

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


_DCP = "torch.distributed.checkpoint"
_ALLOWED: dict[str, Any] = {
    **{f"{_DCP}.metadata.{name}": _Made for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")},
    **{f"{_DCP}.metadata.{kind}StorageMetadata": _Made for kind in ("Tensor", "Bytes", "Chunk")},
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _Made,
    f"{_DCP}.filesystem._StorageInfo": _Made,
    "torch.serialization._get_layout": _Made,
    "pathlib.PosixPath": _Made,
    "pathlib._local.PosixPath": _Made,
    "torch.Size": tuple,
    **{f"torch.{name}": getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int64")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name in the list. Nothing is imported."""
        if (found := _ALLOWED.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}: refused")
        return found


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor in a folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def is_dcp_folder(folder: str | Path) -> bool:
    return os.path.isfile(os.path.join(folder, METADATA))


@file_errors()
def read_index(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder by name, without reading them. Other objects are left out.

    Raises:
        UserError: The folder is not as PyTorch writes it.
    """
    file = plain(folder / METADATA)
    pickled = io.BytesIO(file.read_bytes())
    try:
        metadata = _Unpickler(pickled).load().state
        places = {
            (index.state["fqn"], index.state.get("offset")): info.state
            for index, info in metadata["storage_data"].items()
        }
        return {
            name: _stored(name, of.state, places)
            for name, of in metadata["state_dict_metadata"].items()
            if "chunks" in of.state
        }
    except Exception as error:  # the bytes of a damaged file can raise almost any error
        raise UserError(f"{file} is no index of a checkpoint that PyTorch wrote ({error}); {_COPY}") from error


def _stored(name: str, of: dict[str, Any], places: dict[tuple[str, tuple[int, ...]], dict[str, Any]]) -> Stored:
    shape, dtype = of["size"], of["properties"].state[0]
    chunks = []
    for part in of["chunks"]:
        offsets, sizes = part.state["offsets"], part.state["sizes"]
        place = places[name, offsets]
        chunk = Chunk(offsets, sizes, place["relative_path"], place["offset"], place["length"])
        if not _FILE.fullmatch(chunk.file) or place.get("transform_descriptors"):
            raise ValueError(f"{name} lies at no place of a file, or is compressed")
        if any(first + size > whole for first, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a part of {name} lies outside of it")
        # Checked before memory is taken: the bytes of a part must be in the file.
        if min(chunk.start, *sizes, 0) < 0 or chunk.length < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"a part of {name} has fewer bytes than elements")
        chunks.append(chunk)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"parts of {name} are missing")
    return Stored(shape, dtype, tuple(chunks))


@file_errors()
def read_tensors(folder: Path, index: dict[str, Stored], names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors of a folder by name, whole, on the CPU.

    Args:
        index: of `read_index`.

    Raises:
        UserError: A file is missing or damaged.
    """
    return {name: _read(folder, name, index[name]) for name in names}


def _read(folder: Path, name: str, stored: Stored) -> Tensor:
    for chunk in stored.chunks:
        file = plain(folder / chunk.file)
        if not file.is_file() or file.stat().st_size < chunk.start + chunk.length:
            raise UserError(f"{file} is missing or was cut short, and {name} is in it; {_COPY}")
    # What no part covers stays NaN and is found below. Integers can't be weights.
    tensor = torch.full(stored.shape, math.nan if stored.dtype.is_floating_point else 0, dtype=stored.dtype)
    for chunk in stored.chunks:
        with (folder / chunk.file).open("rb") as stream:
            stream.seek(chunk.start)
            part = read_tensor(stream.read(chunk.length), name, str(folder / chunk.file))
        if tuple(part.shape) != chunk.sizes or part.dtype != stored.dtype:
            raise UserError(f"{folder / chunk.file}: {name} is not as {METADATA} says; {_COPY}")
        place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        tensor[place] = part
    if stored.dtype.is_floating_point and tensor.isnan().any():
        raise UserError(f"{folder}: parts of {name} lie on one another; {_COPY}")
    return tensor
