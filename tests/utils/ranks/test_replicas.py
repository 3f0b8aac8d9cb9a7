"""Ranks whose copies of a tensor differ are named."""

import re

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.spawn import run_ranks
from utils.ranks.config import Axes
from utils.ranks.replicas import require_same_replicas
from utils.ranks.setup import connect_devices
from utils.ranks.world import World


def _said(tensors: dict[str, torch.Tensor], world: World) -> str:
    try:
        require_same_replicas(tensors, 7, world, "check_replicas_every_n_steps=null")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("size", "wrong", "expected"),
    [
        (2, [], ""),
        (3, [1], r"rank 1 \(process \d+ on .*\) differs"),
        (2, [1], "rank 0 .*, rank 1 .* differ from one"),
    ],
)
def test_a_rank_whose_bits_differ_is_named(size: int, wrong: list[int], expected: str) -> None:
    for said in run_ranks(_one_bit_flipped, size, wrong):
        assert re.match(expected, said) if expected else not said
        assert not expected or ("blocks.0 at step 7" in said and "check_replicas_every_n_steps=null" in said)


def _one_bit_flipped(world: World, wrong: list[int]) -> str:
    tensors = {
        "blocks.0": torch.arange(12.0).view(3, 4).T,  # not contiguous
        "state": torch.ones(5, dtype=torch.bfloat16),
        "steps": torch.arange(3),
        "halted": torch.tensor([True, False]),
        "nan": torch.full((2,), float("nan")),  # the comparison is of bits, so that NaN equals NaN
    }
    if world.rank in wrong:
        bits = tensors["blocks.0"].view(torch.int32)
        bits[1, 1] ^= 1  # the last bit of the mantissa
    return _said(tensors, world)


def test_shards_may_differ_but_copies_of_a_shard_may_not() -> None:
    for number, said in enumerate(run_ranks(_parts, 4)):
        quiet, broken = said
        assert not quiet, f"rank {number}: {quiet}"
        assert re.match(r"rank 0 \(.*\), rank 2 \(.*\) differ from one another in split", broken)


def _parts(world: World) -> tuple[str, str]:
    world = connect_devices(world, "cpu", axes=Axes(replicate=2, shard=2))
    assert world.mesh is not None
    mesh = world.mesh["replicate", "shard"]
    shard = world.rank % 2
    own = torch.full((2, 3), float(shard))
    tensors = {"whole": torch.ones(3), "split": DTensor.from_local(own, mesh, [Replicate(), Shard(0)], run_check=False)}
    quiet = _said(tensors, world)
    if world.rank == 2:
        own[0, 0] += 1
    return quiet, _said(tensors, world)
