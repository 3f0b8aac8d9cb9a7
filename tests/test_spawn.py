"""run_ranks reports the failures of its ranks."""

import pytest

from tests.spawn import run_ranks
from utils.ranks.world import World


def _dies_or_waits(world: World) -> None:
    if world.rank == 1:
        raise RuntimeError("rank 1 gave up")
    world.barrier()


def test_helper_reports_the_rank_that_fails() -> None:
    with pytest.raises(AssertionError, match=r"rank [01]:"):
        run_ranks(_dies_or_waits, 2)
