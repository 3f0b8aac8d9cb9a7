"""The launcher for Slurm, with programs in the place of Slurm's that note what they were asked."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submitit.core.utils import cloudpickle_dump

from records.lock import RunLock
from search import slurm
from search.config import LauncherConfig
from search.launchers import Job, SeedRun, command_line, runs_at_once
from search.slurm import SlurmLauncher
from tests.runs import REPOSITORY
from utils.errors import UserError

PROGRAMS = {
    "sbatch": 'cp "$1" {0}/submitted; env > {0}/environment; echo "$1" >> {0}/sbatch; echo Submitted batch job 77',
    "squeue": "cat {0}/queue",
    "scancel": 'echo "$@" >> {0}/scancel',
    "srun": "true",
}


def _config(**options: object) -> LauncherConfig:
    defaults: dict[str, object] = {"name": "slurm", "at_once": None, "threads": 2, "ranks": 1, "gpus": []}
    return LauncherConfig.model_validate(defaults | {"slurm": {"time": 120, "partition": "gpu"}} | options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with what Slurm was asked, and with the logs of a sweep."""
    (tmp_path / "bin").mkdir()
    for name, does in PROGRAMS.items():
        _program(tmp_path, name, does.format(tmp_path))
    (tmp_path / "queue").touch()
    (tmp_path / "my_sweep/logs").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "_ASK_EVERY_S", 0.0)
    return tmp_path


def _runs(folder: Path, number: int) -> list[SeedRun]:
    logs = [folder / f"my_sweep/logs/trial_{index}.log" for index in range(number)]
    return [SeedRun([f"lr={index}"], folder / log.stem, log) for index, log in enumerate(logs)]


def _jobs(launcher: SlurmLauncher, runs: list[SeedRun]) -> list[Job]:
    launcher.start(runs)
    return [run.job for run in runs if run.job is not None]


def _queue(folder: Path, *states: str) -> None:
    (folder / "queue").write_text("".join(f"77_{index} {state}\n" for index, state in enumerate(states)))


def _num_submitted(folder: Path) -> int:
    return len((folder / "sbatch").read_text().splitlines()) if (folder / "sbatch").exists() else 0


