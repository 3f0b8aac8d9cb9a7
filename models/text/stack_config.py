"""The options of one stack of blocks, and what they say about its parts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from models.depth import LARGEST_COUNT
from models.layers import swiglu_width
from utils.config import Float, Int, StrictModel

Mask = Literal["prefixlm", "causal"]
"""What a token sees of its own sequence.

prefixlm: the whole prefix, and the response up to itself. causal: everything up to itself.
"""

Sequences = Sequence[tuple[int, int]]
"""The length of the prefix and of the response of each sequence, in the order of a packed row."""

Kernel = Literal["sdpa", "varlen"]
"""How the tokens of a packed row see one another; models/text/packing.py describes both."""


@dataclass(frozen=True)
class Stds:
    """Standard deviations of the initial weights; inner: of all but outputs, embedding and head."""

    inner: float
    attention_output: float
    mlp_output: float


@dataclass(frozen=True)
class StackShape:
    """All that a stack of blocks needs to know of the options."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # fewer than num_heads: grouped-query attention (arXiv 2305.13245)
    width: int  # inside the MLP
    norm: Literal["pre", "post"]
    norm_eps: float
    mask: Mask
    rope_theta: float | None  # None: no rotation
    stds: Stds
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    is_gated: bool = True  # sigmoid(gate) times the attention's output
    norm_has_weights: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class StackConfig(StrictModel):
    """The options of a stack of blocks. `H_override` may give other values for the H stack."""

    hidden_size: Int = Field(ge=1, le=LARGEST_COUNT)
    num_layers: Int = Field(ge=1, le=LARGEST_COUNT)
    num_heads: Int = Field(ge=1, le=LARGEST_COUNT)
    expansion: Float = Field(gt=0, le=LARGEST_COUNT)
    width_multiple: Int = Field(ge=1, le=LARGEST_COUNT)
    attention: Mask
    norm_type: Literal["pre", "post"]
    norm_eps: Float = Field(gt=0)
    pos_encodings: Literal["rope", "none"]
    rope_theta: Float = Field(ge=1)
    init_type: Literal["lecun_normal", "fixed_normal", "megatron"]
    init_std: Float | None = Field(gt=0)

    @model_validator(mode="after")
    def _init_std_is_used(self) -> Self:
        if self.init_std is not None and self.init_type == "lecun_normal":
            raise ValueError(
                f"init_std {self.init_std} is for init_type fixed_normal and megatron; set it to null, or take one of "
                "these"
            )
        return self

    @model_validator(mode="after")
    def _heads_share_the_hidden_size(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}; change one of them"
            )
        head_dim = self.hidden_size // self.num_heads
        if self.pos_encodings == "rope" and head_dim % 2:
            raise ValueError(
                f"hidden_size / num_heads is {head_dim}, but rope positions turn pairs of components; make it an even "
                "number, or set pos_encodings to none"
            )
        return self

    def stds(self, width: int, num_layers: int) -> Stds:
        """Return the standard deviations that `init_type` asks for.

        megatron: the outputs are smaller in a deeper stack (arXiv 1909.08053).
        """
        match self.init_type:
            case "fixed_normal":
                inner = self.init_std or 0.02
                return Stds(inner, inner, inner)
            case "megatron":
                inner = self.init_std or 1 / math.sqrt(self.hidden_size)
                output = inner / math.sqrt(2 * num_layers)
                return Stds(inner, output, output)
            case "lecun_normal":
                inner = 1 / math.sqrt(self.hidden_size)
                return Stds(inner, inner, 1 / math.sqrt(width))

    def hrm_shape(self, num_layers: int) -> StackShape:
        """Return a stack of HRM-Text: gated attention, SwiGLU, and norms without weights."""
        width = swiglu_width(self.hidden_size, self.expansion, self.width_multiple)
        return StackShape(
            hidden_size=self.hidden_size,
            num_layers=num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            width=width,
            norm=self.norm_type,
            norm_eps=self.norm_eps,
            mask=self.attention,
            rope_theta=self.rope_theta if self.pos_encodings == "rope" else None,
            stds=self.stds(width, num_layers),
        )
