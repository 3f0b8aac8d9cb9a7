"""Read and write files of weights, in safetensors or torch's format. No file can run code.

This is the only module that calls `torch.load` and `torch.save`.
"""

import io
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from sharing.hub import is_address, path_of, with_file
from utils.errors import UserError
from utils.files import write_atomically
from utils.safetensors_files import INDEX_ENDING, read_index, weights_in

_ZIP = b"PK\x03\x04"
_STATE, _STEP = "model_state_dict", "step"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_weights(where: str) -> dict[str, Tensor]:
    """Read the tensors of a file, by name, on the CPU.

    The contents, not the file's name, decide whether it is read as safetensors or as torch's
    format. If it holds {"model": tensors, ...}, {"model_state_dict": tensors, ...} as URM's program
    writes, or {"state_dict": tensors, ...} as Lightning does, the inner tensors are returned.

    Args:
        where: a path, or hf://owner/repo[@revision]/path/in/repo for a file on the Hugging Face
            Hub. A name that ends in .safetensors.index.json is that of an index of several files.
            A folder means the index or the model.safetensors in it, and hf://owner/repo the
            model.safetensors there.

    Raises:
        UserError: The file is missing or damaged, or holds something else than tensors.
    """
    where = _file_at(where)
    if where.endswith(INDEX_ENDING):
        return _read_all(where)
    with _opened(where) as (path, head):
        weights = _read_safetensors(path, where) if _is_safetensors(head) else _read_torch(path, where, head)
    for key in ("model", _STATE, "state_dict"):
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    if not isinstance(weights, dict) or not weights:
        raise UserError(f"{where} holds no weights by name; give a file that holds a model's state dict")
    for name, tensor in weights.items():
        _check(name, tensor, where)
    return {name: tensor.detach() for name, tensor in weights.items()}


def read_step(where: str) -> int | None:
    """Return the step that URM's program stores in its checkpoints; None for any other file.

    Args:
        where: as for `read_weights`.

    Raises:
        UserError: The file is missing or damaged.
    """
    where = _file_at(where)
    if where.endswith(INDEX_ENDING):
        return None
    with _opened(where) as (path, head):
        found = None if _is_safetensors(head) else _read_torch(path, where, head)
    step = found.get(_STEP) if isinstance(found, dict) and isinstance(found.get(_STATE), dict) else None
    return step if type(step) is int and step >= 0 else None


def _read_all(index: str) -> dict[str, Tensor]:
    """Return the tensors in the files of an index."""
    file_of = _file_of(index)
    tensors: dict[str, Tensor] = {}
    for file in sorted({*file_of.values()}):
        tensors |= read_weights(file)
    if tensors.keys() != file_of.keys():
        differing = min(tensors.keys() ^ file_of.keys())
        raise UserError(f"{index} and its files differ in {differing}; copy or download them again")
    return tensors


def _file_at(where: str) -> str:
    """Return the file of weights in a folder or a repository; any other path as it is."""
    if is_address(where):
        return with_file(where)
    found = weights_in(Path(where)) if os.path.isdir(where) else None
    return where if found is None else str(found)


def _file_of(index: str) -> dict[str, str]:
    """Return for each tensor of an index the file that holds it, as `read_weights` takes it."""
    folder = index[: index.rfind("/") + 1]
    with _opened(index) as (path, _):
        return {name: f"{folder}{file}" for name, file in read_index(path).items()}


def read_tensor(saved: bytes, name: str, where: str) -> Tensor:
    """Return the only tensor of a file of torch.save. A folder of DCP joins many to one file.

    Args:
        saved: the contents of the file.
        name, where: of the tensor and of the folder, for messages.

    Raises:
        UserError: The bytes are damaged, or hold something else than a tensor.
    """
    tensor = _read_torch(io.BytesIO(saved), where, saved[:9])
    _check(name, tensor, where)
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def _check(name: Any, tensor: Any, where: str) -> None:
    """Raise UserError unless this is a name and a whole, finite tensor."""
    if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise UserError(
            f"{where} holds {name!r}, which is no plain tensor under a name; give a file that holds a model's "
            "state dict and nothing else"
        )
    # Checked before anything reads the elements: a forged tensor may claim that a small storage is
    # repeated billions of times.
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
        raise UserError(f"{where} holds no elements of {name}, or not all; copy or download it again")
    if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
        raise UserError(f"{where}: {name} is {tensor.dtype}; give weights that were not quantised")
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise UserError(f"{where}: {name} holds NaN or infinity; give a file of another step")


def read_metadata(where: str) -> dict[str, str]:
    """Return the texts in the header of a safetensors file. Files in torch's format have none.

    Args:
        where: as for `read_weights`.

    Raises:
        UserError: The file is missing or damaged.
    """
    where = _file_at(where)
    if where.endswith(INDEX_ENDING):  # all files of a model have the same texts
        where = min(_file_of(where).values())
    with _opened(where) as (path, head):
        if not _is_safetensors(head):
            return {}
        try:
            with safe_open(path, framework="pt") as file:
                return file.metadata() or {}
        except SafetensorError as error:
            raise _damaged(where, error) from error


