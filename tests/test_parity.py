"""The recorded trajectories are reproduced, and tests/parity.py notices every difference."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import parity
from tests.recordings import TOLERANCE, of_json, of_tensor, of_tensors

# Larger recordings that some machines have beside the checkout.
LARGER = Path(__file__).parents[1].parent / "shared" / "reference"


@pytest.fixture(params=["hrm_rope"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a copy of a recording that a test may change."""
    copy = tmp_path / "recording"
    shutil.copytree(parity.REFERENCE / request.param, copy)
    copy.chmod(0o755)
    for path in copy.iterdir():
        path.chmod(0o644)
    return copy


def _last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


SE_RRM = ("se_rrm_learned", "se_rrm_puzzle", "se_rrm_rope2d")


def test_published_models_are_reproduced_in_any_clone(capsys: pytest.CaptureFixture[str]) -> None:
    """The command without arguments replays every recording that this repository ships."""
    status = parity.main([])
    out = capsys.readouterr().out
    assert status == 0, out
    by_folder = {Path(block.split("\n")[0]).name: block for block in out.split(f"{parity.REFERENCE}/")[1:]}
    of_urm = ("urm_adam", "urm_muon")
    assert by_folder.keys() == {"hrm_rope", "hrm_learned", "hrm_softmax", "trm_attention", "trm_mlp", *of_urm, *SE_RRM}
    for name, block in by_folder.items():
        for quantity in parity.QUANTITIES:
            if quantity != "targets" or name.startswith("hrm"):  # only HRM learns q_continue
                assert f"  {quantity}" in block, f"{quantity} was not compared in {name}"
    assert float(out.splitlines()[-1].removeprefix("max_relative_error=")) <= TOLERANCE


# Without a reason, pytest would report that the test was skipped, but not why.
_NONE = pytest.param(LARGER, marks=pytest.mark.skip(reason="there are no larger recordings beside this checkout"))


@pytest.mark.parametrize("folder", parity.recordings_in(LARGER) or [_NONE], ids=lambda folder: folder.name)
def test_larger_recordings_are_reproduced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([str(folder)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("hrm_rope", {"rope_theta": 9000.0}),
        ("hrm_rope", {"pos_encodings": "none"}),
        ("hrm_rope", {"backprop": "last_H_cycle"}),
        ("hrm_rope", {"no_ACT_continue": True}),
        ("hrm_rope", {"num_heads": 4}),
        ("hrm_learned", {"H_cycles": 3}),
        ("hrm_softmax", {"loss": {"loss_type": "stablemax_cross_entropy"}}),
        ("trm_attention", {"rope_theta": 9000.0}),
        ("trm_attention", {"backprop": "one_step"}),
        ("trm_mlp", {"L_cycles": 3}),
        ("trm_mlp", {"halt_max_steps": 4}),
        ("trm_mlp", {"loss": {"halt_weight": 0.51}}),
        ("urm_adam", {"rope_theta": 9000.0}),
        ("urm_adam", {"backprop": "all"}),
        ("urm_adam", {"halt_max_steps": 3}),
        ("urm_muon", {"L_cycles": 3}),
    ],
)
def test_a_planted_error_is_caught_by_the_shipped_recordings(name: str, wrong: dict[str, Any]) -> None:
    recording = parity.read_recording(parity.REFERENCE / name)
    options = recording.config.model_dump()
    for key, value in wrong.items():
        options[key] = options[key] | value if isinstance(value, dict) else value
    recording.config = type(recording.config).model_validate(options)
    assert parity.replay(recording).failures


@pytest.mark.parametrize(
    "wrong",
    [
        {"muon_coefficients": "jordan"},
        {"muon_scale": "spectral"},
        {"muon_matrices": "blocks"},
        {"muon_weight_decay": 0.3},
        {"muon_momentum": 0.9},
        {"muon_iterations": 6},
        {"rest": "adam_atan2"},
    ],
)
def test_another_muon_than_that_of_urm_is_caught(wrong: dict[str, Any]) -> None:
    recording = parity.read_recording(parity.REFERENCE / "urm_muon")
    recording.optimizer = recording.optimizer.model_copy(update=wrong)
    assert parity.replay(recording).failures


def _scaled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.001


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_fill(0, torch.tensor([0]), float("nan"))


def _plus(step: int, key: str, error: float) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        theirs = description["train"][step][key]
        description["train"][step][key] = theirs + error * max(1.0, abs(theirs))

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(
            (of_tensor("trajectory", name, _scaled), name)
            for name in (
                *("train.04.out.logits", "train.00.out.q_halt_logits", "train.11.out.q_continue_logits"),
                *("train.07.out.target_q_continue", "eval.out.logits", "eval.out.q_halt_logits"),
            )
        ),
        (of_tensor("trajectory", "train.03.carry.steps", lambda x: x + 1), "train.03.carry.steps"),
        (of_tensor("trajectory", "train.03.carry.halted", lambda x: ~x), "train.03.carry.halted"),
        (of_tensor("trajectory", "train.02.out.logits", _nan), "train.02.out.logits"),
        (of_tensors("trajectory", lambda t: t.pop("train.05.out.logits")), "train.05.out.logits"),
        (of_tensors("trajectory", lambda t: t.pop("eval.out.logits")), "eval.out.logits"),
        (of_tensors("trajectory", lambda t: t.update({"train.05.out.z_H": torch.ones(2)})), "train.05.out.z_H"),
        *(
            (of_json(_plus(2, key, 1e-3)), f"train[2].{key}")
            for key in ("loss", "grad_norm", "accuracy", "lm_loss", "q_halt_loss", "q_continue_loss")
        ),
        *(
            (of_json(_plus(2, key, 1e-6)), f"train[2].{key}")
            for key in ("count", "exact_accuracy", "q_halt_accuracy", "steps")
        ),
        (of_json(lambda d: d["train"][1].pop("loss")), "train[1].loss"),
        (of_json(lambda d: d["eval"].update(q_continue_loss=0.0)), "eval.q_continue_loss"),
        (of_json(lambda d: d["eval"].update(lm_loss=float("inf"))), "eval.lm_loss"),
        (of_tensor("final", "model.inner.lm_head.weight", _scaled), "final.lm_head.weight"),
        (of_tensor("final", "model.inner.puzzle_emb.weights", _scaled), "final.puzzle_embedding.weight"),
        (of_tensor("final", "model.inner.H_init", _scaled), "final.H_init"),
        (of_tensors("final", lambda t: t.pop("model.inner.q_head.bias")), "final.q_head.bias"),
    ],
)
def test_a_changed_recording_fails_by_name(
    folder: Path, change: Callable[[Path], None], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    assert parity.main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert any(line.startswith(f"  FAILED: {named} ") for line in out.splitlines()), out
    assert float(out.splitlines()[-1].removeprefix("max_relative_error=")) > TOLERANCE


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("folder", ["urm_adam"], indirect=True)
def test_a_convolution_of_urm_with_other_values_is_caught(part: str, folder: Path) -> None:
    of_tensor("initial", f"model.inner.layers.0.mlp.dwconv.{part}", _scaled)(folder)
    assert parity.main([str(folder)]) == 1
