"""The config of a run on Ray: config/ray.yaml says what each key means. Nothing here needs Ray."""

import os
import re
from typing import Literal

from pydantic import Field, field_validator

from launch.ray_job import RayJob
from training.config import PretrainConfig
from training.resume import place_of_resumed
from training.run_config import place_of_run, with_names
from utils.command_line import read_config, validate
from utils.config import Float, Int, StrictModel, page
from utils.ranks.launch import Launch

USAGE = """
python -m launch.ray_train: run pretrain.py on workers of Ray.

  python -m launch.ray_train ray.num_workers=2 experiment=demo                  two ranks on this machine
  python -m launch.ray_train ray.address=head:6379 ray.num_workers=8 ray.gpus=1 ray.cpus=4 experiment=demo
  python -m launch.ray_train ray.num_workers=2 ray.gpus=0.5 experiment=demo     two ranks share a device, over gloo

Keys of Ray begin with ray. and stand below. All other keys are those of pretrain.py, and mean the same.
"""

_GB = 10**9


class RayConfig(StrictModel):
    num_workers: Int = Field(ge=1)
    cpus: Float = Field(gt=0)
    gpus: Float = Field(ge=0, le=1)
    memory_gb: Float | None = Field(gt=0)
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
    placement_timeout_s: Float = Field(gt=0)
    max_failures: Int = Field(ge=0)
    address: str | None
    storage: str = Field(min_length=1)

    @field_validator("address")
    @classmethod
    def _address_is_known(cls, address: str | None) -> str | None:
        if address is not None and address != "local" and not re.fullmatch(r"[^/]+:\d+", address):
            raise ValueError(f"{address!r} is no address of a Ray cluster; give host:port, local or null")
        return address

    @property
    def resources(self) -> dict[str, float]:
        """What each worker reserves, as Ray names it."""
        found = {"CPU": self.cpus}
        if self.gpus:
            found["GPU"] = self.gpus
        if self.memory_gb is not None:
            found["memory"] = self.memory_gb * _GB
        return found

    @property
    def shares_devices(self) -> bool:
        """Whether two workers may get the same CUDA device."""
        return self.num_workers > 1 and 0 < self.gpus <= 0.5


@page("ray", bare="data_path", passes_on="pretrain")
class RayPage(StrictModel):
    ray: RayConfig


def read_ray(typed: list[str]) -> tuple[RayConfig, list[str]]:
    own = [each for each in typed if re.match(r"\+*ray[.=]", each)]
    config = validate(RayPage, read_config("ray", own)).ray
    overrides = [each for each in typed if each not in own]
    # NCCL refuses two ranks on a device, and says so if it was asked for.
    if config.shares_devices and not any(re.match(r"\+*dist\.backend=", each) for each in overrides):
        overrides.append("dist.backend=gloo")
    return config, overrides


def read_job(overrides: list[str]) -> RayJob:
    """Read where the run is, and check a new run's config as far as it needs no data."""
    place = place_of_run(overrides)
    path = place.resume if place.resume not in (None, "auto") else None
    run = (with_names(place, Launch()) if path is None else place_of_resumed(place, overrides)).run_path
    if place.resume is None:  # the config of a resumed run is stored in its checkpoint
        validate(PretrainConfig, read_config("pretrain", overrides))
    return RayJob(tuple(overrides), str(run), path, os.getcwd())
