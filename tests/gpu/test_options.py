"""On CUDA, runs with any options train as on the CPU, and wait for the GPU only when they log."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dataset.loader import TrainLoader
from dataset.sampler import Sampler
from dataset.schema import Split
from models.text.config import HRMTextConfig
from pretrain import stepper
from tests import runs
from tests.gpu.device import DEVICE, on_the_gpu, waiting_is_an_error
from tests.in_process import begin, train_here
from tests.models.text.helpers import make_config
from training.kernels import why_fp8_fails, why_varlen_fails
from training.plan import Plan
from training.step import StepSettings
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

pytestmark = on_the_gpu

FLOAT32, HALF = 2e-3, 5e-2  # relative differences of losses from those of the CPU in float32
SHAPE = make_config(HRMTextConfig, hidden_size=32).stacks["H_level"]
VARLEN = ["arch.attention_kernel=varlen", "arch.forward_dtype=bfloat16"]

TEXT_OPTIONS: dict[str, tuple[list[str], float]] = {
    "gpt": (["arch=gpt"], FLOAT32),
    "gpt, shared keys": (["arch=gpt", "arch.num_kv_heads=1"], FLOAT32),
    "gpt, bfloat16": (["arch=gpt", "arch.forward_dtype=bfloat16"], HALF),
    "gpt, varlen": (["arch=gpt", *VARLEN], HALF),
    "gpt, varlen, shared keys": (["arch=gpt", "arch.num_kv_heads=1", *VARLEN], HALF),
    "gpt, varlen, compile": (["arch=gpt", "compile=true", *VARLEN], HALF),
    "hrm_text": (["arch=hrm_text"], FLOAT32),
    "hrm_text, varlen": (["arch=hrm_text", *VARLEN], HALF),
    "hrm_text, varlen, blocks again": (["arch=hrm_text", "arch.activation_checkpointing=block", *VARLEN], HALF),
}
OPTIONS: dict[str, tuple[list[str], float]] = {
    "compile": (["compile=true"], FLOAT32),
    "compile, bfloat16": (["compile=true", "arch.forward_dtype=bfloat16"], HALF),
    "compile, trm_mlp": (["compile=true", "arch=trm_mlp"], FLOAT32),
    "segment": (["compile=segment"], FLOAT32),
    **{
        f"SwiGLU kernel, {name}": ([*typed, "swiglu_kernel=true", "arch.forward_dtype=bfloat16"], HALF)
        for name, typed in {
            "eager": ["arch=trm"],
            "compile": ["arch=trm_mlp", "arch.mlp=normalized_swiglu", "compile=true"],
        }.items()
    },
    "fast recipe": (
        [
            *["arch=trm_mlp", "arch.mlp=normalized_swiglu", "arch.num_registers=1", "arch.puzzle_emb_ndim=0"],
            *["arch.loss.loss_type=softmax_cross_entropy", "arch.loss.label_smoothing=0.2", "ema=true"],
        ],
        FLOAT32,
    ),
    # On CUDA Muon iterates in bfloat16.
    "muon": (["arch=trm", "optim=muon"], HALF),
    "urm": (["arch=urm"], FLOAT32),
    "transformer": (["arch=transformer", "arch.recurrent=true"], FLOAT32),
    "rope_2d": (["arch.pos_encodings=rope_2d", "arch.puzzle_emb_ndim=0"], FLOAT32),
    "learned positions": (["arch.pos_encodings=learned"], FLOAT32),
    "float16": (["arch.forward_dtype=float16"], HALF),
    "FP8": (["arch.fp8_no_grad=true", "arch.forward_dtype=bfloat16"], HALF),
    "FP8, compile": (["arch.fp8_no_grad=true", "arch.forward_dtype=bfloat16", "compile=true"], HALF),
    # Token mixing amplifies what FP8 rounds.
    "FP8, trm_mlp": (
        ["arch=trm_mlp", "arch.H_cycles=2", "arch.fp8_no_grad=true", "arch.forward_dtype=bfloat16"],
        2 * HALF,
    ),
    "accumulation": (["grad_accumulation=2"], FLOAT32),
    "blocks computed again": (["arch.activation_checkpointing=block"], FLOAT32),
    "cycles computed again": (["arch.activation_checkpointing=cycle"], FLOAT32),
    "augmentation, data on the host": (["augment=online", "data_on=host"], FLOAT32),
    "augmentation, data on the device": (["augment=online", "data_on=device"], FLOAT32),
}


def _settings(data: Path, run: Path, device: str, *typed: str) -> list[str]:
    return [
        *["debug=tiny", f"data_path={data}", f"device={device}", f"checkpoint_path={run}", "max_steps=6"],
        *["eval_every_n_steps=6", "arch.halt_max_steps=3", "arch.halt_exploration_prob=0.5", *typed],
    ]


def _train(arguments: list[str], device: str) -> None:
    train_here(arguments, connect_devices(World.single(), device))  # type: ignore[arg-type]


def _losses(rows: list[runs.Row]) -> list[float]:
    name = "lm_loss" if "train/lm_loss" in rows[0] else "loss"
    return [*(row[f"train/{name}"] for row in rows), rows[-1][f"eval/all/{name}"]]


def _require_support(typed: list[str]) -> None:
    """Skip a test of what this device can't do."""
    device = torch.device(DEVICE)
    if "swiglu_kernel=true" in typed and device.type != "cuda":
        pytest.skip("Triton compiles for CUDA")
    if "arch.fp8_no_grad=true" in typed and (why := why_fp8_fails(device, torch.bfloat16)) is not None:
        pytest.skip(f"no FP8 here: {why}")
    if "arch.attention_kernel=varlen" in typed and (why := why_varlen_fails(device, torch.bfloat16, SHAPE)):
        pytest.skip(f"no varlen here: {why}")


