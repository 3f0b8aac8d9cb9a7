"""A plain transformer as a baseline, and the Universal Transformer (arXiv 1807.03819)."""

# B = batch, S = tokens, T = prefix and tokens, D = hidden size, E = puzzle embedding size

from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from models.carry import NOISY, SegmentOutput, State
from models.depth import LARGEST_COUNT, Depth
from models.tokens import TokenConfig, TokenModel
from utils.config import Bool, Int


class TransformerConfig(TokenConfig):
    """The options of the transformer, as config/arch/transformer.yaml explains them."""

    name: Literal["transformer"]
    num_layers: Int = Field(ge=1, le=LARGEST_COUNT)
    recurrent: Bool

    @property
    def is_gone_through_once(self) -> bool:
        return not self.recurrent

    @model_validator(mode="after")
    def _only_recursion_repeats(self) -> Self:
        repeats = {"H_cycles": self.H_cycles, "L_cycles": self.L_cycles, "halt_max_steps": self.halt_max_steps}
        repeated = [f"{name} {value}" for name, value in repeats.items() if value > 1]
        if not self.recurrent and (repeated or self.depth_curriculum):
            raise ValueError(
                f"recurrent is false, so that {', '.join(repeated) or 'depth_curriculum'} would compute the same "
                "again; set it to 1 (depth_curriculum to []), or recurrent to true"
            )
        if self.recurrent and not repeated:
            raise ValueError(
                "recurrent is true, but H_cycles, L_cycles and halt_max_steps are all 1: the stack is applied once; "
                "raise one of them, or set recurrent to false"
            )
        return self


class Transformer(TokenModel):
    """One stack of blocks, applied once to the question or, if `recurrent`, repeatedly to a state.

    Without recurrence each segment is a whole forward pass.
    """

    def __init__(self, config: TransformerConfig, **sizes: int) -> None:
        super().__init__(config, states={"z": "z_init"} if config.recurrent else {}, **sizes)
        self.level = self._level(config.num_layers)

    def forward(
        self, state: State, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None, depth: Depth
    ) -> SegmentOutput:
        x_BTD = self.embed(inputs_BS, puzzle_rows_BE, state.get(NOISY))
        call, rotary = self.calls(depth), self.rotary()
        if "z" not in state:
            return self.read_out(call(self.level, x_BTD, rotary=rotary), {})
        z_BTD = state["z"]
        for _ in range(depth.H_cycles * depth.L_cycles):
            z_BTD = call(self.level, z_BTD, x_BTD, rotary=rotary)
        return self.read_out(z_BTD, {"z": z_BTD})
