"""The Hierarchical Reasoning Model (arXiv 2506.21734): a slow network H and a fast network L."""

# B = batch, S = tokens, T = prefix and tokens, D = hidden size, E = puzzle embedding size

from typing import ClassVar, Literal

import torch
from pydantic import Field

from models.carry import NOISY, SegmentOutput, State
from models.depth import LARGEST_COUNT, Depth
from models.tokens import TokenConfig, TokenModel
from utils.config import Int


class HRMConfig(TokenConfig):
    """The options of the HRM; config/arch/hrm.yaml explains each and holds the defaults."""

    calls_of_H: ClassVar[int] = 1

    name: Literal["hrm"]
    H_layers: Int = Field(ge=1, le=LARGEST_COUNT)
    L_layers: Int = Field(ge=1, le=LARGEST_COUNT)


class HRM(TokenModel):
    """Two stacks of blocks that run at two speeds."""

    def __init__(self, config: HRMConfig, **sizes: int) -> None:
        super().__init__(config, states={"z_H": "H_init", "z_L": "L_init"}, **sizes)
        self.H_level = self._level(config.H_layers)
        self.L_level = self._level(config.L_layers)

    def forward(
        self, state: State, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None, depth: Depth
    ) -> SegmentOutput:
        """Run one segment (section 2; figure 4 is the paper's code).

        Each of H_cycles cycles has L_cycles fast steps and one slow step. With the published
        `backprop`, only the last call of L and the last call of H carry gradient. This is the
        one-step approximation.
        """
        x_BTD = self.embed(inputs_BS, puzzle_rows_BE, state.get(NOISY))
        z_H_BTD, z_L_BTD = state["z_H"], state["z_L"]
        call, rotary = self.calls(depth), self.rotary()
        for _ in range(depth.H_cycles):
            for _ in range(depth.L_cycles):
                z_L_BTD = call(self.L_level, z_L_BTD, z_H_BTD, x_BTD, rotary=rotary)
            z_H_BTD = call(self.H_level, z_H_BTD, z_L_BTD, rotary=rotary)
        return self.read_out(z_H_BTD, {"z_H": z_H_BTD, "z_L": z_L_BTD})
