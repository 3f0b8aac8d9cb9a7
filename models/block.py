"""The post-norm transformer block, and the stack of blocks that a recursion calls repeatedly."""

# B = batch, T = positions (prefix and tokens), D = hidden size

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.attention import Attention, Rotary
from models.layers import MLPS, BoardConv, ConvSwiGLU, SwiGLU, rms_norm, swiglu_width

if TYPE_CHECKING:
    from models.tokens import TokenConfig


class Block(nn.Module):
    """x = rms(x + mix(x)); x = rms(x + mlp(x)).

    mix is attention or, with `mlp_t`, a SwiGLU over the positions, or, with `conv_2d`, a
    convolution over the board. The norm comes after the sum, so that the state keeps unit scale
    however often it is fed back (HRM, arXiv 2506.21734, section 2).
    """

    def __init__(self, config: "TokenConfig", num_positions: int) -> None:
        super().__init__()
        D = config.hidden_size
        self.self_attn = Attention(D, config.num_heads) if config.has_attention else None
        self.conv_2d = BoardConv(D, config.prefix_len) if config.conv_2d else None
        self.mlp_t: SwiGLU | None = None
        if config.mlp_t:
            # It mixes all tokens already, so it needs no convolution along the tokens.
            over_tokens = MLPS["swiglu" if config.mlp == "conv_swiglu" else config.mlp]
            width = swiglu_width(num_positions, config.expansion, config.width_multiple)
            self.mlp_t = over_tokens(num_positions, width, over_first=True)
        width = swiglu_width(D, config.expansion, config.width_multiple)
        if config.mlp == "conv_swiglu":
            self.mlp: SwiGLU = ConvSwiGLU(D, width, conv_bias=config.conv_bias)
        else:
            self.mlp = MLPS[config.mlp](D, width)

    def forward(
        self,
        x_BTD: torch.Tensor,
        rotary: Rotary | None,
        *,
        first_position_only: bool = False,
        fp8: bool = False,
    ) -> torch.Tensor:
        """Return x_BTD after token mixing and the MLP, or only the first position, (B,1,D)."""
        num_positions = 1 if first_position_only else None
        if self.mlp_t is not None:
            # With positions first, each projection is one product for all slots, and only whole
            # vectors of D change places. PyTorch would multiply the other layouts slot by slot,
            # with a copy of the weights for each slot.
            x_TBD = x_BTD.transpose(0, 1).contiguous()
            mixed_TBD = self.mlp_t(x_TBD.flatten(1), fp8=fp8).view_as(x_TBD)
            x_TBD = rms_norm(x_TBD + mixed_TBD, dim=0)  # the norm is over positions here, as published
            x_BTD = x_TBD.transpose(0, 1)[:, :num_positions].contiguous()
        elif self.conv_2d is not None:
            x_BTD = rms_norm((x_BTD + self.conv_2d(x_BTD))[:, :num_positions])
        else:
            assert self.self_attn is not None
            mixed_BTD = self.self_attn(x_BTD, rotary, num_queries=num_positions, fp8=fp8)
            x_BTD = rms_norm(x_BTD[:, :num_positions] + mixed_BTD)
        return rms_norm(x_BTD + self.mlp(x_BTD, fp8=fp8))


class Level(nn.Module):
    """One network of the recursion: a stack of blocks, applied to the sum of its inputs."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(
        self,
        *inputs_BTD: torch.Tensor,
        rotary: Rotary | None,
        keep_inputs_only: bool = False,
        first_position_only: bool = False,
        fp8: bool = False,
        **of_blocks: Any,
    ) -> torch.Tensor:
        """Return the sum of the inputs after all blocks.

        Args:
            keep_inputs_only: compute each block again in the backward pass.
            first_position_only, fp8: only without gradient.
        """
        # The sum is formed here, where torch.compile makes it a part of the first block.
        x_BTD = functools.reduce(torch.add, inputs_BTD)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if keep_inputs_only:
                x_BTD = recomputed(layer, x_BTD, rotary=rotary, **of_blocks)
            else:
                first_only = first_position_only and index == last
                x_BTD = layer(x_BTD, rotary=rotary, first_position_only=first_only, fp8=fp8, **of_blocks)
        return x_BTD


def recomputed(network: nn.Module, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Return network(x, **arguments), of which only the input is kept for the backward pass."""
    # Blocks draw no random numbers, so there is no random state to restore. Dropout follows from
    # seeds that are arguments.
    y: torch.Tensor = checkpoint(network, x, **arguments, use_reentrant=False, preserve_rng_state=False)
    return y
