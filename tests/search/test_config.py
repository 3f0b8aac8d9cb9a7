"""Mistakes in the YAML of a sweep are refused, and the message names the key or the value."""

from typing import Any

import pytest

from search.sweep import SweepPage
from utils.command_line import read_config, validate, with_changes
from utils.errors import UserError

CONDITION = {"values": [1], "when": {"arch": "urm"}}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"parameters": {"lr": {"range": [1, 2], "values": [1]}}}, "sweep.parameters.lr: .*not values and range"),
    ({"parameters": {"lr": {"log_range": [0, 1]}}}, r"log_range is \[0.0, 1.0\].* above 0"),
    ({"parameters": {"lr": {"values": [1], "num": 2}}}, "num is not for values"),
    ({"parameters": {"lr": [1, 2, 1]}}, r"\[1, 2, 1\]"),
    ({"parameters": {"lr": {"values": [1], "when": {"arch": "trm"}}}}, "'arch', which is no parameter above it"),
    ({"parameters": {"arch": ["hrm", "trm"], "lr": CONDITION}}, "arch is never 'urm'; it is one of hrm, trm"),
    ({"parameters": {"lr": [{"values": [1]}, {"values": [2]}]}}, "parameters.lr has several entries"),
    ({"parameters": {"run_name": [1, 2]}}, "its own run_name"),
    ({"overrides": ["seed=1"]}, "give sweep.seeds instead"),
    ({"parameters": {"lr": [1, 2]}, "overrides": ["lr=3"]}, "parameters.lr is searched, and overrides set it too"),
    ({"seeds": [1, 1]}, r"\[1, 1\]"),
    ({"parameters": {"lr": {"range": [1, 2]}}, "sampler": {"name": "grid"}}, "parameters.lr has infinitely many"),
    ({"parameters": {"lr": [1]}, "points": [{"lr": 1}], "sampler": {"name": "grid"}}, "no parameters"),
    ({"points": [{"lr": 1}], "sampler": {"name": "tpe"}}, "points need sweep.sampler.name=grid, not tpe"),
    ({"sampler": {"name": "random", "startup_trials": 3}}, "startup_trials is for tpe and median, not for random"),
    ({"pruner": {"name": "successive_halving", "warmup_steps": 0}}, "warmup_steps is 0, but the first rung"),
    ({"launcher": {"ranks": 2}}, "ranks is 2"),
    ({"launcher": {"name": "torchrun", "gpus": [0, 1, 2], "at_once": 2, "ranks": 2}}, "gpus has 3 devices"),
    ({"launcher": {"name": "slurm", "slurm": {"time": "2:00:00"}}}, "'2:00:00'"),
    ({"launcher": {"name": "slurm", "slurm": {"time": 9, "nodes": 2}, "ranks": 3}}, r"nodes divide .* \(3\)"),
    ({"launcher": {"name": "slurm", "slurm": {"time": 9}, "gpus": [0]}}, "leave out one"),
    ({"name": "a/b"}, "'a/b'"),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_line(given: dict[str, Any], message: str) -> None:
    container = read_config("sweep", [])
    nested = {
        f"{key}.{inner}": v for key in ("sampler", "pruner", "launcher") for inner, v in given.get(key, {}).items()
    }
    plain = {key: value for key, value in given.items() if key not in ("sampler", "pruner", "launcher")}
    container["sweep"] = with_changes(container["sweep"] | plain, nested)
    with pytest.raises(UserError, match=message) as caught:
        validate(SweepPage, container)
    assert "\n" not in str(caught.value)
