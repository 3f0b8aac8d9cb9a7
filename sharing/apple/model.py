"""HRM and TRM in MLX, the array library for Apple's processors: weights, one segment, and a solver.

The numbers are those of models/ in float32, whatever forward_dtype and fp8_no_grad say.
"""

# B = batch, S = tokens, T = prefix and tokens, D = hidden size, V = vocabulary, E = size of a
# puzzle's row, P = puzzle identifiers, K = segments, N = heads, H = head size, X and Y = any sizes

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np
import torch
from numpy.typing import ArrayLike

from models import build_arch
from models.base import RecursiveModel
from models.hrm import HRMConfig
from models.layers import RMS_EPS
from models.trm import TRMConfig
from sharing.exported import ExportedPuzzles, Source, open_source
from sharing.published import PUZZLE_TABLE, fit_one_by_one
from sharing.sources import step_around
from sharing.weights_file import write_weights
from utils.errors import UserError

Weights = dict[str, mx.array]
State = dict[str, mx.array]
"""z_H and z_L (B, T, D)."""
SegmentOutput = tuple[State, mx.array, mx.array, mx.array]
"""The new state, logits_BSV, q_halt_B and q_continue_B."""

_STARTS = {"z_H": "H_init", "z_L": "L_init"}
# The values of options that are computed here.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    **{"mlp": ("swiglu",), "conv_2d": (False,), "num_registers": (0,)},
    **{"num_states": (1,), "noise": ("none",)},
}


@dataclass(frozen=True)
class Answers:
    """The answers to B puzzles after each of K segments, as of `models.inference.Trace`.

    settled_at_B is the segment, counted from 1, after which adaptive evaluation would stop; K if it
    never would. settled_B says whether the last segment settled the answer.
    """

    predictions_KBS: np.ndarray
    q_halt_KB: np.ndarray
    settled_at_B: np.ndarray
    settled_B: np.ndarray


