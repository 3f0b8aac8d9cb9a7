"""World: messages between ranks, on real gloo processes."""

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.spawn import run_ranks
from tests.utils.ranks.helpers import dist_config
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.setup import connect_devices
from utils.ranks.world import Place, World, shares

SIZES = [1, 2, 4]


def _collectives(world: World) -> None:
    rank, size = world.rank, world.size
    ranks = torch.arange(size)
    rows = torch.tensor([[rank, 10 * rank], [rank, -rank]])
    expected = torch.cat([torch.tensor([[r, 10 * r], [r, -r]]) for r in range(size)])
    torch.testing.assert_close(world.gather_rows(rows), expected, rtol=0, atol=0)
    # A transposed view has the same rows, but gloo needs contiguous memory.
    torch.testing.assert_close(world.gather_rows(rows.T.contiguous().T), expected, rtol=0, atol=0)
    assert world.gather_rows(rows > 0).dtype == torch.bool

    total = world.sum_(torch.tensor([1.0, float(rank)], dtype=torch.float64))
    assert total.tolist() == [size, float(ranks.sum())]

    ours = [("three", torch.full((3,), float(rank))), ("one", torch.tensor(rank))]
    given = [(name, tensor.tolist()) for name, tensor in world.one_by_one(ours)]
    assert given == [("three", [0, 0, 0]), ("one", 0)]

    assert world.broadcast_object({"rank": rank}) == {"rank": 0}
    assert world.from_main(lambda: rank + 7) == 7
    assert world.gather_objects(f"rank {rank}") == [f"rank {r}" for r in range(size)]
    assert not world.any(False)
    assert world.any(rank == size - 1)


@pytest.mark.parametrize("world_size", SIZES)
def test_collectives(world_size: int) -> None:
    run_ranks(_collectives, world_size)


@given(
    num_slots=st.integers(0, 1000),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=9)
    | st.builds(lambda weight, size: [weight] * size, st.sampled_from([0.3, 1.0]), st.integers(1, 16)),
)
def test_shares_cover_every_slot_once_in_proportion(num_slots: int, weights: list[float]) -> None:
    parts = shares(tuple(map(Fraction, weights)), num_slots)
    assert [slot for part in parts for slot in range(num_slots)[part]] == list(range(num_slots))
    for part, weight in zip(parts, weights, strict=True):
        assert abs((part.stop - part.start) - num_slots * weight / sum(weights)) <= 1 + 1e-9
    if len({*weights}) == 1:
        sizes = [part.stop - part.start for part in parts]
        assert max(sizes) - min(sizes) <= 1


def _uneven(world: World) -> list[list[int]]:
    world = connect_devices(world, "cpu", dist_config(rank_weights=[3.0, 1.0, 2.0, 1.0][: world.size]))
    mine = torch.arange(10)[world.slice_of(10)]
    torch.testing.assert_close(world.gather_rows(mine, 10), torch.arange(10), rtol=0, atol=0)
    rows = torch.stack([mine, -mine], 1).bfloat16()
    torch.testing.assert_close(world.gather_rows(rows, 10)[:, 1], -torch.arange(10).bfloat16(), rtol=0, atol=0)
    return [mine.tolist()]


def test_shares_in_proportion_are_gathered_in_the_order_of_slots() -> None:
    assert [len(mine[0]) for mine in run_ranks(_uneven, 4)] == [4, 1, 3, 2]


def _axes(world: World) -> tuple[int, list[int], int, list[int] | None, list[list[int]]]:
    config = dist_config(rank_weights=[2.0, 1.0])
    world = connect_devices(world, "cpu", config, axes=Axes(replicate=1, shard=2, model=2))
    assert world.mesh is not None and world.mesh.mesh_dim_names == ("replicate", "shard", "model")
    shape = [world.mesh[name].mesh.tolist() for name in ("replicate", "shard", "model")]
    total = world.sum_(torch.tensor(10**world.rank))
    return world.data_rank, list(range(6))[world.slice_of(6)], int(total), world.gather_to_main(world.rank), shape


def test_ranks_of_one_model_hold_the_same_slots() -> None:
    """Sums and gathered slots count each share once, although several ranks compute it."""
    assert run_ranks(_axes, 4) == [
        (0, [0, 1, 2, 3], 101, [0, 2], [[0], [0, 2], [0, 1]]),
        (0, [0, 1, 2, 3], 1010, None, [[1], [1, 3], [0, 1]]),
        (1, [4, 5], 101, None, [[2], [0, 2], [2, 3]]),
        (1, [4, 5], 1010, None, [[3], [1, 3], [2, 3]]),
    ]


def _agreement(world: World) -> list[str]:
    said = []
    mistakes: list[dict[int, Exception]] = [
        {1: UserError("a value\nover two lines; mend it")},
        {0: UserError("No space left on device"), 1: UserError("the second to fail is not heard")},
        {1: UserError()},
        {},
    ]
    for mistake in mistakes:
        try:
            with world.shared_errors():
                if world.rank in mistake:
                    raise mistake[world.rank]
            said.append("")
        except UserError as error:
            said.append(str(error))
            assert (error.__cause__ is not None) == (world.rank in mistake)
    return said


def test_all_ranks_raise_the_mistake_of_one_rank() -> None:
    expected = ["a value over two lines; mend it", "No space left on device", "UserError", ""]
    assert run_ranks(_agreement, 2) == [expected, expected]
    with pytest.raises(KeyError, match="ours"), World.single().shared_errors():
        raise KeyError("ours")


def test_a_process_counts_as_gone_only_if_it_can_be_seen_from_here() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        place = replace(Place.here(), pid=process.pid)
    assert place.is_gone and not Place.here().is_gone and not replace(place, pid=1).is_gone
    another = replace(place, host="another")
    assert not another.is_gone
    bound = replace(place, cores=frozenset({10_000}))
    assert World(size=4, places=(place, place, another, bound)).ranks_on_my_cores == 2
    assert not replace(place, pid_namespace="of a container").is_gone
