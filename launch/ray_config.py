"""The config of a run on Ray: config/ray.yaml says what each key means. Nothing here needs Ray."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from training.config import PretrainConfig
from training.resume import place_of_resumed
from training.run_config import place_of_run, with_names
from utils.command_line import read_config, validate
from utils.config import Float, Int, StrictModel, page
from utils.overrides import as_override
from utils.ranks.launch import Launch

USAGE = """
python -m launch.ray_train: run pretrain.py on workers of Ray.

  python -m launch.ray_train ray.num_workers=2 experiment=demo                  two ranks on this machine
  python -m launch.ray_train ray.address=head:6379 ray.num_workers=8 ray.gpus=1 ray.cpus=4 experiment=demo
  python -m launch.ray_train ray.num_workers=2 ray.gpus=0.5 experiment=demo     two ranks share a device, over gloo

Keys of Ray begin with ray. and stand below. All other keys are those of pretrain.py, and mean the same.
"""


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
        if address not in (None, "local") and not re.fullmatch(r"[^/]+:\d+", address):
            raise ValueError(f"{address!r} is no address of a Ray cluster; give host:port, local or null")
        return address


@page("ray", bare="data_path", passes_on="pretrain")
class RayPage(StrictModel):
    ray: RayConfig


def reserved(cpus: float, gpus: float, memory_gb: float | None) -> dict[str, float]:
    """Return what a worker reserves, as Ray names it."""
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {}) | ({"memory": int(memory_gb * 10**9)} if memory_gb else {})


def read_ray(typed: list[str]) -> tuple[RayConfig, list[str]]:
    own = [each for each in typed if re.match(r"\+*ray[.=]", each)]
    config = validate(RayPage, read_config("ray", own)).ray
    overrides = [each for each in typed if each not in own]
    # NCCL refuses two ranks on a device, and says so if it was asked for.
    shared = config.num_workers > 1 and 0 < config.gpus <= 0.5
    if shared and not any(re.match(r"\+*dist\.backend=", each) for each in overrides):
        overrides.append("dist.backend=gloo")
    return config, overrides


def with_folder(overrides: list[str]) -> tuple[list[str], Path]:
    """Return the overrides with the folder of the run, so that each attempt finds the folder.

    A new run's config is checked as far as the check needs no data.
    """
    place = place_of_run(overrides)
    goes_on = place.resume not in (None, "auto")
    run = (place_of_resumed(place, overrides) if goes_on else with_names(place, Launch())).run_path
    if place.resume is None:  # the config of a resumed run is stored in its checkpoint
        validate(PretrainConfig, read_config("pretrain", overrides))
    return [*overrides, *([] if place.checkpoint_path else [f"checkpoint_path={as_override(str(run))}"])], run
