"""What architectures with one vector per token share: options, embeddings, heads and blocks."""

# B = batch, S = tokens, R = registers, P = prefix positions (puzzle row and registers), T = P + S,
# D = hidden size, V = vocabulary, E = puzzle embedding size

import math
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator

from models.attention import Rotary, rotary_tables, rotary_tables_2d
from models.base import CommonConfig, RecursiveModel
from models.block import Block, Level
from models.carry import SegmentOutput, State
from models.depth import LARGEST_COUNT
from models.layers import Embedding, InitialValues, Linear, MlpKind
from models.losses import LossConfig
from utils.config import Bool, Float, Int
from utils.errors import UserError

# So low that a sequence hardly ever halts before the Q head has been trained.
Q_HEAD_BIAS = -5.0


class TokenConfig(CommonConfig):
    """The options of every model of tokens; config/arch/_tokens.yaml explains each."""

    num_heads: Int = Field(ge=1, le=LARGEST_COUNT)
    mlp: MlpKind
    conv_bias: Bool
    mlp_t: Bool
    conv_2d: Bool
    pos_encodings: Literal["rope", "rope_2d", "learned", "none"]
    rope_theta: Float = Field(ge=1)
    num_registers: Int = Field(ge=0, le=LARGEST_COUNT)
    puzzle_emb_len: Int = Field(ge=0, le=LARGEST_COUNT)
    no_ACT_continue: Bool
    loss: LossConfig

    @property
    def values_going_on(self) -> bool:
        return not self.no_ACT_continue

    @property
    def has_attention(self) -> bool:
        return not (self.mlp_t or self.conv_2d)

    @property
    def is_free_of_seq_len(self) -> bool:
        return self.conv_2d and self.pos_encodings != "learned"

    @property
    def puzzle_len(self) -> int:
        # A model without puzzle rows has no prefix, whatever puzzle_emb_len says.
        return self.puzzle_emb_ndim and (self.puzzle_emb_len or math.ceil(self.puzzle_emb_ndim / self.hidden_size))

    @property
    def prefix_len(self) -> int:
        return self.puzzle_len + self.num_registers

    @model_validator(mode="after")
    def _heads_share_the_hidden_size(self) -> Self:
        if not self.has_attention:
            return self  # there are no heads
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}; change one of them"
            )
        pairs = {"rope": 2, "rope_2d": 4}.get(self.pos_encodings, 1)
        head_dim = self.hidden_size // self.num_heads
        if head_dim % pairs:
            raise ValueError(
                f"hidden_size / num_heads is {head_dim}, but {self.pos_encodings} positions turn groups of {pairs} "
                f"components; make it a multiple of {pairs}, or set pos_encodings to learned or none"
            )
        return self

    @model_validator(mode="after")
    def _tokens_are_mixed_in_one_way(self) -> Self:
        if self.mlp_t and self.conv_2d:
            raise ValueError("mlp_t and conv_2d both say how tokens are mixed; set one of them to false")
        if self.conv_2d and self.puzzle_emb_ndim:
            raise ValueError(
                "conv_2d does not carry the puzzle embedding to the cells; set puzzle_emb_ndim to 0, and num_registers "
                "to 1 for a Q head that sees the whole board"
            )
        return self

    @model_validator(mode="after")
    def _the_puzzle_row_fits_its_prefix(self) -> Self:
        if 0 < self.puzzle_emb_len * self.hidden_size < self.puzzle_emb_ndim:
            raise ValueError(
                f"puzzle_emb_len {self.puzzle_emb_len} x hidden_size {self.hidden_size} is less than puzzle_emb_ndim "
                f"{self.puzzle_emb_ndim}; raise puzzle_emb_len, or set it to 0 for as many positions as are needed"
            )
        return self


