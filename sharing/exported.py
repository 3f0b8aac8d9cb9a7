"""Describe a model in the metadata of its file of weights, so that the file alone can be loaded.

The metadata of the safetensors hold a JSON object with the architecture, the sizes of the data, and
where the weights come from. Files come from strangers: the description is read like any config.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from models import ArchConfig
from records.checkpoint.reader import Checkpoint, open_checkpoint
from records.folder import located_paths
from sharing.published import Weights
from sharing.published_text import find_published, read_ours
from sharing.sources import require_known, step_around
from sharing.stored_config import completed
from sharing.weights_file import open_weights
from utils.command_line import validate
from utils.config import Container, Int, StrictModel
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
    """The description of a model in its file."""

    format: Literal[1]
    arch: ArchConfig
    # For people; nothing here opens these names.
    data: list[_Name] = Field(max_length=1000)  # the folders' names of the training data
    run: _Name  # project and run
    step: Int = Field(ge=0)

    @property
    def title(self) -> str:
        return f"{self.arch.name} on {' and '.join(self.data) or 'unknown data'}"

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the data, as a checkpoint stores them."""
        return self.model_dump(exclude={*Exported.model_fields, "kind", "target_only"})

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


def _exported(described: Container) -> Exported:
    """Return a description with defaults for newer options, or raise UserError."""
    if isinstance(arch := described.get("arch"), dict):
        described = described | {"arch": completed({"arch": arch})["arch"]}
    return validate(ExportedText if described.get("kind") == "text" else ExportedPuzzles, described)


def read_description(described: Any, where: str) -> Exported:
    """Return the description of a model in somebody's file, or raise UserError."""
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise UserError(f"{where} has no description of format {FORMAT}; update the program, or export it again")
    try:
        return _exported(described)
    except UserError as error:
        raise UserError(f"{where} describes no model that is known here ({error}); copy or export it again") from error


@dataclass(frozen=True)
class ModelFile:
    """A file of weights, or a published model of text, whose weights were not read."""

    where: str  # as it was typed
    described: Exported | None  # None: it does not describe its model
    read_weights: Callable[[], Weights]  # by our names. Raises UserError if they can't be read
    is_program: bool = False  # a file of ONNX, which sharing/segment/ runs
    has_fixed_size: bool = False  # a program for boards of one size

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


def open_model(where: str) -> ModelFile:
    """Open a file of weights, and read the description of its model.

    Args:
        where: a path or hf://owner/repo[/path], as for `sharing.weights_file.open_weights`; or the
            folder of a published model of text, whose description is in other files.

    Raises:
        UserError: The file can't be read, or its description is damaged, forged or too new.
    """
    if where.endswith(".onnx"):
        return _open_program(where)
    is_training = os.path.isdir(where) and weights_in(Path(where)) is None  # a folder of HRM-Text's training
    file = None if is_training else open_weights(where)
    text = None if file is None else file.header()[0].get(_ENTRY)
    found = find_published(where) if text is None else None
    published, read_weights = found or (None, partial(read_ours, file or open_weights(where)))
    described: Any
    if text is not None:
        described = parse_json(text, f"{where}: its description", "copy or export it again")
    elif published is not None:
        described = {
            "format": FORMAT,
            "kind": "text",
            **published,
            "mean_context": published["max_len"],
            "tokenizer": "unknown",  # the tokens have no names in these files
            "special_tokens": {},
            "data": [],
            "run": where,
            "step": 0,
        }
    else:
        return ModelFile(where, None, read_weights)
    return ModelFile(where, read_description(described, where), read_weights)


def _open_program(where: str) -> ModelFile:
    def read_weights() -> Weights:
        raise UserError(f"{where} is a program, whose weights can't be read; give the checkpoint that it was made from")

    from sharing.segment.host import read_host_config

    host = read_host_config(Path(where), where)
    return ModelFile(where, host.described, read_weights, is_program=True, has_fixed_size=not host.any_size)


@dataclass(frozen=True)
class Source:
    """The weights of a run or a file by our names, and what is known of the model."""

    weights: Weights
    model: Exported | None  # None for a file of weights that does not describe its model
    checkpoint: Checkpoint | None = None  # of a run
    data_paths: Sequence[str] = ()  # of a run, from the current directory

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json beside the data of a text model, if there is one."""
        return next(filter(Path.is_file, (Path(path) / "tokenizer.json" for path in self.data_paths)), None)


def open_source(checkpoint: str, *, raw: bool) -> Source:
    """Read the weights of a checkpoint and its description.

    Args:
        checkpoint: a run folder, a step folder, <run>/best, <run>/latest or a weights file.
        raw: take the trained weights of a run, not its moving average.
    """
    if require_known(checkpoint) == "weights":
        if raw:
            raise UserError(f"{checkpoint} is a file of weights, which has no moving average; leave --raw out")
        file = open_model(checkpoint)
        return Source(file.read_weights(), file.described)
    opened = open_checkpoint(Path(checkpoint), lambda warning: tell(f"warning: {warning}"))
    state, run = opened.state, opened.path.absolute().parent
    config = state.config
    data_paths = located_paths(config.get("started_in"), config.get("data_paths") or [config.get("data_path")])
    of_text = {"kind": "text", "target_only": config.get("target_only", True)}
    described = (of_text if "tokenizer" in state.task else {}) | {
        "format": FORMAT,
        "arch": config.get("arch"),
        **state.task,
        # The names of folders only: the path to them may say more than the owner wants to publish.
        "data": [Path(path).name for path in data_paths],
        "run": f"{run.parent.name}/{run.name}",
        "step": state.step,
    }
    weights = opened.weights() if raw else opened.trained_weights()
    return Source(weights, _exported(described), opened, data_paths)
