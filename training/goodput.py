"""What a run has spent before this start, what it lost, and how often it should save therefore."""

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from records.checkpoint.format import Progress
from records.folder import LAUNCH_FILE, Launched, stopped_by
from utils.perf.clocks import program_began

# What a run writes while it lives. A row comes every log_interval steps.
_SIGNS_OF_LIFE = (LAUNCH_FILE, "metrics.jsonl", "latest")
# A run without a fault yet counts as one with a fault after so long.
_FIRST_FAULT_S = 600.0


class Past(NamedTuple):
    """A run before this start. Times of day are in seconds since the epoch."""

    spent_s: dict[str, float]  # by activity, for utils.perf.clocks.RunClock
    since: float  # when the start began, whose time is not in spent_s
    began_at: float  # when the run began
    faults: int  # how often a process of the run did not end by itself
    is_restart: bool = False  # whether the last one did not

    @staticmethod
    def of(run: Path, progress: Progress) -> "Past":
        """Return the past of the run in a folder, before this start writes there. For rank 0.

        A branch goes on with the account of the run that it left. The time after an end or after
        Ctrl-C does not count, because nobody wanted the run to go on.
        """
        began, before = program_began(), Launched.read(run)
        if before is None:
            return Past(progress.spent_s, began, began, 0)
        spent_s = {"lost": 0.0, "down": 0.0} | progress.spent_s
        until, began_at = progress.spent_until or before.began_at or began, before.began_at or began
        if began < until:  # this process has trained already, and goes back
            now = time.time()
            return Past(spent_s | {"lost": spent_s["lost"] + now - until}, now, began_at, before.faults)
        last_sign = min(began, max(until, *(_changed_at(run / name) for name in _SIGNS_OF_LIFE)))
        spent_s["lost"] += last_sign - until
        stop, is_finished = stopped_by(run), progress.step >= before.last_step
        if stop != "SIGINT" and not is_finished:
            spent_s["down"] += began - last_sign
        is_restart = not stop and not is_finished
        return Past(spent_s, began, began_at, before.faults + is_restart, is_restart)


def best_interval_s(save_s: float, run_s: float, faults: int) -> float:
    """Return the time between two saves that loses the least, if a save takes `save_s`.

    Young, "A first order approximation to the optimum checkpoint interval" (1974). The run has had
    so many faults in `run_s`.
    """
    between_faults_s = (run_s + _FIRST_FAULT_S) / (faults + 1)
    return math.sqrt(2 * save_s * between_faults_s)


def _changed_at(file: Path) -> float:
    with suppress(OSError):
        return os.stat(file).st_mtime
    return 0.0
