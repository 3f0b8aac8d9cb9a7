"""Say which kernels take the time of training steps, and what bounds each.

A kernel's bytes and operations follow from the shapes of the operator that launched it: every
tensor is read or written once, and products have two operations for each pair of numbers. They are
compared with a large copy and a large product on the same device. This is an estimate. A kernel
that stays in the cache may exceed the copy. There is none for kernels of unknown operators.
"""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.on_request import wait_for
from utils.perf.recording import union

Event = dict[str, Any]

_LARGEST = 10
# A shorter kernel has not enough work for the card: its start and its end are most of its time.
_SHORT_US = 5.0
# Below this share of both ceilings, neither bytes nor operations explain the time.
_EXPLAINED = 0.4
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_BYTES = {"float": 4, "double": 8, "int": 4, "long int": 8, "short int": 2}
_BYTES |= {"c10::BFloat16": 2, "c10::Half": 2, "bool": 1, "unsigned char": 1, "signed char": 1}


@dataclass(frozen=True)
class Call:
    """One run of a kernel. `num_bytes` and `operations` are None if nobody knows them."""

    name: str
    start_us: float
    us: float
    num_bytes: float | None
    operations: float | None
    occupancy: float | None


def summary(events: list[Event], num_steps: int, step_ms: float, best: dict[str, float]) -> dict[str, Any]:
    """Return the largest kernels of a trace and what bounds each.

    Args:
        events: the traceEvents of PyTorch's trace of some steps.
        step_ms: the time of a step that was not traced.
        best: what the device does at most.
    """
    calls = list(_kernels(events))
    spans = [(round(1e3 * call.start_us), round(1e3 * (call.start_us + call.us))) for call in calls]
    by_name = defaultdict(list)
    for call in calls:
        by_name[call.name].append(call)
    rows = [_row(name, group, num_steps, best) for name, group in by_name.items()]
    rows.sort(key=lambda row: -row["ms"])
    waits = sum(event.get("name") in _WAITS for event in events if event.get("cat") == "cuda_runtime")
    by_bound: dict[str, float] = defaultdict(float)
    for row in rows:
        by_bound[row["bound"]] += row["ms"]
    return {
        "step_ms": step_ms,
        "busy_ms": union(spans) / 1e6 / num_steps,
        "calls": len(calls) / num_steps,
        "different": len(rows),
        "waits": waits / num_steps,
        "total_ms": sum(row["ms"] for row in rows),
        "by_bound": dict(sorted(by_bound.items(), key=lambda item: -item[1])),
        "largest": rows[:_LARGEST],
        "best": best,
    }


def _row(name: str, calls: list[Call], num_steps: int, best: dict[str, float]) -> dict[str, Any]:
    us = sum(call.us for call in calls)
    known = [call for call in calls if call.num_bytes is not None and call.operations is not None]
    known_us = sum(call.us for call in known)
    memory = compute = math.nan
    if known_us > us / 2:
        memory = sum(call.num_bytes or 0.0 for call in known) / known_us / 1e3 / best["gb_per_s"]
        compute = sum(call.operations or 0.0 for call in known) / known_us / 1e6 / best["tflops"]
    occupancies = [call.occupancy for call in calls if call.occupancy is not None]
    return {
        "name": name,
        "calls": len(calls) / num_steps,
        "ms": us / num_steps / 1e3,
        "us": us / len(calls),
        "memory": None if math.isnan(memory) else memory,
        "compute": None if math.isnan(compute) else compute,
        "occupancy": sum(occupancies) / len(occupancies) if occupancies else None,
        "bound": bound(us / len(calls), memory, compute),
    }


def bound(us: float, memory: float, compute: float) -> str:
    """Return what bounds a kernel.

    Args:
        us: its mean time.
        memory, compute: its shares of the best copy and of the best product; NaN if nobody knows.
    """
    if us < _SHORT_US:
        return "launches"
    if math.isnan(memory) or math.isnan(compute):
        return "unknown"
    if max(memory, compute) < _EXPLAINED:
        return "latency"
    return "compute" if compute > memory else "memory"


def _kernels(events: list[Event]) -> Iterator[Call]:
    """Yield what ran on the device. A kernel that names no operator has that of its launch."""
    operators = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    launches = {
        event["args"]["correlation"]: event["args"].get("External id")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        args = event.get("args", {})
        operator = operators.get(args.get("External id", launches.get(args.get("correlation"))))
        is_triton = event["name"].startswith("triton_")
        if operator is not None and not operator["name"].startswith("triton_" if is_triton else "aten::"):
            operator = None  # something larger around it, such as a whole compiled graph
        num_bytes, operations = work(operator) if operator is not None else (None, None)
        if event["cat"] != "kernel":  # a copy knows its bytes: it reads them and writes them
            writes_only = event["cat"] == "gpu_memset"
            num_bytes, operations = args.get("bytes", 0) * (1.0 if writes_only else 2.0), 0.0
        yield Call(
            event["name"], event["ts"], event["dur"], num_bytes, operations, args.get("est. achieved occupancy %")
        )


def work(operator: Event) -> tuple[float | None, float | None]:
    """Return the bytes that an operator reads and writes, and its operations.

    An operator's result is not in the trace. A product's result follows from its shapes. The result
    of any other operator counts like its largest input. A kernel of Triton gets its result as an
    input.
    """
    args = operator["args"]
    if "Input Dims" not in args:
        return None, None
    tensors = [
        (dims, _BYTES[kind], strides)
        for dims, kind, strides in zip(
            args["Input Dims"], args["Input type"], args.get("Input Strides", args["Input Dims"]), strict=False
        )
        if kind in _BYTES
    ]
    if not tensors:
        return None, None
    # A dimension with stride 0 repeats the same numbers.
    sizes = [
        num_bytes * math.prod(size for size, stride in zip(dims, strides, strict=False) if stride != 0)
        for dims, num_bytes, strides in tensors
    ]
    name, shapes = operator["name"].removeprefix("aten::"), [dims for dims, _, _ in tensors]
    if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        a, b = shapes[1:3] if name in ("addmm", "baddbmm") else shapes[:2]
        result = tensors[0][1] * math.prod(a[:-1]) * b[-1]
        return sum(sizes) + result, 2.0 * math.prod(a) * b[-1]
    if "attention" in name:
        return _attention(name, shapes, sizes)
    is_compiled = name.startswith("triton_") or operator["args"].get("kernel_backend") == "triton"
    return float(sum(sizes) + (0 if is_compiled else max(sizes))), 0.0


def _attention(name: str, shapes: list[list[int]], sizes: list[float]) -> tuple[float | None, float | None]:
    """Return bytes and operations of attention: two products forward, and five backward."""
    is_backward = "backward" in name
    whole = [dims for dims in shapes if len(dims) == 4]
    if len(whole) < 3 + is_backward:
        return None, None
    query, key = whole[is_backward : 2 + is_backward]
    # Kernels themselves take (slots, positions, heads, width). Others have heads before positions.
    positions = 1 if name.startswith(("_flash", "_efficient")) else 2
    operations = (5 if is_backward else 2) * 2.0 * math.prod(query) * key[positions]
    return float(sum(sizes) + max(sizes) * (3 if is_backward else 1)), operations


def trace(train: Callable[[], object], device: torch.device) -> list[Event]:
    """Train some steps, and return the events of PyTorch's trace."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as recorded:
        train()
        wait_for(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events
