"""Record what happens when in a step: transfers between ranks, and the parts that code names."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.autograd import DeviceType  # type: ignore[attr-defined]

# The parts of a step that the code names with torch.profiler.record_function. The calls without
# gradient are inside of the forward part.
FORWARD, NO_GRAD, BACKWARD = "forward", "forward without gradient", "backward"
OPTIMIZER, AVERAGE = "optimizer", "average"

Span = tuple[int, int]  # beginning and end, in ns


@contextmanager
def recording(device: torch.device) -> Iterator[list[Any]]:
    """Record the transfers and the named parts of what runs inside, and on CUDA its kernels.

    torch.profiler would also record every operation of the step, which takes a hundred times as
    long. The list holds the events once the block has ended.
    """
    activities = {ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])}
    # The flags: shapes of inputs, memory, stacks, FLOPs, modules.
    config = ProfilerConfig(ProfilerState.KINETO, True, False, False, False, False, _ExperimentalConfig())
    events: list[Any] = []
    _prepare_profiler(config, activities)
    _enable_profiler(config, activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
    try:
        yield events
    finally:
        events += _disable_profiler().events()


def transfers(events: list[Any]) -> Iterator[Span]:
    return ((event.start_ns(), event.end_ns()) for event in events if is_transfer(event))


def is_transfer(event: Any) -> bool:
    # NCCL's calls return at once, so the kernels on the device count instead.
    on_device = event.device_type() == DeviceType.CUDA
    return bool(event.name().startswith("nccl" if on_device else ("gloo:", "mpi:")))


def union(spans: Iterable[Span]) -> int:
    covered, reached = 0, 0
    for first, end in sorted(spans):
        covered += max(0, end - max(first, reached))
        reached = max(reached, end)
    return covered
