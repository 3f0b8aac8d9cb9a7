"""The Hierarchical Reasoning Model (arXiv 2506.21734): a slow network H and a fast one L, fed one another's state."""

# B = batch, S = tokens, P = prefix positions (the puzzle row), T = P + S, D = hidden size, V = vocabulary,
# E = puzzle embedding size

import math
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator

from models.act import LARGEST_COUNT, ActConfig, RecursiveModel, State
from models.attention import rotary_tables
from models.block import Level
from models.layers import Embedding, Linear, truncated_normal_
from models.losses import LossConfig
from models.puzzle_embedding import PuzzleEmbedding
from utils.config import Bool, Float, Int

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# So that a sequence hardly ever halts before it has learnt when to.
Q_HEAD_BIAS = -5.0


class HRMConfig(ActConfig):
    """The options of the HRM; config/arch/hrm.yaml explains each and holds the defaults."""

    name: Literal["hrm"]
    hidden_size: Int
    num_heads: Int
    expansion: Float
    H_cycles: Int
    L_cycles: Int
    H_layers: Int
    L_layers: Int
    puzzle_emb_ndim: Int
    pos_encodings: Literal["rope", "learned", "none"]
    rope_theta: Float
    forward_dtype: Literal["bfloat16", "float32"]
    mlp_t: Bool
    loss: LossConfig

    @model_validator(mode="after")
    def _counts_are_positive(self) -> Self:
        for name in ("hidden_size", "num_heads", "H_cycles", "L_cycles", "H_layers", "L_layers"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}, but the HRM needs at least one; give 1 or more")
            if value > LARGEST_COUNT:
                raise ValueError(f"{name} is {value}, beyond any memory; give {LARGEST_COUNT} or less")
        return self

    @model_validator(mode="after")
    def _numbers_are_in_range(self) -> Self:
        if not 0 <= self.puzzle_emb_ndim <= LARGEST_COUNT:
            raise ValueError(
                f"puzzle_emb_ndim is {self.puzzle_emb_ndim}; give 0 (no puzzle embedding) to {LARGEST_COUNT}"
            )
        if not 0 < self.expansion <= LARGEST_COUNT:
            raise ValueError(f"expansion is {self.expansion}, no width for an MLP; give a positive number (4 is usual)")
        if self.rope_theta < 1:
            raise ValueError(f"rope_theta is {self.rope_theta}; give 1 or more (10000 is usual)")
        return self

    @model_validator(mode="after")
    def _heads_share_the_hidden_size(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}; change one of them"
            )
        head_dim = self.hidden_size // self.num_heads
        if self.pos_encodings == "rope" and not self.mlp_t and head_dim % 2:
            raise ValueError(
                f"hidden_size / num_heads is {head_dim}, but rotary positions pair up components; "
                "make it even or set pos_encodings to learned or none"
            )
        return self


