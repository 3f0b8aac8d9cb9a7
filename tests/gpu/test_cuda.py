"""On CUDA, training never waits inside a step, agrees with the CPU, and resumes exactly."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset.schema import IGNORE_LABEL
from models.act import ActSettings, initial_carry
from models.hrm import HRM
from models.inference import Slots
from models.losses import ACT_SUMS
from models.metric_sums import OpenSums
from models.parallel.layout import Layout
from optim.build import AdamATan2Config, MuonConfig, OptimConfig, build_optimizers
from optim.ema import EMA
from pretrain import StepResult, StepSettings, train_step
from tests import runs
from tests.gpu.device import waiting_is_an_error
from tests.models.helpers import random_batch, small_hrm
from training.number_watch import NumberWatch
from training.state import TrainState
from utils.batch import Batch
from utils.checkpoint.format import Progress
from utils.out_of_memory import OutOfMemory
from utils.ranks.world import World

# B = slots
BATCH_SIZE = 8
ADAM_ATAN2 = AdamATan2Config(name="adam_atan2")
MUON = MuonConfig(
    name="muon",
    muon_lr=0.02,
    muon_momentum=0.95,
    muon_weight_decay=0.0,
    muon_iterations=5,
    muon_coefficients="jordan",
    muon_scale="spectral",
    muon_matrices="blocks",
    rest="adamw",
    eps=1e-8,
)

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


class _Training:
    """A small model and its optimizer on a device."""

    def __init__(self, device: str, forward_dtype: str, optim: OptimConfig = ADAM_ATAN2) -> None:
        self.world = World.single(device)
        self.model: HRM = small_hrm(seed=1, forward_dtype=forward_dtype)
        self.model.to(device)
        self.layout: Layout = Layout(self.model, self.world)
        self.optimizers = build_optimizers(
            self.model,
            self.model.block_weights(),
            optim,
            lr=1e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )
        self.state = TrainState(
            self.layout,
            self.optimizers,
            EMA(self.model.trained_tensors()),
            None,
            initial_carry(self.model, self.batch(0)),
            OpenSums(ACT_SUMS, self.world),
            NumberWatch(ACT_SUMS, self.world),
            Progress(),
        )

    def batch(self, seed: int) -> Batch:
        return {name: tensor.to(self.world.device) for name, tensor in random_batch(BATCH_SIZE, seed=seed).items()}

    def train(self, batch: Batch, minimum_B: torch.Tensor) -> StepResult:
        self.state.progress.step += 1
        settings = StepSettings(
            objective=ActSettings(
                depth=self.model.config.depth_at(self.state.progress.step, 100),
                loss=self.model.config.loss,
                ignore_label=IGNORE_LABEL,
                global_batch_size=BATCH_SIZE,
                min_halt_steps_B=minimum_B,
            ),
            lr_factor=1.0,
            puzzle_emb_lr=1e-3,
            puzzle_emb_weight_decay=0.1,
            grad_clip=1.0,
            ema_rate=0.9,
        )
        result = train_step(self.state, batch, settings, self.world)
        self.state.sums.add(result.sums, result.grad_norm)
        self.state.watch.add(self.state.progress.step, BATCH_SIZE, result.sums, result.grad_norm)
        return result


@pytest.mark.parametrize("forward_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optim", [ADAM_ATAN2, MUON], ids=lambda optim: optim.name)
def test_a_step_never_waits_for_the_device(forward_dtype: str, optim: OptimConfig) -> None:
    training = _Training("cuda", forward_dtype, optim)
    batches = [training.batch(seed) for seed in range(6)]
    minimum_B = torch.zeros(BATCH_SIZE, dtype=torch.int32).pin_memory()
    training.train(batches[0], minimum_B.cuda())  # libraries initialise at their first call, and may wait then
    with waiting_is_an_error():
        for batch in batches[1:]:
            training.train(batch, minimum_B.to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    training.state.watch.require_no_bad_step(str)


def test_the_guard_sees_a_wait() -> None:
    """The test above proves something only if the guard notices a wait."""
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


def test_float32_agrees_with_the_cpu() -> None:
    """Compare losses, sums, gradient norms and the carry, while sequences halt and go on."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        cpu, cuda = _Training("cpu", "float32"), _Training("cuda", "float32")
        for seed in range(4):
            minimum_B = torch.randint(0, 4, (BATCH_SIZE,), generator=torch.Generator().manual_seed(seed)).int()
            on_cpu = cpu.train(cpu.batch(seed), minimum_B)
            on_cuda = cuda.train(cuda.batch(seed), minimum_B.cuda())
            for name in ("sums", "grad_norm"):
                expected, value = getattr(on_cpu, name), getattr(on_cuda, name).cpu()
                torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)
            assert cpu.state.carry is not None and cuda.state.carry is not None
            for name, tensor in cpu.state.carry.tensors().items():
                torch.testing.assert_close(cuda.state.carry.tensors()[name].cpu(), tensor, rtol=1e-3, atol=1e-3)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def test_a_run_in_bfloat16(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = runs.settings(data, run, device="cuda", arch__forward_dtype="bfloat16", log_interval=1)
    log = _train(settings)
    assert "1 x cuda" in log
    rows = runs.rows(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(0 < row["train/lm_loss"] < 5 for row in rows)
    assert "eval/all/exact_accuracy" in rows[-1]


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
