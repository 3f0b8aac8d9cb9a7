"""What all architectures of puzzles share: options, embeddings, heads and recurrent state."""

# B = batch, S = tokens, R = registers, P = prefix positions (puzzle row and registers), T = P + S,
# D = hidden size, V = vocabulary, E = puzzle embedding size

import math
from abc import abstractmethod
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator

from models.attention import Rotary, rotary_tables, rotary_tables_2d
from models.block import Block, Level
from models.depth import LARGEST_COUNT, Calls, Depth, DepthConfig
from models.layers import FP8_MULTIPLE, ConvSwiGLU, Embedding, InitialValues, Linear, MlpKind, truncated_normal
from models.losses import LossConfig
from models.model import DTYPES, Model
from models.puzzle_embedding import PuzzleEmbedding
from utils.config import Bool, Float, Int

# So low that a sequence hardly ever halts before the Q head has been trained.
Q_HEAD_BIAS = -5.0

State = dict[str, torch.Tensor]
"""The recurrent state of all slots, detached, in forward_dtype, by the architecture's names."""

SegmentOutput = tuple[State, torch.Tensor, torch.Tensor, torch.Tensor]
"""The new state, detached; logits_BSV in forward_dtype; q_halt_B and q_continue_B in float32."""


class CommonConfig(DepthConfig):
    """The options of every architecture of puzzles; config/arch/_common.yaml explains each."""

    kind = "puzzles"

    hidden_size: Int = Field(ge=1, le=LARGEST_COUNT)
    num_heads: Int = Field(ge=1, le=LARGEST_COUNT)
    expansion: Float = Field(gt=0, le=LARGEST_COUNT)
    width_multiple: Int = Field(ge=1, le=LARGEST_COUNT)
    mlp: MlpKind
    mlp_t: Bool
    pos_encodings: Literal["rope", "rope_2d", "learned", "none"]
    rope_theta: Float = Field(ge=1)
    num_registers: Int = Field(ge=0, le=LARGEST_COUNT)
    puzzle_emb_ndim: Int = Field(ge=0, le=LARGEST_COUNT)
    puzzle_emb_len: Int = Field(ge=0, le=LARGEST_COUNT)
    halt_max_steps: Int = Field(ge=1, le=LARGEST_COUNT)
    halt_exploration_prob: Float = Field(ge=0, le=1)
    no_ACT_continue: Bool
    fp8_no_grad: Bool
    loss: LossConfig

    @model_validator(mode="after")
    def _heads_share_the_hidden_size(self) -> Self:
        if self.mlp_t:
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
    def _fp8_has_products(self) -> Self:
        if not self.fp8_no_grad:
            return self
        if self.hidden_size % FP8_MULTIPLE:
            raise ValueError(
                f"fp8_no_grad is true, but FP8 multiplies matrices whose sides are multiples of {FP8_MULTIPLE}, and "
                f"hidden_size is {self.hidden_size}; change it, or set fp8_no_grad to false"
            )
        has_target_pass = self.halt_max_steps > 1 and not self.no_ACT_continue
        if not has_target_pass and not self.has_calls_without_gradient:
            raise ValueError(
                f"fp8_no_grad is true, but with backprop={self.backprop} every call carries gradient; set fp8_no_grad "
                "to false, or backprop to fewer calls"
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


class RecursiveModel(Model):
    """A model of puzzles, whose forward pass is one segment."""

    config: CommonConfig
    block_class, level_class = Block, Level
    rotary_cos: torch.Tensor
    rotary_sin: torch.Tensor

    def __init__(
        self,
        config: CommonConfig,
        *,
        states: dict[str, str],
        seq_len: int,
        vocab_size: int,
        num_puzzle_identifiers: int,
    ) -> None:
        """Allocate what architectures share; the architecture adds its levels.

        The tensors have no values until `init_weights` or a checkpoint fills them.

        Args:
            states: for each recurrent state, its name and the name of the buffer (D,) that it
                starts from. The buffer is drawn once and never trained.

        Raises:
            UserError: The positions don't suit the sequence.
        """
        super().__init__()
        self.config = config
        self._states = states
        assert config.forward_dtype != "auto", "training/precision.py chooses before a model is built"
        self.dtype = DTYPES[config.forward_dtype]
        self.vocab_size = vocab_size
        hidden_size = config.hidden_size
        # A model without puzzle rows has no prefix, whatever puzzle_emb_len says.
        self.puzzle_len = config.puzzle_emb_ndim and (
            config.puzzle_emb_len or math.ceil(config.puzzle_emb_ndim / hidden_size)
        )
        self.prefix_len = self.puzzle_len + config.num_registers
        self.num_positions = self.prefix_len + seq_len

        self.embed_tokens = Embedding(vocab_size, hidden_size)
        self.embed_pos = Embedding(self.num_positions, hidden_size) if config.pos_encodings == "learned" else None
        self.puzzle_embedding = (
            PuzzleEmbedding(num_puzzle_identifiers, config.puzzle_emb_ndim) if config.puzzle_emb_ndim else None
        )
        self.registers = Embedding(config.num_registers, hidden_size) if config.num_registers else None
        self.uses_rotary = config.pos_encodings in ("rope", "rope_2d") and not config.mlp_t
        if self.uses_rotary:
            cos, sin = self._rotary_tables()
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        for start in self._states.values():
            self.register_buffer(start, torch.empty(hidden_size, dtype=self.dtype))
        self.lm_head = Linear(hidden_size, vocab_size)
        self.q_head = Linear(hidden_size, 2, bias=True)

    @abstractmethod
    def forward(
        self, state: State, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None, depth: Depth
    ) -> SegmentOutput:
        """Run one segment."""

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        """As in the base class. Heads and starting states come last."""
        heads = (self.lm_head, self.q_head)
        body = [module for module in self.modules() if module not in heads]
        for module in (*body, *heads):
            if isinstance(module, Linear | Embedding | ConvSwiGLU):
                yield from module.initial_values(generator)
        for start in self._states.values():
            buffer_D = self.get_buffer(start)
            yield buffer_D, truncated_normal(buffer_D.shape, 1.0, generator)
        assert self.q_head.bias is not None
        yield self.q_head.weight, torch.zeros(self.q_head.weight.shape)
        yield self.q_head.bias, torch.full(self.q_head.bias.shape, Q_HEAD_BIAS)

    @torch.no_grad()
    def fill_constants(self) -> None:
        """As in the base class: new puzzle rows, which are zero, and rotary tables."""
        super().fill_constants()
        if self.uses_rotary:
            for buffer_TH, table_TH in zip((self.rotary_cos, self.rotary_sin), self._rotary_tables(), strict=True):
                buffer_TH.copy_(table_TH)

    def initial_state(self, batch_size: int, device: torch.device) -> State:
        """Return a state with the right names, shapes and dtype. `reset` gives it its values."""
        shape = (batch_size, self.num_positions, self.config.hidden_size)
        return {name: torch.zeros(shape, dtype=self.dtype, device=device) for name in self._states}

    def reset(self, state: State, halted_B: torch.Tensor) -> State:
        """Return the state with the slots that halted put back to the start."""
        halted_B11 = halted_B.view(-1, 1, 1)
        return {
            name: torch.where(halted_B11, self.get_buffer(start), state[name]) for name, start in self._states.items()
        }

    # The parts of a forward pass. Architectures and pipeline stages call these methods.

    def embed(self, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None) -> torch.Tensor:
        """Return the input of the recursion, x_BTD, in forward_dtype.

        The puzzle row comes first, zero-padded to its positions x D, then registers, then tokens.
        """
        hidden_size = self.config.hidden_size
        parts = [self.embed_tokens(inputs_BS)]
        if self.registers is not None:
            parts.insert(0, self.registers.weight.expand(len(inputs_BS), -1, -1))
        if puzzle_rows_BE is not None:
            padding = self.puzzle_len * hidden_size - puzzle_rows_BE.shape[1]
            parts.insert(0, F.pad(puzzle_rows_BE, (0, padding)).unflatten(1, (self.puzzle_len, hidden_size)))
        e_BTD = torch.cat(parts, dim=1)
        if self.embed_pos is not None:
            e_BTD = (e_BTD + self.embed_pos.weight) / math.sqrt(2)
        return (math.sqrt(hidden_size) * e_BTD).to(self.dtype)

    def _rotary_tables(self) -> Rotary:
        config, head_dim = self.config, self.config.hidden_size // self.config.num_heads
        if config.pos_encodings == "rope":
            return rotary_tables(self.num_positions, head_dim, config.rope_theta)
        return rotary_tables_2d(self.prefix_len, self.num_positions - self.prefix_len, head_dim, config.rope_theta)

    def rotary(self) -> Rotary | None:
        """Return the cosines and sines of rotary positions, or None where the model uses none."""
        return (self.rotary_cos, self.rotary_sin) if self.uses_rotary else None

    def calls(self, depth: Depth) -> Calls:
        """Return the object through which one segment calls its networks.

        That object decides which calls carry gradient.
        """
        config = self.config
        return Calls(depth, checkpointing=config.activation_checkpointing, fp8_no_grad=config.fp8_no_grad)

    def read_out(self, z_BTD: torch.Tensor, state: State) -> SegmentOutput:
        """Return the output of a segment that ends with z_BTD, and the new state, detached.

        The logits come from the positions after the prefix, the Q values from the first position.
        """
        logits_BSV = self.lm_head(z_BTD[:, self.prefix_len :])
        q_halt_B, q_continue_B = self.q_head(z_BTD[:, 0]).float().unbind(-1)
        return {name: z.detach() for name, z in state.items()}, logits_BSV, q_halt_B, q_continue_B

    def _level(self, num_layers: int) -> Level:
        config = self.config
        return Level(
            Block(
                hidden_size=config.hidden_size,
                num_heads=config.num_heads,
                expansion=config.expansion,
                width_multiple=config.width_multiple,
                num_positions=self.num_positions,
                mlp_t=config.mlp_t,
                mlp=config.mlp,
            )
            for _ in range(num_layers)
        )
