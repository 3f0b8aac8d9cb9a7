"""Traces of steps, and the tables of the largest operations."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.spawn import world_of
from utils.errors import UserError
from utils.perf.trace import ProfileConfig, StepProfiler

DEFAULTS: dict[str, Any] = {"enabled": True, "steps": [4, 6], "ranks": [0], "shapes": False, "stacks": False}


def _work() -> torch.Tensor:
    x = torch.ones(64, 64)
    return (x @ x).relu().sum() + x.sin().cos().exp().log().sqrt().tanh().abs().neg().sigmoid().sum()


def _trace(run: Path, num_steps: int, *, rank: int = 0, size: int = 1, **changes: Any) -> list[str]:
    said: list[str] = []
    profiler = StepProfiler(ProfileConfig(**DEFAULTS | changes), run, said.append, world_of(rank, size))
    for step in range(1, num_steps + 1):
        with torch.profiler.record_function(f"step {step}"):
            _work()
        profiler.step()
    profiler.close()
    return said


def _traces(run: Path) -> list[str]:
    return sorted(file.name.split(".")[0] for file in run.glob("profile/*.pt.trace.json.gz"))


def _events(run: Path) -> list[dict[str, Any]]:
    (file,) = run.glob("profile/*.pt.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


@pytest.mark.parametrize(("steps", "num_steps"), [([1, 1], 1), ([2, 3], 2), ([4, 6], 3)])
def test_the_chosen_steps_are_traced_with_their_largest_operations(
    tmp_path: Path, steps: list[int], num_steps: int
) -> None:
    tables, where = _trace(tmp_path, 7, steps=steps)
    traced = {name for event in _events(tmp_path) if (name := event["name"]).startswith("step ")}
    assert traced == {f"step {step}" for step in range(steps[0], steps[1] + 1)}
    assert where.startswith(f"{num_steps} steps: {tmp_path / 'profile'} has rank_0.")
    assert (tmp_path / "profile" / "rank_0.txt").read_text() == f"{tables}\n"
    assert len(re.findall(r"^ *aten::mm ", tables, re.MULTILINE)) == 2, "one table of times and one of memory"


@pytest.mark.parametrize(("ranks", "traced"), [([0], [0]), ([1, 2], [1, 2]), (None, [0, 1, 2])])
def test_the_chosen_ranks_are_traced(tmp_path: Path, ranks: list[int] | None, traced: list[int]) -> None:
    for rank in range(3):
        _trace(tmp_path, 6, rank=rank, size=3, ranks=ranks)
    assert _traces(tmp_path) == [f"rank_{rank}" for rank in traced]


@pytest.mark.parametrize("asked", [False, True])
def test_shapes_and_python_calls_are_in_the_trace_if_asked_for(tmp_path: Path, asked: bool) -> None:
    assert _trace(tmp_path, 8, enabled=False, ranks=[1]) == list(tmp_path.iterdir()) == []
    _trace(tmp_path, 6, shapes=asked, stacks=not asked)
    events = _events(tmp_path)
    products = [event for event in events if event["name"] == "aten::mm"]
    assert products and all((event["args"].get("Input Dims") == [[64, 64]] * 2) == asked for event in products)
    assert any("_work" in event["name"] for event in events) != asked


def test_a_resumed_run_keeps_its_earlier_trace(tmp_path: Path) -> None:
    assert _trace(tmp_path, 2) == ["no trace: the run ended before step 6"]
    _trace(tmp_path, 6)
    (first,) = tmp_path.glob("profile/*.gz")
    assert re.fullmatch(r"rank_0\.\d+\.pt\.trace\.json\.gz", first.name), "TensorBoard finds it by this pattern"
    contents = first.read_bytes()
    assert _trace(tmp_path, 1) == [], "the first part of the run has a trace"
    assert len(_trace(tmp_path, 1, rank=1, size=2, ranks=None)) == 1, "this rank has none"
    _trace(tmp_path, 6)
    assert _traces(tmp_path) == ["rank_0", "rank_0"] and first.read_bytes() == contents


def test_steps_and_ranks_that_do_not_exist_are_refused() -> None:
    for steps in ([6, 4], [0, 3], [4]):
        with pytest.raises(ValidationError, match=re.escape(str(steps))):
            ProfileConfig(**DEFAULTS | {"steps": steps})
    with pytest.raises(UserError, match="no rank 2, -1 of 2"):
        ProfileConfig(**DEFAULTS | {"ranks": [0, 2, -1]}).require_ranks(2)
    ProfileConfig(**DEFAULTS | {"ranks": [7], "enabled": False}).require_ranks(2)
