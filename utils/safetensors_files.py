"""The files of a model in safetensors: one file, or several with an index.

The index is that of the Hugging Face libraries: model.safetensors.index.json says in which file
beside it each tensor is.

This module does not import PyTorch, so that programs that only look at runs start at once.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from utils.errors import UserError
from utils.json_files import read_json

if TYPE_CHECKING:
    from torch import Tensor

FILE = "model.safetensors"
INDEX_ENDING = ".safetensors.index.json"
INDEX = f"model{INDEX_ENDING}"

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of dtypes in the header of a file."""


def name_of_file(index: int, num_files: int) -> str:
    """Return the name of the file with this number, counted from 0."""
    return FILE if num_files <= 1 else f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"


def read_index(path: Path) -> dict[str, str]:
    """Return for each tensor of a model the name of its file, which lies beside the index.

    Raises:
        UserError: It is no such index.
    """
    index = read_json(path, "copy or download it again")
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise UserError(f"{path} has no weight_map, which says where each tensor is; copy or download it again")
    for file in file_of.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{path} names {str(file)[:100]!r}, which is no safetensors file beside it; refused")
    return file_of


def weights_in(folder: Path) -> Path | None:
    """Return the file of a folder that holds the weights of a model, or names all such files."""
    return next((folder / name for name in (INDEX, FILE) if os.path.isfile(folder / name)), None)


def load_files(folder: Path, name: str) -> "dict[str, Tensor]":
    """Return the tensors of a file of safetensors, or of all files of an index.

    The tensors lie in the files. Memory takes only what is read of them, and can drop it.

    Args:
        name: of the file or the index in the folder.

    Raises:
        OSError, SafetensorError: A file can't be read.
        UserError: The index and its files differ.
    """
    from safetensors.torch import load_file

    if not name.endswith(INDEX_ENDING):
        return load_file(folder / name)
    return joined(str(folder / name), read_index(folder / name), lambda file: load_file(folder / file))


def joined(index: str, file_of: dict[str, str], read: "Callable[[str], dict[str, Tensor]]") -> "dict[str, Tensor]":
    """Return the tensors of all files of an index, which must be those that it names.

    Args:
        index: of the index, for messages.
        read: returns the tensors of a file.

    Raises:
        UserError: The index and its files differ.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted({*file_of.values()}):
        tensors |= read(file)
    if tensors.keys() != file_of.keys():
        differing = min(tensors.keys() ^ file_of.keys())
        raise UserError(f"{index} and its files differ in {differing}; copy or download them again")
    return tensors
