"""Run a part of an evaluation on all ranks, until it is done, too late or stopped."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from utils.perf.clocks import Deadline
from utils.ranks.world import World
from utils.run.stop import StopSignal


@dataclass(frozen=True)
class Interrupts:
    """What an evaluation has to heed beside its examples.

    Attributes:
        lockstep: a forward pass of this model is a collective, so that a rank without examples of
            its own computes along.
        stop: asked between forward passes. If any rank was asked to stop, the evaluation is
            abandoned.
        deadline: of rank 0. A batch then counts whole or not at all, because the sequences that
            halt early are the easy ones. Examples for which no time is left are evenly spread.
    """

    lockstep: bool = False
    stop: StopSignal | None = None
    deadline: Deadline = field(default_factory=Deadline)


def run_lap(
    world: World,
    interrupts: Interrupts,
    deadline: Deadline,
    *,
    is_busy: Callable[[], bool],
    advance: Callable[[], None],
    idle: Callable[[], None],
) -> Literal["done", "stopped", "late"]:
    """Make all forward passes of a lap. Every rank.

    Args:
        deadline: that of this part of the evaluation.
        is_busy: whether a forward pass of this rank is left.
        advance: makes the next one.
        idle: makes one without examples.
    """
    deadline.begin_lap()
    while True:
        asked_to_stop = interrupts.stop is not None and interrupts.stop.requested()
        stopping, any_busy, late = world.any_of(asked_to_stop, is_busy(), world.is_main and deadline.is_over)
        if stopping:
            return "stopped"
        if not any_busy:
            return "done"
        if late:
            return "late"
        if is_busy():
            advance()
        elif interrupts.lockstep:
            idle()
        if deadline.is_set:
            world.wait_for_device()  # otherwise the clock would time what was asked for, not what was done
