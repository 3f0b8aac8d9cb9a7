"""Recorded trajectories of HRM-Text are reproduced, and all that is recorded is compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.text.model import TextModel
from sharing.published import to_published
from tests import parity, parity_text
from tests.models.text.helpers import NUM_TOKENS, SEQUENCES, VOCAB_SIZE, make_row
from tests.recordings import Report

# Recordings of the published program that some machines have beside the checkout.
SHARED = Path(__file__).parents[1].parent / "shared" / "reference_text"
FOLDERS = sorted(path.parent for path in SHARED.glob("*/trajectory.json"))
# Without a reason, pytest would report that the test was skipped, but not why.
_NONE = pytest.param(SHARED, marks=pytest.mark.skip(reason="there are no recordings of text beside this checkout"))


@pytest.mark.parametrize("folder", FOLDERS or [_NONE], ids=lambda folder: folder.name)
def test_published_text_models_are_reproduced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([str(folder)]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    for quantity in parity_text.QUANTITIES:
        assert f"  {quantity}" in out, f"{quantity} was not compared"
    assert float(out.splitlines()[-1].removeprefix("max_relative_error=")) < 2e-5, "a faithful replay is closer"


# ---- recordings of this project's own models: no proof of parity, but of the replay -------------

MODEL: dict[str, Any] = {
    **{"hidden_size": 16, "num_heads": 2, "expansion": 4, "norm_type": "pre", "norm_eps": 1e-6, "n_layers": 2},
    **{"rope_theta": 10000.0, "pos_emb_type": "rope", "init_type": "lecun_normal", "attn_type": "prefixlm"},
    **{"max_seq_len": 64, "vocab_size": VOCAB_SIZE},
}
NETS: dict[str, dict[str, Any]] = {
    "hrm": {
        **{"half_layers": True, "H_cycles": 2, "L_cycles": 3, "bp_warmup_ratio": 0.5},
        "H_override": {"n_layers": 1, "attn_type": "causal", "pos_emb_type": "none"},
    },
    "transformer": {"norm_type": "post", "init_type": "megatron", "rope_theta": None, "pos_emb_type": "none"},
    "trm": {"H_cycles": 2, "L_cycles": 1, "H_bp_steps": 1, "L_bp_steps": 1, "init_type": "fixed_normal"},
    "ut": {"cycles": 3, "bp_cycles": 2, "attn_type": "causal"},
    "rins": {"half_layers": True, "L_cycles": 3, "L_bp_cycles": 2, "init_type": "fixed_normal", "init_std": 0.1},
}
OPTIM = {
    **{"lr": 0.01, "lr_min_ratio": 0.1, "lr_warmup_steps": 2, "total_steps": 4, "weight_decay": 0.5},
    **{"beta1": 0.9, "beta2": 0.95, "ema": 0.9},
}
NUM_STEPS, PROMPTS, NUM_NEW = 5, [[5, 2], [3]], 3


class _Recorder(Report):
    """Takes every value as right, and remembers it."""

    def compare(self, quantity: str, name: str, ours: torch.Tensor | float, *, exact: bool = False) -> None:
        self.recorded[name] = ours.detach().clone() if isinstance(ours, torch.Tensor) else ours

    def compare_equal(self, quantity: str, name: str, ours: object) -> None:
        self.recorded[name] = ours

    def close(self) -> None:
        pass


def _write(folder: Path, net: str) -> None:
    """Record a model of this project as the published program is recorded."""
    options = MODEL | NETS[net]
    config, vocab_size = parity_text._read_model(net, options)
    model = TextModel(config, vocab_size=vocab_size)
    model.init_weights(torch.Generator().manual_seed(0))
    initial = {name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    row = dict(zip(("inputs", "labels", "position_ids"), (part.int() for part in make_row()), strict=True))
    recording = parity_text.Recording(
        config,
        vocab_size,
        {key: float(value) for key, value in OPTIM.items()},
        {name: tensor.float() if name != "zL_init" else tensor for name, tensor in initial.items()},
        [row] * NUM_STEPS,
        [SEQUENCES] * NUM_STEPS,
        PROMPTS,
        NUM_NEW,
        {"final": 2, "ema": 1},
        {},
    )
    found = parity_text.replay(recording).recorded
    steps = []
    for t in range(NUM_STEPS):
        of = {key: found[f"train[{t}].{key}"] for key in parity_text.STEP_KEYS if f"train[{t}].{key}" in found}
        metrics = {name: [found[f"train[{t}].{name}[{n}]"] for n in (0, 1)] for name in parity_text.METRICS}
        total = sum(map(sum, SEQUENCES))
        steps.append(of | {"metrics": metrics, "sequences": SEQUENCES, "total": total})
    generate = {of: {"tokens": found[f"generate.{of}.tokens"], "margin": 0.1} for of in ("initial", "final", "ema")}
    description = {
        **{"arch": net, "model": options, "data": {"length": NUM_TOKENS, "target_only": True}, "optim": OPTIM},
        **{"row_stride": {"final": 2, "ema": 1}, "noise": 1e-6, "train": steps},
        "generate": generate | {"prompts": PROMPTS, "new_tokens": NUM_NEW},
    }
    (folder / "trajectory.json").write_text(json.dumps(description))
    tensors = {name: value for name, value in found.items() if name.split(".")[0] in ("train", "generate")}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    tensors |= {f"train.{t:02d}.batch.{key}": part.clone() for t in range(NUM_STEPS) for key, part in row.items()}
    save_file(tensors, folder / "trajectory.safetensors")
    weights = {"initial": initial}
    for file in ("final", "ema"):
        prefix = f"{file}."
        weights[file] = {name[len(prefix) :]: each for name, each in found.items() if name.startswith(prefix)}
    for file, of_file in weights.items():
        published = to_published(of_file, "training", config.name)
        save_file({name: tensor.contiguous() for name, tensor in published.items()}, folder / f"{file}.safetensors")


@pytest.fixture(params=NETS)
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(parity_text, "Report", _Recorder)
        _write(tmp_path, request.param)
    return tmp_path


def test_every_architecture_and_option_can_be_replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([str(folder)]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1] == "max_relative_error=0"
