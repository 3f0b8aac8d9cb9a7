"""On CUDA, models of text train as on the CPU."""

from pathlib import Path

import pytest
import torch

from models.text.config import HRMTextConfig
from tests import runs
from tests.dataset.text.samples import random_dataset
from tests.gpu.device import DEVICE, on_the_gpu
from tests.in_process import train_here
from tests.models.text.helpers import make_config
from training.attention_kernel import why_varlen_fails
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

pytestmark = on_the_gpu

FLOAT32, HALF = 2e-3, 5e-2  # relative differences of losses from those of the CPU in float32
SHAPE = make_config(HRMTextConfig, hidden_size=32).stacks["H_level"]
VARLEN = ["arch.attention_kernel=varlen", "arch.forward_dtype=bfloat16"]

OPTIONS: dict[str, tuple[list[str], float]] = {
    "gpt": (["arch=gpt"], FLOAT32),
    "gpt, shared keys": (["arch=gpt", "arch.num_kv_heads=1"], FLOAT32),
    "gpt, bfloat16": (["arch=gpt", "arch.forward_dtype=bfloat16"], HALF),
    "gpt, varlen": (["arch=gpt", *VARLEN], HALF),
    "gpt, varlen, shared keys": (["arch=gpt", "arch.num_kv_heads=1", *VARLEN], HALF),
    "gpt, varlen, compile": (["arch=gpt", "compile=true", *VARLEN], HALF),
    "hrm_text": (["arch=hrm_text"], FLOAT32),
    "hrm_text, varlen": (["arch=hrm_text", *VARLEN], HALF),
    "hrm_text, varlen, blocks computed again": (
        ["arch=hrm_text", "arch.activation_checkpointing=block", *VARLEN],
        HALF,
    ),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_dataset(tmp_path_factory.mktemp("text"))


def _losses(data: Path, run: Path, device: str, *typed: str) -> list[float]:
    fixed = ["debug=tiny_text", f"device={device}", "max_steps=4", "global_batch_size=512", "eval_every_n_steps=4"]
    train_here(
        [*fixed, "epochs=100", f"data_path={data}", f"checkpoint_path={run}", *typed],
        connect_devices(World.single(), device),  # type: ignore[arg-type]
    )
    rows = runs.rows(run)
    return [*(row["train/loss"] for row in rows), rows[-1]["eval/all/loss"]]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_losses_equal_those_of_the_cpu(
    name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU computes in float32 with sdpa, and does not compile."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    typed, tolerance = OPTIONS[name]
    if "arch.attention_kernel=varlen" in typed and (
        why := why_varlen_fails(torch.device(DEVICE), torch.bfloat16, SHAPE)
    ):
        pytest.skip(f"no varlen here: {why}")
    plain = [each for each in typed if not each.startswith(("compile", "arch.forward_dtype", "arch.attention_kernel"))]
    ours = _losses(text, tmp_path / "ours", DEVICE, *typed)
    assert ours == pytest.approx(_losses(text, tmp_path / "cpu", "cpu", *plain), rel=tolerance)
