"""The shell of all programs: its report of a fault."""

import os
import subprocess
import sys


def test_a_fault_before_the_ranks_meet_names_its_rank() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "no port"}
    code = "from utils.program import run; run(lambda world: None)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | place, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "fault on rank 1: ValueError" in done.stderr, done.stderr
