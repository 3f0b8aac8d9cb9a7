"""arch.attention_kernel=varlen and arch.fp8_no_grad are refused where they do not run."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from models.text.config import GPTConfig
from tests import runs
from tests.in_process import mistake, train_here
from tests.models.helpers import small_model
from tests.models.text.helpers import make_config, varlen_attention
from training.kernels import require_kernels, why_fp8_fails, why_varlen_fails
from utils.errors import UserError
from utils.ranks.world import World

CPU = torch.device("cpu")


def _typed(data: Path, run: Path, *more: str) -> list[str]:
    fixed = ["debug=tiny_text", "device=cpu", "max_steps=4", "global_batch_size=512", "eval_every_n_steps=4"]
    return [*fixed, "epochs=100", f"data_path={data}", f"checkpoint_path={run}", *more]


def test_a_cpu_refuses_the_kernel_before_the_run_starts(text: Path, tmp_path: Path) -> None:
    message = mistake(_typed(text, tmp_path / "run", "arch.attention_kernel=varlen"))
    assert message.startswith("arch.attention_kernel=varlen does not run on cpu in float32 (")
    assert message.endswith("take a CUDA device and arch.forward_dtype=bfloat16, or arch.attention_kernel=sdpa")


@pytest.mark.parametrize("arch", ["gpt", "hrm_text"])
def test_a_run_has_the_losses_of_sdpa(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """A plain loop takes the place of the part that runs on CUDA alone."""
    calls = Mock(side_effect=varlen_attention)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", calls)
    for kernel in ("sdpa", "varlen"):
        assert not calls.called
        train_here(_typed(text, tmp_path / kernel, f"arch={arch}", f"arch.attention_kernel={kernel}"))
    assert calls.called
    sdpa, varlen = (
        [row[key] for row in runs.rows(tmp_path / kernel) for key in ("train/loss", "train/grad_norm")]
        for kernel in ("sdpa", "varlen")
    )
    assert varlen == pytest.approx(sdpa, rel=1e-5)


@pytest.mark.parametrize("fault", ["always", "shared keys", "no queries"])
def test_a_kernel_whose_results_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Faults may show only where heads share keys, or where a response has no tokens."""
    (shape,) = make_config(GPTConfig, attention="prefixlm").stacks.values()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attention)
    assert why_varlen_fails(CPU, torch.float32, shape) is None

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        is_hit = {
            "always": True,
            "shared keys": options["enable_gqa"],
            "no queries": bool((args[3].diff() == 0).any()),
        }[fault]
        return varlen_attention(*args, **options) * (1.5 if is_hit else 1.0)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong)
    assert why_varlen_fails(CPU, torch.float32, shape) == "its results differ from those of sdpa"


# ---- FP8 ---------------------------------------------------------------------------------------


def test_sizes_that_fp8_never_multiplies_are_refused() -> None:
    model = small_model("trm", fp8_no_grad=True, mlp_t=True, width_multiple=1, expansion=1.0)
    with pytest.raises(UserError, match=r"the model has none; give arch.width_multiple=16, or set arch.fp8_no_grad to"):
        require_kernels(model, World.single())


def test_a_device_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that multiplies by the scales at the end gives 128.00002 instead of 128."""
    fails = RuntimeError("torch._scaled_mm is only supported on CUDA devices\nwith 9.0")
    monkeypatch.setattr(torch, "_scaled_mm", Mock(side_effect=fails))
    with pytest.raises(UserError, match=r"can't multiply in FP8 on cpu into float32 .*supported on CUDA devices with"):
        require_kernels(small_model("hrm", fp8_no_grad=True), World.single())
    almost = torch.full((128, 128), 128.0000153)
    for product, why in ((torch.zeros(128, 128), "a product of ones is wrong"), (almost, None)):
        monkeypatch.setattr(torch, "_scaled_mm", Mock(return_value=product))
        assert why_fp8_fails(CPU, torch.float32) == why