def test_runs_that_start_together_are_one_array(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")  # the sweep itself may run in a job
    monkeypatch.setenv("SLURM_CONF", "here")
    options = {"time": 120, "partition": "gpu", "gpus_per_node": 2, "nodes": 2, "exclusive": True}
    jobs = _jobs(SlurmLauncher(_config(ranks=4, slurm=options)), _runs(folder, 3))
    assert len(jobs) == 3 and _num_submitted(folder) == 1
    script = (folder / "submitted").read_text()
    asked = set(re.findall(r"^#SBATCH --(.*)$", script, flags=re.MULTILINE))
    assert asked > {
        *("array=0-2%3", "time=120", "partition=gpu", "gpus-per-node=2", "nodes=2", "exclusive"),
        *("ntasks-per-node=2", "cpus-per-task=2", "signal=USR2@120", "job-name=my_sweep", "open-mode=append"),
    }
    assert " --kill-on-bad-exit=1 " in script
    assert "export OMP_NUM_THREADS=2 " in script and f"export PYTHONPATH={REPOSITORY}" in script
    environment = (folder / "environment").read_text().splitlines()
    assert "SLURM_CONF=here" in environment and "SLURM_RESTART_COUNT=3" not in environment
    assert os.environ["SLURM_RESTART_COUNT"] == "3", "the sweep itself keeps its environment"
    notes = [(folder / f"my_sweep/logs/trial_{index}.job").read_text() for index in range(3)]
    assert notes == ["77_0\n", "77_1\n", "77_2\n"]


def test_a_later_process_finds_the_jobs_that_have_not_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_ASK_EVERY_S", 60.0)
    runs = _runs(folder, 3)
    SlurmLauncher(_config()).start(runs)
    _queue(folder, "RUNNING", "COMPLETED", "PENDING")
    later = SlurmLauncher(_config())
    jobs = _jobs(later, [runs[0], runs[2]])
    assert _num_submitted(folder) == 1 and [job.poll() for job in jobs] == [None, None]
    later.start([runs[1]])
    assert _num_submitted(folder) == 2
    assert not later.has_ended("77"), "a job that was submitted since squeue was asked is pending"


def test_a_run_in_use_starts_only_if_its_job_is_known(folder: Path) -> None:
    run, other = SeedRun([], folder, folder / "a.log"), SeedRun([], folder / "b", folder / "b.log")
    with RunLock() as lock:
        lock.take(folder, print)
        assert not SlurmLauncher(_config()).may_start(run)
        run.log.with_suffix(".job").write_text("77_0\n")
        assert not SlurmLauncher(_config()).may_start(run)
        _queue(folder, "RUNNING")
        assert SlurmLauncher(_config()).may_start(run)
    assert SlurmLauncher(_config()).may_start(other)


def test_the_status_is_that_of_the_run_unless_slurm_ended_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_RESULT_WITHIN_S", 0.1)
    _queue(folder, "RUNNING")
    one, other, third = _jobs(SlurmLauncher(_config()), runs := _runs(folder, 3))
    assert one.poll() is None
    (folder / "my_sweep/logs/slurm/77_0_0_result.pkl").parent.mkdir(exist_ok=True)
    cloudpickle_dump(("success", -9), folder / "my_sweep/logs/slurm/77_0_0_result.pkl")
    assert one.poll() == -9
    cloudpickle_dump(("error", "a traceback\nOSError: no space\n"), folder / "my_sweep/logs/slurm/77_2_0_result.pkl")
    assert third.poll() == 1 and runs[2].log.read_text() == "error: job 77_2 of Slurm failed: OSError: no space\n"
    _queue(folder, "COMPLETED", "OUT_OF_MEMORY")
    assert other.poll() is None, "the result may still be on its way"
    time.sleep(0.2)
    assert other.poll() == 1
    assert runs[1].log.read_text() == "error: job 77_1 of Slurm ended as OUT_OF_MEMORY\n"


def test_a_stop_takes_a_waiting_job_away_and_signals_a_running_one(folder: Path) -> None:
    (job,) = _jobs(SlurmLauncher(_config()), _runs(folder, 1))
    job.terminate()
    job.kill()
    assert (folder / "scancel").read_text().splitlines() == [
        "--quiet --state=PENDING 77",
        "--quiet --signal=TERM 77",
        "--quiet 77",
    ]


def _program(folder: Path, name: str, does: str) -> None:
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
    (folder / "bin" / name).chmod(0o755)


def test_a_refusing_or_silent_slurm_is_one_line_and_later_no_end(folder: Path) -> None:
    launcher = SlurmLauncher(_config())
    (job,) = _jobs(launcher, _runs(folder, 1))
    _program(folder, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(UserError, match=r"^sbatch refuses the runs \(error: invalid partition specified: gpu\)"):
        SlurmLauncher(_config()).start([SeedRun([], folder / "other", folder / "other.log")])
    _program(folder, "squeue", "echo down >&2; exit 1")
    with pytest.raises(UserError, match=r"squeue fails \(down\)"):
        job.poll()
    for does in ("echo 77 RUNNING", "exit 1"):
        _program(folder, "squeue", does)
        assert job.poll() is None


def test_without_slurm_the_command_line_is_shown_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = _config(ranks=2, slurm={"time": 120, "partition": "gpu", "exclusive": True})
    assert runs_at_once(config) == 8
    assert command_line(config, ["a='b c'"]) == (
        "OMP_NUM_THREADS=2 srun --nodes=1 --time=120 --partition=gpu --exclusive --ntasks-per-node=2 "
        "--cpus-per-task=2 python pretrain.py \"a='b c'\""
    )
    launcher = SlurmLauncher(config)
    launcher.start([])  # nothing is left to do
    with pytest.raises(UserError, match="there is no sbatch here"):
        launcher.start(_runs(tmp_path, 1))


# ---- what runs in the job ----------------------------------------------------------------------

# Takes the place of pretrain.py.
PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
os.kill(os.getpid(), signal.SIGUSR2)  # Slurm's warning reaches it too
print("begun", *sys.argv[1:], flush=True)
while "wait" in sys.argv:
    time.sleep(0.01)
sys.exit(5)
"""


# Does what submitit does in a job. submitit's handler of the warning calls `checkpoint`.
SUBMITIT = """
import signal, sys
from pathlib import Path
from search import slurm
folder = Path(sys.argv[1])
slurm.PRETRAIN = folder / "pretrain.py"
run = slurm.Run(sys.argv[2:], folder / "log")
def warned(*_):
    again = run.checkpoint()
    sys.exit(100 + run._status + len(again.function._arguments))
signal.signal(signal.SIGUSR2, warned)
sys.exit(run())
"""


def _task(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    (folder / "pretrain.py").write_text(PROGRAM)
    task = subprocess.Popen([sys.executable, "-c", SUBMITIT, str(folder), *arguments], cwd=REPOSITORY)
    while not (folder / "log").exists() or not (folder / "log").read_text():
        assert task.poll() in (None, 5)
        time.sleep(0.01)
    return task


def test_a_run_writes_its_log_and_a_signal_stops_it(tmp_path: Path) -> None:
    """After a warning before the time limit, the same is to start again."""
    for name, argument, number, status in (
        ("ends", "lr=1", None, 5),
        ("is stopped", "wait", signal.SIGTERM, 7),
        ("is warned", "wait", signal.SIGUSR2, 100 + 7 + 1),
    ):
        (tmp_path / name).mkdir()
        task = _task(tmp_path / name, argument)
        if number is not None:
            task.send_signal(number)
        assert task.wait(30) == status
        assert (tmp_path / name / "log").read_text() == f"begun {argument}\n"
