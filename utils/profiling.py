"""Where the time and the memory go: a clock that is always on, and a trace of a few steps for whoever asks."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_SKIPPED, _WARMUP, _TRACED = 2, 1, 3

T = TypeVar("T")


class TimeShare:
    """How much of this process's time evaluation takes, and how much it may still take."""

    def __init__(self, largest: float | None) -> None:
        self._largest, self._began, self._taken_s = largest, time.perf_counter(), 0.0
        self._lap_s = 0.0

    @property
    def share(self) -> float:
        return self._taken_s / (time.perf_counter() - self._began)

    @contextmanager
    def taking(self, *, limited: bool) -> Iterator["Deadline"]:
        """Counts what happens inside. The deadline, if `limited`, is that by which it has taken the largest share."""
        began = time.perf_counter()
        limit_s = math.inf
        if limited and self._largest is not None:  # (taken + limit) / (elapsed + limit) = largest
            limit_s = (self._largest * (began - self._began) - self._taken_s) / (1 - self._largest)
        deadline = Deadline(limit_s, self._lap_s)
        yield deadline
        self._lap_s = deadline.lap_s
        self._taken_s += time.perf_counter() - began


class Deadline:
    """When to come to an end: `limit_s` seconds from now, never if that is infinite.

    Attributes:
        lap_s: the longest lap so far; given where one is known from before.
        was_met: whether nothing had to be left out.
    """

    def __init__(self, limit_s: float = math.inf, lap_s: float = 0.0) -> None:
        self.is_set, self.lap_s, self.was_met = math.isfinite(limit_s), lap_s, True
        self._lap_began = time.perf_counter()
        self._ends = self._lap_began + limit_s

    def shared_by(self, names: list[str]) -> Iterator[tuple[str, "Deadline"]]:
        """Each with a deadline of its own: an equal part of the time that is left when its turn comes."""
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
        """Whether it comes before the end of another lap."""
        return time.perf_counter() + self.lap_s > self._ends


class StepClock:
    """Wall-clock time of training steps since the last reading, without what is done between steps (evaluation,
    saving).
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._since = time.perf_counter()
        self._paused_s = self._data_s = 0.0
        self._num_steps = 0

    def timing_data(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time that the loop waits for each counts as data time, and each is a step."""
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._data_s += time.perf_counter() - asked
            self._num_steps += 1
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def read(self, global_batch_size: int) -> dict[str, float]:
        """perf/{examples_per_second, step_ms, data_ms} since the last reading. Call it where the host has just waited
        for the device.
        """
        elapsed_s = time.perf_counter() - self._since - self._paused_s
        row = {
            "perf/examples_per_second": self._num_steps * global_batch_size / elapsed_s,
            "perf/step_ms": 1e3 * elapsed_s / self._num_steps,
            "perf/data_ms": 1e3 * self._data_s / self._num_steps,
        }
        self._reset()
        return row


def max_memory_gb(device: torch.device) -> float:
    """The most that this process has held so far: on the CUDA device, elsewhere in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak / 1e6  # bytes on macOS, KiB elsewhere


class StepProfiler:
    """Traces steps 4 to 6 of this process into <run>/trace.json. Switched off, it does nothing."""

    def __init__(self, enabled: bool, run: Path, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._profile: profile | None = None
        if enabled:
            on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *on_device],
                schedule=schedule(wait=_SKIPPED, warmup=_WARMUP, active=_TRACED, repeat=1),
                on_trace_ready=self._write,
                profile_memory=True,
            )
            self._profile.start()

    def step(self) -> None:
        """A training step is over."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()

    def _write(self, finished: profile) -> None:
        path = self._run / "trace.json"
        finished.export_chrome_trace(str(path))
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        self._say(finished.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=40))
        self._say(f"trace of {_TRACED} steps: {path} (open it in https://ui.perfetto.dev)")
