"""The symbol-equivariant mixer: a vector for each symbol in each cell, and one small network.

A cell, a row, a column and a box of a Sudoku are constraints of one kind: exactly one of their
candidates is right. A candidate is a symbol in a cell. With `cells: units`, the same network
combines the candidates of every constraint, as in a factor graph. No weight depends on the names
of symbols. With `units` and `attention`, none depends on the size of a board either.
"""

# B = slots, S = cells, V = vocabulary, K = symbols of the state (V less the special tokens),
# D = hidden size, M = size of a message, W = width of the MLP, N = side of the board,
# U = units (3 N rows, columns and boxes), E = K + D, the size of a puzzle's row,
# L = sides of boards, from 0 to N

import math
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn

from models.attention import Attention, Rotary, rotary_tables_2d
from models.base import CommonConfig, RecursiveModel
from models.block import Level
from models.carry import NOISY, SegmentOutput, State
from models.depth import LARGEST_COUNT, Depth
from models.layers import Embedding, Linear, SwiGLU, rms_norm, swiglu_width
from models.symbols import NUM_SPECIAL, with_confidence
from utils.config import Int
from utils.errors import UserError

# Scales the sum over the candidates of a constraint. It is the same for all sizes, so that "one
# candidate is left" looks the same on boards of every size.
_SUM_SCALE = 0.5

# The logit of a symbol that a board does not have. float16 can still hold it.
_ABSENT = -1e4

# Boards have at most 30 rows. With 10,000, which suits texts, most components would hardly turn.
_ROTARY_THETA = 100.0


class SEMixerConfig(CommonConfig):
    """The options of the mixer; config/arch/se_mixer.yaml explains each and holds the defaults."""

    name: Literal["se_mixer"]
    L_layers: Int = Field(ge=1, le=LARGEST_COUNT)
    message_size: Int = Field(ge=1, le=LARGEST_COUNT)
    cells: Literal["units", "attention", "mlp"]
    num_heads: Int = Field(ge=1, le=LARGEST_COUNT)
    symbols: Literal["side", "all"]

    @model_validator(mode="after")
    def _units_are_those_of_a_board(self) -> Self:
        if self.cells == "units" and self.symbols == "all":
            raise ValueError(
                "cells is units, the rows, columns and boxes of a Sudoku, which has as many symbols as its side; set "
                "symbols to side, or cells to attention or mlp"
            )
        return self

    @model_validator(mode="after")
    def _heads_share_the_hidden_size(self) -> Self:
        if self.cells == "attention" and self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by 4 * num_heads ({self.num_heads}): positions of "
                "rows and columns turn groups of 4 components; change one of them"
            )
        return self

    @property
    def reads_boards_of_any_size(self) -> bool:
        return self.symbols == "side"

    @property
    def is_equivariant(self) -> bool:
        # The network is told the units of a Sudoku, which its symmetries permute.
        return self.cells == "units" and self.noise == "none"

    @property
    def is_free_of_sizes(self) -> bool:
        return self.cells != "mlp" and not self.puzzle_emb_ndim


class Extent(NamedTuple):
    """Which candidates the boards of a batch have. A smaller board lies in the canvas's corner.

    Attributes:
        candidates_BSK1: 1 for a candidate that the board has, else 0.
        symbols_B1K1: the same for a symbol.
        cells_B11S: true for a cell of the board, as attention masks its keys.
        units_BUS: 1 for a cell of a unit, else 0; None without units.
    """

    candidates_BSK1: torch.Tensor
    symbols_B1K1: torch.Tensor
    cells_B11S: torch.Tensor
    units_BUS: torch.Tensor | None


