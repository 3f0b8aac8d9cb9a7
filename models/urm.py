"""The Universal Reasoning Model (arXiv 2512.14693): one looped stack with ConvSwiGLU.

Backpropagation through its loops is truncated.
"""

# B = batch, S = tokens, T = prefix and tokens, D = hidden size, E = puzzle embedding size

from typing import Literal

import torch
from pydantic import Field

from models.carry import NOISY, SegmentOutput, State
from models.depth import LARGEST_COUNT, Depth
from models.tokens import TokenConfig, TokenModel
from utils.config import Int


class URMConfig(TokenConfig):
    """The options of the URM; config/arch/urm.yaml explains each and holds the defaults."""

    name: Literal["urm"]
    num_layers: Int = Field(ge=1, le=LARGEST_COUNT)


class URM(TokenModel):
    """One stack of blocks and one state. The MLP of a block is a ConvSwiGLU by default."""

    def __init__(self, config: URMConfig, **sizes: int) -> None:
        super().__init__(config, states={"z": "z_init"}, **sizes)
        self.level = self._level(config.num_layers)

    def forward(
        self, state: State, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None, depth: Depth
    ) -> SegmentOutput:
        """Run one segment: H_cycles x L_cycles loops (section 3.1).

        Only the last loops carry gradient. The paper calls this truncated backpropagation through
        loops (section 3.3).
        """
        x_BTD = self.embed(inputs_BS, puzzle_rows_BE, state.get(NOISY))
        z_BTD = state["z"]
        call, rotary = self.calls(depth), self.rotary()
        for _ in range(depth.H_cycles):
            for _ in range(depth.L_cycles):
                z_BTD = call(self.level, z_BTD, x_BTD, rotary=rotary)
        return self.read_out(z_BTD, {"z": z_BTD})
