"""The advice of a run that is out of memory on the host.

tests/gpu has the same test for a device.
"""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.runs import settings, train
from utils.out_of_memory import advice, is_out_of_memory


def _little_memory(rank: int) -> None:
    """Forbid the process to allocate more memory from the third step on."""

    def limit(step: int) -> None:
        if step == 3:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used, used))

    runs.before_step(limit)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_run_out_of_memory_advises_which_keys_to_change(data: Path, tmp_path: Path, log: Path) -> None:
    done = train(settings(data, tmp_path / "run", global_batch_size=1024), log, hook=_little_memory)
    assert done.status == 1, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("fault on rank 0: ")]
    assert "can't allocate memory" in line or "MemoryError" in line
    assert "out of memory with 1024 slots at a time (1024 of global_batch_size=1024 on this rank" in line
    assert "GB taken by this process" in line and "grad_accumulation=2 (512 slots at a time)" in line
    assert "arch.activation_checkpointing=block" in line and "parallel=fsdp" in line
    assert "step_00000002" in line, "the message does not name the last good checkpoint"


def test_advice_names_only_keys_that_can_still_help() -> None:
    base: dict[str, Any] = {"num_slots": 8, "divisible_slots": 8, "global_batch_size": 64, "num_state_bytes": 10**9}
    text = advice(torch.device("cpu"), grad_accumulation=8, activation_checkpointing="block", parallel="fsdp", **base)
    assert "1 slots at a time" in text and "lower global_batch_size" in text
    assert "grad_accumulation=9" not in text and "activation_checkpointing=" not in text and "parallel=" not in text
    text = advice(torch.device("cpu"), grad_accumulation=2, activation_checkpointing="none", parallel="ddp", **base)
    assert "grad_accumulation=4 (2 slots at a time)" in text and "splits the 1.00 GB" in text


def test_which_errors_count_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
