"""Describe a model in the metadata of its file of weights, so that the file alone can be loaded.

The metadata of the safetensors hold a JSON object with the architecture, the sizes of the data, and
where the weights come from. Files come from strangers: the description is read like any config.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from models import ArchConfig
from sharing.published import COMPILED, PREFIX, Weights, prefix_of, to_ours
from sharing.published_text import PublishedModel, find_published
from sharing.sources import step_around
from sharing.stored_config import completed
from sharing.weights_file import WeightsFile, open_weights
from utils.command_line import validate
from utils.config import Int, StrictModel
from utils.errors import UserError
from utils.json_files import parse_json
from utils.safetensors_files import weights_in
from utils.terminal import tell

FORMAT = 1
_ENTRY = "recursive_model"
# Far above any dataset. models/__init__.py compares the model's size with the memory.
_LONGEST_SEQUENCE = 2**20
_LARGEST_TABLE = 2**31
_Name = Annotated[str, Field(max_length=1000)]


class Exported(StrictModel):
    """The description of a model in its file.

    Attributes:
        reads: what the model reads, as `kind` of an architecture has it.
        task_type: the Hub's name of what the model does.
        question: what solve.py is asked.
        unit: what a global batch counts.
    """

    reads: ClassVar[str]
    task_type: ClassVar[str]
    question: ClassVar[str]
    unit: ClassVar[str]

    format: Literal[1]
    arch: ArchConfig
    # For people; nothing here opens these names.
    data: list[_Name] = Field(max_length=1000)  # the folders' names of the training data
    run: _Name  # project and run
    step: Int = Field(ge=0)

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the data, as a checkpoint stores them."""
        return self.model_dump(exclude={*Exported.model_fields, "kind", "target_only"})

    def as_metadata(self) -> dict[str, str]:
        """Return the metadata of the file."""
        return {_ENTRY: self.model_dump_json()}

    @model_validator(mode="after")
    def _arch_reads_such_data(self) -> Self:
        if self.arch.kind != self.reads:
            raise ValueError(f"{self.arch.name} reads {self.arch.kind}, but the sizes are of {self.reads}")
        return self


class ExportedPuzzles(Exported):
    """The description of a model of puzzles. It has no key `kind`, as all files once had none."""

    reads, task_type, question, unit = "puzzles", "reasoning", "puzzle=...", "sequences"
    seq_len: Int = Field(ge=1, le=_LONGEST_SEQUENCE)
    vocab_size: Int = Field(ge=1, le=_LARGEST_TABLE)
    num_puzzle_identifiers: Int = Field(ge=1, le=_LARGEST_TABLE)


class ExportedText(Exported):
    """The description of a model of text. training/data.py says what the sizes mean."""

    reads, task_type, question, unit = "text", "text-generation", "prompt=...", "tokens"
    kind: Literal["text"]
    vocab_size: Int = Field(ge=1, le=_LARGEST_TABLE)
    max_len: Int = Field(ge=1, le=_LARGEST_TABLE)
    mean_context: Int = Field(ge=0, le=_LARGEST_TABLE)
    tokenizer: _Name
    special_tokens: dict[_Name, Int] = Field(max_length=10)
    form: Literal["instruction", "text"] | None = None
    target_only: bool = True  # whether the loss of its training was that of responses alone


def exported_as(described: dict[str, Any]) -> Exported:
    """Return the description of a model. Raise UserError if a value is wrong."""
    return validate(ExportedText if described.get("kind") == "text" else ExportedPuzzles, described)


@dataclass(frozen=True)
class ModelFile:
    """A file of weights, or a published model of text, whose weights were not read.

    Attributes:
        where: as it was typed.
        described: the description of its model; None if there is none.
    """

    where: str
    described: Exported | None
    _weights: WeightsFile | PublishedModel

    @property
    def step(self) -> int:
        """Return the step that the weights were trained for; 0 if that is not known."""
        if self.described is not None:
            return self.described.step
        return (self._weights.step() if isinstance(self._weights, WeightsFile) else None) or 0

    def require_description(self) -> Exported:
        """Return the description of the model. Raise UserError if there is none."""
        if self.described is None:
            raise UserError(
                step_around(self.where)
                or f"{self.where} is a file of weights, which says neither its architecture nor its data; give "
                "arch=... (with the options that it was trained with) and data_path=..., or a file that "
                "python -m sharing.export wrote"
            )
        return self.described

    def read_weights(self) -> Weights:
        """Return the weights by our names. Raise UserError if they can't be read."""
        if isinstance(self._weights, PublishedModel):
            return self._weights.read_weights()
        weights = self._weights.read()
        dropped = sorted({prefix_of(name) for name in weights} - {""})
        if any(each.replace(COMPILED, "") != PREFIX for each in dropped):  # not as the published programs save
            tell(f"{self.where}: dropped {' and '.join(dropped)} from the names of its weights")
        return to_ours(weights)


def open_model(where: str) -> ModelFile:
    """Open a file of weights, and read the description of its model.

    A published model of text describes itself in other files (sharing/published_text.py).

    Args:
        where: a path or hf://owner/repo[/path], as for `sharing.weights_file.open_weights`; or the
            folder of a published model of text.

    Raises:
        UserError: The file can't be read, or its description is damaged, forged or of another
            version.
    """
    is_training = os.path.isdir(where) and weights_in(Path(where)) is None  # a folder of HRM-Text's training
    file = None if is_training else open_weights(where)
    text = None if file is None else file.metadata().get(_ENTRY)
    weights: WeightsFile | PublishedModel
    if text is not None and file is not None:
        described, weights = parse_json(text, f"{where}: its description", "copy or export it again"), file
        version = described.get("format") if isinstance(described, dict) else described
        if not isinstance(described, dict) or version != FORMAT:
            raise UserError(
                f"{where} has a description of format {str(version)[:80]!r}, and this version reads {FORMAT}; update "
                "the program, or export the model again"
            )
    elif (published := find_published(where)) is not None:
        weights = published
        described = {
            "format": FORMAT,
            "kind": "text",
            "arch": published.arch,
            "vocab_size": published.vocab_size,
            "max_len": published.max_len,
            "mean_context": published.max_len,
            "tokenizer": "unknown",  # the tokens have no names in these files
            "special_tokens": {},
            "data": [],
            "run": where,
            "step": 0,
        }
    else:
        return ModelFile(where, None, file or open_weights(where))
    try:
        return ModelFile(where, exported_as(described | {"arch": whole_arch(described)}), weights)
    except UserError as error:
        raise UserError(f"{where} describes no model that is known here ({error}); copy or export it again") from error


def whole_arch(config: dict[str, Any]) -> Any:
    """Return the architecture of a stored config, with defaults for newer options."""
    arch = config.get("arch")
    return completed({"arch": arch})["arch"] if isinstance(arch, dict) else arch
