"""What all architectures of puzzles share: options, states, puzzle table and initial values."""

# B = batch, S = tokens, T = positions, D = hidden size, V = vocabulary, E = puzzle embedding size

import math
from abc import abstractmethod
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator

from models.attention import Rotary
from models.block import Level
from models.carry import SegmentOutput, State
from models.depth import LARGEST_COUNT, Calls, Depth, DepthConfig
from models.layers import FP8_MULTIPLE, BoardConv, ConvSwiGLU, Embedding, InitialValues, Linear, truncated_normal
from models.losses import TokenLossConfig
from models.model import DTYPES, Model
from models.puzzle_embedding import PuzzleEmbedding
from utils.config import Bool, Float, Int
from utils.errors import UserError

# Seeds the initial states beyond the first. Every run has the same ones, so none has to store them.
_STARTS_SEED = 0x2601


class CommonConfig(DepthConfig):
    """The options of every architecture of puzzles; config/arch/_common.yaml explains each."""

    kind = "puzzles"

    hidden_size: Int = Field(ge=1, le=LARGEST_COUNT)
    expansion: Float = Field(gt=0, le=LARGEST_COUNT)
    width_multiple: Int = Field(ge=1, le=LARGEST_COUNT)
    puzzle_emb_ndim: Int = Field(ge=0, le=LARGEST_COUNT)
    halt_max_steps: Int = Field(ge=1, le=LARGEST_COUNT)
    halt_exploration_prob: Float = Field(ge=0, le=1)
    num_states: Int = Field(ge=1, le=LARGEST_COUNT)
    noise: Literal["none", "fresh", "annealed"]
    pseudo_target_steps: Int = Field(ge=0)
    fp8_no_grad: Bool
    loss: TokenLossConfig

    @model_validator(mode="after")
    def _pseudo_targets_are_in_a_copy(self) -> Self:
        if self.pseudo_target_steps and self.noise != "annealed":
            raise ValueError("pseudo_target_steps needs noise=annealed; set it to 0")
        return self

    halts_at_random: ClassVar[bool] = False
    """Whether chance alone halts a slot in training before its last segment."""

    @property
    def values_going_on(self) -> bool:
        """Whether the model values going on (q_continue) beside halting (q_halt)."""
        return False

    @property
    def has_target_pass(self) -> bool:
        """Whether a training step has one more segment, for the target of q_continue."""
        return self.values_going_on and self.halt_max_steps > 1

    @property
    def is_random(self) -> bool:
        """Whether the forward pass of a training step takes a seed for each slot."""
        return False

    @property
    def takes_seeds(self) -> bool:
        """Whether a training step takes a seed for each slot."""
        return self.is_random or self.noise != "none"

    @property
    def is_equivariant(self) -> bool:
        """Whether all symmetries of a puzzle get the same answer, so that votes can't gain."""
        return False

    @property
    def is_free_of_sizes(self) -> bool:
        """Whether no weight depends on the sizes of the data, so that other data fit the model."""
        return False

    @property
    def is_free_of_seq_len(self) -> bool:
        """Whether no weight depends on the number of tokens, so that other boards fit the model."""
        return self.is_free_of_sizes

    def weights_fit(self, *, same_vocabulary: bool) -> bool:
        return self.is_free_of_sizes or (same_vocabulary and self.is_free_of_seq_len)

    @property
    def reads_boards_of_any_size(self) -> bool:
        """Whether a batch may mix boards of several sizes.

        Each board lies in the upper left corner of a canvas, whose other cells have no label.
        """
        return False

    @model_validator(mode="after")
    def _fp8_has_products(self) -> Self:
        if not self.fp8_no_grad:
            return self
        if self.hidden_size % FP8_MULTIPLE:
            raise ValueError(
                f"fp8_no_grad is true, but FP8 multiplies matrices whose sides are multiples of {FP8_MULTIPLE}, and "
                f"hidden_size is {self.hidden_size}; change it, or set fp8_no_grad to false"
            )
        if not self.has_target_pass and not self.has_calls_without_gradient:
            raise ValueError(
                f"fp8_no_grad is true, but with backprop={self.backprop} every call carries gradient; set fp8_no_grad "
                "to false, or backprop to fewer calls"
            )
        return self


