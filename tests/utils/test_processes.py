"""A program ends when its parent is killed, by the signal that it was started with."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.runs import REPOSITORY

# A parent that starts a child, and tells its number. The child notes SIGTERM.
PARENT = """
import signal, subprocess, sys, time
from utils.processes import ending_with_parent
child = "import pathlib, signal, sys, time\\n"
child += "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit()))\\n"
child += "print('ready', flush=True)\\n"
child += "time.sleep(600)"
process = subprocess.Popen(
    [sys.executable, "-c", child, sys.argv[1]], stdout=subprocess.PIPE,
    preexec_fn=ending_with_parent(signal.Signals[sys.argv[2]]),
)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a program that its parent is gone")
@pytest.mark.parametrize(("name", "may_save"), [("SIGTERM", True), ("SIGKILL", False)])
def test_a_program_ends_with_its_killed_parent(name: str, may_save: bool, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "saved"), name], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    try:
        child.wait(60)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    assert (tmp_path / "saved").exists() == may_save
