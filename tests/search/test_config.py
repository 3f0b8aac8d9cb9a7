"""Mistakes in the YAML of a sweep name the key, the value and the correction."""

from typing import Any

import pytest

from search.sweep import SweepPage
from utils.command_line import read_config, validate, with_changes
from utils.errors import UserError

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "two kinds": (
        {"parameters": {"lr": {"range": [1, 2], "values": [1]}}},
        "sweep.parameters.lr: give one of values, range, log_range and int_range, not values and range",
    ),
    "no kind": ({"parameters": {"lr": {}}}, "sweep.parameters.lr: give one of values, range, .*, not none of them"),
    "empty list": ({"parameters": {"lr": []}}, "sweep.parameters.lr: "),
    "scalar": ({"parameters": {"lr": 3}}, "sweep.parameters.lr: input should be a valid list, but it is 3"),
    "upside down": (
        {"parameters": {"lr": {"range": [2, 1]}}},
        r"range is \[2.0, 1.0\]; its first number must be below",
    ),
    "logarithm of 0": ({"parameters": {"lr": {"log_range": [0, 1]}}}, "numbers with a logarithm are above 0"),
    "fractions of integers": ({"parameters": {"lr": {"int_range": [0.5, 2]}}}, "int_range.0: .*integer, but it is 0.5"),
    "num of a list": (
        {"parameters": {"lr": {"values": [1], "num": 2}}},
        "num is for range and log_range, not for values",
    ),
    "step of a range": ({"parameters": {"lr": {"range": [1, 2], "step": 2}}}, "step is for int_range, not for range"),
    "a value twice": ({"parameters": {"lr": [1, 2, 1]}}, r"values is \[1, 2, 1\]; name each value once"),
    "condition on nothing": (
        {"parameters": {"lr": {"values": [1], "when": {"arch": "trm"}}}},
        "parameters.lr: `when` names 'arch', which is no parameter above it; above are none",
    ),
    "condition on what never is": (
        {"parameters": {"arch": ["hrm", "trm"], "lr": {"values": [1], "when": {"arch": "urm"}}}},
        "parameters.lr: arch is never 'urm'; it is one of hrm, trm",
    ),
    "several without a condition": (
        {"parameters": {"lr": [{"values": [1]}, {"values": [2]}]}},
        "parameters.lr has several entries; each needs a `when` of its own",
    ),
    "seed": ({"parameters": {"seed": [1, 2]}}, "parameters.seed: give sweep.seeds instead"),
    "folder": (
        {"parameters": {"checkpoint_path": ["a"]}},
        "parameters.checkpoint_path: sweep.py gives every run its own",
    ),
    "seed of all": ({"overrides": ["seed=3"]}, "'seed=3': give sweep.seeds instead"),
    "searched and set": (
        {"parameters": {"lr": [1, 2]}, "overrides": ["lr=3"]},
        "parameters.lr is searched, and overrides set it too; leave it out of one of them",
    ),
    "seeds twice": ({"seeds": [1, 1]}, r"sweep.seeds: \[1, 1\] are no seeds; give each once"),
    "infinite grid": (
        {"parameters": {"lr": {"range": [1, 2]}}, "sampler": {"name": "grid"}},
        "parameters.lr has infinitely many values; give num",
    ),
    "points and parameters": (
        {"parameters": {"lr": [1]}, "points": [{"lr": 1}], "sampler": {"name": "grid"}},
        r"points and parameters \(lr\) exclude each other; give one",
    ),
    "points that are drawn": (
        {"points": [{"lr": 1}]},
        "points are taken one after the other; give sweep.sampler.name=grid, not tpe",
    ),
    "startup of random": (
        {"sampler": {"name": "random", "startup_trials": 3}},
        "sweep.sampler: startup_trials is for the sampler tpe, not for random",
    ),
    "option of another pruner": (
        {"pruner": {"name": "median", "reduction_factor": 3}},
        "sweep.pruner: reduction_factor is for the pruner successive_halving, not for median; leave it out",
    ),
    "warm-up of none": (
        {"pruner": {"warmup_steps": 3}},
        "warmup_steps is for the pruner median and successive_halving, not for none",
    ),
    "first rung at 0": ({"pruner": {"name": "successive_halving", "warmup_steps": 0}}, "first rung .* is at step 1 or"),
    "unknown pruner": ({"pruner": {"name": "hyperband"}}, "sweep.pruner.name: input should be 'none', 'median' or"),
    "ranks without torchrun": (
        {"launcher": {"ranks": 2}},
        "sweep.launcher: ranks is 2, but the launcher local starts one process; give name=torchrun",
    ),
    "too few devices": (
        {"launcher": {"gpus": [0, 1], "at_once": 3}},
        "gpus has 2 devices, too few for 3 runs of 1 ranks at once",
    ),
    "name that is a path": ({"name": "a/b"}, "'a/b' can't name a folder; give a name without /"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case: str) -> None:
    given, message = MISTAKES[case]
    container = read_config("sweep", [])
    nested = {
        f"{key}.{inner}": v for key in ("sampler", "pruner", "launcher") for inner, v in given.get(key, {}).items()
    }
    plain = {key: value for key, value in given.items() if key not in ("sampler", "pruner", "launcher")}
    container["sweep"] = with_changes(container["sweep"] | plain, nested)
    with pytest.raises(UserError, match=message) as caught:
        validate(SweepPage, container)
    assert "\n" not in str(caught.value)
