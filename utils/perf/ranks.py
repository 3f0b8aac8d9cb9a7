"""Measure what each rank does in a step, in a few sampled steps: communication, speed, memory."""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any, NamedTuple

from torch.autograd import DeviceType  # type: ignore[attr-defined]

from utils.perf.devices import gpu_utilization, max_memory_gb
from utils.perf.recording import recording, transfers, union
from utils.ranks.world import World

# The name of a transfer on the host. Of a message, only the sender counts.
_SENT = re.compile(r"(gloo|nccl|mpi):(?!recv)")
# Bytes of an element, by the names that the profiler gives to dtypes.
_BYTES = {
    **dict.fromkeys(("bool", "unsigned char", "signed char", "c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
    **dict.fromkeys(("short int", "c10::Half", "c10::BFloat16"), 2),
    **dict.fromkeys(("int", "float"), 4),
    **dict.fromkeys(("long int", "long", "long long", "double"), 8),
}


# A rank that computes so many times as long as the others, for so long, is named.
_SLOW, _SLOW_FOR_S = 1.5, 180.0


class _Sample(NamedTuple):
    comm_ms: float
    step_ms: float
    trace_ms: float  # to start the trace, to end it and to read it
    num_bytes: float  # NaN: of a dtype whose size is not known
    num_examples: int
    memory_gb: float
    gpu_utilization: float | None


class RankSampler:
    """Measures in every n-th step what ranks send, for how long, and how fast each rank is.

    A sampled step runs under PyTorch's profiler. docs/scaling.md says what the metrics mean. In a
    world of one, and with `every_n_steps` None, no step is sampled.

    Args:
        num_examples: how many examples (or what `unit` says) this rank computes in a step.
        max_share: the share of the time that traces may take; None: there is no limit.
        say: names a rank that is slower than the others for minutes.
    """

    def __init__(
        self,
        every_n_steps: int | None,
        world: World,
        *,
        num_examples: int = 1,
        unit: str = "examples",
        max_share: float | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._every_n_steps = every_n_steps if world.size > 1 else None
        self._world, self._max_share = world, max_share
        self._num_examples, self._unit = num_examples, unit
        self._sample: _Sample | None = None
        self._largest_gb = 0.0
        self._next = 0  # the first step that may be sampled
        self._step = 0
        self._say, self._slow_since, self._named = say, dict[int, float](), set[int]()
        self._sampled: int | None = None  # the step of the last sample, or the one before the first step

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run training step `step` inside. Only in a sampled step the host waits for the device."""
        if self._sampled is None:
            self._sampled = step - 1
        # All ranks take the same steps: those of the last row decide when the next one is.
        if self._every_n_steps is None or step % self._every_n_steps or step < self._next or self._sample is not None:
            yield
            return
        device = self._world.device
        utilization = gpu_utilization(device)  # of the steps before this one
        self._world.await_peers()
        self._world.wait_for_device()
        entered = time.perf_counter()
        with recording(device) as events:
            began = time.perf_counter()
            yield
            self._world.wait_for_device()
            step_ms = 1e3 * (time.perf_counter() - began)
        comm_ms, num_bytes = union(transfers(events)) / 1e6, _num_bytes(events)
        trace_ms = 1e3 * (time.perf_counter() - entered) - step_ms
        memory_gb = max_memory_gb(device)
        self._step = step
        self._sample = _Sample(comm_ms, step_ms, trace_ms, num_bytes, self._num_examples, memory_gb, utilization)

    def row(self) -> dict[str, float]:
        """Return memory and use of the GPU, and the metrics of a sample. Every rank."""
        row: dict[str, float] = {}
        if self._sample is not None:
            samples, self._sample = self._world.gather_objects(self._sample), None
            row = self._row_of(samples)
        if (utilization := gpu_utilization(self._world.device)) is not None:
            row["perf/gpu_utilization"] = utilization
        return row | {"perf/max_memory_gb": max(self._largest_gb, max_memory_gb(self._world.device))}

    def _row_of(self, samples: list[_Sample]) -> dict[str, float]:
        comm_ms, mean_step_ms = [sample.comm_ms for sample in samples], fmean(sample.step_ms for sample in samples)
        rest_ms = [sample.step_ms - sample.comm_ms for sample in samples]
        assert self._sampled is not None
        row = {
            "perf/comm_ms": fmean(comm_ms),
            "perf/comm_ms_min": min(comm_ms),
            "perf/comm_ms_max": max(comm_ms),
            "perf/comm_total_s": fmean(comm_ms) * (self._step - self._sampled) / 1e3,
            "perf/comm_share": fmean(comm_ms) / mean_step_ms,
            "perf/imbalance": max(rest_ms) / fmean(rest_ms),
        }
        num_bytes = fmean(sample.num_bytes for sample in samples)
        if not math.isnan(num_bytes):
            row["perf/comm_mb"] = num_bytes / 1e6
            # The others waited for the rank that was the shortest time in its transfers.
            last = min(samples, key=lambda sample: sample.comm_ms)
            if last.comm_ms > 0:
                row["perf/comm_gb_per_s"] = last.num_bytes / last.comm_ms / 1e6
        for rank, sample in enumerate(samples):
            row[f"perf/memory_gb/rank_{rank}"] = sample.memory_gb
            row[f"perf/{self._unit}_per_second/rank_{rank}"] = 1e3 * sample.num_examples / rest_ms[rank]
            if sample.gpu_utilization is not None:
                row[f"perf/gpu_utilization/rank_{rank}"] = sample.gpu_utilization
        self._largest_gb = max(sample.memory_gb for sample in samples)
        row |= self._stragglers(rest_ms)
        # A step may be sampled again once the traces have kept to their share.
        trace_ms = max(sample.trace_ms for sample in samples)
        wait = 1 if self._max_share is None else math.ceil(trace_ms / (self._max_share * mean_step_ms))
        self._sampled, self._next = self._step, self._step + wait
        return row

    def _stragglers(self, rest_ms: list[float]) -> dict[str, float]:
        """Name each rank once that was slower than the others in every sample of some minutes."""
        now = time.monotonic()
        others_ms = [median(rest_ms[:rank] + rest_ms[rank + 1 :]) for rank in range(len(rest_ms))]
        ratios = {rank: own / others for rank, (own, others) in enumerate(zip(rest_ms, others_ms, strict=True))}
        slow = [rank for rank, ratio in ratios.items() if ratio > _SLOW]
        self._slow_since = {rank: self._slow_since.get(rank, now) for rank in slow}
        stragglers = [rank for rank in slow if now - self._slow_since[rank] >= _SLOW_FOR_S]
        for rank in stragglers:
            if rank not in self._named:
                self._named.add(rank)
                self._say(
                    f"rank {rank} ({self._world.places[rank]}) computes {ratios[rank]:.1f} times as long as the median "
                    f"of the other ranks, for {_SLOW_FOR_S / 60:.0f} minutes: look at its machine, or at "
                    "dist.rank_weights"
                )
        return {"perf/slow_rank": float(stragglers[0])} if stragglers else {}


def _num_bytes(events: list[Any]) -> float:
    return sum(
        math.prod(shape) * _BYTES.get(dtype, math.nan)
        for event in events
        if event.device_type() == DeviceType.CPU and _SENT.match(event.name())
        for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True)
    )
