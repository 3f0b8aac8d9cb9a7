"""An exported experiment trains what the winner's command line trains."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from search.report import EXPERIMENTS, write_experiment
from search.study import Study, open_study
from sweep import sweep as main
from tests.search.finished import Ended, add_trials, finished, read_sweep
from utils.command_line import read_config
from utils.config import Container, flatten
from utils.errors import UserError


def _exported(study: Study, file: Path) -> tuple[Container, dict[str, Any]]:
    """Return the config of the exported file, and its own values."""
    path, command = write_experiment(study, file).splitlines()
    assert path == str(file) and command.endswith(f" experiment={file}")
    return read_config("pretrain", [f"experiment={file}"]), yaml.safe_load(file.read_text()) or {}


_DEPTH = "arch.depth_curriculum=[{until:0.5,H_cycles:1,L_cycles:1}]"
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "one key": ([], {"lr": 3.0123456789012345e-05}),
    "a key that others follow": ([], {"arch.hidden_size": 64}),
    "the names of a run": (["wandb.group=mine"], {"lr": 1e-3}),
    "arch and optim": ([], {"arch": "trm_mlp", "optim": "muon", "optim.muon_lr": 0.03, "arch.L_cycles": 3}),
    "an experiment": (["experiment=trm_sudoku_6x6", "max_steps=7"], {"lr": 1e-3, "arch.H_cycles": 1}),
    "an experiment and debug": (["experiment=sudoku_extreme_fast", "debug=tiny"], {"ema_rate": 0.95}),
    "what follows from another key": (["arch=transformer"], {"arch.recurrent": True, "arch.hidden_size": 64}),
    "lists, nulls and texts": (
        ["wandb.tags=[a,b c]", "project_name='it is: mine'", _DEPTH],
        {"data_paths": "[a/b,c]", "grad_clip": None, "eval_interval": None, "evaluators": "[sudoku]"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_command_line_of_the_best(tmp_path: Path, case: str) -> None:
    overrides, point = CASES[case]
    parameters = {key: [value] for key, value in point.items()}
    sweep = read_sweep(tmp_path, overrides=overrides, parameters=parameters, seeds=[3])
    study = finished(sweep, [Ended(point, (0.5,))])
    config, own = _exported(study, tmp_path / "best.yaml")
    run = [each for each in sweep.overrides(point, 0) if not each.startswith("wandb.group=")]
    assert config == read_config("pretrain", run), "the seed is that of any run"
    trained_on = ", ".join(config["data_paths"] or [config["data_path"]])
    assert f"# The data are {trained_on}. " in (tmp_path / "best.yaml").read_text()
    groups = [pair for entry in own.pop("defaults", []) for pair in entry.items()]
    defaults = [f"{key.removeprefix('override /')}={choice}" for key, choice in groups]
    base = OmegaConf.create(read_config("pretrain", defaults))
    same = [key for key, value in flatten(own) if OmegaConf.select(base, key) == value]
    assert same == []


def test_a_group_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "arch").mkdir()
    (tmp_path / "arch/small.yaml").write_text("defaults:\n  - trm\n  - _self_\nhidden_size: 48\nnum_heads: 4\n")
    arch = f"{tmp_path}/arch/small.yaml"
    sweep = read_sweep(tmp_path, parameters={"arch": [arch, "hrm"]})
    config, own = _exported(finished(sweep, [Ended({"arch": arch}, (0.5,))]), tmp_path / "best.yaml")
    assert own == {"defaults": [{"override /arch": "trm"}], "arch": {"hidden_size": 48, "num_heads": 4}}
    assert config == read_config("pretrain", [f"arch={arch}"])


def test_the_default_file_is_an_experiment_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "experiment"
    monkeypatch.setattr("search.report.EXPERIMENTS", folder)
    assert EXPERIMENTS.is_dir() and EXPERIMENTS.name == "experiment"
    study = finished(read_sweep(tmp_path, name="lr+arch.x", parameters={"lr": [1e-3]}), [Ended({"lr": 1e-3}, (0.5,))])
    path, command = write_experiment(study, None).splitlines()
    assert path == str(folder / "lr_arch_x_best.yaml") and command.endswith("experiment=lr_arch_x_best")


def test_mistakes(tmp_path: Path) -> None:
    sweep = read_sweep(tmp_path, parameters={"lr": [1e-3]})
    study = finished(sweep, [Ended({"lr": 1e-3}, (0.5,))])
    file = tmp_path / "there.yaml"
    file.write_text("lr: 1\n")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "nowhere.yaml")
    for path, message in (
        (file, "there.yaml exists; remove it, or name another file with -o"),
        (tmp_path / "link.yaml", "link.yaml exists; remove it"),
        (tmp_path / "x.txt", "x.txt can't be chosen as experiment="),
    ):
        with pytest.raises(UserError, match=message):
            write_experiment(study, path)
    assert file.read_text() == "lr: 1\n"
    with pytest.raises(UserError, match="has ended with a value yet"):
        write_experiment(finished(sweep, []), tmp_path / "none.yaml")


def test_the_commands(tmp_path: Path) -> None:
    """They open the study from its folder."""
    sweep = read_sweep(tmp_path, parameters={"lr": [1e-3, 1e-2]}, seeds=[0, 1])
    with open_study(sweep, create=True) as study:
        sweep.write()
        add_trials(study.optuna, sweep, [Ended({"lr": 1e-2}, (0.5, 0.5)), Ended({"lr": 1e-3}, (0.7, 0.8))])
    file = tmp_path / "best.yaml"
    for typed, shown in (
        (["export", str(sweep.path), "-o", str(file)], str(file)),
        (["plot", str(sweep.path), "-o", str(tmp_path)], str(tmp_path / "plots.html")),
        (["status", str(sweep.path)], "0.7500"),
        (["best", str(sweep.path)], "pretrain.py lr=0.001 seed=0"),
    ):
        page = main(typed)
        assert isinstance(page, str) and shown in page
    assert "lr: 0.001" in file.read_text() and "over 2 seeds (0.7000, 0.8000)" in file.read_text()
    with pytest.raises(UserError, match="unrecognized arguments: --dry-run"):
        main(["status", str(sweep.path), "--dry-run"])
