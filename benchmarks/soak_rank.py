"""pretrain.py for benchmarks/soak.py: with steps of a given length, on a disk that may be slow."""

import os
import time
from pathlib import Path
from typing import Any

import pretrain
from tests import runs
from utils.program import run

SLOW_S = 0.5  # that a slow disk takes for each file


def _disturbed(step_s: float, slow: Path) -> None:
    runs.before_step(lambda _: time.sleep(step_s))
    fsync = os.fsync

    def slow_fsync(fd: Any) -> None:
        if slow.exists():
            time.sleep(SLOW_S)
        fsync(fd)

    os.fsync = slow_fsync


if __name__ == "__main__":
    _disturbed(float(os.environ["SOAK_STEP_S"]), Path(os.environ["SOAK_SLOW"]))
    run(pretrain.main)
