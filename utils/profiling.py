"""Measure time and memory: step times always, communication in sampled steps, traces on request."""

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
_MEMORY_EVENTS = 200_000  # how many allocations and frees are kept; the newest ones, over six steps

T = TypeVar("T")


class TimeShare:
    """Measures the share of this process's time that evaluation takes, and limits it.

    Args:
        largest: the largest share, between 0 and 1; None: no limit.
    """

    def __init__(self, largest: float | None) -> None:
        self._largest, self._began, self._taken_s = largest, time.perf_counter(), 0.0
        self._lap_s = 0.0

    @property
    def share(self) -> float:
        return self._taken_s / (time.perf_counter() - self._began)

    @contextmanager
    def taking(self, *, limited: bool) -> Iterator["Deadline"]:
        """Count the time spent inside, and yield its deadline.

        Args:
            limited: the deadline is when the time inside reaches the largest share; otherwise there
                is no deadline.
        """
        began = time.perf_counter()
        limit_s = math.inf
        if limited and self._largest is not None:  # (taken + limit) / (elapsed + limit) = largest
            limit_s = (self._largest * (began - self._began) - self._taken_s) / (1 - self._largest)
        deadline = Deadline(limit_s, self._lap_s)
        yield deadline
        self._lap_s = deadline.lap_s
        self._taken_s += time.perf_counter() - began


class Deadline:
    """A point in time at which work must end, `limit_s` seconds from now; infinite: never.

    The work consists of laps, such as the batches of an evaluation.

    Attributes:
        is_set: whether the limit is finite.
        lap_s: seconds of the longest lap so far; the argument `lap_s` is one known from before.
        was_met: whether nothing had to be left out. The work itself sets it to False.
    """

    def __init__(self, limit_s: float = math.inf, lap_s: float = 0.0) -> None:
        self.is_set, self.lap_s, self.was_met = math.isfinite(limit_s), lap_s, True
        self._lap_began = time.perf_counter()
        self._ends = self._lap_began + limit_s

    def shared_by(self, names: list[str]) -> Iterator[tuple[str, "Deadline"]]:
        """Yield each name with a deadline of its own.

        When its turn comes, a name gets an equal part of the remaining time.
        """
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
    """Measures the wall-clock time of training steps since the last reading.

    The time of evaluation and saving between steps does not count.
    """

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
        """Count the time inside as data time, for waits before the loop asks for a batch."""
        began = time.perf_counter()
        yield
        self._data_s += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def read(self, global_batch_size: int) -> dict[str, float]:
        """Return perf/examples_per_second, perf/step_ms and perf/data_ms since the last reading.

        Call it right after the host waited for the device.
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
    """Return this process's peak memory so far, in GB: on the CUDA device, else on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak / 1e6  # bytes on macOS, KiB elsewhere


@dataclass(frozen=True)
class _Sample:
    """The measurements of one step on one rank."""

    comm_ms: float
    step_ms: float
    memory_gb: float

    @property
    def rest_ms(self) -> float:
        return self.step_ms - self.comm_ms


class CommSampler:
    """Measures the time that ranks spend on communication, in every n-th step.

    A sampled step runs under torch.profiler, which sees each collective, send and receive of any
    strategy. For gloo it sees the time from the call to the end of the transfer, for NCCL the time
    of the kernels. Simultaneous transfers count once. The time includes waiting for slower ranks,
    and part of it may overlap with computation, so it is an upper bound of the cost.

    In a world of one, and with `every_n_steps` None, no step is sampled.
    """

    def __init__(self, every_n_steps: int | None, world: World) -> None:
        self._every_n_steps = every_n_steps if world.size > 1 else None
        self._world = world
        self._sample: _Sample | None = None
        self._largest_gb = 0.0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run training step `step` inside. Only in a sampled step the host waits for the device."""
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
        """Return metrics of memory and communication. Every rank.

        perf/max_memory_gb is the peak memory over all ranks. This rank's peak is the current one,
        that of the others is from the last sample. If a step was sampled since the last call, the
        row also holds

        - perf/comm_ms, the mean over the ranks, and perf/comm_share, its share of the step;
        - perf/imbalance, the largest time of a rank outside communication, divided by the mean of
          all ranks; 1 is even;
        - perf/memory_gb/rank_<n>, the peak memory of each rank.
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
    """Return for how many ms a transfer between ranks was under way."""
    # finished.events() would take as long as a small step: it builds a tree of all operations.
    assert finished.profiler is not None and finished.profiler.kineto_results is not None
    events = finished.profiler.kineto_results.events()
    spans = ((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if _is_comm(event))
    return _union(spans) / 1e6


def _is_comm(event: Any) -> bool:
    """Return whether the event is a transfer.

    On the host a call ends with its transfer. NCCL's calls return at once, so the events on the
    device count instead.
    """
    name = event.name()
    return name.startswith(("gloo:", "mpi:")) or (name.startswith("nccl") and event.device_type() == DeviceType.CUDA)


def _union(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length that the spans (first, end) cover together."""
    covered, reached = 0, 0
    for first, end in sorted(spans):
        covered += max(0, end - max(first, reached))
        reached = max(reached, end)
    return covered


class StepProfiler:
    """Traces steps 4 to 6 of this process; does nothing if it is switched off.

    The trace goes into <run>/trace.json, and the ten operations that took the most time and memory
    are printed. The table of memory also goes into <run>/memory.txt. On CUDA PyTorch's snapshot of
    the memory goes into <run>/memory.pickle instead, for https://pytorch.org/memory_viz. This
    program never reads it.
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
        """Tell the profiler that a training step is over."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            # A run that was resumed may have been traced before.
            if not self._written and not (self._run / _TRACE_FILE).exists():
                self._say(f"no trace: the run ended before step {_SKIPPED + _WARMUP + _TRACED}")

    def _write(self, finished: profile) -> None:
        if finished.step_num < _SKIPPED + _WARMUP + _TRACED:  # the run ended during the trace
            return
        self._written = True
        trace = self._run / _TRACE_FILE
        finished.export_chrome_trace(str(trace))
        # Kernels are left out: their time is already in the operations that started them.
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
    """Return the ten largest figures as a table; one line may be the time between operations."""
    total = sum(value for value in figures.values() if value > 0)
    lines = [f"{what}: {total:.1f} {unit} a step", f"{'operation':<56}{'calls':>8}{unit:>10}{'share':>8}"]
    for name in sorted(figures, key=lambda name: -figures[name])[:_LARGEST]:
        # The profiler calls the part of a step outside of all operations ProfilerStep.
        title = "(Python, between operations)" if name.startswith("ProfilerStep") else name
        title = title if len(title) < 56 else title[:52] + "..."
        lines.append(f"{title:<56}{calls[name]:>8.0f}{figures[name]:>10.2f}{figures[name] / total:>8.1%}")
    return "\n".join(lines)
