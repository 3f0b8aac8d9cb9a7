"""Describe a model in the metadata of its file of weights, so that the file alone can be loaded.

The file is in safetensors and has this project's names. Its metadata holds one entry, a JSON object
with the architecture and all its options, the sizes of the data, and where the weights come from.
Files come from strangers: the description is read like any config, and can't name code.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from models import ArchConfig
from utils.checkpoint.names import folder_around
from utils.command_line import validate
from utils.config import Int, StrictModel
from utils.errors import UserError
from utils.run.resume import completed
from utils.weights_file import is_text, read_metadata

FORMAT = 1
_ENTRY = "recursive_model"
# Far above any dataset. models/__init__.py compares the model's size with the memory.
_LONGEST_SEQUENCE = 2**20
_LARGEST_TABLE = 2**31
_Name = Annotated[str, Field(max_length=1000)]


class Exported(StrictModel):
    """The description of a model in its file."""

    format: Literal[1]
    arch: ArchConfig
    seq_len: Int = Field(ge=1, le=_LONGEST_SEQUENCE)
    vocab_size: Int = Field(ge=1, le=_LARGEST_TABLE)
    num_puzzle_identifiers: Int = Field(ge=1, le=_LARGEST_TABLE)
    # For people; nothing here opens these names.
    data: list[_Name] = Field(max_length=1000)  # the folders' names of the training data
    run: _Name  # project and run
    step: Int = Field(ge=0)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the data, as `build_arch` takes them."""
        return {key: getattr(self, key) for key in ("seq_len", "vocab_size", "num_puzzle_identifiers")}

    def as_metadata(self) -> dict[str, str]:
        """Return the metadata of the file."""
        return {_ENTRY: self.model_dump_json()}


def why_not_described(where: str) -> str:
    """Return a line about a file without a description of its model, and what to give instead.

    Args:
        where: a path or hf://owner/repo/file.

    Raises:
        UserError: The file can't be read.
    """
    if around := folder_around(where):
        return around
    if is_text(where):
        return f"{where} is no checkpoint, but a file of text; give the folder of a run or of one of its steps"
    return (
        f"{where} is a file of weights, which says neither its architecture nor its data; give arch=... (with "
        "the options that it was trained with) and data_path=..., or a file that python -m models.export wrote"
    )


def read_exported(where: str) -> Exported | None:
    """Return the description in a file of weights; None if the file has none.

    Args:
        where: a path or hf://owner/repo/file, as for `utils.weights_file.read_weights`.

    Raises:
        UserError: The file can't be read, or its description is damaged, forged or of another
            version.
    """
    text = read_metadata(where).get(_ENTRY)
    if text is None:
        return None
    try:
        described: Any = json.loads(text)
    except (ValueError, RecursionError):
        described = None
    if not isinstance(described, dict):
        raise UserError(f"{where} is damaged: the description of its model is no JSON object; copy or export it again")
    if described.get("format") != FORMAT:
        raise UserError(
            f"{where} has a description of format {described.get('format')!r}, and this version reads {FORMAT}; update "
            "the program, or export the model again"
        )
    try:
        return validate(Exported, described | {"arch": whole_arch(described)})
    except UserError as error:
        raise UserError(f"{where} describes no model that is known here ({error}); export it again") from error


def whole_arch(config: dict[str, Any]) -> Any:
    """Return the architecture of a stored config, with defaults for options that were added since.

    Raises:
        UserError: An option is an interpolation.
    """
    arch = config.get("arch")
    return completed({"arch": arch}, "pretrain")["arch"] if isinstance(arch, dict) else arch
