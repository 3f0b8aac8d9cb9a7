"""Checks that several strategies share, and the arithmetic of their advice."""

import torch

from models.model import Model
from utils.errors import UserError
from utils.ranks.world import World


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the four divisors of `number` that are nearest to `wanted`, in ascending order."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:4])


def fill_in_degrees(num_ranks: int, given: dict[str, int | None]) -> tuple[int, int]:
    """Return two degrees, the outer one first, whose product is the number of ranks.

    Degrees that are None become as close as possible.
    """
    fitting = [(n, num_ranks // n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    matching = [
        pair for pair in fitting if all(want in (None, n) for want, n in zip(given.values(), pair, strict=True))
    ]
    if not matching:
        asked = " x ".join(f"{name} {want}" for name, want in given.items() if want is not None)
        raise UserError(
            f"parallel: {asked} doesn't make {num_ranks} ranks; {' x '.join(given)} can be "
            f"{', '.join(f'{outer} x {inner}' for outer, inner in fitting)} (null is filled in), "
            "or start another number of ranks"
        )
    return min(matching, key=lambda pair: (abs(pair[0] - pair[1]), pair))


def require_gradients(model: Model) -> None:
    """Raise UserError if the backward pass that has ended left out a trained parameter."""
    may_lack = model.may_lack_gradient()
    left_out = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.grad is None and name not in may_lack
    ]
    if left_out:
        backprop = getattr(model.config, "backprop", "all")  # text models reach all of their weights
        deeper = "" if backprop == "all" else f"arch.backprop={backprop} may end before it: give more calls, or "
        raise UserError(
            f"arch={model.config.name}: no gradient reaches {left_out[0]} ({len(left_out)} such parameters), so it is "
            f"never trained; {deeper}use it in forward, remove it, or freeze it with requires_grad_(False)"
        )


def can_sum(dtype: torch.dtype, world: World) -> bool:
    """Return whether the backend can sum tensors of this dtype, by trying. Every rank."""
    try:
        world.sum_(torch.zeros(1, dtype=dtype, device=world.device))
    except RuntimeError as error:
        if "type" not in str(error).lower():  # not "Invalid scalar type" or the like, but a fault
            raise
        return False
    return True
