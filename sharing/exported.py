"""Describe a model in the metadata of its file of weights, so that the file alone can be loaded.

The file is in safetensors and has this project's names. Its metadata holds one entry, a JSON object
with the architecture and all its options, the sizes of the data, and where the weights come from.
Files come from strangers: the description is read like any config, and can't name code.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from models import ArchConfig
from sharing.published import COMPILED, PREFIX, Weights, prefix_of, to_ours
from sharing.published_text_files import find_published
from sharing.weights_file import holds_characters, read_metadata, read_weights
from utils.checkpoint.names import folder_around
from utils.command_line import read_config, validate
from utils.config import Int, StrictModel
from utils.errors import UserError
from utils.json_files import parse_json
from utils.run.resume import completed
from utils.safetensors_files import weights_in
from utils.terminal import tell

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
    # For people; nothing here opens these names.
    data: list[_Name] = Field(max_length=1000)  # the folders' names of the training data
    run: _Name  # project and run
    step: Int = Field(ge=0)

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the data, as a checkpoint stores them."""
        return self.model_dump(exclude={*Exported.model_fields, "kind"})

    def as_metadata(self) -> dict[str, str]:
        """Return the metadata of the file."""
        return {_ENTRY: self.model_dump_json()}

    @model_validator(mode="after")
    def _arch_reads_such_data(self) -> Self:
        kind = "text" if isinstance(self, ExportedText) else "puzzles"
        if self.arch.kind != kind:
            raise ValueError(f"{self.arch.name} reads {self.arch.kind}, but the sizes are of {kind}")
        return self


class ExportedPuzzles(Exported):
    """The description of a model of puzzles. It has no key `kind`, as all files once had none."""

    seq_len: Int = Field(ge=1, le=_LONGEST_SEQUENCE)
    vocab_size: Int = Field(ge=1, le=_LARGEST_TABLE)
    num_puzzle_identifiers: Int = Field(ge=1, le=_LARGEST_TABLE)


class ExportedText(Exported):
    """The description of a model of text. training/data.py says what the sizes mean."""

    kind: Literal["text"]
    vocab_size: Int = Field(ge=1, le=_LARGEST_TABLE)
    max_len: Int = Field(ge=1, le=_LARGEST_TABLE)
    mean_context: Int = Field(ge=0, le=_LARGEST_TABLE)
    tokenizer: _Name
    special_tokens: dict[_Name, Int] = Field(max_length=10)
    form: Literal["instruction", "text"] | None = None
    target_only: bool = True  # whether the loss of its training was that of responses alone

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = super().sizes
        del sizes["target_only"]
        return sizes


def _own_text(where: str) -> str | None:
    """Return the text that describes the model in a file that was exported here."""
    if os.path.isdir(where) and weights_in(Path(where)) is None:  # a folder of HRM-Text's training
        return None
    return read_metadata(where).get(_ENTRY)


def _published(where: str) -> Exported | None:
    """Return the description of a published model of text, which nobody exported here."""
    published = find_published(where)
    if published is None:
        return None
    defaults = read_config("pretrain", [f"arch={published.arch['name']}"])["arch"]
    described = {
        "format": FORMAT,
        "kind": "text",
        "arch": defaults | published.arch,
        "vocab_size": published.vocab_size,
        "max_len": published.max_len,
        "mean_context": published.max_len,
        "tokenizer": "unknown",  # the tokens have no names in these files
        "special_tokens": {},
        "data": [],
        "run": where,
        "step": 0,
    }
    try:
        return exported_as(described)
    except UserError as error:
        raise UserError(f"{where} is no published model that is known here ({error}); copy it again") from error


def exported_as(described: dict[str, Any]) -> Exported:
    """Return the description of a model.

    Raises:
        UserError: A value is wrong.
    """
    return validate(ExportedText if described.get("kind") == "text" else ExportedPuzzles, described)


def why_not_described(where: str) -> str:
    """Return a line about a file without a description of its model, and what to give instead.

    Args:
        where: a path or hf://owner/repo[/path].

    Raises:
        UserError: The file can't be read.
    """
    if around := folder_around(where):
        return around
    if holds_characters(where):
        return f"{where} is no checkpoint, but a file of text; give the folder of a run or of one of its steps"
    return (
        f"{where} is a file of weights, which says neither its architecture nor its data; give arch=... (with "
        "the options that it was trained with) and data_path=..., or a file that python -m sharing.export wrote"
    )


def read_exported(where: str) -> Exported | None:
    """Return the description in a file of weights; None if the file has none.

    A published model of text describes itself in other files (sharing/published_text_files.py).

    Args:
        where: a path or hf://owner/repo[/path], as for `sharing.weights_file.read_weights`; or the
            folder of a published model of text.

    Raises:
        UserError: The file can't be read, or its description is damaged, forged or of another
            version.
    """
    text = _own_text(where)
    if text is None:
        return _published(where)
    described = parse_json(text, f"{where}: its description", "copy or export it again")
    if not isinstance(described, dict):
        raise UserError(f"{where} is damaged: the description of its model is no JSON object; copy or export it again")
    if described.get("format") != FORMAT:
        raise UserError(
            f"{where} has a description of format {described.get('format')!r}, and this version reads {FORMAT}; update "
            "the program, or export the model again"
        )
    try:
        return exported_as(described | {"arch": whole_arch(described)})
    except UserError as error:
        raise UserError(f"{where} describes no model that is known here ({error}); export it again") from error


def read_foreign(where: str) -> Weights:
    """Return the weights of a file, or of a published model of text, by our names.

    Raises:
        UserError: They can't be read.
    """
    published = find_published(where) if _own_text(where) is None else None
    if published is not None:
        return published.read_weights()
    weights = read_weights(where)
    dropped = sorted({prefix_of(name) for name in weights} - {""})
    if any(each.replace(COMPILED, "") != PREFIX for each in dropped):  # not as the published programs save
        tell(f"{where}: dropped {' and '.join(dropped)} from the names of its weights")
    return to_ours(weights)


def whole_arch(config: dict[str, Any]) -> Any:
    """Return the architecture of a stored config, with defaults for options that were added since.

    Raises:
        UserError: An option is an interpolation.
    """
    arch = config.get("arch")
    return completed({"arch": arch}, "pretrain")["arch"] if isinstance(arch, dict) else arch
