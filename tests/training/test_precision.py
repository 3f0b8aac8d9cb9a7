"""arch.forward_dtype=auto is decided once by rank 0, and arch.fp8_no_grad only where it works."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml

from models.base import RecursiveModel
from tests import fuzz, runs
from tests.in_process import changed, load_run, train_here
from tests.models.helpers import needs_fp8, small_model
from tests.runs import settings, train, with_arguments
from training import precision
from utils.errors import UserError
from utils.ranks.world import World


def _cpu_with(bfloat16: bool, rank: int) -> None:
    """Pretend that the CPU of rank 0 multiplies bfloat16, and those of other ranks don't."""
    precision.multiplies_bfloat16 = lambda device: bfloat16 == (rank == 0)


@pytest.mark.parametrize(("ranks", "bfloat16", "expected"), [(1, True, "bfloat16"), (2, False, "float32")])
def test_auto_is_decided_by_rank_0_and_stored(
    data: Path, tmp_path: Path, log: Path, ranks: int, bfloat16: bool, expected: str
) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, arch__forward_dtype="auto", max_steps=2, eval_every_n_steps=None)
    train(typed, log, ranks=ranks, hook=with_arguments(_cpu_with, bfloat16)).ok()
    assert yaml.safe_load((run / "config.yaml").read_text())["arch"]["forward_dtype"] == expected
    z_H = next(tensor for name, tensor in runs.tensors(run, 2).items() if name.endswith(".state.z_H"))
    assert z_H.dtype == getattr(torch, expected), "the model computed in another dtype than that of the config"
    # A resumed run keeps the dtype on a CPU of the other kind.
    done = train([f"resume={run}", "max_steps=3"], log, ranks=ranks, hook=with_arguments(_cpu_with, not bfloat16))
    # On a CPU that emulates bfloat16 another line advises against it.
    assert not [line for line in done.ok().splitlines() if "forward_dtype" in line and "emulates" not in line]
    assert yaml.safe_load((run / "config.yaml").read_text())["arch"]["forward_dtype"] == expected


def test_the_capabilities_of_the_cpu_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    for able in (False, True):
        found = {"avx2": True, "avx512_bf16": able}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        assert precision.multiplies_bfloat16(torch.device("cpu")) == able
    assert not precision.multiplies_bfloat16(torch.device("mps"))


def _losses(run: Path) -> list[float]:
    return [row["train/lm_loss"] for row in runs.rows(run)]


@needs_fp8
def test_fp8_learns_resumes_and_differs(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"max_steps": 8, "checkpoint_every_n_steps": 4, "overfit_one_batch": True, "lr": 3e-3}
    for name in ("plain", "fp8"):
        on = {"lr_warmup_steps": 0, "eval_every_n_steps": None, "log_interval": 1, "arch__fp8_no_grad": name == "fp8"}
        train_here(settings(data, tmp_path / name, **changes, **on))
    plain, fp8 = _losses(tmp_path / "plain"), _losses(tmp_path / "fp8")
    assert plain != fp8 and fp8 == pytest.approx(plain, rel=0.1)
    assert fp8[-1] < 0.9 * fp8[0], "the loss of a batch that is repeated does not fall"
    assert (
        "calls without gradient multiply in FP8: self_attn.qkv_proj, self_attn.o_proj, mlp.gate"
        in capsys.readouterr().err
    )
    train_here([f"resume={tmp_path / 'fp8' / 'step_00000004'}", f"checkpoint_path={tmp_path / 'resumed'}"])
    assert not changed(runs.tensors(tmp_path / "fp8", 8), runs.tensors(tmp_path / "resumed", 8))


@needs_fp8
def test_a_run_that_began_without_the_key_goes_on_without_fp8(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(settings(data, run, max_steps=2, checkpoint_every_n_steps=1, eval_every_n_steps=None))
    for state in run.glob("step_*/state.json"):
        stored = json.loads(state.read_text())
        del stored["config"]["arch"]["fp8_no_grad"]
        state.write_text(json.dumps(stored))
        fuzz.seal(state.parent)
    config, _, _ = load_run(run)
    assert config.puzzle_arch.fp8_no_grad is False
    again = train_here([f"resume={run / 'step_00000001'}", f"checkpoint_path={tmp_path / 'again'}"])
    assert isinstance(again.model, RecursiveModel) and again.model.config.fp8_no_grad is False
    assert not changed(runs.tensors(run, 2), runs.tensors(tmp_path / "again", 2))


def test_sizes_that_fp8_never_multiplies_are_refused() -> None:
    model = small_model("trm", fp8_no_grad=True, mlp_t=True, width_multiple=1, expansion=1.0)
    with pytest.raises(UserError, match=r"the model has none; give arch.width_multiple=16, or set arch.fp8_no_grad to"):
        precision.require_fp8_products(model, World.single())


def test_a_device_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that multiplies by the scales at the end gives 128.00002 instead of 128."""
    fails = RuntimeError("torch._scaled_mm is only supported on CUDA devices\nwith 9.0")
    monkeypatch.setattr(torch, "_scaled_mm", Mock(side_effect=fails))
    with pytest.raises(UserError, match=r"can't multiply in FP8 on cpu into float32 .*supported on CUDA devices with"):
        precision.require_fp8_products(small_model("hrm", fp8_no_grad=True), World.single())
    almost = torch.full((128, 128), 128.0000153)
    for product, why in ((torch.zeros(128, 128), "a product of ones is wrong"), (almost, None)):
        monkeypatch.setattr(torch, "_scaled_mm", Mock(return_value=product))
        assert precision.why_fp8_fails(torch.device("cpu"), torch.float32) == why
