"""What a rank on Ray makes of the program below it. Nothing here starts Ray."""

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed (requirements-ray.txt)")

from launch import ray_rank
from launch.ray_job import rank_environment


def _environment(port: int) -> dict[str, str]:
    return rank_environment(rank=0, size=2, local_rank=0, local_size=2, meeting=("127.0.0.1", port), has_device=False)


@pytest.mark.parametrize(("status", "mistake"), [(2, "error: one"), (1, ""), (0, "")])
def test_only_a_mistake_is_kept_back(
    status: int, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nprint('error: one\\nother\\nerror: two')\nsys.exit({status})\n")
    monkeypatch.setattr(ray_rank, "PRETRAIN", program)
    told: list[str] = []
    started = ray_rank.Program([], _environment(1), str(tmp_path), told.append)
    assert started.wait(60) == status
    assert started.mistake == mistake
    assert sorted([*told, *([mistake] if mistake else [])]) == ["error: one", "error: two", "other"]


def test_the_desk_knows_whether_an_attempt_has_begun() -> None:
    desk = ray_rank.Desk()
    assert desk.begin_attempt((1, 1)) == (1, False), "the folder may hold another run"
    assert desk.begin_attempt((1, 1)) == (2, False), "the first attempt failed before it began"
    assert desk.begin_attempt((2, 1)) == (3, True)


def test_the_newest_value_of_each_metric_is_told(tmp_path: Path) -> None:
    """A resumed run writes the file anew, without the rows that it repeats."""
    file, metrics = tmp_path / "metrics.jsonl", ray_rank.NewestMetrics(tmp_path)
    assert not metrics.read() and metrics.values == {}
    file.write_text('{"step": 1, "lr": 0.5}\n{"step": 2, "eval": 0.25}\n{"step": 3, "lr')
    assert metrics.read() and metrics.values == {"step": 2, "lr": 0.5, "eval": 0.25}
    assert not metrics.read(), "the last line is not whole yet"
    file.write_text('{"step": 1, "lr": 0.5}\n')
    assert metrics.read() and metrics.values == {"step": 1, "lr": 0.5, "eval": 0.25}
    with file.open("a") as again:
        again.write('{"step": 2, "lr": 0.75}\n')
    assert metrics.read() and metrics.values == {"step": 2, "lr": 0.75, "eval": 0.25}
