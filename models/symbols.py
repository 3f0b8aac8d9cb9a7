"""What models with a vector for each symbol in each cell share (SE-RRM, arXiv 2603.02193)."""

# B = slots, V = symbols (the vocabulary), S = cells (the tokens of a sequence)

import torch

from models.carry import SegmentOutput, State

NUM_SPECIAL = 2
"""How many of the first symbols have a meaning of their own: padding, and blank or end."""


def with_confidence(logits_BSV: torch.Tensor, state: State, cells_BS: torch.Tensor | None = None) -> SegmentOutput:
    """Return the output of a segment of a model without a Q head, and the new state, detached."""
    q_halt_B = confidence_logit(logits_BSV, cells_BS)
    return {name: z.detach() for name, z in state.items()}, logits_BSV, q_halt_B, torch.zeros_like(q_halt_B)


@torch.no_grad()
def confidence_logit(logits_BSV: torch.Tensor, cells_BS: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logit of the confidence in each answer, float32 (B,), without gradient.

    The confidence is the smallest over the cells of the largest softmax probability of a cell
    (published code of SE-RRM). Its logit is the largest logit less the logsumexp of the others,
    which is finite also where the probability rounds to 1. A board without a cell has the logit 0.
    """
    top = logits_BSV.float().max(-1, keepdim=True)
    others_BSV = logits_BSV.float().scatter(-1, top.indices, -torch.inf)
    of_cells_BS = top.values.squeeze(-1) - others_BSV.logsumexp(-1)
    if cells_BS is None:
        return of_cells_BS.amin(-1)
    lowest_B = of_cells_BS.masked_fill(~cells_BS, torch.inf).amin(-1)
    return lowest_B.masked_fill(~cells_BS.any(-1), 0)
