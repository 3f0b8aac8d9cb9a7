"""Measure the time of steps, and limit the time of evaluations."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class TimeShare:
    """Measures the share of this process's time that evaluation takes, and limits it."""

    def __init__(self, largest: float | None) -> None:
        self._largest, self._began = largest, time.perf_counter()
        self._taken_s = self._lap_s = 0.0
        self.last_s: float | None = None  # the time that was taken the last time

    @property
    def share(self) -> float:
        return self._taken_s / (time.perf_counter() - self._began)

    @contextmanager
    def taking(self, *, limited: bool) -> Iterator["Deadline"]:
        """Count the time spent inside, and yield its deadline, if it is limited."""
        began = time.perf_counter()
        limit_s = math.inf
        if limited and self._largest is not None:  # (taken + limit) / (elapsed + limit) = largest
            limit_s = (self._largest * (began - self._began) - self._taken_s) / (1 - self._largest)
        deadline = Deadline(limit_s, self._lap_s)
        yield deadline
        self._lap_s = deadline.lap_s
        self.last_s = time.perf_counter() - began
        self._taken_s += self.last_s


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


class StepClock:
    """Measures the time of training steps since the last reading, without pauses between them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._since = time.perf_counter()
        self._paused_s = self._data_s = 0.0
        self._num_steps = 0

    def timing_data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same batches. Each is a step, and the wait for it counts as data time."""
        iterator = iter(batches)
        while True:
            with self.waiting_for_data():
                batch = next(iterator, None)
            if batch is None:
                return
            self._num_steps += 1
            yield batch

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as data time, for waits before the loop asks for a batch."""
        began = time.perf_counter()
        yield
        self._data_s += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def read(self, batch_size: int, unit: str = "examples") -> dict[str, float]:
        """Return perf/ metrics since the last reading. `unit` is what batch_size counts.

        The host has just waited for the device.
        """
        elapsed_s = time.perf_counter() - self._since - self._paused_s
        row = {
            f"perf/{unit}_per_second": self._num_steps * batch_size / elapsed_s,
            "perf/step_ms": 1e3 * elapsed_s / self._num_steps,
            "perf/data_ms": 1e3 * self._data_s / self._num_steps,
        }
        self._reset()
        return row
