"""The command line of each attempt, and the environment of each rank."""

from pathlib import Path

import pytest

from launch.ray_job import RayJob, rank_environment
from records.folder import Launched


@pytest.mark.parametrize(
    ("resume", "has_begun", "has_checkpoints", "added"),
    [
        (None, False, False, []),
        (None, False, True, []),  # they are of another run: pretrain.py refuses its folder, as ever
        (None, True, False, ["resume=auto"]),
        (None, True, True, ["resume=auto"]),
        ("other", False, False, []),
        ("other", False, True, []),
        ("other", True, False, []),  # it did not come to a checkpoint of its own
        ("other", True, True, ["resume=auto"]),
    ],
)
def test_an_attempt_resumes_what_an_earlier_one_began(
    resume: str | None, has_begun: bool, has_checkpoints: bool, added: list[str]
) -> None:
    typed = ("lr=1e-3", *([f"resume={resume}"] if resume else []))
    job = RayJob(typed, "checkpoints/my, run", resume, "/")
    words = job.arguments(has_begun=has_begun, has_checkpoints=has_checkpoints)
    assert words == [*typed, "checkpoint_path='checkpoints/my, run'", *added]


def test_a_folder_that_was_typed_is_not_repeated() -> None:
    typed = ("+checkpoint_path=there",)
    words = RayJob(typed, "there", None, "/").arguments(has_begun=True, has_checkpoints=False)
    assert words == [*typed, "resume=auto"]


def test_a_run_begins_when_it_writes_its_launch(tmp_path: Path) -> None:
    job = RayJob((), "run", None, str(tmp_path))
    assert job.beginning() is None
    (tmp_path / "run").mkdir()
    Launched(last_step=1, ranks=1, device="cpu", host="here").write(tmp_path / "run")
    before = job.beginning()
    assert before is not None and job.beginning() == before
    Launched(last_step=1, ranks=1, device="cpu", host="here").write(tmp_path / "run")
    assert job.beginning() != before


@pytest.mark.parametrize(("has_device", "local_rank"), [(False, "3"), (True, "0")])
def test_a_rank_finds_its_device_and_the_others(has_device: bool, local_rank: str) -> None:
    places = {"rank": 7, "size": 8, "local_rank": 3, "local_size": 4}
    found = rank_environment(**places, meeting=("10.0.0.1", 29000), has_device=has_device)
    assert found == {
        **{"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "4"},
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29000"},
        **({} if has_device else {"CUDA_VISIBLE_DEVICES": ""}),
    }
