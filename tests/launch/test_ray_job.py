"""The command line of each attempt, and the environment of each rank."""

import pytest

from launch.ray_job import RayJob, rank_environment


@pytest.mark.parametrize(
    ("resume", "attempt", "has_checkpoints", "added"),
    [
        (None, 1, False, []),
        (None, 1, True, []),  # pretrain.py refuses to overwrite a run, as ever
        (None, 2, False, ["resume=auto"]),
        (None, 2, True, ["resume=auto"]),
        ("other", 1, False, []),
        ("other", 2, False, []),  # it did not come to a checkpoint of its own
        ("other", 2, True, ["resume=auto"]),
    ],
)
def test_a_later_attempt_resumes(resume: str | None, attempt: int, has_checkpoints: bool, added: list[str]) -> None:
    typed = ("lr=1e-3", *([f"resume={resume}"] if resume else []))
    job = RayJob(typed, "checkpoints/my run", resume, "/")
    words = job.arguments(attempt, has_checkpoints=has_checkpoints)
    assert words == [*typed, "checkpoint_path='checkpoints/my run'", *added]


def test_a_folder_that_was_typed_is_not_repeated() -> None:
    assert RayJob(("lr=1e-3",), "checkpoints/run", None, "/").arguments(1, has_checkpoints=False) == [
        "lr=1e-3",
        "checkpoint_path=checkpoints/run",
    ]
    typed = ("+checkpoint_path=there",)
    assert RayJob(typed, "there", None, "/").arguments(2, has_checkpoints=False) == [*typed, "resume=auto"]


@pytest.mark.parametrize(("has_device", "local_rank"), [(False, "3"), (True, "0")])
def test_a_rank_finds_its_device_and_the_others(has_device: bool, local_rank: str) -> None:
    found = rank_environment(
        rank=7, size=8, local_rank=3, local_size=4, meeting=("10.0.0.1", 29000), has_device=has_device
    )
    assert found == {
        "RANK": "7",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29000",
    }
