"""Settings of the process groups, and the layout of the ranks."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from utils.command_line import typed_values, validate
from utils.config import Float, Int, StrictModel

DeviceName = Literal["auto", "cuda", "mps", "cpu"]


class MeetingConfig(StrictModel):
    """How ranks find one another. They need this before rank 0 has read any YAML."""

    launcher: Literal["auto", "torchrun", "slurm", "mpi", "single"]
    init_method: str
    start_timeout_s: Float = Field(gt=0, le=10**7)

    @field_validator("init_method")
    @classmethod
    def _is_known(cls, value: str) -> str:
        address = re.fullmatch(r"tcp://(?:\[[^\]]+\]|[^:/]+):(\d{1,5})", value)
        is_address = address is not None and 0 < int(address[1]) < 2**16
        if value != "env" and not is_address and not value.startswith("file:///"):
            raise ValueError(
                f"dist.init_method is {value!r}; give env, tcp://host:port or file:///path/on/all/machines"
            )
        return value

    @staticmethod
    def typed(arguments: list[str]) -> "MeetingConfig":
        typed = typed_values(arguments, [f"dist.{name}" for name in MeetingConfig.model_fields])
        values = DEFAULT_MEETING.model_dump() | {key.removeprefix("dist."): value for key, value in typed.items()}
        return validate(_Typed, {"dist": values}).dist


# The values of config/pretrain.yaml, which ranks need before they have read it.
DEFAULT_MEETING = MeetingConfig(launcher="auto", init_method="env", start_timeout_s=300.0)


class _Typed(StrictModel):
    """Gives the keys in error messages their group."""

    dist: MeetingConfig


class DistConfig(MeetingConfig):
    """How ranks find one another and communicate. config/pretrain.yaml explains each key."""

    backend: Literal["auto", "nccl", "gloo", "mpi"]
    timeout_s: Float = Field(gt=0, le=10**7)
    num_threads: Int | None = Field(gt=0)
    rank_weights: list[Annotated[Float, Field(gt=0)]]


@dataclass(frozen=True)
class Axes:
    """The sizes of the axes on which ranks are laid out, outermost axis first.

    Each position on `replicate` x `shard` holds slots of its own from the global batch. The ranks
    along `model` (the parts of a tensor or the stages of a pipeline) share the slots of their
    position. They communicate the most, so their numbers are consecutive.
    """

    replicate: int = 1
    shard: int = 1
    model: int = 1
