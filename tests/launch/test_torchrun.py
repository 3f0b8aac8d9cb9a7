"""The exit status tells a mistake from a fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import REPOSITORY
from utils.ranks.launch import without_launcher


@pytest.mark.launch
@pytest.mark.parametrize("options", [[], ["--start-method=fork"]], ids=["processes", "forks"])
@pytest.mark.parametrize(
    ("program", "expected"),
    [("", 0), ("os._exit(0)", 0), ("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 1)],
    ids=["done", "left", "mistake", "killed"],
)
def test_the_status_of_a_rank(tmp_path: Path, program: str, expected: int, options: list[str]) -> None:
    (tmp_path / "rank.py").write_text(f"import os, sys\nif __name__ == '__main__':\n    0\n    {program}\n")
    words = ["--standalone", "--nproc-per-node=2", *options, str(tmp_path / "rank.py")]
    done = subprocess.run(
        [sys.executable, "-m", "launch.torchrun", *words],
        cwd=REPOSITORY,
        env=without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == expected, done.stderr
    # A mistake was told by a rank, and the report would hide it.
    assert ("FAILED" in done.stderr) == (expected == 1)
