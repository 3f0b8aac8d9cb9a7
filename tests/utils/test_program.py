"""The shell of all programs: what it says before the ranks have met."""

import os
import subprocess
import sys

import pytest

from tests.spawn import free_port
from utils.dist.launch import without_launcher

pytestmark = pytest.mark.launch

_PROGRAM = [sys.executable, "-c", "from utils.program import run; run(lambda world: print(world.size))"]


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_PROGRAM, *arguments],
        env=without_launcher(os.environ) | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_missing_rank_is_one_line() -> None:
    """A traceback would be of the wait."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for rank, expected in ((0, "rank 1 of 2 did not come within 1 s"), (1, "rank 0 does not answer at localhost:")):
        done = _run(place | {"RANK": str(rank)}, "dist.start_timeout_s=1")
        assert done.returncode == 1 and done.stderr.startswith(f"fault on rank {rank}: {expected}"), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_mistake_in_the_environment_is_said_by_the_first_rank_alone() -> None:
    for rank in range(2):
        done = _run({"RANK": str(rank), "WORLD_SIZE": "2"})
        assert done.returncode == 2
        assert ("error: there are 2 ranks, but nothing says where they meet" in done.stderr) == (rank == 0)


def test_launcher_single_ignores_the_environment() -> None:
    done = _run({"RANK": "1", "WORLD_SIZE": "2"}, "dist.launcher=single")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