class Model:
    """An HRM (arXiv 2506.21734) or a TRM (arXiv 2510.04871), with weights by our names.

    Attributes:
        weights: the parameters.
        starts: H_init and L_init (D,), where states start.
        table_PE: the puzzle table, if there is one.
    """

    def __init__(self, source: Source, where: str = "the checkpoint") -> None:
        """Take the weights of a source. Raise UserError if MLX does not compute such a model."""
        described = source.model
        if described is None:
            raise UserError(step_around(where) or f"{where} does not describe its model; give the run that wrote it")
        arch = described.arch
        if not isinstance(arch, HRMConfig | TRMConfig) or not isinstance(described, ExportedPuzzles):
            raise UserError(f"{where} is a model of arch={arch.name}, but MLX computes only hrm and trm")
        require_options(arch, _COMPUTED, where)
        self.described, self.arch, self.depth = described, arch, arch.depth
        shaped = build_arch(arch.model_copy(update={"forward_dtype": "float32"}), **described.sizes)
        assert isinstance(shaped, RecursiveModel)
        self._state_shape, self._rotary = shaped.state_shape, None
        if (tables := shaped.rotary()) is not None:
            self._rotary = [mx.array(table_TH.numpy()) for table_TH in tables]
        fitting = fit_one_by_one(dict(source.weights), shaped.state_dict(), None, where)
        self.weights = {name: mx.array(tensor.numpy()) for name, tensor in fitting}
        self.starts = {name: self.weights.pop(name) for name in _STARTS.values()}
        self.table_PE = self.weights.pop(PUZZLE_TABLE, None)

    @classmethod
    def from_file(cls, where: str | Path, *, raw: bool = False) -> Self:
        """Open a run or a file of weights, or what `write_mlx` wrote.

        Args:
            raw: take the trained weights of a run, not its moving average.

        Raises:
            UserError: It can't be read, or MLX does not compute such a model.
        """
        return cls(open_source(str(where), raw=raw), str(where))

    def save(self, file: Path) -> None:
        """Write float32 safetensors that describe their model, for this project and for mx.load."""
        all_weights = self.weights | self.starts | ({} if self.table_PE is None else {PUZZLE_TABLE: self.table_PE})
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in all_weights.items()}
        write_weights(file, tensors, self.described.as_metadata())

    def reset(self, state: State, halted_B: mx.array) -> State:
        """Return the state in which slots that halted start anew."""
        return {name: mx.where(halted_B[:, None, None], self.starts[_STARTS[name]], z) for name, z in state.items()}

    def blank_state(self, batch_size: int) -> State:
        return {name: mx.zeros((batch_size, *self._state_shape)) for name in _STARTS}

    def forward(self, weights: Weights, state: State, inputs_BS: mx.array, rows_BE: mx.array | None) -> SegmentOutput:
        """Run one segment, as models/hrm.py and models/trm.py do.

        Only the last calls, which `backprop` counts, carry gradient to `weights` and to `rows_BE`.
        """
        x_BTD = self._embed(weights, inputs_BS, rows_BE)
        z, depth = dict(state), self.depth
        order = (["z_L"] * depth.L_cycles + ["z_H"]) * depth.H_cycles
        for left, name in zip(reversed(range(depth.num_calls)), order, strict=True):
            level = "H_level" if name == "z_H" and isinstance(self.arch, HRMConfig) else "L_level"
            sum_BTD = z["z_L"] + z["z_H"]  # both orders of two numbers have the same sum
            new_BTD = self._level(weights, level, sum_BTD + x_BTD if name == "z_L" else sum_BTD)
            z[name] = new_BTD if left < depth.num_grad_calls else mx.stop_gradient(new_BTD)
        logits_BSV = _linear(weights, "lm_head", z["z_H"][:, self.arch.prefix_len :])
        q_B2 = _linear(weights, "q_head", z["z_H"][:, 0]) + weights["q_head.bias"]
        return {name: mx.stop_gradient(z[name]) for name in z}, logits_BSV, q_B2[:, 0], q_B2[:, 1]

    def segments(self, tokens_BS: ArrayLike, puzzles_B: ArrayLike | None = None) -> Iterator[SegmentOutput]:
        """Yield what each segment of these puzzles returns, for as many segments as in training.

        Args:
            puzzles_B: the numbers of the puzzles' rows; None: 0, a puzzle that is not in training.

        Raises:
            UserError: The tokens have another length, or are none of the vocabulary.
        """
        tokens_BS = np.atleast_2d(tokens_BS)
        batch_size, sizes = len(tokens_BS), self.described
        inputs_BS = checked("tokens", tokens_BS, (batch_size, sizes.seq_len), sizes.vocab_size)
        puzzles_B = np.zeros(batch_size) if puzzles_B is None else puzzles_B
        ids_B = checked("puzzles", puzzles_B, (batch_size,), sizes.num_puzzle_identifiers)
        rows_BE = None if self.table_PE is None else self.table_PE[ids_B]
        state = self.reset(self.blank_state(batch_size), mx.ones(batch_size, dtype=mx.bool_))
        for _ in range(self.arch.halt_max_steps):
            output = self.forward(self.weights, state, inputs_BS, rows_BE)
            mx.eval(output)
            state = output[0]
            yield output

    def solve(self, tokens_BS: ArrayLike, puzzles_B: ArrayLike | None = None) -> Answers:
        """Answer puzzles, as `models.inference.trace` does. The arguments are as of `segments`."""
        predictions, q_halt, wants = [], [], []
        for _, logits_BSV, q_halt_B, q_continue_B in self.segments(tokens_BS, puzzles_B):
            predictions.append(np.array(mx.argmax(logits_BSV, axis=-1)))
            q_halt.append(np.array(q_halt_B))
            wants.append(np.array(self.wants_to_halt(q_halt_B, q_continue_B)))
        predictions_KBS, settled_KB = np.stack(predictions), np.stack(wants)
        settled_KB[0] = False
        settled_KB[1:] &= (predictions_KBS[1:] == predictions_KBS[:-1]).all(-1)
        settled_B = settled_KB[-1].copy()
        settled_KB[-1] = True
        return Answers(predictions_KBS, np.stack(q_halt), settled_KB.argmax(0) + 1, settled_B)

    def wants_to_halt(self, q_halt_B: mx.array, q_continue_B: mx.array) -> mx.array:
        """Return for each slot whether the Q head would halt here, bool (B,)."""
        return q_halt_B > (q_continue_B if self.arch.values_going_on else 0)

    # The parts of a forward pass, as in models/tokens.py and models/block.py.

    def _embed(self, weights: Weights, inputs_BS: mx.array, rows_BE: mx.array | None) -> mx.array:
        D, puzzle_len = self.arch.hidden_size, self.arch.puzzle_len
        e_BTD = weights["embed_tokens.weight"][inputs_BS]
        if rows_BE is not None:
            padded_BX = mx.pad(rows_BE, [(0, 0), (0, puzzle_len * D - rows_BE.shape[1])])
            e_BTD = mx.concatenate([padded_BX.reshape(-1, puzzle_len, D), e_BTD], axis=1)
        if self.arch.pos_encodings == "learned":
            e_BTD = (e_BTD + weights["embed_pos.weight"]) / math.sqrt(2)
        return math.sqrt(D) * e_BTD

    def _level(self, weights: Weights, level: str, x_BTD: mx.array) -> mx.array:
        layers = self.arch.H_layers if level == "H_level" else self.arch.L_layers
        for block in (f"{level}.layers.{number}" for number in range(layers)):
            if self.arch.mlp_t:
                x_BDT = x_BTD.swapaxes(1, 2)
                x_BTD = _rms_norm(x_BDT + _swiglu(weights, f"{block}.mlp_t", x_BDT)).swapaxes(1, 2)
            else:
                x_BTD = _rms_norm(x_BTD + self._attend(weights, f"{block}.self_attn", x_BTD))
            x_BTD = _rms_norm(x_BTD + _swiglu(weights, f"{block}.mlp", x_BTD))
        return x_BTD

    def _attend(self, weights: Weights, name: str, x_BTD: mx.array) -> mx.array:
        (B, T, D), N = x_BTD.shape, self.arch.num_heads
        qkv_BT3NH = _linear(weights, f"{name}.qkv_proj", x_BTD).reshape(B, T, 3, N, D // N)
        q_BNTH, k_BNTH, v_BNTH = qkv_BT3NH.transpose(2, 0, 3, 1, 4)
        if self._rotary is not None:
            cos_TH, sin_TH = self._rotary
            q_BNTH, k_BNTH = (x * cos_TH + mx.roll(x, D // N // 2, -1) * sin_TH for x in (q_BNTH, k_BNTH))
        y_BNTH = mx.fast.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, scale=(D // N) ** -0.5)
        return _linear(weights, f"{name}.o_proj", y_BNTH.transpose(0, 2, 1, 3).reshape(B, T, D))


def checked(what: str, values: ArrayLike, shape: tuple[int, ...], limit: int, *, ignored: int = 0) -> mx.array:
    """Return indices as int32. MLX itself would read what lies behind a table.

    Args:
        ignored: a value that is allowed beside 0 to limit - 1.
    """
    array = np.asarray(values)
    if array.shape != shape or not (((array >= 0) & (array < limit)) | (array == ignored)).all():
        raise UserError(f"{what} must have the shape {shape} and values from 0 to {limit - 1}; correct them")
    return mx.array(array.astype(np.int32))


def require_options(arch: HRMConfig | TRMConfig, computed: dict[str, tuple[Any, ...]], where: str) -> None:
    """Raise UserError for an option with another value than those that are computed."""
    for option, values in computed.items():
        if (value := getattr(arch, option)) not in values:
            known = " or ".join(map(str, values))
            raise UserError(f"{where} has arch.{option}={value}, but MLX computes only {known}; use PyTorch for it")


def _linear(weights: Weights, name: str, x_BTX: mx.array) -> mx.array:
    return x_BTX @ weights[f"{name}.weight"].T


def _swiglu(weights: Weights, name: str, x_BTX: mx.array) -> mx.array:
    gate_BTY, up_BTY = mx.split(_linear(weights, f"{name}.gate_up_proj", x_BTX), 2, axis=-1)
    return _linear(weights, f"{name}.down_proj", gate_BTY * mx.sigmoid(gate_BTY) * up_BTY)


def _rms_norm(x_BTX: mx.array) -> mx.array:
    return mx.fast.rms_norm(x_BTX, None, RMS_EPS)


def write_mlx(source: Source, file: Path) -> Model:
    """Write a file of safetensors, and return what is read from there.

    Raises:
        UserError: MLX does not compute such a model.
    """
    model = Model(source)
    # The name of a run is its owner's matter.
    model.described = model.described.model_copy(update={"run": ""})
    model.save(file)
    return Model.from_file(file)


def run_of(model: Model) -> Any:
    """Return what runs a segment on PyTorch's tensors, as sharing/segment/check.py compares it.

    It takes the inputs of `sharing.segment.function.SegmentFunction`, and returns its outputs.
    """
    names = ["tokens", *([] if model.table_PE is None else ["puzzles"]), *_STARTS]

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = {name: mx.array(tensor.numpy()) for name, tensor in zip(names, inputs, strict=True)}
        rows_BE = None if model.table_PE is None else model.table_PE[given["puzzles"]]
        state, *outputs = model.forward(
            model.weights, {name: given[name] for name in _STARTS}, given["tokens"], rows_BE
        )
        return [torch.from_numpy(np.array(array)) for array in (*outputs, *state.values())]

    return run
