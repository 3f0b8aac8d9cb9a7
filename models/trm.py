"""The Tiny Recursive Model (arXiv 2510.04871): one small network refines a latent and an answer."""

# B = batch, S = tokens, T = prefix and tokens, D = hidden size, E = puzzle embedding size

from typing import ClassVar, Literal

import torch
from pydantic import Field

from models.carry import NOISY, SegmentOutput, State
from models.depth import LARGEST_COUNT, Depth
from models.tokens import TokenConfig, TokenModel
from utils.config import Int


class TRMConfig(TokenConfig):
    """The options of the TRM; config/arch/trm.yaml explains each and holds the defaults."""

    calls_of_H: ClassVar[int] = 1

    name: Literal["trm"]
    H_layers: Int  # the published configs have this key; it has no effect, because there is one network
    L_layers: Int = Field(ge=1, le=LARGEST_COUNT)


class TRM(TokenModel):
    """One stack of blocks.

    The paper's answer y is z_H here, and its latent z is z_L. These are the names in published
    checkpoints.
    """

    def __init__(self, config: TRMConfig, **sizes: int) -> None:
        super().__init__(config, states={"z_H": "H_init", "z_L": "L_init"}, **sizes)
        self.L_level = self._level(config.L_layers)

    def forward(
        self, state: State, inputs_BS: torch.Tensor, puzzle_rows_BE: torch.Tensor | None, depth: Depth
    ) -> SegmentOutput:
        """Run one segment (figure 3 of the paper is its code).

        The question x enters only where the latent is refined. With the published `backprop`, the
        whole last H cycle carries gradient. The cycles before it improve the states without
        gradient.
        """
        x_BTD = self.embed(inputs_BS, puzzle_rows_BE, state.get(NOISY))
        z_H_BTD, z_L_BTD = state["z_H"], state["z_L"]
        call, rotary = self.calls(depth), self.rotary()
        for _ in range(depth.H_cycles):
            for _ in range(depth.L_cycles):
                z_L_BTD = call(self.L_level, z_L_BTD, z_H_BTD, x_BTD, rotary=rotary)
            z_H_BTD = call(self.L_level, z_H_BTD, z_L_BTD, rotary=rotary)
        return self.read_out(z_H_BTD, {"z_H": z_H_BTD, "z_L": z_L_BTD})
