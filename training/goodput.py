"""What a run has spent before this start, what it lost, and how often it should save therefore."""

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from records.checkpoint.format import Progress
from records.folder import LAUNCH_FILE, Launched, stopped_by
from utils.perf.clocks import ACTIVITIES, program_began

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
    def of(run: Path, progress: Progress, *, goes_back: bool) -> "Past":
        """Return the past of the run in a folder, before this start writes there. For rank 0.

        A branch goes on with the account of the run that it left. The time after an end or after
        Ctrl-C does not count, because nobody wanted the run to go on.

        Args:
            goes_back: this process has trained already, and a step went wrong.
        """
        began, before = program_began(), Launched.read(run)
        if before is None or not before.since:  # an older version wrote it
            return Past(_known(progress.spent_s), began, began, 0)
        # The last start may have ended before it saved. Its account is then the newer one.
        accounts = [(progress.spent_until, progress.spent_s), (before.since, before.spent_s)]
        until, of_account = max(accounts, key=lambda account: account[0])
        began = max(began, until)  # a notebook, or a worker of Ray, may open a run twice
        spent_s = {"lost": 0.0, "down": 0.0} | _known(of_account)
        if goes_back:
            now = time.time()
            return Past(spent_s | {"lost": spent_s["lost"] + now - until}, now, before.began_at, before.faults)
        stop = stopped_by(run)
        is_restart = not stop and not before.has_ended
        signs = [_changed_at(run / name) for name in _SIGNS_OF_LIFE] if is_restart else []
        last_sign = max(until, min(began, max(signs, default=0.0)))
        spent_s["lost"] += last_sign - until
        if is_restart or stop not in ("", "SIGINT"):
            spent_s["down"] += max(0.0, began - last_sign)
        return Past(spent_s, began, before.began_at, before.faults + is_restart, is_restart)


def _known(spent_s: dict[str, float]) -> dict[str, float]:
    """Return what a file says of known activities. A stranger may have written it."""
    return {name: spent_s[name] for name in ACTIVITIES if 0 <= spent_s.get(name, -1.0) < math.inf}


def best_interval_s(save_s: float, run_s: float, faults: int) -> float:
    """Return the time between two saves that loses the least, if a save takes `save_s`.

    Young, "A first order approximation to the optimum checkpoint interval" (1974). The run has had
    so many faults in `run_s`.
    """
    between_faults_s = (run_s + _FIRST_FAULT_S) / (faults + 1)
    return math.sqrt(2 * max(0.0, save_s) * between_faults_s)


def _changed_at(file: Path) -> float:
    with suppress(OSError):
        return os.stat(file).st_mtime
    return 0.0
