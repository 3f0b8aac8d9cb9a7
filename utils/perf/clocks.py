"""Tell where the time of a run goes, and limit the time of evaluations."""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ACTIVITIES = {
    "steps": "training steps that count",
    "data": "waiting for a batch",
    "evaluation": "evaluating",
    "save": "saving, as long as the steps wait for it",
    "other": "logging, and whatever else happens between steps",
    "start": "starting the program, and what its first step took longer than others, as for compiling",
    "lost": "work after the last checkpoint before a fault, which had to be done again",
    "down": "nothing: the run had no process",
}


@cache  # not at import: ranks may be forks of a process that has imported this
def program_began() -> float:
    """Return when this program was started, in seconds since the epoch; now if nobody knows."""
    now = time.time()
    try:  # Linux
        ticks = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
        age_s = float(Path("/proc/uptime").read_text("utf-8").split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - age_s if 0 <= age_s < 600 else now  # containers may show another machine's uptime


class RunClock:
    """Adds up the wall-clock time of a run over all its processes, by activity.

    One activity goes on at any time, so that the sum is the time since the run began. Before the
    first batch the program starts; then it takes steps, but for what `doing` says.

    Args:
        spent_s: what earlier processes of the run spent on each activity.
        since: when this one began, in seconds since the epoch.
        largest_eval_share: the limit of `evaluating`; None for none.
    """

    def __init__(self, spent_s: Mapping[str, float], since: float, largest_eval_share: float | None = None) -> None:
        self._spent_s = dict.fromkeys((*ACTIVITIES, "first step"), 0.0) | dict(spent_s)
        self._activity = "start"
        # The time of day may be set meanwhile, and a suspended machine lets it jump.
        self._offset = time.time() - time.perf_counter()
        self._since = since
        self._largest_eval_share, self._lap_s = largest_eval_share, 0.0
        self.last_evaluation_s: float | None = None
        self._num_steps = 0  # of this process
        self._steps_s = 0.0  # those without the first
        self._read = 0, self._spent_s["steps"] + self._spent_s["data"], self._spent_s["data"]  # at the last row

    def _switch(self, activity: str) -> None:
        now = time.perf_counter() + self._offset
        self._spent_s[self._activity] += now - self._since
        if self._activity == "steps":
            self._steps_s += now - self._since
        self._activity, self._since = activity, now

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Count the time inside as that of another activity."""
        before = self._activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def timing(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same batches. Each is a step, and the wait for it is one for data."""
        iterator = iter(batches)
        while True:
            with self.doing("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            self._switch("steps" if self._num_steps else "first step")
            self._num_steps += 1
            yield batch

    @contextmanager
    def evaluating(self, *, limited: bool) -> Iterator["Deadline"]:
        """Count the time inside as evaluation, and yield its deadline, if it is limited."""
        limit_s = math.inf
        if limited and self._largest_eval_share is not None:  # (taken + limit) / (all + limit) = largest
            spent_s = self.spent_s()
            at_work_s = sum(spent_s.values()) - spent_s["down"] - spent_s["lost"]
            limit_s = (self._largest_eval_share * at_work_s - spent_s["evaluation"]) / (1 - self._largest_eval_share)
        deadline = Deadline(limit_s, self._lap_s)
        before_s = self._spent_s["evaluation"]
        with self.doing("evaluation"):
            yield deadline
        self._lap_s = deadline.lap_s
        self.last_evaluation_s = self._spent_s["evaluation"] - before_s

    def spent_s(self) -> dict[str, float]:
        """Return the seconds of each activity so far. The first step counts like any other."""
        self._switch(self._activity)
        spent_s = dict(self._spent_s)
        first_s = spent_s.pop("first step")
        counts_s = min(first_s, self._steps_s / (self._num_steps - 1)) if self._num_steps > 1 else 0.0
        spent_s["steps"] += counts_s
        spent_s["start"] += first_s - counts_s
        return spent_s

    def shares(self) -> dict[str, float]:
        """Return the share of each activity in all time; that of steps is the goodput."""
        spent_s = self.spent_s()
        return {name: seconds / (sum(spent_s.values()) or 1.0) for name, seconds in spent_s.items()}

    def row(self, batch_size: int, unit: str = "examples") -> dict[str, float]:
        """Return perf/ metrics of the steps since the last call, and where all time went.

        `unit` is what batch_size counts. The host has just waited for the device.
        """
        spent_s = self.spent_s()
        num_steps, data_s = self._num_steps, self._spent_s["data"]
        busy_s = self._spent_s["first step"] + self._spent_s["steps"] + data_s
        steps_before, busy_before_s, data_before_s = self._read
        elapsed_s, new = busy_s - busy_before_s, num_steps - steps_before
        self._read = num_steps, busy_s, data_s
        return {
            f"perf/{unit}_per_second": new * batch_size / elapsed_s,
            "perf/step_ms": 1e3 * elapsed_s / new,
            "perf/data_ms": 1e3 * (data_s - data_before_s) / new,
            "perf/goodput": spent_s["steps"] / sum(spent_s.values()),
            **{f"perf/spent_s/{name}": round(seconds, 3) for name, seconds in spent_s.items() if seconds},
        }


class Deadline:
    """A point in time at which work must end. The work consists of laps, such as batches."""

    def __init__(self, limit_s: float = math.inf, lap_s: float = 0.0) -> None:
        self.is_set = math.isfinite(limit_s)
        self.lap_s = lap_s  # of the longest lap so far
        self.was_met = True  # whether nothing had to be left out; the work itself sets it to False
        self._lap_began = time.perf_counter()
        self._ends = self._lap_began + limit_s

    def shared_by(self, names: list[str]) -> Iterator[tuple[str, "Deadline"]]:
        """Yield each name with a deadline of its own: an equal part of the remaining time."""
        for index, name in enumerate(names):
            part = Deadline((self._ends - time.perf_counter()) / (len(names) - index), self.lap_s)
            yield name, part
            self.lap_s, self.was_met = part.lap_s, self.was_met and part.was_met

    def begin_lap(self) -> None:
        self._lap_began = time.perf_counter()

    def end_lap(self) -> None:
        self.lap_s = max(self.lap_s, time.perf_counter() - self._lap_began)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._ends

    @property
    def is_near(self) -> bool:
        """Whether the deadline comes before the end of another lap."""
        return time.perf_counter() + self.lap_s > self._ends