class HRM(RecursiveModel):
    """Two stacks of blocks that run at two speeds. Parameters are float32, activations `forward_dtype`."""

    config: HRMConfig
    H_init: torch.Tensor
    L_init: torch.Tensor
    rotary_cos: torch.Tensor
    rotary_sin: torch.Tensor

    def __init__(self, config: HRMConfig, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int) -> None:
        """Allocates; `init_weights` or a checkpoint fills."""
        super().__init__()
        self.config = config
        self.dtype = DTYPES[config.forward_dtype]
        hidden_size = config.hidden_size
        self.prefix_len = math.ceil(config.puzzle_emb_ndim / hidden_size)
        self.num_positions = self.prefix_len + seq_len

        self.embed_tokens = Embedding(vocab_size, hidden_size)
        self.embed_pos = Embedding(self.num_positions, hidden_size) if config.pos_encodings == "learned" else None
        self.puzzle_embedding = (
            PuzzleEmbedding(num_puzzle_identifiers, config.puzzle_emb_ndim) if config.puzzle_emb_ndim else None
        )
        self.uses_rotary = config.pos_encodings == "rope" and not config.mlp_t
        if self.uses_rotary:
            cos, sin = rotary_tables(self.num_positions, hidden_size // config.num_heads, config.rope_theta)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)

        def level(num_layers: int) -> Level:
            return Level(
                num_layers,
                hidden_size=hidden_size,
                num_heads=config.num_heads,
                expansion=config.expansion,
                num_positions=self.num_positions,
                mlp_t=config.mlp_t,
            )

        self.H_level = level(config.H_layers)
        self.L_level = level(config.L_layers)
        self.register_buffer("H_init", torch.empty(hidden_size, dtype=self.dtype))
        self.register_buffer("L_init", torch.empty(hidden_size, dtype=self.dtype))
        self.lm_head = Linear(hidden_size, vocab_size)
        self.q_head = Linear(hidden_size, 2, bias=True)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, Linear | Embedding):
                module.init_weights(generator)
        truncated_normal_(self.H_init, 1.0, generator)
        truncated_normal_(self.L_init, 1.0, generator)
        assert self.q_head.bias is not None
        self.q_head.weight.zero_()
        self.q_head.bias.fill_(Q_HEAD_BIAS)
        if self.puzzle_embedding is not None:
            self.puzzle_embedding.init_weights()

    def initial_state(self, batch_size: int, device: torch.device) -> State:
        shape = (batch_size, self.num_positions, self.config.hidden_size)
        return {name: torch.zeros(shape, dtype=self.dtype, device=device) for name in ("z_H", "z_L")}

    def reset(self, state: State, halted_B: torch.Tensor) -> State:
        halted_B11 = halted_B.view(-1, 1, 1)
        return {
            "z_H": torch.where(halted_B11, self.H_init, state["z_H"]),
            "z_L": torch.where(halted_B11, self.L_init, state["z_L"]),
        }

    def forward(
        self, state: State, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None
    ) -> tuple[State, torch.Tensor, torch.Tensor, torch.Tensor]:
        """One segment: H_cycles times, L_cycles fast steps and one slow step (section 2; figure 4 is the paper's code).

        Only the last call of L and the last of H are differentiated: the paper's one-step approximate gradient.

        Returns:
            The new state, detached; logits_BSV in forward_dtype; q_halt_B and q_continue_B in float32.
        """
        x_BTD = self._embed(inputs_BS, puzzle_rows_BE)
        rotary = (self.rotary_cos, self.rotary_sin) if self.uses_rotary else None
        z_H_BTD, z_L_BTD = state["z_H"], state["z_L"]

        grad_wanted = torch.is_grad_enabled()
        for H_cycle in range(self.config.H_cycles):
            last_H = H_cycle == self.config.H_cycles - 1
            for L_cycle in range(self.config.L_cycles):
                last_L = last_H and L_cycle == self.config.L_cycles - 1
                with torch.set_grad_enabled(grad_wanted and last_L):
                    z_L_BTD = self.L_level(z_L_BTD + z_H_BTD + x_BTD, rotary)
            with torch.set_grad_enabled(grad_wanted and last_H):
                z_H_BTD = self.H_level(z_H_BTD + z_L_BTD, rotary)

        logits_BSV = self.lm_head(z_H_BTD[:, self.prefix_len :])
        q_halt_B, q_continue_B = self.q_head(z_H_BTD[:, 0]).float().unbind(-1)
        return {"z_H": z_H_BTD.detach(), "z_L": z_L_BTD.detach()}, logits_BSV, q_halt_B, q_continue_B

    def _embed(self, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None) -> torch.Tensor:
        """x_BTD: the puzzle row, zero-padded to P x D, then the tokens; in forward_dtype."""
        hidden_size = self.config.hidden_size
        e_BTD = self.embed_tokens(inputs_BS)
        if puzzle_rows_BE is not None:
            padding = self.prefix_len * hidden_size - puzzle_rows_BE.shape[1]
            prefix_BPD = F.pad(puzzle_rows_BE, (0, padding)).unflatten(1, (self.prefix_len, hidden_size))
            e_BTD = torch.cat([prefix_BPD, e_BTD], dim=1)
        if self.embed_pos is not None:
            e_BTD = (e_BTD + self.embed_pos.weight) / math.sqrt(2)
        return (math.sqrt(hidden_size) * e_BTD).to(self.dtype)