@pytest.mark.parametrize("name", [*OPTIONS, *TEXT_OPTIONS])
def test_the_losses_equal_those_of_the_cpu(
    name: str, data: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU computes in float32 with sdpa, and neither compiles nor rounds to FP8."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    typed, tolerance = (OPTIONS | TEXT_OPTIONS)[name]
    _require_support(typed)
    special = ("compile", "swiglu_kernel", "arch.forward_dtype", "arch.fp8_no_grad", "arch.attention_kernel")
    losses: list[list[float]] = []
    for device, its in ((DEVICE, typed), ("cpu", [each for each in typed if not each.startswith(special)])):
        run = tmp_path / f"run_{len(losses)}"
        if name in TEXT_OPTIONS:
            fixed = ["debug=tiny_text", f"device={device}", "max_steps=4", "global_batch_size=512", "epochs=100"]
            its = [*fixed, "eval_every_n_steps=4", f"data_path={text}", f"checkpoint_path={run}", *its]
        else:
            its = _settings(data, run, device, *its)
        _train(its, device)
        losses.append(_losses(runs.rows(run)))
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


# As many tokens in a batch as in a real one: above 3,072, CUDA sorts the gradients of embeddings.
MANY = ("global_batch_size=256", "max_steps=40", "log_interval=1000", "loss_spike=3", "ema=true", "grad_clip=1")


@pytest.mark.parametrize(
    "typed",
    [
        ["augment=online", "data_on=host"],
        ["augment=online", "data_on=device", "optim=muon"],
        ["arch=trm_mlp", "arch.forward_dtype=bfloat16", "grad_accumulation=2", "compile=true"],
        ["arch=urm", "arch.activation_checkpointing=block"],
    ],
    ids=" ".join,
)
def test_nothing_waits_between_two_logs(typed: list[str], data: Path, tmp_path: Path) -> None:
    """Loading, pinning, augmenting, exploring, training and summing up go on without a wait."""
    world = connect_devices(World.single(), DEVICE)  # type: ignore[arg-type]
    begun = begin(_settings(data, tmp_path / "run", DEVICE, *MANY, *typed), world)
    state, config = begun.state, begun.start.config
    plan = Plan.make(config, begun.data, state.progress, world)
    assert isinstance(plan.sampler, Sampler) and isinstance(begun.data.train, Split)
    loader = TrainLoader(begun.data.train, plan.sampler, world, augmentation=plan.augmentation, data_on=config.data_on)
    batches, said = enumerate(loader.batches(range(1, 11)), start=1), list[str]()
    take = stepper(state, said.append, world)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            step, batch = next(batches)
            result = take(batch, StepSettings.at(step, plan, world))
            state.sums.add(result.sums, result.grad_norm)
            state.watch.add(step, result.divisor, result.sums, result.grad_norm)

    train(6)  # libraries start, levels are compiled, and the step is captured
    assert [line.split(";")[0] for line in said] == ([] if DEVICE == "cpu" else ["cuda_graph: on"])
    with waiting_is_an_error():
        train(4)
    world.wait_for_device()
    state.watch.require_no_bad_step(str)


@pytest.mark.skipif(DEVICE == "cpu", reason="the host never waits for a CPU")
def test_the_guard_sees_a_wait() -> None:
    """The test above proves something only if the guard notices a wait."""
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=DEVICE).item()


def test_a_profile_holds_the_kernels_of_the_gpu(data: Path, tmp_path: Path) -> None:
    _train(_settings(data, tmp_path / "run", DEVICE, "profile.enabled=true", "profile.steps=[2,3]"), DEVICE)
    (trace,) = (tmp_path / "run" / "profile").glob("*.pt.trace.json.gz")
    kinds = {event.get("cat") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"cuda": "kernel", "cpu": "cpu_op"}[DEVICE] in kinds


@pytest.mark.parametrize("typed", [[], ["parallel.puzzle_table=sharded"], ["compile=true"]], ids=" ".join)
def test_two_ranks_on_one_gpu_train_as_one(typed: list[str], data: Path, tmp_path: Path) -> None:
    """NCCL refuses two ranks on one card, so gloo carries the gradients."""
    losses = []
    for ranks in (1, 2):
        run = tmp_path / f"{ranks}"
        arguments = _settings(data, run, DEVICE, "dist.backend=gloo", "eval_batch_size=16", *typed)
        runs.train(arguments, tmp_path / f"{ranks}.log", ranks=ranks).ok()
        losses.append(_losses(runs.rows(run)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


_SECOND_CARD = """
import sys
from pathlib import Path
import torch
from tests.records.checkpoint.helpers import snapshot_at
from records.checkpoint.writer import Checkpointer
from utils.ranks.launch import Launch
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

world = connect_devices(World(launch=Launch(local_rank=1)), "cuda")
checkpointer = Checkpointer(Path(sys.argv[1]), world, None)
for step in (1, 2):
    checkpointer.save(snapshot_at(step, world, weights={"w": torch.ones(1000, device=world.device)}), is_best=False)
checkpointer.wait()
assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_of_the_second_card_opens_no_context_on_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SECOND_CARD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=runs.REPOSITORY)
    assert done.returncode == 0, done.stderr
