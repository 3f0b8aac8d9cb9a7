"""The recorded trajectories are reproduced, and tests/parity.py notices every difference."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import parity
from tests.recordings import TOLERANCE, change_json, change_tensors

# Larger recordings that some machines have beside the checkout.
LARGER = Path(__file__).parents[1].parent / "shared" / "reference"

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of a recording that a test may change."""
    copy = tmp_path / "recording"
    shutil.copytree(parity.REFERENCE / "hrm_rope", copy)
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


def test_the_shipped_recordings_stay_small() -> None:
    assert sum(path.stat().st_size for path in parity.REFERENCE.rglob("*")) < 1_750_000


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


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_convolution_of_urm_with_other_values_is_caught(part: str, tmp_path: Path) -> None:
    copy = tmp_path / "recording"
    shutil.copytree(parity.REFERENCE / "urm_adam", copy)
    change_tensors(copy / "initial.safetensors", lambda t: t[f"model.inner.layers.0.mlp.dwconv.{part}"].mul_(1.01))
    assert parity.main([str(copy)]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["model"].update(halt_max_steps=4), "halt_max_steps"),
        (lambda d: d["model"].pop("loops"), "loops"),
        (
            lambda d: d["model"].update(pos_encodings="learned"),
            "pos_encodings is 'learned', but an URM only does",
        ),
        (lambda d: d["optim"].update(use_muon="yes"), "use_muon is 'yes'; it must be true or false"),
    ],
)
def test_what_cannot_be_replayed_of_urm_is_one_line(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "recording"
    shutil.copytree(parity.REFERENCE / "urm_adam", copy)
    change_json(copy, change)
    assert parity.main([str(copy)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def _scale(name: str, factor: float) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensors[name] * factor})


def _plus_one(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensors[name] + 1})


def _drop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda table: table.pop(name)


