"""What programs say where memory runs out: two lines, of which the second is a change that fits.

tests/gpu has the error of a device.
"""

import resource
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import runs
from tests.runs import settings, train, with_arguments
from tests.spawn import free_port
from utils.out_of_memory import OutOfMemory, advising, half, is_out_of_memory
from utils.shell import run_command

pytestmark = pytest.mark.faults

ON_HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
ON_HOST += "allocate 691200000 bytes. Error code 12 (Cannot allocate memory)"
ON_GPU = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB."


def _lines(output: str) -> list[str]:
    assert "Traceback" not in output, output
    lines = output.splitlines()
    (first,) = [n for n, line in enumerate(lines) if line.startswith("fault")]
    return lines[first:]


def _little_memory(rank: int) -> None:
    """Forbid the process to allocate much more memory from the third step on."""

    def limit(step: int) -> None:
        if step == 3:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**23, used + 2**23))

    runs.before_step(limit)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_run_ends_with_two_lines_that_name_a_change(data: Path, tmp_path: Path, log: Path) -> None:
    done = train(settings(data, tmp_path / "run", global_batch_size=1024), log, hook=_little_memory)
    assert done.status == 1, done.output
    what, change = _lines(done.output)
    assert what.startswith("fault on rank 0: out of memory on the host")
    assert "step_00000002" in what, "the line does not name the last good checkpoint"
    assert "grad_accumulation" in change


def _lacks_memory(on_ranks: list[int], rank: int) -> None:
    def fail(step: int) -> None:
        if step == 3 and rank in on_ranks:
            raise torch.OutOfMemoryError(ON_GPU)

    runs.before_step(fail)


@pytest.mark.parametrize("on_ranks", [[1], [0, 1]])
def test_several_ranks_say_it_once(data: Path, tmp_path: Path, on_ranks: list[int]) -> None:
    arguments, log = settings(data, tmp_path / "run"), tmp_path / "log"
    hook = with_arguments(_lacks_memory, on_ranks)
    done = runs.Torchrun(["--master-port", str(free_port())], hook, arguments, log, tmp_path).wait()
    assert done.status == 1, done.output
    own = [line for line in done.output.splitlines() if line.startswith(("fault", "it should fit with"))]
    assert len(own) == 2 and own[0][len("fault on rank ")] in map(str, on_ranks), done.output
    assert "20.00 GiB" in own[0] and 'pretrain.py", line' not in done.output, done.output


def _allocate(num_bytes: int) -> None:
    torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("allocate", [_allocate, lambda num: np.empty(num, np.uint8), lambda num: bytearray(num)])
def test_which_errors_count(allocate: Callable[[int], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError(ON_GPU))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError, match="an assert"), advising(lambda: "never"):
        raise RuntimeError("an assert")


def test_the_lines_say_what_did_not_fit_and_give_the_innermost_advice() -> None:
    held = list[weakref.ref[torch.Tensor]]()

    def without_memory() -> str:
        tensor = torch.ones(1)
        held.append(weakref.ref(tensor))
        raise MemoryError

    on_gpu = torch.OutOfMemoryError(ON_GPU)
    for error, part in ((RuntimeError(ON_HOST), "host: 691.2 MB"), (MemoryError(), "host"), (on_gpu, "GPU: 20.00 GiB")):
        error.add_note("at step 7")
        what, advice = OutOfMemory(error, without_memory).lines()
        assert part in what and what.endswith("at step 7") and "\n" not in what
        assert len(advice) > 20, "a general one"
    with pytest.raises(OutOfMemory) as caught, advising(lambda: "outer"), advising(lambda: "inner"):
        without_memory()
    assert held[-1]() is not None
    assert caught.value.lines()[1] == "inner" and held[-1]() is None, "what the failed call held is not free"
    assert half("batch_size", 9).startswith("batch_size=4 ") and "batch_size" not in half("batch_size", 1)


def test_a_command_of_one_process_prints_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def program(argv: list[str] | None) -> str:
        np.empty(2**60, np.uint8)
        return "built"

    assert run_command(program, [], less_memory="lower --generate") == 1
    captured = capsys.readouterr()
    what, change = captured.err.splitlines()
    assert what.startswith("fault: out of memory on the host: 1.00 EiB") and change == "lower --generate"
    assert captured.out == ""