class SEMixerBlock(nn.Module):
    """m = messages of the constraints of each candidate; x = rms(x + swiglu([x, m])).

    A constraint sums what its candidates offer, and answers all of them alike. With `attention`
    (for each symbol) and `mlp` (for each symbol and component), cells are mixed first: x = rms(x +
    mix(x)). Then a cell is a constraint, but no row, column or box is.
    """

    def __init__(self, config: SEMixerConfig, seq_len: int) -> None:
        super().__init__()
        D, M = config.hidden_size, config.message_size
        width = swiglu_width(D, config.expansion, config.width_multiple)
        self.attn = Attention(D, config.num_heads) if config.cells == "attention" else None
        over_cells = swiglu_width(seq_len, config.expansion, config.width_multiple)
        self.mlp_t = SwiGLU(seq_len, over_cells, over_first=True) if config.cells == "mlp" else None
        self.offer_proj = Linear(D, M)
        self.answer_proj = Linear(M, 2 * M)
        self.gate_up_proj = Linear(D + M, 2 * width)
        self.down_proj = Linear(width, D)

    def forward(
        self,
        x_BSKD: torch.Tensor,
        rotary: Rotary | None,
        *,
        extent: Extent,
        first_position_only: bool = False,
        fp8: bool = False,
    ) -> torch.Tensor:
        """Return x_BSKD after one exchange of messages. Absent candidates stay zero.

        Without the mask at the end their gradient would grow in each call by 316, the derivative of
        the norm at zero. first_position_only must be false.
        """
        assert not first_position_only
        if self.attn is not None:
            x_BKSD = x_BSKD.transpose(1, 2)
            mask = extent.cells_B11S.repeat_interleave(x_BKSD.shape[1], dim=0)
            mixed_BKSD = self.attn(x_BKSD.flatten(0, 1), rotary, mask=mask, fp8=fp8).view(x_BKSD.shape)
            x_BSKD = rms_norm(x_BSKD + mixed_BKSD.transpose(1, 2)) * extent.candidates_BSK1
        elif self.mlp_t is not None:
            x_SBKD = x_BSKD.transpose(0, 1).contiguous()
            mixed_SBKD = self.mlp_t(x_SBKD.flatten(1), fp8=fp8).view_as(x_SBKD)
            x_BSKD = rms_norm(x_BSKD + mixed_SBKD.transpose(0, 1)) * extent.candidates_BSK1

        offers_BSKM = F.silu(self.offer_proj(x_BSKD, fp8=fp8))
        of_cells_BS1M = self._answer(offers_BSKM.sum(2, keepdim=True), fp8=fp8)
        # The mask keeps the candidates that a board lacks at zero.
        if extent.units_BUS is None:
            messages_BSKM = of_cells_BS1M * extent.symbols_B1K1
        else:
            offers_BUKM = (extent.units_BUS @ offers_BSKM.flatten(2)).unflatten(2, offers_BSKM.shape[2:])
            answers_BUKM = self._answer(offers_BUKM, fp8=fp8)
            of_units_BSKM = (extent.units_BUS.mT @ answers_BUKM.flatten(2)).view_as(offers_BSKM)
            messages_BSKM = torch.addcmul(of_units_BSKM, of_cells_BS1M, extent.symbols_B1K1)
        gate, up = self.gate_up_proj(torch.cat([x_BSKD, messages_BSKM], dim=-1), fp8=fp8).chunk(2, dim=-1)
        return rms_norm(x_BSKD + self.down_proj(F.silu(gate) * up, fp8=fp8)) * extent.candidates_BSK1

    def _answer(self, sums: torch.Tensor, *, fp8: bool) -> torch.Tensor:
        gate, up = self.answer_proj(_SUM_SCALE * sums, fp8=fp8).chunk(2, dim=-1)
        return F.silu(gate) * up


