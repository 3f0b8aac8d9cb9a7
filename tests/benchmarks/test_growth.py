"""The benchmark of growth compares each part of a step with what the part works on."""

from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import growth
from benchmarks.growth import Axis, compare, measure, tables
from benchmarks.our_steps import OurTrainer
from models.puzzle_embedding import PUZZLE_TABLE
from utils.perf.recording import AVERAGE, BACKWARD, FORWARD, METRICS, NO_GRAD

PARTS = ("data", NO_GRAD, FORWARD, BACKWARD, PUZZLE_TABLE, "optimizer", AVERAGE, METRICS, "reduction", "rest")


class InThisProcess:
    """Answers requests as a process of benchmarks.our_steps does."""

    def __init__(self, command: list[str]) -> None:
        self._trainer = OurTrainer(command[command.index("benchmarks.our_steps") + 1 :])

    def ask(self, request: str) -> dict[str, Any]:
        kind, *arguments = request.split()
        answer: dict[str, Any] = getattr(self._trainer, kind)(*map(int, arguments))
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(growth, "Asked", InThisProcess)


@pytest.mark.usefixtures("in_this_process")
def test_a_table_ten_times_as_large_costs_the_average_ten_times_as_much() -> None:
    axis = Axis("puzzles", [999, 9_999])
    results = measure(
        axis, ["device=cpu", "arch.hidden_size=32", "global_batch_size=2", "compile=false"], round_s=0.0, num_rounds=2
    )
    first, last = (result["sizes"] for result in results)
    table_bytes = 9_000 * 32 * 4
    for key in ("averaged_bytes", "state_bytes", "checkpoint_bytes"):
        times = 1 if key == "averaged_bytes" else 2  # the table, and its average
        assert last[key] - first[key] == times * table_bytes, key
    for key in ("batch_bytes", "row_bytes", "trained_bytes", "slot_bytes", "kept_bytes", f"flops {BACKWARD}"):
        assert last[key] == first[key] > 0, key

    compared = compare(axis, results, cores=1)
    assert [row["value"] for row in compared["rows"]] == [999, 9_999]
    printed = tables(compared)
    assert "| puzzles | step, ms |" in printed and "| average |" in printed


def _result(value: int, step_ms: float, backward_ms: float, tokens: int) -> dict[str, Any]:
    parts = dict.fromkeys(PARTS, 0.0) | {"step": step_ms, BACKWARD: backward_ms, "data": step_ms - backward_ms}
    work = ("row", "trained", "averaged", "slot", "state", "kept")
    sizes: dict[str, float] = dict.fromkeys((f"{name}_bytes" for name in work), 1.0)
    sizes |= dict.fromkeys((f"flops {name}" for name in (NO_GRAD, FORWARD, BACKWARD)), 10.0 * tokens)
    row = {"step_ms": step_ms, "max_memory_gb": 0.5}
    return {"value": value, "rounds": [row], "parts": parts, "sizes": sizes | {"batch_bytes": 1.0 * tokens}}


def test_what_grows_faster_than_its_formula_is_named() -> None:
    axis = Axis("tokens", [1, 2])
    assert not compare(axis, [_result(1, 10, 4, tokens=1), _result(2, 20, 8, tokens=2)], cores=1)["flags"]
    flags = compare(axis, [_result(1, 10, 4, tokens=1), _result(2, 28, 16, tokens=2)], cores=1)["flags"]
    assert len(flags) == 3 and all("1.40 times" in flag for flag in flags[:2])
    assert flags[2] == "tokens 2: backward grows 2.00 times as much as its formula"


def test_ranks_that_share_a_core_take_turns() -> None:
    axis = Axis("ranks", [1, 4])
    compared = compare(axis, [_result(1, 10, 4, tokens=1), _result(4, 20, 8, tokens=4)], cores=2)
    assert compared["work"][1][BACKWARD] == 2 * compared["work"][0][BACKWARD]
