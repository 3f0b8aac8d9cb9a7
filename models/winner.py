"""Winner takes all: K initial states for each slot, of which the best one trains the model.

"Speed is Confidence" (arXiv 2601.19085) and its code. The trajectories of a slot begin with
different values of the last recurrent state (z_L). The trajectory with the lowest token loss wins
the segment: its outputs are those of the slot. All trajectories go on from the winner's z_H, each
with its own z_L. A step runs all of them without gradient, and the winner again with it.
"""

# B = slots, K = initial states, N = B x K trajectories, S = tokens, V = vocabulary, E = puzzle
# embedding size, D = hidden size

from collections.abc import Callable

import torch
from torch import Tensor

from models.base import RecursiveModel
from models.carry import SegmentOutput, State
from models.losses import mean_token_loss


def start_at(model: RecursiveModel, state: State, fresh_N: Tensor, which_N: Tensor) -> State:
    """Let trajectories that begin start from the model's initial state with this number."""
    name, z = list(state.items())[-1]
    start_ND = model.starts()[which_N]
    middle = [1] * (z.ndim - 2)
    start = start_ND.view(len(z), *middle, -1)
    return state | {name: torch.where(fresh_N.view(-1, *middle, 1), start, z)}


def spread_states(state: State, num_states: int) -> State:
    return {name: z[:, None].expand(-1, num_states, *z.shape[1:]).contiguous() for name, z in state.items()}


def winner_takes_all(
    model: RecursiveModel,
    states: State,
    fresh_B: Tensor,
    noisy: State,
    inputs_BS: Tensor,
    labels_BS: Tensor,
    rows_BE: Tensor | None,
    forward: Callable[[State, Tensor, Tensor | None], SegmentOutput],
) -> tuple[State, SegmentOutput]:
    """Run one segment of K trajectories for every slot, and the winners' again with gradient.

    Args:
        states: of all trajectories, (B, K, ...).
        noisy: what the segment reads beside the state, (N, ...).

    Returns:
        The new states of all trajectories, detached, and what the segment of the winners gave.
    """
    num_slots, num_states = len(fresh_B), model.config.num_states

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(num_states, 0)

    fresh_N, which_N = repeated(fresh_B), torch.arange(num_states, device=fresh_B.device).repeat(num_slots)
    start = model.reset({name: z.flatten(0, 1) for name, z in states.items()}, fresh_N)
    start = start_at(model, start, fresh_N, which_N) | noisy
    with torch.no_grad():
        rows_NE = None if rows_BE is None else repeated(rows_BE)
        state, logits_NSV, *_ = forward(start, repeated(inputs_BS), rows_NE)
        loss_N = mean_token_loss(logits_NSV, repeated(labels_BS), config=model.config.loss)
        loss_BK = loss_N.view(num_slots, num_states)
        winner_B = loss_BK.argmin(1) + num_states * torch.arange(num_slots, device=loss_BK.device)
    of_winners = forward({name: z[winner_B] for name, z in start.items()}, inputs_BS, rows_BE)
    *shared, own = state
    states = spread_states({name: of_winners[0][name] for name in shared}, num_states)
    states[own] = state[own].unflatten(0, (num_slots, num_states))
    return states, of_winners
