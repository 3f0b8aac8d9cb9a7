"""The symbol-equivariant recurrent reasoning model (SE-RRM, arXiv 2603.02193)."""

# B = slots, V = symbols, S = cells, A = additional tokens, T = S + A, D = hidden size,
# E = V + D, the size of a puzzle's row, C = calls of a segment

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn

from models.attention import Attention, Rotary, rotary_at, rotary_tables_2d
from models.base import CommonConfig, RecursiveModel
from models.block import Level
from models.carry import NOISY, SegmentOutput, State
from models.depth import LARGEST_COUNT, Depth
from models.dropout import Dropout, derived
from models.layers import Embedding, InitialValues, Linear, SwiGLU, rms_norm, swiglu_width, truncated_normal
from models.symbols import NUM_SPECIAL, with_confidence
from utils.config import Bool, Float, Int


class SERRMConfig(CommonConfig):
    """The options of the SE-RRM; config/arch/se_rrm.yaml explains each and holds the defaults."""

    halts_at_random: ClassVar[bool] = True

    name: Literal["se_rrm"]
    L_layers: Int = Field(ge=1, le=LARGEST_COUNT)
    num_heads: Int = Field(ge=1, le=LARGEST_COUNT)
    num_heads_t: Int = Field(ge=1, le=LARGEST_COUNT)
    head_dim: Int = Field(ge=1, le=LARGEST_COUNT)
    head_dim_t: Int = Field(ge=1, le=LARGEST_COUNT)
    pos_encodings: Literal["rope", "rope_2d", "learned"]
    rope_theta: Float = Field(ge=1)
    equivariant_symbols: Bool
    add_tokens: Int = Field(ge=0, le=LARGEST_COUNT)
    dropout: Float = Field(ge=0, lt=1)

    @field_validator("pos_encodings", mode="before")
    @classmethod
    def _published_name(cls, value: object) -> object:
        return "rope_2d" if value == "rope2d" else value

    @model_validator(mode="after")
    def _heads_turn_whole_groups(self) -> Self:
        group = {"rope": 2, "rope_2d": 4}.get(self.pos_encodings, 1)
        if self.head_dim % group:
            raise ValueError(
                f"head_dim is {self.head_dim}, but {self.pos_encodings} positions turn groups of {group} components; "
                f"make it a multiple of {group}, or set pos_encodings to learned"
            )
        return self

    @property
    def is_random(self) -> bool:
        return self.dropout > 0

    @property
    def is_free_of_sizes(self) -> bool:
        return self.equivariant_symbols and self.pos_encodings != "learned" and not self.puzzle_emb_ndim


class SERRMBlock(nn.Module):
    """x = rms(x + attn(x)) over cells; x = rms(x + attn_t(x)) over symbols; x = rms(x + mlp(x)).

    The index tells the dropout of the block from that of other blocks.
    """

    def __init__(self, config: SERRMConfig, index: int) -> None:
        super().__init__()
        D = config.hidden_size
        self.attn = Attention(D, config.num_heads, config.head_dim)
        self.attn_t = Attention(D, config.num_heads_t, config.head_dim_t, heads_option="num_heads_t")
        self.mlp = SwiGLU(D, swiglu_width(D, config.expansion, config.width_multiple))
        self._index, self._rate = index, config.dropout

    def forward(
        self,
        x_BVTD: torch.Tensor,
        rotary: Rotary | None,
        *,
        seeds_B: torch.Tensor | None,
        first_position_only: bool = False,
        fp8: bool = False,
    ) -> torch.Tensor:
        """Return x_BVTD after both attentions and the MLP. first_position_only must be false."""
        assert not first_position_only
        x_BVTD = rms_norm(x_BVTD + self._over_second(self.attn, x_BVTD, rotary, self._seeds(seeds_B, 0), fp8=fp8))
        x_BTVD = x_BVTD.transpose(1, 2)
        mixed_BTVD = self._over_second(self.attn_t, x_BTVD, None, self._seeds(seeds_B, 1), fp8=fp8)
        x_BVTD = rms_norm(x_BVTD + mixed_BTVD.transpose(1, 2))
        return rms_norm(x_BVTD + self.mlp(x_BVTD, fp8=fp8))

    def _seeds(self, seeds_B: torch.Tensor | None, which: int) -> torch.Tensor | None:
        return None if seeds_B is None else derived(seeds_B, 2 * self._index + which)

    def _over_second(
        self, attention: Attention, x: torch.Tensor, rotary: Rotary | None, seeds_B: torch.Tensor | None, *, fp8: bool
    ) -> torch.Tensor:
        """Return what attention over dimension 2 makes of x, each row of dimension 1 by itself."""
        dropout = None
        if seeds_B is not None:
            rows = torch.arange(x.shape[1], device=x.device)
            dropout = Dropout(derived(seeds_B[:, None], rows).flatten(), self._rate)
        y: torch.Tensor = attention(x.flatten(0, 1), rotary, fp8=fp8, dropout=dropout)
        return y.unflatten(0, x.shape[:2])


