"""An exported segment as a model of puzzles, for the loops over segments of this project."""

# B = batch, S = cells, V = vocabulary, U = rows, columns and boxes

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from models.act import empty_batch, initial_carry, segment
from models.attention import Rotary
from models.base import CommonConfig, RecursiveModel
from models.carry import NOISY, SegmentOutput, State
from models.depth import Depth
from models.layers import Linear
from models.puzzle_embedding import PuzzleEmbedding
from models.se_mixer import units_of_board
from models.symbols import NUM_SPECIAL
from sharing.segment.host import CONFIG, HostConfig, read_host_config
from utils.errors import UserError
from utils.text import one_line

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Runs one segment: from the inputs of a `SegmentFunction` to its outputs, on the CPU."""


class ExportedModel(RecursiveModel):
    """A model whose forward pass an exported file computes. It has no weights, and can't train."""

    block_class = nn.Identity

    def __init__(self, host: HostConfig, run: Run, *, seq_len: int, vocab_size: int) -> None:
        arch = host.described.arch
        assert isinstance(arch, CommonConfig)
        # state_shape needs them.
        self._host, self._run, self._sizes = host, run, {"cells": seq_len, "symbols": vocab_size - NUM_SPECIAL}
        states = {name: f"start_{name}" for name in host.starts}
        super().__init__(
            arch,
            states=states,
            puzzle_row_size=0,
            seq_len=seq_len,
            vocab_size=vocab_size,
            num_puzzle_identifiers=1,
        )
        if "puzzles" in host.inputs:
            self.puzzle_embedding = _RowNumbers()
        for name, starts in host.starts.items():
            self.get_buffer(states[name]).copy_(torch.tensor(starts[0]).view(arch.hidden_size))
        self.fill_constants()
        if host.starts:
            starts_KD = torch.tensor(list(host.starts.values())[-1])
            if starts_KD.shape != self.starts().shape or not torch.equal(starts_KD, self.starts()):
                raise UserError(f"{host.file} has other initial states than arch.num_states makes; export it again")
        if "units" in host.inputs:
            side = math.isqrt(seq_len)
            self._units_US = units_of_board(side, side)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return tuple(self._sizes[size] if isinstance(size, str) else size for size in self._host.state_shape)

    def _rotary_tables(self) -> Rotary | None:
        return None

    def heads(self) -> tuple[Linear, ...]:
        return ()

    def forward(self, state: State, inputs_BS: Tensor, puzzle_rows_BE: Tensor | None, depth: Depth) -> SegmentOutput:
        """Run one segment. The rows are numbers of puzzles, and the depth is that of the file."""
        given = {"tokens": inputs_BS.int(), **state}
        if puzzle_rows_BE is not None:
            given["puzzles"] = puzzle_rows_BE.int()
        if NOISY in given:
            given["noise"] = given.pop(NOISY)
        if "units" in self._host.inputs:
            if (inputs_BS == 0).any():
                raise UserError(
                    f"{self._host.file} reads boards of any size, but not in one batch; give it data of one size"
                )
            given["units"] = self._units_US
        outputs = self._run([given[name].contiguous() for name in self._host.inputs])
        of = dict(zip(self._host.outputs, outputs, strict=True))
        return {name: of[f"next_{name}"] for name in self._host.starts}, of["logits"], of["q_halt"], of["q_continue"]


class _RowNumbers(PuzzleEmbedding):
    """A table in the file: the rows of a batch are their numbers."""

    def __init__(self) -> None:
        super().__init__(0, 0)

    def rows(self, ids_B: Tensor) -> Tensor:
        return ids_B


def load_onnx(file: Path, where: str, *, seq_len: int, vocab_size: int) -> ExportedModel:
    """Return the model in a file of ONNX, for boards of a size, or raise UserError."""
    host = read_host_config(file, where)
    run = onnx_runner(file, where, host.inputs, host.outputs)
    try:
        model = ExportedModel(host, run, seq_len=seq_len, vocab_size=vocab_size)
        # Two, because a file may have the size of its batch fixed at one.
        batch = {name: torch.ones_like(tensor) for name, tensor in empty_batch(2, seq_len, torch.device("cpu")).items()}
        batch["puzzle_identifiers"].zero_()
        carry, outputs = segment(model, initial_carry(model, batch), batch)
        found = [outputs.logits_BSV, outputs.q_halt_B, *carry.state.values()]
        expected = [(2, seq_len, vocab_size), (2,), *((2, *model.state_shape) for _ in host.starts)]
        if [tuple(tensor.shape) for tensor in found] != expected:
            raise ValueError("its outputs have other shapes")
    except (UserError, KeyError, RuntimeError, ValueError) as error:  # whatever a stranger's file does not fit
        raise UserError(f"{where} doesn't fit {CONFIG} beside it ({one_line(error)}); export it again") from error
    return model


def onnx_runner(file: Path, where: str, inputs: Sequence[str], outputs: Sequence[str]) -> Run:
    """Return what runs an ONNX file on the CPU, with as many threads as PyTorch has.

    Raises:
        UserError: ONNX Runtime is not installed, or can't read the file.
    """
    try:
        import onnxruntime
    except ImportError:
        raise UserError(f"{where} needs ONNX Runtime; run pip install -r requirements-export.txt") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        # From bytes, so that the file can't name others.
        session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes have no common one
        raise UserError(f"ONNX Runtime can't read {where} ({error}); export it again") from None

    def run(given: Sequence[Tensor]) -> list[Tensor]:
        fed = {name: tensor.numpy() for name, tensor in zip(inputs, given, strict=True)}
        try:
            return [torch.from_numpy(array) for array in session.run(outputs, fed)]
        except Exception as error:
            raise UserError(f"{where} can't be run ({one_line(error)}); export it again") from error

    return run
