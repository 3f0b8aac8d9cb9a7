"""What a rank on Ray tells the program below it and Ray. Nothing here starts Ray."""

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed (requirements-ray.txt)")

from launch.ray_rank import newest_metrics, rank_environment


@pytest.mark.parametrize(("has_device", "local_rank"), [(False, "3"), (True, "0")])
def test_a_rank_finds_its_device_and_the_others(has_device: bool, local_rank: str) -> None:
    assert rank_environment(7, 8, 3, ("10.0.0.1", 29000), has_device=has_device) == {
        **{"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": local_rank},
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29000"},
        **({} if has_device else {"CUDA_VISIBLE_DEVICES": ""}),
    }


def test_the_newest_value_of_each_metric_is_told(tmp_path: Path) -> None:
    assert newest_metrics(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lr": 0.5}\n{"step": 2, "eval": 0.25}\n{"step": 3, "lr')
    assert newest_metrics(tmp_path) == {"step": 2, "lr": 0.5, "eval": 0.25}
