"""Read tensors from a folder of torch.distributed.checkpoint (DCP), as other programs write it.

PyTorch's own reader runs the code that the file .metadata names. This one takes the file for plain
data, and reads the tensors with the same checks as any file of weights.
"""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharing.pickled_data import Made, Named, plain_data
from sharing.weights_file import read_tensor
from utils.errors import UserError
from utils.files import file_errors, plain

METADATA = ".metadata"
# A model of 70 billion parameters on 1,000 ranks has less.
_MOST_METADATA = 1 << 28
_FILE = re.compile(r"__\d+_\d+\.distcp")
_DTYPES = {f"torch.{name}": getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int64")}
_COPY = "copy or download it again"


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
    if file.stat().st_size > _MOST_METADATA:
        raise UserError(f"{file} has {file.stat().st_size:,} bytes, too many for the index of a checkpoint; {_COPY}")
    try:
        metadata = _state(plain_data(file.read_bytes()), "Metadata")
        stored: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
        for index, info in metadata["storage_data"].items():
            at = _state(index, "MetadataIndex")
            if at.get("offset") is not None:  # a tensor
                stored[at["fqn"], _sizes(at["offset"])] = _state(info, "_StorageInfo")
        return {
            name: _tensor(name, of.state, stored)
            for name, of in metadata["state_dict_metadata"].items()
            if isinstance(name, str) and isinstance(of, Made) and of.name.endswith(".TensorStorageMetadata")
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no index of a checkpoint that PyTorch wrote ({error}); {_COPY}") from error


def _state(made: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an object of PyTorch. Raise ValueError if it is another."""
    if not isinstance(made, Made) or not made.name.endswith(f".{name}") or not isinstance(made.state, dict):
        raise ValueError(f"a {name} is missing")
    return made.state


def _sizes(made: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    (sizes,) = made.arguments
    if made.name != "torch.Size" or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise ValueError("a size is wrong")
    return tuple(sizes)


def _tensor(name: str, of: dict[str, Any], stored: dict[tuple[str, tuple[int, ...]], dict[str, Any]]) -> Stored:
    dtype = of["properties"].state[0]
    shape = _sizes(of["size"])
    if not isinstance(dtype, Named) or dtype.name not in _DTYPES:
        raise ValueError(f"{name} has a dtype that no weight has")
    chunks = []
    for chunk in of["chunks"]:
        chunk = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        info = stored[name, offsets]
        if info.get("transform_descriptors"):
            raise ValueError(f"{name} is compressed")
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if not isinstance(file, str) or not _FILE.fullmatch(file) or type(start) is not int or type(length) is not int:
            raise ValueError(f"{name} lies at no place of a file")
        if not len(shape) == len(offsets) == len(sizes) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a part of {name} lies outside of it")
        # Checked before memory is taken: the bytes of a part must be in the file.
        if start < 0 or length < math.prod(sizes) * _DTYPES[dtype.name].itemsize:
            raise ValueError(f"a part of {name} has fewer bytes than elements")
        chunks.append(Chunk(offsets, sizes, file, start, length))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"parts of {name} are missing")
    return Stored(shape, _DTYPES[dtype.name], tuple(chunks))


@file_errors()
def read_tensors(folder: Path, index: dict[str, Stored], names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors of a folder by name, whole, on the CPU.

    Args:
        index: of `read_index`.

    Raises:
        UserError: A file is missing or damaged.
    """
    tensors = {}
    for name in names:
        stored = index[name]
        for chunk in stored.chunks:
            file = plain(folder / chunk.file)
            if not file.is_file() or file.stat().st_size < chunk.start + chunk.length:
                raise UserError(f"{file} is missing or was cut short, and {name} is in it; {_COPY}")
        tensors[name] = _read(folder, name, stored)
    return tensors


def _read(folder: Path, name: str, stored: Stored) -> Tensor:
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
