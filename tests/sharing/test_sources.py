"""What a typed path names: a run, weights, or something else."""

from pathlib import Path

import pytest

from sharing.sources import kind_of, no_checkpoint


def test_runs_are_told_from_weights(quiet: Path, tmp_path: Path) -> None:
    kinds = {"": "run", "best": "run", "latest": "run", "step_00000012": "run", "gone": "other"}
    assert {name: kind_of(quiet / name) for name in kinds} == kinds
    (tmp_path / "best").write_bytes(b"PK\3\4" + bytes(1000))
    (tmp_path / "step_20000000").write_bytes(b"PK\3\4")  # the published code names its files like this
    for typed in ("hf://owner/repo/best", tmp_path / "best", tmp_path / "step_20000000"):
        assert kind_of(typed) == "weights"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "fsdp2_epoch_1"])
def test_a_folder_with_weights_counts_as_their_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "all_config.yaml").touch()
    assert kind_of(tmp_path) == "other"
    (tmp_path / name).mkdir() if "epoch" in name else (tmp_path / name).touch()
    assert kind_of(tmp_path) == "weights"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["all_config.yaml", "step_117", "step_90", "step_117_all_preds.0"], "{0}/step_117,"),
        (["config.json", "pytorch_model.bin"], "{0}/pytorch_model.bin, and with it arch=... and data_path=..."),
        (["train/dataset.json"], "{0} is a dataset, which data_path takes"),
        ([], "there is no checkpoint at {0}"),
    ],
)
def test_a_folder_of_something_else_is_named(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert kind_of(tmp_path) == "other" and said.format(tmp_path) in no_checkpoint(tmp_path)
