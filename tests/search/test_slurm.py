"""The launcher for Slurm, with programs in the place of Slurm's that note what they were asked."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from records.lock import RunLock
from search import slurm
from search.config import LauncherConfig
from search.launchers import SeedRun, command_line, runs_at_once
from search.slurm import SlurmLauncher
from tests.runs import REPOSITORY
from utils.errors import UserError

PROGRAMS = {
    "sbatch": 'echo "$@" >> {0}/sbatch; env > {0}/environment; for last; do :; done; cp "$last" {0}/script; echo 77',
    "squeue": "cat {0}/queue",
    "scancel": 'echo "$@" >> {0}/scancel',
    "scontrol": 'echo "$@" >> {0}/scontrol',
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


def _program(folder: Path, name: str, does: str) -> None:
    (folder / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
    (folder / "bin" / name).chmod(0o755)


def _runs(folder: Path, number: int) -> list[SeedRun]:
    sweep = folder / "my_sweep"
    return [
        SeedRun([f"lr={index}"], sweep / f"trial_{index}", sweep / f"logs/trial_{index}.log") for index in range(number)
    ]


def _started(launcher: SlurmLauncher, *runs: SeedRun) -> list[int | None]:
    """Start runs, and return their exit statuses."""
    launcher.start([*runs])
    return [run.job.poll() for run in runs if run.job is not None]


def _queue(folder: Path, *states: str) -> None:
    (folder / "queue").write_text("".join(f"77_{index} {state}\n" for index, state in enumerate(states)))


def _num_submitted(folder: Path) -> int:
    return len((folder / "sbatch").read_text().splitlines())


def test_runs_that_start_together_are_one_array(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")  # the sweep itself may run in a job
    monkeypatch.setenv("SLURM_CONF", "here")
    options = {"time": 120, "partition": "gpu", "gpus_per_node": 2, "nodes": 2, "exclusive": True}
    SlurmLauncher(_config(ranks=4, slurm=options)).start(_runs(folder, 3))
    assert _num_submitted(folder) == 1
    assert set((folder / "sbatch").read_text().split()) > {
        *("--array=0-2", "--time=120", "--partition=gpu", "--gpus-per-node=2", "--nodes=2", "--exclusive"),
        *("--ntasks-per-node=2", "--cpus-per-task=2", "--signal=B:USR1@120", "--job-name=my_sweep", "--requeue"),
    }
    environment = (folder / "environment").read_text().splitlines()
    assert "SLURM_CONF=here" in environment and "SLURM_RESTART_COUNT=3" not in environment
    notes = [(folder / f"my_sweep/logs/trial_{index}.job").read_text() for index in range(3)]
    assert notes == ["77_0\n", "77_1\n", "77_2\n"]


def test_a_later_process_finds_the_jobs_that_have_not_ended(folder: Path) -> None:
    runs = _runs(folder, 3)
    SlurmLauncher(_config()).start(runs)
    _queue(folder, "RUNNING", "COMPLETED", "PENDING")
    later = SlurmLauncher(_config())
    assert _started(later, runs[0], runs[2]) == [None, None] and _num_submitted(folder) == 1
    later.start([runs[1]])
    assert _num_submitted(folder) == 2
    runs[0].log.with_suffix(".status").write_text("1\n")
    assert _started(later, runs[0]) == [None] and _num_submitted(folder) == 3, "its job ends, whatever squeue says yet"


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


def test_a_job_without_a_status_was_ended_by_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_STATUS_WITHIN_S", 0.1)
    (run,) = _runs(folder, 1)
    _queue(folder, "OUT_OF_MEMORY")
    assert _started(SlurmLauncher(_config()), run) == [None], "the status may still be on its way"
    time.sleep(0.2)
    assert run.job is not None and run.job.poll() == 1
    assert run.log.read_text() == "error: job 77_0 of Slurm ended as OUT_OF_MEMORY\n"


def test_a_stop_takes_a_waiting_job_away_and_signals_a_running_one(folder: Path) -> None:
    (run,) = _runs(folder, 1)
    SlurmLauncher(_config()).start([run])
    assert run.job is not None
    run.job.terminate()
    run.job.kill()
    assert (folder / "scancel").read_text().splitlines() == [
        "--quiet --state=PENDING 77_0",
        "--quiet --signal=TERM 77_0",
        "--quiet 77_0",
    ]


def test_a_refusing_or_silent_slurm_is_one_line_and_later_no_end(folder: Path) -> None:
    run, other = _runs(folder, 2)
    SlurmLauncher(_config()).start([run])
    assert run.job is not None
    _program(folder, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(UserError, match=r"^sbatch refuses the runs \(error: invalid partition specified: gpu\)"):
        SlurmLauncher(_config()).start([other])
    _program(folder, "squeue", "echo down >&2; exit 1")
    with pytest.raises(UserError, match=r"squeue fails \(down\)"):
        run.job.poll()
    for does in ("echo 77_0 RUNNING", "exit 1"):
        _program(folder, "squeue", does)
        assert run.job.poll() is None


def test_without_slurm_the_command_line_is_shown_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = _config(ranks=2)
    assert runs_at_once(config) == 8
    assert command_line(config, ["a='b c'"]) == (
        "OMP_NUM_THREADS=2 srun --nodes=1 --time=120 --partition=gpu --ntasks-per-node=2 --cpus-per-task=2 "
        "python pretrain.py \"a='b c'\""
    )
    with pytest.raises(UserError, match="there is no sbatch here"):
        SlurmLauncher(config)


# What srun does in the place of a run. It notes its arguments, and a signal stops it.
RUN = """
printf '%s\\n' "$@" OMP_NUM_THREADS=$OMP_NUM_THREADS > {0}/asked
stop() {{ sleep 0.2; touch {0}/my_sweep/trial_1/stopped; exit 0; }}
trap stop USR1
echo begun
while [ "$wait" ]; do sleep 0.05; done
exit 5
"""


@pytest.mark.parametrize("is_warned", [False, True])
def test_a_job_runs_its_trial_and_goes_back_into_the_queue_at_its_limit(folder: Path, is_warned: bool) -> None:
    runs = _runs(folder, 2)
    runs[1].arguments.append("run_name='a b'")
    runs[1].folder.mkdir()
    SlurmLauncher(_config()).start(runs)
    _program(folder, "srun", RUN.format(folder))
    variables = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "78", "wait": "1" if is_warned else ""}
    job = subprocess.Popen(["bash", folder / "script"], env={**os.environ, **variables})
    while not runs[1].log.exists() or not runs[1].log.read_text():
        assert job.poll() in (None, 0)
        time.sleep(0.01)
    if is_warned:
        job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 0 and runs[1].log.read_text() == "begun\n"
    pretrain = [sys.executable, str(REPOSITORY / "pretrain.py")]
    asked = ["--kill-on-bad-exit=1", *pretrain, "lr=1", "run_name='a b'", "OMP_NUM_THREADS=2"]
    assert (folder / "asked").read_text().splitlines() == asked
    requeued = (folder / "scontrol").read_text() if is_warned else None
    assert runs[1].job is not None and not runs[0].log.exists()
    assert (runs[1].job.poll(), requeued) == ((None, "requeue 78\n") if is_warned else (5, None))
