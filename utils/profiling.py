"""Where the time and the memory go: a clock that is always on, a look at one step in every few for what ranks spend
on talking to one another, and a trace of a few steps for whoever asks.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, schedule

from utils.dist.world import World

_SKIPPED, _WARMUP, _TRACED = 2, 1, 3
_LARGEST = 10
_TRACE_FILE = "trace.json"
_MEMORY_EVENTS = 200_000  # allocations and frees with their stacks, the newest of six steps

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
    def waiting_for_data(self) -> Iterator[None]:
        """Data time that is spent before the loop asks for the batch."""
        began = time.perf_counter()
        yield
        self._data_s += time.perf_counter() - began

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


@dataclass(frozen=True)
class _Sample:
    """One step of one rank."""

    comm_ms: float
    step_ms: float
    memory_gb: float

    @property
    def rest_ms(self) -> float:
        return self.step_ms - self.comm_ms


class CommSampler:
    """What ranks spend on talking to one another, looked at in one step of every few.

    A sampled step runs under torch.profiler, which sees every collective and every send and receive, of whichever
    strategy: those of gloo as the time from the call to the end of the transfer, those of NCCL as the time of their
    kernels. Several at once count once. The time includes waiting for a slower rank, and whatever the backward pass
    computes meanwhile hides a part of it: it is what communication would cost at most.

    In a world of one, and with `every_n_steps` None, no step is sampled.
    """

    def __init__(self, every_n_steps: int | None, world: World) -> None:
        self._every_n_steps = every_n_steps if world.size > 1 else None
        self._world = world
        self._sample: _Sample | None = None
        self._largest_gb = 0.0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Put training step `step` inside. The host waits for the device in a sampled one only."""
        if self._every_n_steps is None or step % self._every_n_steps:
            yield
            return
        self._world.await_peers()
        self._world.wait_for_device()
        with profile(activities=_activities(self._world.device)) as finished:
            began = time.perf_counter()
            yield
            self._world.wait_for_device()
            step_ms = 1e3 * (time.perf_counter() - began)
        self._sample = _Sample(_comm_ms(finished), step_ms, max_memory_gb(self._world.device))

    def row(self) -> dict[str, float]:
        """perf/max_memory_gb, the most that a rank has held, as far as is known: this rank's is of now, the others' of
        the last sample. If a step was sampled since the last call, also

        - perf/comm_ms, mean over the ranks, and perf/comm_share of the step;
        - perf/imbalance: time outside communication, the largest of the ranks' over their mean; 1 is even;
        - perf/memory_gb/rank_<n>.

        Every rank.
        """
        row: dict[str, float] = {}
        if self._sample is not None:
            samples = self._world.gather_objects(self._sample)
            self._sample = None
            self._largest_gb = max(sample.memory_gb for sample in samples)
            comm_ms, step_ms, rest_ms = (
                fmean(getattr(sample, name) for sample in samples) for name in ("comm_ms", "step_ms", "rest_ms")
            )
            row = {
                "perf/comm_ms": comm_ms,
                "perf/comm_share": comm_ms / step_ms,
                "perf/imbalance": max(sample.rest_ms for sample in samples) / rest_ms,
                **{f"perf/memory_gb/rank_{rank}": sample.memory_gb for rank, sample in enumerate(samples)},
            }
        return row | {"perf/max_memory_gb": max(self._largest_gb, max_memory_gb(self._world.device))}


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def _comm_ms(finished: profile) -> float:
    """How long something travelled between ranks."""
    # Not finished.events(), which builds a tree of all operations in Python and takes as long as a small step.
    assert finished.profiler is not None and finished.profiler.kineto_results is not None
    events = finished.profiler.kineto_results.events()
    spans = ((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if _is_comm(event))
    return _union(spans) / 1e6


def _is_comm(event: Any) -> bool:
    """NCCL's calls return at once, and what counts is on the device; those of the host end with the transfer."""
    name = event.name()
    return name.startswith(("gloo:", "mpi:")) or (name.startswith("nccl") and event.device_type() == DeviceType.CUDA)


def _union(spans: Iterable[tuple[int, int]]) -> int:
    """Length of what the spans (first, end) cover together."""
    covered, reached = 0, 0
    for first, end in sorted(spans):
        covered += max(0, end - max(first, reached))
        reached = max(reached, end)
    return covered


class StepProfiler:
    """Traces steps 4 to 6 of this process into <run>/trace.json and prints the ten operations that took most time;
    the same for memory, into <run>/memory.txt, or on CUDA PyTorch's own snapshot into <run>/memory.pickle (for
    https://pytorch.org/memory_viz; nothing here ever reads it). Switched off, it does nothing.
    """

    def __init__(self, enabled: bool, run: Path, say: Callable[[str], None], device: torch.device) -> None:
        self._run, self._say, self._on_cuda = run, say, device.type == "cuda"
        self._profile: profile | None = None
        self._written = False
        if enabled:
            if self._on_cuda:
                torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
            self._profile = profile(
                activities=_activities(device),
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
            # A run that was resumed may have been traced before.
            if not self._written and not (self._run / _TRACE_FILE).exists():
                self._say(f"no trace: the run ended before step {_SKIPPED + _WARMUP + _TRACED}")

    def _write(self, finished: profile) -> None:
        if finished.step_num < _SKIPPED + _WARMUP + _TRACED:  # stopped amid it
            return
        self._written = True
        trace = self._run / _TRACE_FILE
        finished.export_chrome_trace(str(trace))
        # A kernel stands in the list once more, on the device, beside the operation that started it.
        operations = [each for each in finished.key_averages() if each.device_type == DeviceType.CPU]
        if self._on_cuda:
            time_ms = {each.key: each.self_device_time_total / 1e3 / _TRACED for each in operations}
            held_mb = {each.key: each.self_device_memory_usage / 1e6 / _TRACED for each in operations}
            memory = self._run / "memory.pickle"
            torch.cuda.memory._dump_snapshot(str(memory))
            torch.cuda.memory._record_memory_history(enabled=None)
            memory_page = "https://pytorch.org/memory_viz"
        else:
            time_ms = {each.key: each.self_cpu_time_total / 1e3 / _TRACED for each in operations}
            held_mb = {each.key: each.self_cpu_memory_usage / 1e6 / _TRACED for each in operations}
            memory = self._run / "memory.txt"
            memory_page = "a text editor"
        calls = {each.key: each.count / _TRACED for each in operations}
        where = "on the device" if self._on_cuda else "on the host"
        self._say(_largest_of(time_ms, calls, f"time {where}", "ms"))
        table = _largest_of(held_mb, calls, "memory allocated and not freed by the operation itself", "MB")
        self._say(table)
        if not self._on_cuda:
            memory.write_text(table + "\n")
        self._say(
            f"{_TRACED} steps: {trace} (open it in https://ui.perfetto.dev) and {memory} (open it in {memory_page})"
        )


def _largest_of(figures: dict[str, float], calls: dict[str, float], what: str, unit: str) -> str:
    """The ten largest as a table. What isn't in an operation has a line of its own, where it is that large."""
    total = sum(value for value in figures.values() if value > 0)
    lines = [f"{what}: {total:.1f} {unit} a step", f"{'operation':<56}{'calls':>8}{unit:>10}{'share':>8}"]
    for name in sorted(figures, key=lambda name: -figures[name])[:_LARGEST]:
        # The profiler's own name for a step, of which it counts what no operation has taken.
        title = "(Python, between operations)" if name.startswith("ProfilerStep") else name
        title = title if len(title) < 56 else title[:52] + "..."
        lines.append(f"{title:<56}{calls[name]:>8.0f}{figures[name]:>10.2f}{figures[name] / total:>8.1%}")
    return "\n".join(lines)
