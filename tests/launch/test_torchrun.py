"""The exit status tells a mistake from a fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import REPOSITORY
from utils.ranks.launch import without_launcher


@pytest.mark.launch
@pytest.mark.parametrize(
    ("program", "expected"),
    [("", 0), ("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 1)],
    ids=["done", "mistake", "killed"],
)
def test_the_status_of_a_rank(tmp_path: Path, program: str, expected: int) -> None:
    (tmp_path / "rank.py").write_text(f"import os, sys\n{program}\n")
    done = subprocess.run(
        [sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py")],
        cwd=REPOSITORY,
        env=without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == expected, done.stderr
    # A mistake was told by a rank, and the report would hide it.
    assert ("rank.py FAILED" in done.stderr) == (expected == 1)
