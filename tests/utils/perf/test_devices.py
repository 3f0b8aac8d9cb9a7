"""Memory, utilisation and peak speed of devices."""

import resource
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
import torch

from tests.spawn import run_ranks
from utils.perf.devices import _PEAK_TFLOPS, gpu_utilization, peak_of, peak_tflops, room_for
from utils.ranks.world import Place, World

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_peak_of_a_gpu() -> None:
    for name, half, single in (
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA A10G", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
    ):
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        assert [peak_of(name, dtype) for dtype in dtypes] == [half, half, single], name
    for words, *peaks in _PEAK_TFLOPS:
        assert [peak_of(" ".join(words), dtype) for dtype in (torch.float16, torch.float32)] == peaks, (
            "an earlier row hides it"
        )
    assert peak_tflops(World.single(), torch.float32) is None, "a CPU has none"


def _peak_of_ranks(world: World, names: list[str]) -> float | None:
    """Return the peak of ranks that have GPUs with these names; the name is also the identity."""
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(  # type: ignore[assignment, misc]
        uuid=names[world.rank], name=names[world.rank]
    )
    claimed = World(rank=world.rank, size=world.size, device=GPU, host_group=world.host_group)
    return peak_tflops(claimed, torch.bfloat16)


def test_the_peak_of_a_run_is_that_of_all_its_gpus() -> None:
    for names, peak in ((["A100 a", "H100 b"], 312 + 989), (["A100 a", "A100 a"], 312), (["A100 a", "K620"], None)):
        assert run_ranks(_peak_of_ranks, 2, names) == [peak, peak], names


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (resource.RLIM_INFINITY, -1))
    here, whole = Place.here(), room_for(World.single())
    places = (here, here, replace(here, host="another"))
    assert [room_for(World(rank=rank, size=3, places=places)) * num for rank, num in ((1, 2), (2, 1))] == [whole] * 2
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**62, -1))
    assert room_for(World.single()) == whole
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**20, -1))
    assert room_for(World.single()) == 0, "this process holds more than it may"


def test_a_driver_that_does_not_answer_leaves_the_utilization_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [37, RuntimeError("cuda driver can't be loaded"), pynvml.NVMLError_NotSupported()]

    def utilization(device: torch.device) -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, int)
        return answer

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    assert [gpu_utilization(GPU) for _ in range(3)] == [0.37, None, None]
    assert gpu_utilization(CPU) is None
