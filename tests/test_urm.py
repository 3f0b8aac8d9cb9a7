"""URM runs as published, and runs and weights of URM from before it was go on as they were."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.layers import ConvSwiGLU
from models.urm import URM, URMConfig
from tests import fuzz, runs
from tests.in_process import begin, load_run, train_here

SMALL = {"arch": "urm", "arch.num_layers": 1, "arch.H_cycles": 2, "arch.L_cycles": 2, "lr_warmup_steps": 3}
SHORT = {"max_steps": 4, "checkpoint_every_n_steps": 2, "eval_every_n_steps": None, "log_interval": 1}


def _settings(data: Path, run: Path, **changes: object) -> list[str]:
    values = {"data_path": data, "device": "cpu", "checkpoint_path": run, **SMALL, **SHORT, **changes}
    return ["debug=tiny", *(f"{key}={'null' if value is None else value}" for key, value in values.items())]


@pytest.fixture(scope="module")
def old(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of URM as it was stored before the convolution had a bias."""
    run = tmp_path_factory.mktemp("old") / "run"
    train_here(_settings(data, run, **{"arch.conv_bias": "false", "lr_counts_from": 1, "ema": "true"}))
    for state in run.glob("step_*/state.json"):
        stored = json.loads(state.read_text())
        del stored["config"]["arch"]["conv_bias"], stored["config"]["lr_counts_from"]
        state.write_text(json.dumps(stored))
        fuzz.seal(state.parent)
    return run


def _convolution(model: torch.nn.Module) -> ConvSwiGLU:
    assert isinstance(model, URM)
    (layer,) = [module for module in model.modules() if isinstance(module, ConvSwiGLU)]
    return layer


def test_an_old_run_goes_on_bit_for_bit_without_the_bias(old: Path, tmp_path: Path) -> None:
    config, model, _ = load_run(old)
    assert isinstance(config.arch, URMConfig) and not config.arch.conv_bias
    assert config.lr_counts_from == 1
    assert _convolution(model).conv_bias_W is None
    train_here([f"resume={old / 'step_00000002'}", f"checkpoint_path={tmp_path / 'again'}"])
    again, before = runs.tensors(tmp_path / "again", 4), runs.tensors(old, 4)
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)


@pytest.mark.parametrize("source", ["", "step_00000004/model.safetensors"])
def test_weights_without_the_bias_start_a_run_with_a_bias_of_zeros(
    old: Path, data: Path, tmp_path: Path, source: str
) -> None:
    weights = old / source
    if source:  # the file of a step is refused where it lies
        weights = tmp_path / "weights.safetensors"
        weights.write_bytes((old / source).read_bytes())
    begun = begin(_settings(data, tmp_path / "run", init_from=weights, max_steps=1))
    layer = _convolution(begun.state.model)
    assert layer.conv_bias_W is not None and not layer.conv_bias_W.any()
    saved = load_file(old / "step_00000004/model.safetensors")
    if source:
        assert torch.equal(layer.conv_weight_W12, saved["level.layers.0.mlp.conv_weight_W12"])
    begun.fit()


def test_a_published_schedule_begins_with_a_rate_of_0(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(_settings(data, run, lr=3e-3, lr_scaling="none"))
    rates = [row["train/lr"] for row in runs.rows(run) if "train/lr" in row]
    assert rates == pytest.approx([0.0, 1e-3, 2e-3, 3e-3])
