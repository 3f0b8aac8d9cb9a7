"""One segment of a model as a pure function of tensors, of which every exported format is made.

The calls of the recursion are unrolled. The loop over segments, the start of a state, the noise and
the rule to halt stay in the host, because exporters refuse loops that end early. `HostConfig` says
what the host has to know.
"""

# B = batch, S = cells of a board, V = vocabulary, K = its symbols, U = rows, columns and boxes, D =
# hidden size, T = tokens of a text

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from models.attention import attend
from models.base import RecursiveModel
from models.carry import NOISY
from models.layers import Embedding, Linear
from models.se_mixer import Extent, SEMixer, SEMixerConfig, units_of_board
from models.text.config import CallCounts
from models.text.model import TextModel

WeightDtype = Literal["float32", "bfloat16", "int8"]


class SegmentFunction(nn.Module):
    """(tokens, [puzzles], [noise], [units], *states) -> (logits, q_halt, q_continue, *states).

    Attributes:
        names, outputs: what each input and output is. `tokens` (B, S) and `puzzles` (B,) are int32,
            everything else float32. `puzzles` are the numbers of puzzle rows, which are part of
            the function. `noise` (B, S, V) is what a model reads of the answer (models/noise.py).
            `units` (U, S) has 1 for each cell of a row, a column or a box.
        has_any_size: whether S, K and U are free. Otherwise only the batch is.
    """

    names: list[str]
    outputs: list[str]

    def __init__(self, model: RecursiveModel) -> None:
        super().__init__()
        self.model, config = model, model.config
        self.states = list(model.initial_state(1, torch.device("cpu")))
        self.has_any_size = isinstance(config, SEMixerConfig) and config.cells == "units" and config.is_free_of_sizes
        self.names = [
            "tokens",
            *(["puzzles"] if model.puzzle_embedding is not None else []),
            *(["noise"] if config.noise != "none" else []),
            *(["units"] if self.has_any_size else []),
            *self.states,
        ]
        if isinstance(model, SEMixer) and self.has_any_size:
            model.units_LUS = torch.empty(0)  # `units` takes its place
        self.outputs = ["logits", "q_halt", "q_continue", *(f"next_{name}" for name in self.states)]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, inputs, strict=True))
        tokens_BS, table = given["tokens"], self.model.puzzle_embedding
        state = {name: given[name] for name in self.states}
        if "noise" in given:
            state[NOISY] = given["noise"]
        rows_BE = None if table is None else table.weight.index_select(0, given["puzzles"])
        extent: dict[str, Any] = {}
        if "units" in given:
            extent["extent"] = _whole(tokens_BS, state["z"], given["units"])
        state, logits_BSV, q_halt_B, q_continue_B = self.model(
            state, tokens_BS, rows_BE, self.model.config.depth, **extent
        )
        return logits_BSV, q_halt_B, q_continue_B, *(state[name] for name in self.states)

    def example(self, batch: int) -> tuple[Tensor, ...]:
        """Return inputs of the right shapes: blank boards in their first segment."""
        model = self.model
        tokens_BS = torch.ones(batch, model.seq_len, dtype=torch.int32)
        fresh_B = torch.ones(batch, dtype=torch.bool)
        given = {
            "tokens": tokens_BS,
            "puzzles": torch.zeros(batch, dtype=torch.int32),
            "noise": torch.zeros(batch, model.seq_len, model.vocab_size),
            **model.reset(model.initial_state(batch, tokens_BS.device), fresh_B),
        }
        if self.has_any_size:
            side = math.isqrt(model.seq_len)
            given["units"] = units_of_board(side, side)
        return tuple(given[name] for name in self.names)


def _whole(tokens_BS: Tensor, z_BSKD: Tensor, units_US: Tensor) -> Extent:
    """Return the extent of boards that have every cell and every symbol."""
    ones_B1 = torch.ones_like(tokens_BS[:, :1], dtype=z_BSKD.dtype)
    candidates_BSK1 = torch.ones_like(z_BSKD[..., :1])
    return Extent(
        candidates_BSK1,
        candidates_BSK1[:, :1],
        torch.ones_like(tokens_BS, dtype=torch.bool)[:, None, None],
        ones_B1[:, :, None] * units_US,
    )


class TextFunction(nn.Module):
    """tokens (B, T), int64 -> logits (B, T, V): one pass of a causal model of text."""

    names: list[str]
    outputs: list[str]
    has_any_size = False

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self.model, self.names, self.outputs = model, ["tokens"], ["logits"]

    def example(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.zeros(batch, 5, dtype=torch.int64),)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        model, (tokens_BT,) = self.model, inputs
        batch, length = tokens_BT.shape
        positions_N = torch.arange(length).expand(batch, length).flatten()
        y_ND = model.hidden(tokens_BT.flatten(), positions_N, _Causal(batch, length), CallCounts(H=0, L=0))
        return (model.logits(y_ND).unflatten(0, (batch, length)),)


Function = SegmentFunction | TextFunction


class _Causal:
    """Attention of sequences of one length, each of which follows the one before in the row."""

    def __init__(self, batch: int, length: int) -> None:
        self._shape = batch, length

    def attend(self, q_NAH: Tensor, k_NGH: Tensor, v_NGH: Tensor, mask: str) -> Tensor:
        q, k, v = (x.unflatten(0, self._shape).transpose(1, 2) for x in (q_NAH, k_NGH, v_NGH))
        length = self._shape[1]
        visible_TT = torch.ones(length, length, dtype=torch.bool).tril()
        return attend(q, k, v, mask=visible_TT).transpose(1, 2).flatten(0, 1)


class _BFloat16(nn.Module):
    """A parametrization: half of the bits, which the function makes float32 again."""

    def right_inverse(self, weight: Tensor) -> Sequence[Tensor]:
        return (weight.bfloat16(),)

    def forward(self, stored: Tensor) -> Tensor:
        return stored.float()


class _Int8(nn.Module):
    """The same with a whole number from -127 to 127, and a scale for each row of the matrix."""

    def right_inverse(self, weight: Tensor) -> Sequence[Tensor]:
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (weight / scale).round().to(torch.int8), scale

    def forward(self, stored: Tensor, scale: Tensor) -> Tensor:
        return stored.float() * scale


def stored_weights(model: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """Return each weight as it is stored: alone, or with the scales of its rows."""
    found = dict[str, tuple[Tensor, ...]]()
    for name, tensor in model.named_parameters():
        module, rounded, _ = name.partition(".parametrizations.")
        name = f"{module}.weight" if rounded else name
        found[name] = (*found.get(name, ()), tensor.detach())
    return found


def store_weights_as(model: nn.Module, dtype: WeightDtype) -> None:
    """Round the matrices of a model to a dtype, in which an exported file keeps them."""
    if dtype == "float32":
        return
    for module in list(model.modules()):
        if isinstance(module, Linear | Embedding):
            module.weight.requires_grad_(False)
            parametrize.register_parametrization(
                module, "weight", {"bfloat16": _BFloat16, "int8": _Int8}[dtype](), unsafe=True
            )
