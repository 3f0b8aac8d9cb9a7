"""The files of a model in safetensors: one file, or several with the index of Hugging Face.

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

# The names of dtypes in the header of a file.
DTYPES = {f"float{bits}": f"F{bits}" for bits in (64, 32, 16)} | {f"int{bits}": f"I{bits}" for bits in (64, 32, 16, 8)}
DTYPES |= {"bfloat16": "BF16", "uint8": "U8", "bool": "BOOL"}


def read_index(path: Path) -> dict[str, str]:
    """Return for each tensor of a model the name of its file, which lies beside the index."""
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


def joined(index: str, file_of: dict[str, str], read: "Callable[[str], dict[str, Tensor]]") -> "dict[str, Tensor]":
    """Return the tensors of all files of an index, or raise UserError if they are others."""
    tensors: dict[str, Tensor] = {}
    for file in sorted({*file_of.values()}):
        tensors |= read(file)
    if tensors.keys() != file_of.keys():
        differing = min(tensors.keys() ^ file_of.keys())
        raise UserError(f"{index} and its files differ in {differing}; copy or download them again")
    return tensors
