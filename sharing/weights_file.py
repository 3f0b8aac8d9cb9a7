"""Read and write files of weights, in safetensors or torch's format. No file can run code.

This is the only module that calls `torch.load` and `torch.save`.
"""

import io
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.hub import is_address, path_of, with_file
from utils.safetensors_files import INDEX_ENDING, joined, read_index, weights_in

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class WeightsFile:
    """A file of weights, or the index of several, whose tensors were not read."""

    where: str  # a path, or an address of the Hugging Face Hub
    path: Path  # of the file on this machine
    head: bytes  # its first nine bytes

    @property
    def is_index(self) -> bool:
        return self.where.endswith(INDEX_ENDING)

    @property
    def is_safetensors(self) -> bool:
        # Safetensors start with eight bytes for the header's length, then the header as JSON.
        return self.head[8:] == b"{"

    def file_of(self) -> dict[str, str]:
        """Return for each tensor of an index the file that holds it."""
        folder = self.where[: self.where.rfind("/") + 1]
        return {name: f"{folder}{file}" for name, file in read_index(self.path).items()}

    def header(self) -> tuple[dict[str, str], list[str]]:
        """Return the texts and the names of tensors in the header of safetensors.

        Files in torch's format have none.
        """
        if self.is_index:  # all files of a model have the same texts
            file_of = self.file_of()
            return open_weights(min(file_of.values())).header()[0], list(file_of)
        if not self.is_safetensors:
            return {}, []
        with self._safetensors() as file:
            return file.metadata() or {}, list(file.keys())

    def read(self) -> dict[str, Tensor]:
        """Read the tensors by name, on the CPU. Raise UserError if it holds anything else.

        They may lie under "model", "model_state_dict" (URM's program) or "state_dict" (Lightning).
        """
        if self.is_index:
            return joined(self.where, self.file_of(), lambda file: open_weights(file).read())
        weights: Any
        if self.is_safetensors:
            with self._safetensors() as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        else:
            weights = _read_torch(self.path, self.where, self.head)
        for key in ("model", "model_state_dict", "state_dict"):
            if isinstance(weights, dict) and isinstance(weights.get(key), dict):
                weights = weights[key]
        if not isinstance(weights, dict) or not weights:
            raise UserError(f"{self.where} holds no weights by name; give a file that holds a model's state dict")
        for name, tensor in weights.items():
            _check(name, tensor, self.where)
        return {name: tensor.detach() for name, tensor in weights.items()}

    def step(self) -> int:
        """Return the step that URM's program stores beside the weights; 0 if the file has none."""
        stored = None if self.is_index or self.is_safetensors else _read_torch(self.path, self.where, self.head)
        step = stored.get("step") if isinstance(stored, dict) else None
        return step if type(step) is int and step >= 0 else 0

    @contextmanager
    def _safetensors(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch has no name for
            message = f"{self.where} is no whole safetensors file ({error}); copy or download it again"
            raise UserError(message) from error


@file_errors()
def open_weights(where: str) -> WeightsFile:
    """Find a file of weights. Its contents, not its name, tell safetensors from torch's format.

    Args:
        where: a path, or hf://owner/repo[@revision]/path/in/repo: of a file, or of the index of
            several. A folder means the index or the model.safetensors in it, and hf://owner/repo
            the model.safetensors there.

    Raises:
        UserError: The file is missing, or no file of weights.
    """
    if not is_address(where) and os.path.isdir(where):
        where = str(weights_in(Path(where)) or where)
    where = with_file(where)
    path = path_of(where)
    if not os.path.isfile(path):  # unlike path.is_file(), False where a folder may not be read
        raise UserError(f"there is no file at {where}; give a file of weights (safetensors, or written by torch.save)")
    with path.open("rb") as file:
        opened = WeightsFile(where, path, file.read(9))
    if not (opened.is_index or opened.is_safetensors or opened.head.startswith((_ZIP, _PICKLE))):
        raise UserError(f"{where} is no file of weights (safetensors, or written by torch.save); give one, or a run")
    return opened


def read_tensor(saved: bytes, name: str, where: str) -> Tensor:
    """Return the only tensor in the bytes of a file of torch.save, or raise UserError."""
    tensor = _read_torch(io.BytesIO(saved), where, saved[:9])
    _check(name, tensor, where)
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def _check(name: Any, tensor: Any, where: str) -> None:
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


def write_weights(
    path: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None, *, step: int | None = None
) -> None:
    """Write safetensors if the name ends in .safetensors, else a plain dict by torch.save.

    Args:
        metadata: texts for the header, which only safetensors have.
        step: torch.save writes {"step": step, "model_state_dict": weights}, as URM's program does;
            None: the weights alone.

    Raises:
        OSError: The file can't be written. An earlier file stays as it was.
    """
    # A clone holds only its own elements. torch.save would write all the memory behind a view, and
    # safetensors refuses views.
    weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    contents: bytes | memoryview
    if path.suffix == ".safetensors":
        contents = save(weights, metadata)
    else:
        buffer = io.BytesIO()
        torch.save(weights if step is None else {"step": step, "model_state_dict": weights}, buffer)
        contents = buffer.getbuffer()
    write_atomically(path, contents)


def _read_torch(source: Path | io.BytesIO, where: str, head: bytes) -> Any:
    # With mmap a large puzzle table takes no memory until its rows are read. But torch.load reads
    # any path that ends in .safetensors as safetensors. It gets such a file open and without mmap.
    use_mmap = isinstance(source, Path) and head.startswith(_ZIP) and source.suffix != ".safetensors"
    file: BinaryIO
    try:
        with (
            source.open("rb") if isinstance(source, Path) else source as file,
            warnings.catch_warnings(action="ignore"),
        ):
            if head.startswith(_ZIP):
                with zipfile.ZipFile(file) as archive:
                    if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                        # They could take any amount of memory.
                        raise UserError(
                            f"{where} is compressed, as torch.jit.save writes programs (torch.save compresses "
                            "nothing): refused; give a file that holds a model's state dict and nothing else"
                        )
            file.seek(0)
            return torch.load(str(source) if use_mmap else file, weights_only=True, map_location="cpu", mmap=use_mmap)
    except (OSError, UserError):
        raise
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
