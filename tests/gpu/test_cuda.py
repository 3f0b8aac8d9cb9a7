"""On CUDA, runs resume exactly, and sequences and strategies do as on the CPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from models.inference import Slots
from tests import runs
from tests.models.helpers import random_batch, small_hrm
from utils.out_of_memory import OutOfMemory

# B = slots
BATCH_SIZE = 8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here"),
]


def _train(arguments: list[str], *, status: int = 0) -> str:
    """Run pretrain.py in its own process, because a CUDA context does not survive a fork."""
    command = [sys.executable, str(runs.REPOSITORY / "pretrain.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return done.stderr


@pytest.mark.parametrize("forward_dtype", ["float32", "bfloat16"])
def test_deterministic_runs_resume_bit_for_bit(data: Path, tmp_path: Path, forward_dtype: str) -> None:
    options = {"device": "cuda", "deterministic": True, "arch__forward_dtype": forward_dtype}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    _train(runs.settings(data, whole, **options))
    shutil.copytree(whole, resumed)
    runs.rewind(resumed, 4)
    _train(runs.settings(data, resumed, resume="auto", **options))
    runs.assert_same_run(resumed, whole)


def test_a_checkpoint_of_the_gpu_can_be_scored_on_the_cpu(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _train(runs.settings(data, run, device="cuda", max_steps=2))
    command = [sys.executable, str(runs.REPOSITORY / "evaluate.py"), f"checkpoint={run}", "device=cpu", "batch_size=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    trained = runs.rows(run)[-1]["eval/all/lm_loss"]
    (line,) = [line for line in done.stdout.splitlines() if "eval/all/lm_loss" in line]
    assert float(line.split()[1]) == pytest.approx(trained, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("adaptive", [False, True])
def test_sequences_leave_their_slots_as_on_the_cpu(adaptive: bool) -> None:
    """Sequences arrive one by one, so that slots are reused and closed at the end."""
    steps: dict[str, dict[int, int]] = {}
    for device in ("cpu", "cuda"):
        model = small_hrm(seed=6).to(device)
        batch = {name: tensor.to(device) for name, tensor in random_batch(BATCH_SIZE, seed=0).items()}
        pieces = [
            (np.array([n]), {name: tensor[n : n + 1] for name, tensor in batch.items()}) for n in range(BATCH_SIZE)
        ]
        slots = Slots(model, iter(pieces), num_steps=5, adaptive=adaptive, keep_steps=True)
        steps[device] = {}
        while slots.busy:
            done = slots.advance().finished
            if done is not None:
                assert done.predictions_NTS is not None and done.predictions_NTS.device.type == device
                steps[device] |= dict(zip(done.rows_N.tolist(), done.steps_N.tolist(), strict=True))
    assert steps["cuda"] == steps["cpu"] and len(steps["cpu"]) == BATCH_SIZE


def test_a_lack_of_memory_is_two_lines() -> None:
    device = torch.device("cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    what, change = OutOfMemory(caught.value, lambda: "take less").lines()
    assert "GPU" in what and "1048576.00 GiB" in what and "\n" not in what
    assert change == "take less"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp parallel.cpu_offload=true", "tp", "fsdp_tp"])
def test_strategies_on_one_device(tmp_path: Path, strategy: str) -> None:
    """With nccl and one rank, groups, sharding and splitting work as on many ranks."""
    data = runs.build_data(tmp_path / "data")
    losses = []
    for name, typed in (("plain", []), ("run", f"parallel={strategy}".split())):
        arguments = runs.settings(data, tmp_path / name, device="cuda", log_interval=1, arch__num_heads=2)
        runs.train([*arguments, *typed], tmp_path / "log").ok()
        losses.append([row["train/lm_loss"] for row in runs.rows(tmp_path / name)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
