"""Traces of steps, and the tables of the largest operations."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests import runs
from tests.spawn import world_of
from utils.errors import UserError
from utils.perf.trace import ProfileConfig, StepProfiler

DEFAULTS: dict[str, Any] = {"enabled": True, "steps": [4, 6], "ranks": [0], "shapes": False, "stacks": False}


def _work() -> torch.Tensor:
    x = torch.ones(64, 64)
    return (x @ x).relu().sum() + x.sin().cos().exp().log().sqrt().tanh().abs().neg().sigmoid().sum()


def _profiler(run: Path, said: list[str], *, rank: int = 0, size: int = 1, **changes: Any) -> StepProfiler:
    return StepProfiler(ProfileConfig(**DEFAULTS | changes), run, said.append, world_of(rank, size))


def _do(profiler: StepProfiler, num_steps: int) -> None:
    for _ in range(num_steps):
        _work()
        profiler.step()
    profiler.close()


def _traces(run: Path) -> list[str]:
    return sorted(file.name.split(".")[0] for file in run.glob("profile/*.pt.trace.json.gz"))


def _events(run: Path) -> list[dict[str, Any]]:
    (file,) = run.glob("profile/*.pt.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_profile_has_a_trace_and_the_ten_largest_operations(tmp_path: Path) -> None:
    said: list[str] = []
    _do(_profiler(tmp_path, said), 8)
    times, memory, where = said
    assert where.startswith(f"3 steps: {tmp_path / 'profile'} has rank_0.")
    assert (tmp_path / "profile" / "rank_0.txt").read_text() == f"{times}\n\n{memory}\n"
    for table in (times, memory):
        operations = [line for line in table.splitlines() if line.strip().startswith(("aten::", "ProfilerStep"))]
        assert 0 < len(operations) <= 10, table
    assert "aten::mm" in memory


@pytest.mark.parametrize(("steps", "num_steps"), [([1, 1], 1), ([2, 3], 2), ([4, 6], 3)])
def test_the_chosen_steps_are_traced(tmp_path: Path, steps: list[int], num_steps: int) -> None:
    said: list[str] = []
    profiler = _profiler(tmp_path, said, steps=steps)
    for step in range(1, 8):
        with torch.profiler.record_function(f"step {step}"):
            _work()
        profiler.step()
    profiler.close()
    traced = sorted(name for event in _events(tmp_path) if (name := event["name"]).startswith("step "))
    assert set(traced) == {f"step {step}" for step in range(steps[0], steps[1] + 1)}
    assert said[-1].startswith(f"{num_steps} steps: ")


@pytest.mark.parametrize(("ranks", "traced"), [([0], ["rank_0"]), ([1, 2], ["rank_1", "rank_2"]), (None, None)])
def test_the_chosen_ranks_are_traced(tmp_path: Path, ranks: list[int] | None, traced: list[str] | None) -> None:
    said: list[str] = []
    for rank in range(3):
        _do(_profiler(tmp_path, said if rank == 0 else [], rank=rank, size=3, ranks=ranks), 6)
    assert _traces(tmp_path) == (traced or ["rank_0", "rank_1", "rank_2"])
    if ranks == [1, 2]:  # rank 0, whose words are seen, has no trace of its own
        assert said == [f"ranks 1, 2 trace steps 4 to 6 into {tmp_path / 'profile'}"]


@pytest.mark.parametrize("asked", [False, True])
def test_shapes_and_python_calls_are_in_the_trace_if_asked_for(tmp_path: Path, asked: bool) -> None:
    _do(_profiler(tmp_path, [], shapes=asked, stacks=asked), 6)
    events = _events(tmp_path)
    products = [event for event in events if event["name"] == "aten::mm"]
    assert products and all((event["args"].get("Input Dims") == [[64, 64]] * 2) == asked for event in products)
    assert any("_work" in event["name"] for event in events) == asked


def test_a_disabled_profiler_writes_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    _do(_profiler(tmp_path, said, enabled=False, ranks=[1]), 8)
    assert list(tmp_path.iterdir()) == said == []


def test_a_run_that_ends_before_its_trace_reports_that(tmp_path: Path) -> None:
    said: list[str] = []
    _do(_profiler(tmp_path, said), 2)
    assert said == ["no trace: the run ended before step 6"]


def test_a_resumed_run_keeps_its_earlier_trace(tmp_path: Path) -> None:
    _do(_profiler(tmp_path, []), 6)
    (first,) = tmp_path.glob("profile/*.gz")
    assert re.fullmatch(r"rank_0\.\d+\.pt\.trace\.json\.gz", first.name), "TensorBoard finds it by this pattern"
    contents, said = first.read_bytes(), list[str]()
    _do(_profiler(tmp_path, said), 1)
    assert said == [], "the first part of the run has a trace"
    _do(_profiler(tmp_path, said), 6)
    assert _traces(tmp_path) == ["rank_0", "rank_0"] and first.read_bytes() == contents


@pytest.mark.parametrize("steps", [[6, 4], [0, 3], [4]])
def test_steps_that_are_no_range_are_refused(steps: list[int]) -> None:
    with pytest.raises(ValidationError, match=re.escape(str(steps))):
        ProfileConfig(**DEFAULTS | {"steps": steps})


def test_ranks_that_do_not_exist_are_refused() -> None:
    config = ProfileConfig(**DEFAULTS | {"ranks": [0, 2, -1]})
    with pytest.raises(UserError, match="no rank 2, -1 of 2"):
        config.require_ranks(2)
    ProfileConfig(**DEFAULTS | {"ranks": None}).require_ranks(2)
    ProfileConfig(**DEFAULTS | {"ranks": [7], "enabled": False}).require_ranks(2)


# ---- the program -------------------------------------------------------------------------------


def test_each_chosen_rank_of_a_run_writes_a_trace_also_after_a_resume(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    typed = runs.settings(data, run, max_steps=4, profile="true", profile__steps="[2,3]", profile__ranks="null")
    output = runs.train(typed, log, ranks=2).ok()
    assert output.count("2 steps: ") == 1, "rank 0 alone tells where its trace is"
    assert _traces(run) == ["rank_0", "rank_1"]
    again = ["resume=auto", f"checkpoint_path={run}", "max_steps=8"]
    runs.train([*again, "profile.ranks=[1]"], log, ranks=2).ok()
    assert _traces(run) == ["rank_0", "rank_1", "rank_1"], "steps are counted from the start of a process"
    runs.train([*again, "max_steps=12", "profile=false"], log, ranks=2).ok()
    assert len(_traces(run)) == 3 and runs.rows(run)[-1]["step"] == 12
