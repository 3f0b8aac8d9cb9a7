"""torchrun restarts its workers. What earlier attempts left in its store misleads no rank."""

from pathlib import Path

import pytest

from tests import runs
from tests.runs import Torchrun, assert_same_run, latest, settings, until
from tests.spawn import free_port

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_torchrun_restarts_a_killed_run(data: Path, quiet_2: Path, tmp_path: Path, log: Path, rendezvous: str) -> None:
    """Each rank is killed once. The restarts find the folder that the first attempt named."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job 7"]
    if rendezvous == "static":
        where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launched = Torchrun(["--max-restarts", "2", *where], runs.slowly, settings(data, None), log, tmp_path)

    def step() -> int:
        return max(map(latest, (tmp_path / "checkpoints" / "debug").glob("[!.]*")), default=0)

    try:
        for worker, at_step in ((0, 2), (1, 6)):
            until(lambda at_step=at_step: step() >= at_step, launched, timeout_s=60)  # type: ignore[misc]
            launched.workers()[worker].kill()
        output = launched.wait(60).ok()
    finally:
        launched.kill()
    (run,) = (tmp_path / "checkpoints" / "debug").glob("[!.]*")
    assert output.count("resuming ") == 2 and run.name in output
    assert_same_run(run, quiet_2)


def test_a_refused_launch_is_refused_again_after_its_restart(
    data: Path, copied: Path, tmp_path: Path, log: Path
) -> None:
    """A restart resumes only a run that its own launch began, not any run in the folder."""
    runs.rewind(copied, 4)
    launched = Torchrun(["--standalone", "--max-restarts", "1"], runs.slowly, settings(data, copied), log, tmp_path)
    try:
        done = launched.wait(60)
    finally:
        launched.kill()
    # Once in each of two attempts.
    assert done.status == 1 and done.output.count("already holds checkpoints (newest step_00000004)") == 2, done.output
    assert latest(copied) == 4 and "resuming" not in done.output
