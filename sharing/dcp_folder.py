"""Read tensors from a folder of torch.distributed.checkpoint (DCP), as other programs write it.

PyTorch's own reader runs the code that the pickle .metadata names. This module looks up only the
names of a short list, and reads the tensors with the same checks as any file of weights.
"""

import io
import math
import pickle
import re
from collections.abc import Iterable
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


class DCPFolder:
    """A folder whose index was read, and whose tensors were not; `names` are those of the tensors.

    Raises:
        UserError: The folder is not as PyTorch writes it.
    """

    @file_errors()
    def __init__(self, path: Path) -> None:
        self._path = path
        pickled = io.BytesIO(plain(path / METADATA).read_bytes())
        try:
            metadata = _Unpickler(pickled).load().state
            stored = {name: of.state for name, of in metadata["state_dict_metadata"].items()}
            self._stored = {name: of for name, of in stored.items() if "chunks" in of}
            self._places = {
                (index.state["fqn"], index.state.get("offset")): info.state
                for index, info in metadata["storage_data"].items()
            }
        except Exception as error:  # the bytes of a damaged file can raise almost any error
            raise self._damaged(str(error)) from error
        self.names = [*self._stored]

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self._path / METADATA} is no index of a checkpoint that PyTorch wrote ({reason}); {_COPY}")

    @file_errors()
    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors by name, on the CPU. Raise UserError if one is missing or damaged."""
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        try:
            of = self._stored[name]
            shape, dtype = of["size"], of["properties"].state[0]
            parts = [self._checked(name, chunk.state, shape, dtype) for chunk in of["chunks"]]
            if sum(math.prod(chunk.state["sizes"]) for chunk in of["chunks"]) != math.prod(shape):
                raise ValueError(f"parts of {name} are missing")
        except Exception as error:  # the index of a stranger may hold anything
            raise self._damaged(str(error)) from error
        for _, _, file, end in parts:
            if not plain(file).is_file() or file.stat().st_size < end:
                raise UserError(f"{file} is missing or was cut short, and {name} is in it; {_COPY}")
        # What no part covers stays NaN and is found below. Integers can't be weights.
        tensor = torch.full(shape, math.nan if dtype.is_floating_point else 0, dtype=dtype)
        for place, start, file, end in parts:
            with file.open("rb") as stream:
                stream.seek(start)
                part = read_tensor(stream.read(end - start), name, str(file))
            if part.shape != tensor[place].shape or part.dtype != dtype:
                raise UserError(f"{file}: {name} is not as {METADATA} says; {_COPY}")
            tensor[place] = part
        if dtype.is_floating_point and tensor.isnan().any():
            raise UserError(f"{self._path}: parts of {name} lie on one another; {_COPY}")
        return tensor

    def _checked(
        self, name: str, chunk: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[tuple[slice, ...], int, Path, int]:
        """Return the place of a part in a tensor, its first byte, its file and its end there.

        These are checked before memory is taken: the bytes of each part must be in its file.
        """
        offsets, sizes = chunk["offsets"], chunk["sizes"]
        info = self._places[name, offsets]
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if not _FILE.fullmatch(file) or info.get("transform_descriptors"):
            raise ValueError(f"{name} lies at no place of a file, or is compressed")
        if any(first + size > whole for first, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a part of {name} lies outside of it")
        if min(start, *offsets, *sizes, 0) < 0 or length < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"a part of {name} has fewer bytes than elements")
        place = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
        return place, start, self._path / file, start + length