def _nan(name: str) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = float("nan")

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_scale("train.04.out.logits", 1.001), "train.04.out.logits"),
        (_scale("train.00.out.q_halt_logits", 0.999), "train.00.out.q_halt_logits"),
        (_scale("train.11.out.q_continue_logits", 1.001), "train.11.out.q_continue_logits"),
        (_scale("train.07.out.target_q_continue", 1.001), "train.07.out.target_q_continue"),
        (_plus_one("train.03.carry.steps"), "train.03.carry.steps"),
        (lambda t: t["train.03.carry.halted"].logical_not_(), "train.03.carry.halted"),
        (_scale("eval.out.logits", 1.001), "eval.out.logits"),
        (_scale("eval.out.q_halt_logits", 1.001), "eval.out.q_halt_logits"),
        (_nan("train.02.out.logits"), "train.02.out.logits"),
        (_nan("eval.out.q_halt_logits"), "eval.out.q_halt_logits"),
        (_drop("train.05.out.logits"), "train.05.out.logits"),
        (_drop("train.05.out.target_q_continue"), "train.05.out.target_q_continue"),
        (_drop("eval.out.logits"), "eval.out.logits"),
        (lambda t: t.update({"train.05.out.z_H": torch.ones(2)}), "train.05.out.z_H"),
        (lambda t: t.update({"train.12.out.logits": torch.ones(2)}), "train.12.out.logits"),
    ],
)
def test_a_changed_trajectory_fails_by_name(
    folder: Path, change: Callable[[Tensors], Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_tensors(folder / "trajectory.safetensors", change)
    assert parity.main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert any(line.startswith(f"  FAILED: {named} ") for line in out.splitlines()), out
    assert float(out.splitlines()[-1].removeprefix("max_relative_error=")) > TOLERANCE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((name, 1e-3) for name in ("loss", "grad_norm", "accuracy", "lm_loss", "q_halt_loss", "q_continue_loss")),
        *((name, 1e-6) for name in ("count", "exact_accuracy", "q_halt_accuracy", "steps")),
    ],
)
def test_a_changed_number_fails_by_name(
    folder: Path, key: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(description: dict[str, Any]) -> None:
        theirs = description["train"][2][key]
        description["train"][2][key] = theirs + value * max(1.0, abs(theirs))

    change_json(folder, change)
    assert parity.main([str(folder)]) == 1
    assert f"FAILED: train[2].{key} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["train"][1].pop("loss"), "train[1].loss"),
        (lambda d: d["eval"].pop("steps"), "eval.steps"),
        (lambda d: d["eval"].update(q_continue_loss=0.0), "eval.q_continue_loss"),
        (lambda d: d["train"][1].update(perplexity=1.0), "train[1].perplexity"),
        (lambda d: d["train"][1].update(loss=float("nan")), "train[1].loss"),
        (lambda d: d["eval"].update(lm_loss=float("inf")), "eval.lm_loss"),
        (lambda d: d["optim"].update(weight_decay=0.2), "train.02.out.logits"),
        (lambda d: d["model"].update(L_cycles=3), "train.00.out.logits"),
        (lambda d: d["train"][0].update(lr_multiplier=0.26), "train.01.out.logits"),
    ],
)
def test_a_changed_description_fails_by_name(
    folder: Path, change: Callable[[dict[str, Any]], Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_json(folder, change)
    assert parity.main([str(folder)]) == 1
    assert f"FAILED: {named} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_scale("model.inner.lm_head.weight", 1.001), "final.lm_head.weight"),
        (_scale("model.inner.puzzle_emb.weights", 1.001), "final.puzzle_embedding.weight"),
        (_scale("model.inner.H_init", 1.001), "final.H_init"),
        (_drop("model.inner.q_head.bias"), "final.q_head.bias"),
        (lambda t: t.update({"model.inner.extra": torch.ones(2)}), "final.extra"),
    ],
)
def test_changed_final_weights_fail_by_name(
    folder: Path, change: Callable[[Tensors], Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_tensors(folder / "final.safetensors", change)
    assert parity.main([str(folder)]) == 1
    assert f"FAILED: {named} " in capsys.readouterr().out


def test_names_of_compiled_models_and_further_options_are_accepted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, prefix in [("initial", "_orig_mod."), ("final", "_orig_mod._orig_mod.")]:
        path = folder / f"{file}.safetensors"
        weights = {prefix + name: tensor for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(weights, path)
    options = {"rope_theta": 10000, "rms_norm_eps": 1e-5, "mlp_t": False, "puzzle_emb_len": 0, "no_ACT_continue": False}
    change_json(folder, lambda d: d["model"].update(options))
    assert parity.main([str(folder)]) == 0, capsys.readouterr().out


def _cut(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-50])


def _option(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: change_json(folder, lambda d: d["model"].update(changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut("initial.safetensors"), "initial.safetensors is damaged"),
        (_cut("trajectory.safetensors"), "trajectory.safetensors is damaged"),
        (_cut("trajectory.json"), "trajectory.json is damaged"),
        (lambda folder: (folder / "final.safetensors").unlink(), "final.safetensors is missing"),
        (lambda folder: (folder / "trajectory.json").write_text("[]"), "no table"),
        (_option(rms_norm_eps=1e-6), "rms_norm_eps"),
        (_option(no_ACT_continue=True), "no_ACT_continue"),
        (_option(puzzle_emb_len=4), "puzzle_emb_len"),
        (_option(halt_exploration_prob=0.1), "exploration"),
        (_option(dropout=0.1), "dropout"),
        (_option(num_heads=3), "num_heads"),
        (_option(L_layers=2), "L_level.layers.1"),
        (_option(vocab_size=12), "embed_tokens.weight"),
        (_option(batch_size=9), "train.00.batch.inputs"),
        (lambda folder: change_json(folder, lambda d: d["optim"].update(ema=0.9)), "ema"),
        (lambda folder: change_json(folder, lambda d: d["train"][3].pop("lr_multiplier")), "lr_multiplier"),
        (
            lambda folder: change_tensors(
                folder / "trajectory.safetensors", _plus_one("train.06.batch.puzzle_identifiers")
            ),
            "train.06.batch.puzzle_identifiers",
        ),
        (
            lambda folder: change_tensors(folder / "trajectory.safetensors", _drop("train.06.batch.labels")),
            "train.06.batch.labels",
        ),
    ],
)
def test_what_cannot_be_replayed_is_one_line_and_status_2(
    folder: Path, damage: Callable[[Path], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    assert parity.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_a_missing_folder_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["no/such/folder"]) == 2
    assert capsys.readouterr().err.count("error: ") == 1
