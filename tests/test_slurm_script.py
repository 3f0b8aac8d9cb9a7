"""launch/slurm.sbatch without Slurm, whose place programs take that note their arguments."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import REPOSITORY

SCRIPT = REPOSITORY / "launch/slurm.sbatch"
# srun notes its arguments and environment, one for each line. Then it does what a test asks for.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > srun.arguments
env > srun.environment
{does}
"""
NOTES = '#!/bin/bash\nprintf "%s\\n" "$*" >> {name}.arguments\n{does}\n'
SAVES = "mkdir -p run; echo step_00000004 > run/latest"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pretrain.py").touch()
    (tmp_path / "bin").mkdir()
    _program(tmp_path, "scontrol", NOTES.format(name="scontrol", does='[ "$1" = show ] && printf "n1\\nn2\\n"; true'))
    return tmp_path


def _program(folder: Path, name: str, text: str) -> None:
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def _start(folder: Path, does: str, *overrides: str, **variables: str) -> subprocess.Popen[str]:
    _program(folder, "srun", SRUN.format(does=does))
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHON": "true", "SLURM_JOB_ID": "31017"}
    environment |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *overrides],
        cwd=folder,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _ended(started: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Return the exit status of the script, and what it asked of scontrol."""
    started.communicate(timeout=60)
    asked = folder / "scontrol.arguments"
    return started.returncode, asked.read_text() if asked.exists() else ""


def _lines(folder: Path, name: str) -> list[str]:
    return (folder / f"srun.{name}").read_text().splitlines()


def test_shellcheck_finds_nothing() -> None:
    program = Path(sys.executable).parent / "shellcheck"
    checked = subprocess.run([program, SCRIPT], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_srun_gets_the_overrides_as_they_were_typed(folder: Path) -> None:
    overrides = ["run_name='a  b'", "data_paths=[a, b]", "optim={name: muon}", "wandb.name=$HOME*"]
    variables = {"SLURM_CPUS_PER_TASK": "7"}
    assert _ended(_start(folder, "", *overrides, "checkpoint_path=run", **variables), folder) == (0, "")
    first, rest = ["--kill-on-bad-exit=1", "true", "pretrain.py", *overrides], ["resume=auto"]
    assert _lines(folder, "arguments") == [*first, "checkpoint_path=run", *rest]
    assert {"OMP_NUM_THREADS=7", "SRUN_CPUS_PER_TASK=7"} <= {*_lines(folder, "environment")}
    _ended(_start(folder, "", *overrides), folder)
    assert _lines(folder, "arguments") == [*first, "checkpoint_path=checkpoints/slurm/31017", *rest]
    (folder / "pretrain.py").unlink()
    told, _ = _start(folder, "").communicate(timeout=60)
    assert told.startswith("error: there is no pretrain.py in ") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "threads"),
    [({"SLURM_GPUS_ON_NODE": "4"}, 2), ({"SLURM_GPUS_ON_NODE": "8", "RANKS_PER_NODE": "4", "OMP_NUM_THREADS": "5"}, 5)],
)
def test_torchrun_starts_once_on_each_node(folder: Path, variables: dict[str, str], threads: int) -> None:
    variables |= {"LAUNCHER": "torchrun", "SLURM_CPUS_PER_TASK": "8", "SLURM_NODEID": "1", "PYTHON": "echo"}
    started = _start(folder, '"${@:4}"', "checkpoint_path=run", **variables)
    told, _ = started.communicate(timeout=60)
    assert _lines(folder, "arguments")[:3] == ["--kill-on-bad-exit=1", "--ntasks=2", "--ntasks-per-node=1"]
    expected = (
        "-m torch.distributed.run --node-rank=1 --nnodes=2 --nproc-per-node=4 --master-addr=n1 --master-port=21017"
    )
    assert f"{expected} pretrain.py checkpoint_path=run resume=auto\n" in told
    assert f"OMP_NUM_THREADS={threads}" in _lines(folder, "environment")


def test_a_run_that_began_elsewhere_goes_on_from_its_own_checkpoint(folder: Path) -> None:
    _ended(_start(folder, "", "checkpoint_path=run", "resume=other/step_00000002"), folder)
    assert _lines(folder, "arguments")[-1] == "resume=other/step_00000002"
    _ended(_start(folder, SAVES, "checkpoint_path=run"), folder)
    _ended(_start(folder, "", "checkpoint_path=run", "resume=other/step_00000002"), folder)
    assert _lines(folder, "arguments")[-1] == "resume=auto"


@pytest.mark.parametrize(
    ("does", "status", "asked"),
    [
        ("exit 0", 0, ""),
        ("touch run/stopped; exit 0", 0, ""),  # somebody else has stopped the run
        ("exit 137", 0, "requeue 31017\n"),
        ("exit 1", 0, "requeue 31017\n"),
        ("exit 2", 2, ""),  # a mistake
        ("rm run/latest; exit 137", 137, ""),  # the next attempt would fail at the same place
    ],
)
def test_a_job_goes_back_into_the_queue_only_if_it_came_further(
    folder: Path, does: str, status: int, asked: str
) -> None:
    assert _ended(_start(folder, f"{SAVES}; {does}", "checkpoint_path=run"), folder) == (status, asked)


@pytest.mark.parametrize(
    ("does", "status", "asked"),
    [
        (f"{SAVES}; touch run/stopped; exit 0", 0, "requeue 31017\n"),
        (f"{SAVES}; touch run/stopped; exit 1", 0, "requeue 31017\n"),  # torchrun, in some versions
        (f"{SAVES}; exit 0", 0, ""),  # the run finished before it could stop
        ("exit 7", 7, ""),
    ],
)
def test_the_warning_reaches_srun_whose_status_counts(folder: Path, does: str, status: int, asked: str) -> None:
    (folder / "run").mkdir()
    (folder / "run/stopped").touch()  # of an earlier attempt
    waits = f"trap 'sleep 0.3; {does}' USR1; touch begun; while true; do sleep 0.05; done"
    started = _start(folder, waits, "checkpoint_path='run'")
    while not (folder / "begun").exists():
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGUSR1)
    assert _ended(started, folder) == (status, asked)