def read_names(where: str) -> list[str]:
    """Return the names of the tensors of a safetensors file, without reading them.

    Args:
        where: as for `read_weights`.

    Raises:
        UserError: The file is missing, damaged, or of another format.
    """
    where = _file_at(where)
    if where.endswith(INDEX_ENDING):
        return list(_file_of(where))
    with _opened(where) as (path, head):
        if not _is_safetensors(head):
            raise UserError(f"{where} is no safetensors file; copy or download it again")
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except SafetensorError as error:
            raise _damaged(where, error) from error


def write_weights(
    path: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None, *, step: int | None = None
) -> None:
    """Write safetensors if the name ends in .safetensors, else a plain dict by torch.save.

    The file appears under its name when it is whole.

    Args:
        metadata: texts for the header, which only safetensors have.
        step: torch.save writes {"step": step, "model_state_dict": weights}, as URM's program does;
            None: the weights alone.

    Raises:
        OSError: The file can't be written.
    """
    # A clone holds only its own elements. torch.save would write all the memory behind a view, and
    # safetensors refuses views.
    weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    contents: bytes | memoryview
    if path.suffix == ".safetensors":
        contents = save(weights, metadata)
    else:
        buffer = io.BytesIO()
        torch.save(weights if step is None else {_STEP: step, _STATE: weights}, buffer)
        contents = buffer.getbuffer()
    write_atomically(path, contents)


def holds_characters(where: str) -> bool:
    """Return whether a file begins with text, unlike a file of weights or the index of several.

    Args:
        where: as for `read_weights`.

    Raises:
        UserError: The file is missing or can't be read.
    """
    where = _file_at(where)
    if os.path.isdir(where):  # of a published model of text
        return False
    with _opened(where) as (_, head):
        return (
            not where.endswith(INDEX_ENDING)
            and head[0] < 0x80
            and all(byte >= 32 or chr(byte).isspace() for byte in head)
        )


@contextmanager
def _opened(where: str) -> Iterator[tuple[Path, bytes]]:
    """Give the path of a file of weights and its first nine bytes.

    Raises:
        UserError: The file is missing, empty or can't be read.
    """
    path = path_of(where)
    if not os.path.isfile(path):  # unlike path.is_file(), False where a folder may not be read
        what = (
            "is a folder"
            if os.path.isdir(path)
            else "does not exist"
            if not os.path.exists(path)
            else "is no regular file"
        )
        raise UserError(f"{where} {what}; give a file of weights (safetensors, or written by torch.save)")
    try:
        with path.open("rb") as file:
            head = file.read(9)
        if not head:
            raise UserError(f"{where} is empty; copy or download it again")
        yield path, head
    except OSError as error:
        raise UserError(f"{where} can't be read ({error.strerror or error}); check its permissions") from error


def _is_safetensors(head: bytes) -> bool:
    # Safetensors start with eight bytes for the header's length, then the header as JSON.
    return head[8:] == b"{"


def _read_safetensors(path: Path, where: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch has no name for
        raise _damaged(where, error) from error


def _damaged(where: str, error: Exception) -> UserError:
    return UserError(f"{where} is no whole safetensors file ({error}); copy or download it again")


class _Compressed(Exception):
    """The zip file has compressed parts, which could expand to a thousand times their size."""


def _require_stored(file: Path | BinaryIO) -> None:
    with zipfile.ZipFile(file) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise _Compressed


def _read_torch(source: Path | io.BytesIO, where: str, head: bytes) -> Any:
    # With mmap a large puzzle table takes no memory until its rows are read. But torch.load reads
    # any path that ends in .safetensors as safetensors. It gets such a file open and without mmap.
    use_mmap = isinstance(source, Path) and head.startswith(_ZIP) and source.suffix != ".safetensors"
    try:
        if head.startswith(_ZIP):
            _require_stored(source)
        opened = source.open("rb") if isinstance(source, Path) else source
        with opened as file, warnings.catch_warnings(action="ignore"):
            file.seek(0)
            return torch.load(str(source) if use_mmap else file, weights_only=True, map_location="cpu", mmap=use_mmap)
    except OSError:
        raise
    except _Compressed as error:
        raise UserError(
            f"{where} is compressed, as torch.jit.save writes programs (torch.save compresses nothing), and could "
            "take any amount of memory: refused; give a file that holds a model's state dict and nothing else"
        ) from error
    except Exception as error:  # the bytes of a damaged file can raise almost any error
        # Torch's own message is left out, because it advises to load the file without the check.
        if "weights_only" in str(error):
            raise UserError(
                f"{where} holds more than tensors (or is no file of weights at all), and loading it would run code: "
                "refused; give a file that holds a model's state dict and nothing else"
            ) from error
        raise UserError(
            f"{where} is neither a whole safetensors file nor a whole file of torch.save; copy or download it again"
        ) from error
