"""The keys of Ray, and what a run on Ray knows before it begins."""

from pathlib import Path

import pytest

from launch.ray_config import read_ray, reserved, with_folder
from tests import runs
from utils.errors import UserError


def test_other_keys_are_those_of_pretrain() -> None:
    config, overrides = read_ray(["ray.num_workers=4", "lr=2e-4", "+ray.gpus=1", "arch.H_layers=2"])
    assert (config.num_workers, config.gpus) == (4, 1)
    assert overrides == ["lr=2e-4", "arch.H_layers=2"]


def test_ranks_that_share_a_device_talk_over_gloo() -> None:
    for workers, gpus, shared in ((2, 0.5, True), (2, 0.6, False), (2, 1, False), (1, 0.5, False), (2, 0, False)):
        _, overrides = read_ray([f"ray.num_workers={workers}", f"ray.gpus={gpus}"])
        assert overrides == ["dist.backend=gloo"] * shared
    assert read_ray(["ray.num_workers=2", "ray.gpus=0.5", "dist.backend=nccl"])[1] == ["dist.backend=nccl"]


def test_what_a_worker_reserves() -> None:
    assert reserved(4, 0.5, 1.5) == {"CPU": 4, "GPU": 0.5, "memory": 1_500_000_000}
    assert reserved(1, 0, None) == {"CPU": 1}


def test_mistakes_are_one_line() -> None:
    for typed, message in (
        ("ray.gpus=2", "ray.gpus: input should be less than or equal to 1, but it is 2"),
        ("ray.address=ray://head:10001", "ray.address: 'ray://head:10001' is no address of a Ray cluster"),
    ):
        with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
            read_ray([typed])


def test_the_folder_of_a_run_is_chosen_before_it_begins(data: Path, tmp_path: Path) -> None:
    typed = runs.settings(data, tmp_path / "run")
    assert with_folder(typed) == (typed, tmp_path / "run"), "a folder that was typed is not repeated"
    unnamed = runs.settings(data, None)
    (first, run), (_, other) = with_folder(unnamed), with_folder(unnamed)
    assert run != other and run.parts[0] == "checkpoints", "each run without a name gets one of its own"
    assert first == [*unnamed, f"checkpoint_path={run}"]
    step = tmp_path / "run" / "step_00000004"
    step.mkdir(parents=True)
    for typed, run in (([], tmp_path / "run"), (["checkpoint_path=branch"], Path("branch"))):
        assert with_folder([f"resume={step}", *typed])[1] == run


def test_a_new_run_is_refused_before_ray_starts(data: Path, tmp_path: Path) -> None:
    for typed, key in ((["lrr=1"], "lrr"), (["max_steps=0"], "max_steps")):
        with pytest.raises(UserError, match=key):
            with_folder([*runs.settings(data, tmp_path / "run"), *typed])
