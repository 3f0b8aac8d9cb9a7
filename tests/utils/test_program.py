"""The shell of all programs: what it says before the ranks have met, and how it ends."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import Ended, command
from tests.spawn import free_port
from utils.ranks.launch import without_launcher

pytestmark = pytest.mark.launch


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Return a function that runs a program with variables and arguments."""
    (tmp_path / "program.py").write_text("from utils.program import run; run(lambda world: print(world.size))")

    def run(variables: dict[str, str], argument: str = "") -> Ended:
        names = " ".join(f"{name}={value}" for name, value in variables.items())
        return command(f"{names} python program.py {argument}", tmp_path)

    return run


def test_a_missing_rank_is_one_line(run: Callable[..., Ended]) -> None:
    """A traceback would be of the wait."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for rank, expected in ((0, "rank 1 of 2 did not come within 1 s"), (1, "rank 0 does not answer at localhost:")):
        done = run(place | {"RANK": str(rank)}, "dist.start_timeout_s=1")
        assert done.status == 1 and done.stderr.startswith(f"fault on rank {rank}: {expected}"), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_mistake_in_the_environment_is_said_by_the_first_rank_alone(run: Callable[..., Ended]) -> None:
    for rank in range(2):
        done = run({"RANK": str(rank), "WORLD_SIZE": "2"})
        assert done.status == 2
        assert ("error: there are 2 ranks, but nothing says where they meet" in done.stderr) == (rank == 0)
    done = run({"RANK": "1", "WORLD_SIZE": "2"}, "dist.launcher=single")
    assert (done.status, done.stdout) == (0, "1\n"), done.stderr


# The last collective ends after Python's finalization has begun: gloo's thread waits for Python's
# lock, which the main thread does not give back before.
_LATE = """
import atexit, sys, time
steps = []
atexit.register(lambda: steps[0]())  # before torch registers its own, so that it runs last
import torch
import torch.distributed as dist
from utils.program import run

def main(world):
    group = dist.new_group(backend="gloo")

    def end():
        sys.setswitchinterval(100)
        group.allreduce([torch.ones(3)])
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        print("all functions of atexit ran")

    steps.append(end)

run(main)
"""


def test_a_thread_of_gloo_that_still_needs_python_does_not_abort_the_end() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environment = without_launcher(os.environ) | place
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _LATE],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        output, _ = process.communicate(timeout=120)
        assert (process.returncode, output) == (0, "all functions of atexit ran\n"), f"rank {rank}:\n{output}"
