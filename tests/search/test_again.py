"""The best points of a sweep become a sweep of their own."""

from pathlib import Path

import pytest

from search.again import sweep_again
from search.study import open_study
from sweep import read_again
from tests.search.finished import Ended, add_trials, finished, read_sweep
from utils.errors import UserError


def test_it_has_the_points_and_what_all_trials_share(tmp_path: Path) -> None:
    keys = {"overrides": ["arch=trm"], "metric": "train/lm_loss", "direction": "minimize"}
    other = {"pruner": {"name": "median"}, "launcher": {"name": "local", "at_once": 1, "threads": 3}}
    sweep = read_sweep(tmp_path, name="old", parameters={"lr": [1, 2, 3]}, **keys, **other)
    study = finished(sweep, [Ended({"lr": lr}, (value,)) for lr, value in ((1, 0.9), (2, 0.1), (3, 0.5))])
    again = sweep_again(study, 2, ["seed=range(2)", "max_steps=7"])
    assert (again.name, again.config.points, again.config.seeds) == ("old_again", [{"lr": 2}, {"lr": 3}], [0, 1])
    assert again.config.overrides == ["arch=trm", "max_steps=7"]
    assert (again.config.metric, again.config.direction) == ("train/lm_loss", "minimize")
    assert (again.config.pruner.name, again.config.launcher.threads) == ("none", 1)


def test_without_a_value_there_is_nothing_to_run_again(tmp_path: Path) -> None:
    study = finished(read_sweep(tmp_path, parameters={"lr": [1, 2]}), [])
    with pytest.raises(UserError, match="has ended with a value yet"):
        sweep_again(study, 2, [])


def test_it_takes_files_from_a_folder(tmp_path: Path) -> None:
    sweep = read_sweep(tmp_path, name="old", parameters={"lr": [1, 2]})
    with open_study(sweep, create=True) as study:
        sweep.write()
        add_trials(study.optuna, sweep, [Ended({"lr": 1}, (0.5,))])
    file = tmp_path / "conf" / "arch" / "small.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("defaults: [trm, _self_]\nhidden_size: 48\n")
    again = read_again([str(sweep.path), "seed=range(2)", "--config-dir", str(tmp_path / "conf"), "arch=small"])
    assert again.config.overrides == [f"arch='{file}'"] and again.config.seeds == [0, 1]
