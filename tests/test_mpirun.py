"""mpirun starts one training, whose ranks find one another without torchrun."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.runs import assert_same_run, latest, settings, until
from utils.ranks.launch import without_launcher

pytestmark = [pytest.mark.launch, pytest.mark.slow]

OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
MPICH = ["mpirun.mpich", "-n", "2"]
# Each step takes a moment, so that a rank can be killed between two steps.
_SLOWLY = "import runpy; from tests import runs; runs.slowly(0); runpy.run_path('pretrain.py', run_name='__main__')"


class Mpirun:
    """mpirun with a Python program on 2 ranks."""

    def __init__(self, launcher: list[str], words: list[str], log: Path) -> None:
        if shutil.which(launcher[0]) is None:
            pytest.skip(f"there is no {launcher[0]} here")
        self._log = log
        with open(log, "w") as output:
            self.process = subprocess.Popen(
                [*launcher, sys.executable, *words],
                cwd=runs.REPOSITORY,
                env=without_launcher(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        """Return the Python processes, in no order."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if "python" in process.name()]

    def wait(self) -> int:
        try:
            return self.process.wait(120)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.alive:
            own = psutil.Process(self.process.pid)
            for process in [*own.children(recursive=True), own]:
                process.kill()


def test_open_mpi_goes_on_after_a_killed_rank(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    arguments = [*settings(data, run), "resume=auto"]
    first = Mpirun(OPEN_MPI, ["-c", _SLOWLY, *arguments], log)
    try:
        until(lambda: latest(run) >= 4, first, timeout_s=120)
        first.ranks()[0].send_signal(signal.SIGKILL)
        assert first.wait() != 0, "a killed rank must end the launch"
    finally:
        first.kill()
    assert latest(run) < runs.LAST_STEP
    again = Mpirun(OPEN_MPI, ["pretrain.py", *arguments], log)
    assert again.wait() == 0, again.output
    assert "ranks: 2, as told by mpi, met at 127.0.0.1:" in again.output and "resuming " in again.output
    assert_same_run(run, quiet_2)


def test_mpich_starts_one_training(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    launched = Mpirun(MPICH, ["pretrain.py", *settings(data, tmp_path / "run")], log)
    assert launched.wait() == 0, launched.output
    assert_same_run(tmp_path / "run", quiet_2)
