"""Run an evaluation lap by lap on all ranks, until it is done, too late or stopped."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from utils.errors import UserError
from utils.perf.clocks import Deadline
from utils.ranks.world import World
from utils.stop import StopSignal


@dataclass(frozen=True)
class Interrupts:
    """What an evaluation has to heed beside its examples."""

    # A forward pass is a collective, so that a rank without examples of its own computes along.
    lockstep: bool = False
    stop: StopSignal | None = None  # asked between forward passes
    # Of rank 0. A batch then counts whole or not at all, because the sequences that halt early are
    # the easy ones. Examples for which no time is left are evenly spread.
    deadline: Deadline = field(default_factory=Deadline)


Lap = Iterator[bool]
"""Forward passes of this rank, whose results count together or not at all.

It yields True before each forward pass. Then it yields False, and at the end adds the results.
"""


def run_laps(
    laps: Iterator[Lap], idle: Callable[[], None], world: World, interrupts: Interrupts, deadline: Deadline
) -> bool:
    """Run laps until no rank has another one, or until no time is left. Every rank.

    Args:
        idle: makes a forward pass without examples.
        deadline: that of this part of the evaluation.

    Returns:
        False if any rank was asked to stop.
    """
    while True:
        lap, is_busy, mistake = None, False, None
        try:
            if (lap := next(laps, None)) is not None:
                is_busy = next(lap)
        except UserError as error:
            mistake = error
        more, late, failed = world.any_of(lap is not None, world.is_main and deadline.is_near, mistake is not None)
        if failed:
            with world.shared_errors():
                if mistake is not None:
                    raise mistake
        if late or not more:
            deadline.was_met &= not more
            return True
        deadline.begin_lap()
        while True:
            asked_to_stop = interrupts.stop is not None and interrupts.stop.requested()
            stopping, any_busy, late = world.any_of(asked_to_stop, is_busy, world.is_main and deadline.is_over)
            if stopping:
                return False
            if not any_busy:
                break
            if late:
                deadline.was_met = False
                return True
            if lap is not None and is_busy:
                is_busy = next(lap)
            elif interrupts.lockstep:
                idle()
            if deadline.is_set:
                world.wait_for_device()  # otherwise the clock would time what was asked for, not what was done
        deadline.end_lap()
        if lap is not None:
            next(lap, None)  # adds the results