class RecursiveModel(Model):
    """A model of puzzles, whose forward pass is one segment."""

    config: CommonConfig
    level_class = Level
    lm_head: Linear
    rotary_cos: torch.Tensor
    rotary_sin: torch.Tensor

    def __init__(
        self,
        config: CommonConfig,
        *,
        states: dict[str, str],
        puzzle_row_size: int,
        seq_len: int,
        vocab_size: int,
        num_puzzle_identifiers: int,
    ) -> None:
        """Allocate the starting states and the puzzle table. Subclasses add everything else.

        Args:
            states: for each recurrent state, its name and that of the buffer (D,) where it starts.
            puzzle_row_size: numbers of a puzzle's row, E; 0: no puzzle table.
        """
        super().__init__()
        self.config = config
        self._states = states
        assert config.forward_dtype != "auto", "training/precision.py chooses before a model is built"
        self.dtype = DTYPES[config.forward_dtype]
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.puzzle_embedding = PuzzleEmbedding(num_puzzle_identifiers, puzzle_row_size) if puzzle_row_size else None
        tables = self._rotary_tables()
        self.uses_rotary = tables is not None
        if tables is not None:
            cos, sin = tables
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        for start in self._states.values():
            self.register_buffer(start, torch.empty(config.hidden_size, dtype=self.dtype))
        for key, needless in (("num_states", 1), ("noise", "none")) if not states else ():
            if (typed := getattr(config, key)) != needless:
                raise UserError(f"{key} is {typed}, but arch={config.name} has no state; set it to {needless}")
        if config.num_states > 1:
            more_KD = torch.empty(config.num_states - 1, config.hidden_size, dtype=self.dtype)
            self.register_buffer("more_starts", more_KD, persistent=False)

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a slot's state. Its last dimension is D."""

    @abstractmethod
    def _rotary_tables(self) -> Rotary | None:
        """Return cos_TH and sin_TH, or None for a model without rotary positions."""

    @abstractmethod
    def heads(self) -> tuple[Linear, ...]:
        """Return the networks that read the state. Their values are drawn last."""

    @abstractmethod
    def forward(
        self, state: State, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None, depth: Depth
    ) -> SegmentOutput:
        """Run one segment. With noise, the state has the noisy copy of the answer as NOISY."""

    @property
    def positions_per_slot(self) -> int:  # type: ignore[override]
        return math.prod(self.state_shape[:-1])

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        heads = self.heads()
        body = [module for module in self.modules() if module not in heads]
        for module in (*body, *heads):
            if isinstance(module, BoardConv | Linear | Embedding | ConvSwiGLU):
                yield from module.initial_values(generator)
        for start in self._states.values():
            buffer_D = self.get_buffer(start)
            yield buffer_D, truncated_normal(buffer_D.shape, 1.0, generator)

    @torch.no_grad()
    def fill_constants(self) -> None:
        super().fill_constants()
        if (tables := self._rotary_tables()) is not None:
            for buffer_TH, table_TH in zip((self.rotary_cos, self.rotary_sin), tables, strict=True):
                buffer_TH.copy_(table_TH)
        if self.config.num_states > 1:
            generator = torch.Generator().manual_seed(_STARTS_SEED)
            for start_D in self.get_buffer("more_starts"):
                start_D.copy_(truncated_normal(start_D.shape, 1.0, generator))

    def initial_state(self, batch_size: int, device: torch.device) -> State:
        shape = (batch_size, *self.state_shape)
        return {name: torch.zeros(shape, dtype=self.dtype, device=device) for name in self._states}

    def reset(self, state: State, halted_B: torch.Tensor) -> State:
        halted = halted_B.view(-1, *[1] * len(self.state_shape))
        return {name: torch.where(halted, self.get_buffer(start), state[name]) for name, start in self._states.items()}

    def starts(self) -> torch.Tensor:
        """Return the initial values of the last state, (num_states, D). `reset` takes the first."""
        first_1D = self.get_buffer(list(self._states.values())[-1])[None]
        return torch.cat([first_1D, self.get_buffer("more_starts")]) if self.config.num_states > 1 else first_1D

    # The parts of a forward pass.

    def rotary(self) -> Rotary | None:
        return (self.rotary_cos, self.rotary_sin) if self.uses_rotary else None

    def calls(self, depth: Depth) -> Calls:
        config = self.config
        return Calls(depth, checkpointing=config.activation_checkpointing, fp8_no_grad=config.fp8_no_grad)
