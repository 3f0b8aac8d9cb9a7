"""Read what the devices of a run can do and are doing: memory, utilisation, peak speed."""

import os
import re
import resource
import sys
from pathlib import Path

import pynvml
import torch

from utils.ranks.world import World

# Dense TFLOP/s of data sheets: of bfloat16 and float16 with float32 sums, and of float32 without
# TF32. The first entry whose words are all in the GPU's name counts.
_PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("B200",), 2250.0, 75.0),
    (("H200", "NVL"), 835.0, 60.0),
    (("H200",), 989.0, 67.0),
    (("GH200",), 989.0, 67.0),
    (("H100", "NVL"), 835.0, 60.0),
    (("H100", "PCIE"), 756.0, 51.0),
    (("H100",), 989.0, 67.0),
    (("A100",), 312.0, 19.5),
    (("L40S",), 362.0, 91.6),
    (("A40",), 150.0, 37.4),
    (("A30",), 165.0, 10.3),
    (("A10",), 125.0, 31.2),
    (("L4",), 121.0, 30.3),
    (("RTX", "4090"), 165.0, 82.6),
    (("RTX", "3090"), 71.0, 35.6),
)


def max_memory_gb(device: torch.device) -> float:
    """Return this process's peak memory so far, in GB: on the CUDA device, else on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak / 1e6  # bytes on macOS, KiB elsewhere


def room_for(world: World) -> float:
    """Return the bytes that this rank can have at a time: on its CUDA device, else on the host."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device)
    own = world.places[world.rank]
    num_ranks = sum(own.shares_host_with(other) for other in world.places)
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num_ranks
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return room
    used = Path("/proc/self/statm")  # ulimit -v counts what this process holds already
    taken = int(used.read_text(encoding="utf-8").split()[0]) * resource.getpagesize() if used.exists() else 0
    return min(room, max(0, limit - taken))


def gpu_utilization(device: torch.device) -> float | None:
    """Return the share of the last moments in which the GPU computed; None if nobody knows."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (RuntimeError, pynvml.NVMLError):  # a slice of a GPU (MIG) and some machines don't say
        return None


def peak_tflops(world: World, dtype: torch.dtype) -> float | None:
    """Return the peak of all GPUs of a run, in TFLOP/s of a dtype; None if unknown. Every rank."""
    gpu = None
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        gpu = (str(properties.uuid), properties.name)
    gpus = set(world.gather_objects(gpu))
    peaks = [None if gpu is None else peak_of(gpu[1], dtype) for gpu in gpus]
    return None if None in peaks else sum(peak for peak in peaks if peak is not None)


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak of the GPU of this name in TFLOP/s; None if the table does not know it."""
    words = set(re.split(r"\W+", name.upper()))
    if "MIG" in words:  # a slice of a GPU
        return None
    for needed, half, single in _PEAK_TFLOPS:
        if words.issuperset(needed):
            return single if dtype == torch.float32 else half
    return None