class SEMixer(RecursiveModel):
    """One stack of blocks and one state z. Renaming the symbols of a puzzle renames the answer.

    The first NUM_SPECIAL tokens are no symbols. They have embeddings, as questions, and logits of
    their own, which read the mean over the symbols.
    """

    block_class = SEMixerBlock
    config: SEMixerConfig
    units_LUS: torch.Tensor

    def __init__(self, config: SEMixerConfig, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int) -> None:
        D = config.hidden_size
        self.num_symbols = vocab_size - NUM_SPECIAL
        if self.num_symbols < 1:
            raise UserError(
                f"arch se_mixer needs symbols beside the {NUM_SPECIAL} special tokens, but the vocabulary has "
                f"{vocab_size}; take another arch"
            )
        self.side = math.isqrt(seq_len)
        if config.symbols == "side" and self.side**2 != seq_len:
            raise UserError(
                f"arch.symbols is side, but a sequence of {seq_len} tokens is no square board; set it to all"
            )
        if config.symbols == "side" and self.side != self.num_symbols:
            raise UserError(
                f"arch.symbols is side, but the data have {self.num_symbols} symbols on boards of side {self.side}; "
                "set arch.symbols to all, and arch.cells to attention or mlp"
            )
        if config.cells == "attention" and self.side**2 != seq_len:
            raise UserError(
                f"arch.cells is attention, which needs square boards, and a sequence of {seq_len} tokens is none; set "
                "it to mlp"
            )
        super().__init__(
            config,
            states={"z": "z_init"},
            puzzle_row_size=D + self.num_symbols if config.puzzle_emb_ndim else 0,
            seq_len=seq_len,
            vocab_size=vocab_size,
            num_puzzle_identifiers=num_puzzle_identifiers,
        )
        # The symbol of the cell, another symbol than the cell's, and the special tokens:
        self.embed_kinds = Embedding(2 + NUM_SPECIAL, D)
        if config.noise != "none":
            self.embed_noisy = Embedding(1, D)
        self.L_level = Level(SEMixerBlock(config, seq_len) for _ in range(config.L_layers))
        self.lm_head = Linear(D, 1)
        self.special_head = Linear(D, NUM_SPECIAL)
        if config.cells == "units":
            self.register_buffer("units_LUS", torch.empty(self.side + 1, 3 * self.side, seq_len), persistent=False)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.seq_len, self.num_symbols, self.config.hidden_size

    def heads(self) -> tuple[Linear, ...]:
        return self.lm_head, self.special_head

    def _rotary_tables(self) -> Rotary | None:
        config = self.config
        if config.cells != "attention":
            return None
        return rotary_tables_2d(0, self.seq_len, config.hidden_size // config.num_heads, theta=_ROTARY_THETA)

    @torch.no_grad()
    def fill_constants(self) -> None:
        super().fill_constants()
        if self.config.cells == "units":
            for side, units_US in enumerate(self.units_LUS):
                units_US.copy_(units_of_board(side, self.side))

    def embed(
        self,
        inputs_BS: torch.Tensor,
        puzzle_rows_BE: torch.Tensor | None,
        noisy_BSV: torch.Tensor | None,
        num_symbols: int,
    ) -> torch.Tensor:
        symbols_K = NUM_SPECIAL + torch.arange(num_symbols, device=inputs_BS.device)
        cells_BS1 = inputs_BS.unsqueeze(-1)
        other_BSK = (cells_BS1 != symbols_K).long()
        kinds_BSK = torch.where(cells_BS1 < NUM_SPECIAL, cells_BS1 + 2, other_BSK)
        x_BSKD = self.embed_kinds(kinds_BSK)
        if noisy_BSV is not None:
            x_BSKD = x_BSKD + noisy_BSV[..., NUM_SPECIAL:, None] * self.embed_noisy.weight
        x_BSKD = math.sqrt(self.config.hidden_size) * x_BSKD
        if puzzle_rows_BE is not None:
            of_all_BD, of_each_BK = puzzle_rows_BE.split([self.config.hidden_size, num_symbols], dim=1)
            x_BSKD = x_BSKD + of_each_BK[:, None, :, None] + of_all_BD[:, None, None, :]
        return x_BSKD.to(self.dtype)

    def _extent(self, inputs_BS: torch.Tensor) -> Extent:
        if self.config.symbols == "all":
            cells_BS = torch.ones_like(inputs_BS, dtype=torch.bool)
            symbols_BK = cells_BS.new_ones(len(inputs_BS), self.num_symbols)
        else:
            cells_BS = inputs_BS != 0
            side_B = cells_BS.sum(-1).float().sqrt().long()
            symbols_BK = torch.arange(self.num_symbols, device=inputs_BS.device) < side_B[:, None]
        candidates_BSK = cells_BS[:, :, None] & symbols_BK[:, None]
        units_BUS = self._units_of_boards(side_B) if self.config.cells == "units" else None
        return Extent(
            candidates_BSK.unsqueeze(-1).to(self.dtype),
            symbols_BK[:, None, :, None].to(self.dtype),
            cells_BS[:, None, None],
            units_BUS,
        )

    def _units_of_boards(self, side_B: torch.Tensor) -> torch.Tensor:
        units_BUS = self.units_LUS[side_B].to(self.dtype)
        if units_BUS.device.type in ("cpu", "mps"):
            return units_BUS
        # The fast kernels of a GPU need rows that begin at multiples of 16 bytes.
        return F.pad(units_BUS, (0, -self.seq_len % 8))[..., : self.seq_len]

    def forward(
        self,
        state: State,
        inputs_BS: torch.Tensor,
        puzzle_rows_BE: torch.Tensor | None,
        depth: Depth,
        extent: Extent | None = None,
    ) -> SegmentOutput:
        """As in the base class. `extent` is that of boards that are no part of a canvas."""
        extent = self._extent(inputs_BS) if extent is None else extent
        num_symbols = state["z"].shape[2]
        x_BSKD = self.embed(inputs_BS, puzzle_rows_BE, state.get(NOISY), num_symbols) * extent.candidates_BSK1
        z_BSKD = state["z"] * extent.candidates_BSK1
        call, rotary = self.calls(depth), self.rotary()
        for _ in range(depth.H_cycles * depth.L_cycles):
            z_BSKD = call(self.L_level, z_BSKD, x_BSKD, rotary=rotary, extent=extent)
        of_symbols_BSK = self.lm_head(z_BSKD).squeeze(-1)
        of_symbols_BSK = of_symbols_BSK.masked_fill(extent.candidates_BSK1.squeeze(-1) == 0, _ABSENT)
        num_symbols_B11 = extent.symbols_B1K1.sum(2).clamp(min=1)
        of_special_BS2 = self.special_head(z_BSKD.sum(2) / num_symbols_B11)
        logits_BSV = torch.cat([of_special_BS2, of_symbols_BSK], dim=-1)
        return with_confidence(logits_BSV, {"z": z_BSKD}, extent.cells_B11S[:, 0, 0])


def box_of(side: int) -> tuple[int, int]:
    """Return the rows and the columns of a board's boxes: the closest factors of its side."""
    rows = next(rows for rows in range(math.isqrt(side), 0, -1) if side % rows == 0)
    return rows, side // rows


def units_of_board(side: int, canvas: int) -> torch.Tensor:
    """Return which cells belong to which rows, columns and boxes, float32 (3 canvas, canvas^2).

    The board lies in the upper left corner of the canvas. What it lacks is zero.
    """
    member = torch.zeros(3, canvas, canvas, canvas)
    if side:
        rows, columns = box_of(side)
        for row in range(side):
            for column in range(side):
                box = row // rows * rows + column // columns
                for kind, unit in enumerate((row, column, box)):
                    member[kind, unit, row, column] = 1
    return member.view(3 * canvas, canvas * canvas)
