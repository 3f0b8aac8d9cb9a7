"""The soak's verdict on samples that are made up, because a real soak takes an hour."""

from typing import Any

import pytest

from benchmarks.soak import problems_of_growth

HOUR = 60


def _samples(quantity: str, per_hour: float, damaged: int = 0, lives_min: int = 5) -> list[dict[str, Any]]:
    """Return an hour of samples in which one quantity grows.

    Each process lives for `lives_min` minutes.
    """
    usual = {"rss_mb": 600.0, "fds": 50.0, "threads": 30.0, "disk_mb": 20.0}
    lines: list[dict[str, Any]] = [{"event": "damage", "minutes": 1.0}] * damaged
    for minutes in range(HOUR):
        values = usual | {quantity: usual[quantity] + per_hour * minutes / HOUR}
        process = {"pid": minutes // lives_min, "age_s": 60.0}
        process |= {name: values[name] for name in ("rss_mb", "fds", "threads")}
        of_run = {"disk_mb": values["disk_mb"], "files": 20, "tmp": 1, "shm": 0}
        lines.append({"minutes": float(minutes), "processes": {"rank 0": process}, **of_run})
    return lines


@pytest.mark.parametrize(
    ("quantity", "tolerated", "too_much"),
    [("rss_mb", 80, 150), ("fds", 8, 12), ("threads", 8, 12), ("disk_mb", 8, 16)],
)
def test_a_quantity_that_grows_too_much_is_a_problem(quantity: str, tolerated: float, too_much: float) -> None:
    assert list(problems_of_growth(_samples(quantity, tolerated), checkpoint_mb=5.0)) == []
    (problem,) = problems_of_growth(_samples(quantity, too_much), checkpoint_mb=5.0)
    assert f"{quantity} grew by" in problem


def test_memory_that_grows_again_in_each_process_is_a_problem() -> None:
    lines = _samples("rss_mb", 0)
    for line in lines:
        line["processes"]["rank 0"]["rss_mb"] += 30 * (line["minutes"] % 5)  # a process grows by 1.8 GB an hour
    assert [problem for problem in problems_of_growth(lines, checkpoint_mb=5.0) if "of a process" in problem]
