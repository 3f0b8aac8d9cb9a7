"""What a host has to know to run an exported segment: config.json, beside the file.

A host keeps the state of each puzzle. It starts from `starts`, hands each segment the noise that
models/noise.py defines, and stops when the answer is settled: the model would halt, and its answer
is that of the segment before.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from dataset.augment import BOXES
from dataset.tasks import task_of_shape
from dataset.tasks.sudoku import SudokuTask
from models.base import CommonConfig
from sharing.exported import Exported, ExportedPuzzles, read_description
from sharing.published import Weights
from sharing.segment.function import Function, SegmentFunction, WeightDtype
from utils.command_line import validate
from utils.config import Bool, Float, Int, StrictModel
from utils.errors import UserError
from utils.files import file_errors
from utils.json_files import read_json

CONFIG = "config.json"
_MOST = 2**20
_Name = Annotated[str, Field(max_length=1000)]
_Size = Annotated[Int, Field(ge=1, le=_MOST)]
_Row = Annotated[list[Float], Field(max_length=_MOST)]


class HostConfig(StrictModel):
    """The content of config.json.

    Attributes:
        sha256: of the file; empty inside a page.
        checkpoint_sha256: of the weights that it was made from, in the checkpoint's own dtypes.
        inputs, outputs: as in `SegmentFunction`, whose `has_any_size` is any_size.
        state_shape: of a puzzle, for every state: numbers, or "cells" and "symbols" where any_size.
        starts: for each state the vectors (D,) that fill it at the start. Of the last state there
            are num_states, and trajectory k takes the one with number k mod num_states.
        noise: none, fresh or annealed, as arch.noise.
        segments: how many a puzzle takes at most.
        values_going_on: whether the model halts where q_halt > q_continue; or else where
            q_halt > 0.
        symbols: a character for each token of a board; empty where boards are no texts.
        model: the description of the model, as in our files of weights.
    """

    format: Literal[1]
    file: _Name
    sha256: _Name
    checkpoint_sha256: _Name
    weights: WeightDtype
    inputs: list[_Name] = Field(max_length=100)
    outputs: list[_Name] = Field(max_length=100)
    any_size: Bool
    state_shape: list[_Size | Literal["cells", "symbols"]] = Field(max_length=4)
    starts: dict[_Name, Annotated[list[_Row], Field(max_length=_MOST)]] = Field(max_length=10)
    noise: Literal["none", "fresh", "annealed"]
    segments: _Size
    values_going_on: Bool
    symbols: _Name
    model: dict[str, Any]

    @property
    def described(self) -> Exported:
        return read_description(self.model, self.file)


def host_config(
    function: Function, described: Exported, weights: WeightDtype, checkpoint: Weights, file: str
) -> HostConfig:
    """Return what hosts have to know of a function in a file."""
    arch = described.arch.model_copy(update={"forward_dtype": "float32"})
    of_states: dict[str, Any] = {
        "state_shape": [],
        "starts": {},
        "noise": "none",
        "segments": 1,
        "values_going_on": False,
        "symbols": "",
    }
    if isinstance(function, SegmentFunction):
        assert isinstance(arch, CommonConfig) and isinstance(described, ExportedPuzzles)
        model = function.model
        fresh = model.reset(model.initial_state(1, torch.device("cpu")), torch.ones(1, dtype=torch.bool))
        starts = {name: z[0].flatten(0, -2)[:1].tolist() for name, z in fresh.items()}
        if starts:
            starts[list(starts)[-1]] = model.starts().tolist()
        of_states = {
            "state_shape": ["cells", "symbols", arch.hidden_size] if function.has_any_size else list(model.state_shape),
            "starts": starts,
            "noise": arch.noise,
            "segments": arch.halt_max_steps,
            "values_going_on": arch.values_going_on,
            "symbols": _symbols(described, any_size=function.has_any_size),
        }
    return HostConfig(
        format=1,
        file=file,
        sha256="",  # that of a file that is still to be written
        checkpoint_sha256=hash_of(checkpoint),
        weights=weights,
        inputs=list(function.names),
        outputs=list(function.outputs),
        any_size=function.has_any_size,
        model=described.model_copy(update={"arch": arch, "run": ""}).model_dump(mode="json"),
        **of_states,
    )


def write_host_config(host: HostConfig, folder: Path) -> None:
    """Write config.json beside the file that it describes."""
    whole = host.model_copy(update={"sha256": _sha256(folder / host.file)})
    (folder / CONFIG).write_text(whole.model_dump_json(indent=1), encoding="utf-8")


def read_host_config(file: Path, where: str) -> HostConfig:
    """Read and check config.json beside a file, and that it is the config of this file.

    Raises:
        UserError: One of them is missing, damaged, too new, or of another export.
    """
    fix = "copy the whole folder that python -m sharing.export wrote, or export it again"
    try:
        stored = read_json(file.parent / CONFIG, fix)
    except FileNotFoundError:
        raise UserError(f"{where} has no {CONFIG} beside it; {fix}") from None
    if not isinstance(stored, dict) or stored.get("format") != 1:
        raise UserError(f"{file.parent / CONFIG} is not of format 1; update the program, or export it again")
    try:
        host = validate(HostConfig, stored)
    except UserError as error:
        raise UserError(f"{file.parent / CONFIG} describes no exported segment ({error}); {fix}") from error
    described = host.described
    if isinstance(described, ExportedPuzzles) and (wrong := _contradictions(host, described)):
        raise UserError(f"{file.parent / CONFIG} contradicts its model in {', '.join(wrong)}; {fix}")
    if _sha256(file) != host.sha256:
        raise UserError(f"{where} is not the file that {CONFIG} beside it describes; {fix}")
    return host


def _contradictions(host: HostConfig, described: ExportedPuzzles) -> list[str]:
    """Return the keys of what a host reads that are not as the model says."""
    arch = described.arch
    assert isinstance(arch, CommonConfig)
    expected = {
        "noise": arch.noise,
        "segments": arch.halt_max_steps,
        "values_going_on": arch.values_going_on,
        "any_size": "units" in host.inputs,
        "outputs": ["logits", "q_halt", "q_continue", *(f"next_{name}" for name in host.starts)],
        "inputs": [name for name in ("tokens", "puzzles", "noise", "units") if name in host.inputs] + [*host.starts],
    }
    wrong = [key for key, value in expected.items() if getattr(host, key) != value]
    if ("noise" in host.inputs) != (arch.noise != "none"):
        wrong.append("inputs")
    if host.symbols != _symbols(described, any_size=host.any_size):
        wrong.append("symbols")
    return wrong


def _symbols(described: ExportedPuzzles, *, any_size: bool) -> str:
    board = task_of_shape(described.seq_len, described.vocab_size)
    # A model that reads any size names the symbols of the largest boards.
    board = SudokuTask(list(BOXES.values())[-1]) if any_size else board
    return "" if board is None else board.symbols


def hash_of(weights: Weights) -> str:
    """Return the SHA-256 of all names, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@file_errors()
def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
