"""A space offers each value under its condition, each combination once, and each end of a range."""

from typing import Any

import optuna
import pytest
from pydantic import TypeAdapter

from search.config import SweepConfig
from search.space import Space, overrides_of, shown_point
from utils.command_line import read_config


def space_of(parameters: dict[str, Any], points: tuple[dict[str, Any], ...] = ()) -> Space:
    defaults = read_config("sweep", [])["sweep"]
    config = TypeAdapter(SweepConfig).validate_python(defaults | {"parameters": parameters})
    return Space(config.parameters, points)


def _grid(space: Space) -> list[dict[str, Any]]:
    return [point for _, point in space.grid()]


CONDITIONAL = {
    "arch": ["hrm", "trm"],
    "arch.mlp_t": {"values": [True, False], "when": {"arch": "trm"}},
    "arch.H_layers": {"int_range": [1, 2], "when": {"arch": ["hrm"]}},
    "lr": [{"values": [1.0], "when": {"arch": "hrm"}}, {"values": [2.0, 3.0], "when": {"arch": "trm"}}],
}


def test_a_grid_has_every_combination_that_the_conditions_allow() -> None:
    points = _grid(space_of(CONDITIONAL))
    assert points == [
        {"arch": "hrm", "arch.H_layers": 1, "lr": 1.0},
        {"arch": "hrm", "arch.H_layers": 2, "lr": 1.0},
        *({"arch": "trm", "arch.mlp_t": mlp_t, "lr": lr} for mlp_t in (True, False) for lr in (2.0, 3.0)),
    ]
    points = _grid(space_of(CONDITIONAL | {"ema_rate": {"values": [0.9], "when": {"lr": 3.0}}}))
    assert [point["lr"] for point in points if "ema_rate" in point] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ({"int_range": [2, 7], "step": 2}, [2, 4, 6]),
        ({"range": [0.0, 1.0], "num": 3}, [0.0, 0.5, 1.0]),
        ({"log_range": [1e-4, 1e-2], "num": 3}, [1e-4, 1e-3, 1e-2]),
        ([None, True, 1, 0.5, "a"], [None, True, 1, 0.5, "a"]),
        ({"values": [[0.9, 0.95], [1, 2]]}, ["[0.9,0.95]", "[1,2]"]),
    ],
)
def test_the_values_of_an_entry(entry: Any, values: list[Any]) -> None:
    assert [point["x"] for point in _grid(space_of({"x": entry}))] == values


def test_probes_have_every_value_and_both_ends_of_a_range() -> None:
    space = space_of(CONDITIONAL | {"weight_decay": {"range": [0.0, 0.5]}, "n": {"log_range": [1, 9]}})
    seen: dict[str, set[Any]] = {}
    for point in space.probes():
        assert ("arch.mlp_t" in point) == (point["arch"] == "trm"), point
        for key, value in point.items():
            seen.setdefault(key, set()).add(value)
    assert seen == {
        "arch": {"hrm", "trm"},
        "arch.mlp_t": {True, False},
        "arch.H_layers": {1, 2},
        "lr": {1.0, 2.0, 3.0},
        "weight_decay": {0.0, 0.5},
        "n": {1, 9},
    }


def test_suggested_points_obey_the_conditions_and_the_ranges() -> None:
    more = {
        "weight_decay": {"range": [0.1, 0.5]},
        "beta2": {"log_range": [0.01, 0.1]},
        "n": {"int_range": [2, 6], "step": 2},
    }
    space, stepped = space_of(CONDITIONAL | more), set[Any]()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    for _ in range(40):
        trial = study.ask()
        point = space.suggest(trial)
        assert ("arch.mlp_t" in point) == (point["arch"] == "trm") == (point["lr"] != 1.0)
        assert 0.1 <= float(str(point["weight_decay"])) <= 0.5 and 0.01 <= float(str(point["beta2"])) <= 0.1
        stepped.add(point["n"])
        study.tell(trial, 0.0)
        assert space.point_of(study.trials[-1].params) == point
    assert stepped == {2, 4, 6}
    assert [name for name, of in trial.distributions.items() if getattr(of, "log", False)] == ["beta2"]


def test_a_point_on_a_command_line() -> None:
    point = {"ema": True, "max_steps": None, "lr": 3.4129381e-4, "arch": "trm", "a": "x, y", "b": "[1,2]"}
    assert overrides_of(point) == [
        *("ema=true", "max_steps=null", "lr=0.00034129381", "arch=trm", "a='x, y'", "b=[1,2]"),
    ]
    assert overrides_of({"a": "null", "b": "1e-3"}) == ["a='null'", "b='1e-3'"], "text stays text"
    assert overrides_of({"arch": "configs/mine.yaml"}) == ["arch=configs/mine.yaml"]
    assert shown_point({"lr": 3.4129381e-4, "ema": False}) == "lr=0.0003413 ema=false"