class SERRM(RecursiveModel):
    """One stack of blocks and one state z, with the names and shapes of the published weights.

    With `equivariant_symbols`, all symbols but the first NUM_SPECIAL have the same embedding, and
    the head reads each symbol by itself. Then renaming the symbols renames the answer (section 3).
    """

    block_class = SERRMBlock
    config: SERRMConfig

    def __init__(self, config: SERRMConfig, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int) -> None:
        D, A = config.hidden_size, config.add_tokens
        super().__init__(
            config,
            states={"z": "Z_init"},
            # A part for all symbols, and a number for each symbol. As published, puzzle_emb_ndim
            # only says whether there are rows.
            puzzle_row_size=D + vocab_size if config.puzzle_emb_ndim else 0,
            seq_len=seq_len,
            vocab_size=vocab_size,
            num_puzzle_identifiers=num_puzzle_identifiers,
        )

        def parameter(*shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(1, *shape, D)) if shape[-1] else None

        self.pos_embedding = parameter(1, seq_len) if config.pos_encodings == "learned" else None
        # The symbols' embeddings, and those of the tokens behind the cells, (1, V, 1 or A, D):
        if config.equivariant_symbols:
            self.embed_special_tokens, self.embed_symbol_tokens = parameter(NUM_SPECIAL, 1), parameter(1, 1)
            self.add_tokens_special, self.add_tokens = parameter(NUM_SPECIAL, A), parameter(1, A)
        else:
            self.embed_symbols, self.add_tokens = parameter(vocab_size, 1), parameter(vocab_size, A)
        if config.noise != "none":
            self.embed_noisy = Embedding(1, D)
        self.L_level = Level(SERRMBlock(config, index) for index in range(config.L_layers))
        self.lm_head = Linear(D, 1) if config.equivariant_symbols else Linear(vocab_size * D, vocab_size)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.vocab_size, self.seq_len + self.config.add_tokens, self.config.hidden_size

    def heads(self) -> tuple[Linear, ...]:
        return (self.lm_head,)

    def _rotary_tables(self) -> Rotary | None:
        """Return tables that rotate the cells alone, which count from 0, as published."""
        config = self.config
        if config.pos_encodings == "rope":
            positions_T = torch.cat([torch.arange(self.seq_len), torch.zeros(config.add_tokens, dtype=torch.int64)])
            return rotary_at(positions_T, config.head_dim, config.rope_theta)
        if config.pos_encodings == "rope_2d":
            return rotary_tables_2d(
                0, self.seq_len, config.head_dim, config.rope_theta, first=0, suffix_len=config.add_tokens
            )
        return None

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        yield from super().initial_values(generator)
        for parameter in self.parameters(recurse=False):
            yield parameter, truncated_normal(parameter.shape, 1.0, generator)

    def embed(
        self, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None, noisy_BSV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the input of the recursion, x_BVTD, in forward_dtype.

        A cell has the embedding of its symbol at that symbol, and zeros at all others. Positions
        and the puzzle row are added to both. The additional tokens follow the cells.
        """
        V, config = self.vocab_size, self.config
        symbols_V = torch.arange(V, device=inputs_BS.device)
        present_BVS1 = (inputs_BS[:, None] == symbols_V[:, None]).unsqueeze(-1)
        x_BVTD = torch.where(present_BVS1, math.sqrt(V) * self._of_symbols("embed"), 0.0)
        if noisy_BSV is not None:
            x_BVTD = x_BVTD + math.sqrt(config.hidden_size) * noisy_BSV.mT.unsqueeze(-1) * self.embed_noisy.weight
        if self.pos_embedding is not None:
            x_BVTD = x_BVTD + self.pos_embedding
        if puzzle_rows_BE is not None:
            of_all_BD, of_each_BV = puzzle_rows_BE.split([config.hidden_size, V], dim=1)
            x_BVTD = x_BVTD + of_each_BV[:, :, None, None] + of_all_BD[:, None, None, :]
        if self.add_tokens is not None:
            added_BVAD = self._of_symbols("add").expand(x_BVTD.shape[0], -1, -1, -1)
            x_BVTD = torch.cat([x_BVTD, added_BVAD], dim=2)
        return x_BVTD.to(self.dtype)

    def _of_symbols(self, what: Literal["embed", "add"]) -> torch.Tensor:
        """Return the embeddings of all symbols, (1, V, 1 or A, D), of cells or of added tokens."""
        if not self.config.equivariant_symbols:
            own = self.embed_symbols if what == "embed" else self.add_tokens
            assert own is not None
            return own
        names = {"embed": ("embed_special_tokens", "embed_symbol_tokens"), "add": ("add_tokens_special", "add_tokens")}
        special, symbol = (self.get_parameter(name) for name in names[what])
        return torch.cat([special, symbol.expand(-1, self.vocab_size - NUM_SPECIAL, -1, -1)], dim=1)

    def forward(
        self,
        state: State,
        inputs_BS: torch.Tensor,
        puzzle_rows_BE: torch.Tensor | None,
        depth: Depth,
        seeds_B: torch.Tensor | None = None,
    ) -> SegmentOutput:
        """Run one segment: H_cycles x L_cycles calls of the stack, on the sum of z and x."""
        x_BVTD, z_BVTD = self.embed(inputs_BS, puzzle_rows_BE, state.get(NOISY)), state["z"]
        call, rotary = self.calls(depth), self.rotary()
        for index in range(depth.H_cycles * depth.L_cycles):
            # A tensor, because a compiled level would take each number for another program.
            seeds = None if seeds_B is None else derived(seeds_B, index)
            z_BVTD = call(self.L_level, z_BVTD, x_BVTD, rotary=rotary, seeds_B=seeds)
        return with_confidence(self._logits(z_BVTD[:, :, : self.seq_len]), {"z": z_BVTD})

    def _logits(self, z_BVSD: torch.Tensor) -> torch.Tensor:
        z_BSVD = z_BVSD.transpose(1, 2)
        if self.config.equivariant_symbols:
            of_each_BSV: torch.Tensor = self.lm_head(z_BSVD).squeeze(-1)
            return of_each_BSV
        of_all_BSV: torch.Tensor = self.lm_head(z_BSVD.flatten(2))
        return of_all_BSV