class TokenModel(RecursiveModel):
    """A model whose state has one vector per position: prefix and tokens, (T, D)."""

    block_class = Block
    config: TokenConfig

    def __init__(self, config: TokenConfig, *, states: dict[str, str], **sizes: int) -> None:
        """As in the base class. `sizes` are seq_len, vocab_size and num_puzzle_identifiers."""
        super().__init__(config, states=states, puzzle_row_size=config.puzzle_emb_ndim, **sizes)
        if config.conv_2d and math.isqrt(self.seq_len) ** 2 != self.seq_len:
            raise UserError(
                f"arch.conv_2d is true, but a sequence of {self.seq_len} tokens is no square board; set it to false"
            )
        hidden_size = config.hidden_size
        self.puzzle_len, self.prefix_len = config.puzzle_len, config.prefix_len
        self.num_positions = self.prefix_len + self.seq_len

        self.embed_tokens = Embedding(self.vocab_size, hidden_size)
        self.embed_pos = Embedding(self.num_positions, hidden_size) if config.pos_encodings == "learned" else None
        self.registers = Embedding(config.num_registers, hidden_size) if config.num_registers else None
        if config.noise != "none":
            self.embed_noisy = Embedding(self.vocab_size, hidden_size)
        self.lm_head = Linear(hidden_size, self.vocab_size)
        self.q_head = Linear(hidden_size, 2, bias=True)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_positions, self.config.hidden_size

    def heads(self) -> tuple[Linear, ...]:
        return self.lm_head, self.q_head

    def _rotary_tables(self) -> Rotary | None:
        config = self.config
        if not config.has_attention or config.pos_encodings not in ("rope", "rope_2d"):
            return None
        head_dim = config.hidden_size // config.num_heads
        if config.pos_encodings == "rope":
            return rotary_tables(config.prefix_len + self.seq_len, head_dim, config.rope_theta)
        return rotary_tables_2d(config.prefix_len, self.seq_len, head_dim, config.rope_theta)

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        """As in the base class. The Q head starts with zero weights and a low bias."""
        yield from super().initial_values(generator)
        assert self.q_head.bias is not None
        yield self.q_head.weight, torch.zeros(self.q_head.weight.shape)
        yield self.q_head.bias, torch.full(self.q_head.bias.shape, Q_HEAD_BIAS)

    # The parts of a forward pass. Architectures and pipeline stages call these methods.

    def embed(
        self, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None, noisy_BSV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the input of the recursion, x_BTD, in forward_dtype.

        The puzzle row comes first, zero-padded to its positions x D, then registers, then tokens.
        """
        hidden_size = self.config.hidden_size
        tokens_BSD = self.embed_tokens(inputs_BS)
        if noisy_BSV is not None:
            tokens_BSD = tokens_BSD + noisy_BSV @ self.embed_noisy.weight
        parts = [tokens_BSD]
        if self.registers is not None:
            parts.insert(0, self.registers.weight.expand(inputs_BS.shape[0], -1, -1))
        if puzzle_rows_BE is not None:
            padding = self.puzzle_len * hidden_size - puzzle_rows_BE.shape[1]
            parts.insert(0, F.pad(puzzle_rows_BE, (0, padding)).unflatten(1, (self.puzzle_len, hidden_size)))
        e_BTD = torch.cat(parts, dim=1)
        if self.embed_pos is not None:
            e_BTD = (e_BTD + self.embed_pos.weight) / math.sqrt(2)
        return (math.sqrt(hidden_size) * e_BTD).to(self.dtype)

    def read_out(self, z_BTD: torch.Tensor, state: State) -> SegmentOutput:
        """Return the output of a segment that ends with z_BTD, and the new state, detached.

        The logits come from the positions after the prefix, the Q values from the first position.
        """
        logits_BSV = self.lm_head(z_BTD[:, self.prefix_len :])
        q_halt_B, q_continue_B = self.q_head(z_BTD[:, 0]).float().unbind(-1)
        return {name: z.detach() for name, z in state.items()}, logits_BSV, q_halt_B, q_continue_B

    def _level(self, num_layers: int) -> Level:
        return Level(Block(self.config, self.num_positions) for _ in range(num_layers))
