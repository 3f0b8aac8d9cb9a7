"""Settings of the process groups, and the layout of the ranks."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from utils.config import Float, Int, StrictModel

DeviceName = Literal["auto", "cuda", "mps", "cpu"]

INIT_METHODS = ("env", "tcp://", "file://")


class DistConfig(StrictModel):
    """How ranks find one another and communicate. config/pretrain.yaml explains each key."""

    backend: Literal["auto", "nccl", "gloo", "mpi"]
    init_method: str
    timeout_s: Float = Field(gt=0, le=10**7)
    num_threads: Int | None = Field(gt=0)
    rank_weights: list[Float]

    @field_validator("init_method")
    @classmethod
    def known_init_method(cls, value: str) -> str:
        if not value.startswith(INIT_METHODS):
            raise ValueError(
                f"dist.init_method is {value!r}; give env, tcp://host:port or file:///path/on/all/machines"
            )
        return value

    @field_validator("rank_weights")
    @classmethod
    def _weights_are_positive(cls, values: list[float]) -> list[float]:
        if any(not 0 < value < float("inf") for value in values):
            raise ValueError(f"rank_weights is {values}; give a positive number for each rank")
        return values


@dataclass(frozen=True)
class Axes:
    """The sizes of the axes on which ranks are laid out, outermost axis first.

    The product of the sizes is the number of ranks. Each position on `replicate` x `shard` holds
    slots of its own from the global batch. The ranks along `model` (the parts of a tensor or the
    stages of a pipeline) share the slots of their position. They communicate the most, so their
    numbers are consecutive, which puts them on one machine if possible.
    """

    replicate: int = 1
    shard: int = 1
    model: int = 1
