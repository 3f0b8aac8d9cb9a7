"""Run the commands of docs/launching.md as written, with real launchers.

The test appends options that make them small. Each command for 8 ranks starts 2, and the hosts of a
launch are this machine. Commands of Slurm and Ray have their own groups of tests, which need those
engines.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.pages import blocks, commands
from tests.runs import REPOSITORY, Torchrun, rows
from tests.spawn import free_port
from utils.ranks.launch import without_launcher

COMMANDS = commands("docs/launching.md")
TINY = "debug=tiny device=cpu max_steps=5 log_interval=1 eval_every_n_steps=null best_metric=null"


def _launches() -> list[list[str]]:
    """Return the commands that belong together, one for each host."""
    launches: list[list[str]] = []
    for command in COMMANDS:
        if not command.startswith(("torchrun", "RANK=")):
            continue
        if "--node-rank 1" in command or command.startswith("RANK=1"):
            launches[-1].append(command)
        else:
            launches.append([command] * (2 if "--rdzv-endpoint" in command else 1))
    return launches


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return without_launcher(os.environ) | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def _made_small(command: str, num_hosts: int, port: int, data: Path, run: Path) -> str:
    ranks = 2 // num_hosts
    command = command.replace("--nproc-per-node 8", f"--nproc-per-node {ranks}").replace("node1", "localhost")
    command = re.sub(r"(localhost:|--master-port )\d+", rf"\g<1>{port}", command)
    if command.startswith("torchrun") and not re.search("--master-port|rdzv|--standalone", command):
        command = command.replace("torchrun ", f"torchrun --master-port {port} ")
    return f"{command} {TINY} checkpoint_path={run}".replace("data_path=data/sudoku-6x6", f"data_path={data}")


def _start(command: str, log: Path) -> Any:
    """Start the command of a host: with torchrun's own agent, but forked, which saves imports."""
    words = shlex.split(command)
    place = words.index("pretrain.py")
    if words[0] == "torchrun":
        return Torchrun(words[1:place], _undisturbed, words[place + 1 :], log, REPOSITORY).process
    names = dict(word.split("=", 1) for word in words[: place - 1])
    return runs.fork(runs._child, "pretrain", words[place + 1 :], str(log), names, None)


def _undisturbed(rank: int) -> None:
    pass


@pytest.mark.launch
@pytest.mark.parametrize("commands", _launches(), ids=lambda commands: commands[0][:60])
def test_launch(commands: list[str], data: Path, tmp_path: Path) -> None:
    port, run = free_port(), tmp_path / "run"
    logs = [tmp_path / f"log_{number}" for number in range(len(commands))]
    hosts = [
        _start(_made_small(command, len(commands), port, data, run), log)
        for command, log in zip(commands, logs, strict=True)
    ]
    for host in hosts:
        host.join(120)
    statuses = [host.exitcode for host in hosts]
    for host in hosts:
        host.kill()
    said = "".join(log.read_text() for log in logs)
    assert statuses == [0] * len(commands), said
    assert "ranks: 2, as told by " in said and said.count("steps of 16 sequences") == 1, "one training of two ranks"
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5]


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [command for command in COMMANDS if "launch.ray_train" in command])
def test_ray_command(command: str, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (requirements-ray.txt)")
    small = command.replace("data_path=data/sudoku-6x6", f"data_path={data}")
    small += f" ray.address=local ray.storage={tmp_path}/ray {TINY} checkpoint_path={tmp_path}/run"
    done = subprocess.run(
        ["bash", "-c", small], cwd=REPOSITORY, env=_environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "ranks: 2, as told by RANK and WORLD_SIZE" in done.stderr
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_ray_program(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (requirements-ray.txt)")
    (program,) = blocks(REPOSITORY / "docs/launching.md", "python")
    tiny = ["debug=tiny", "device=cpu", "eval_every_n_steps=2", "best_metric=null"]
    for written, small in (
        ('"/path/to/the/project"', repr(str(REPOSITORY))),
        ("ray.init(", 'ray.init(address="local", '),
        ("range(100)", "range(3)"),
        ("/data/sudoku-6x6", str(data)),
        ("/runs/mine", str(tmp_path / "run")),
        ("overrides = [", f"overrides = [*{tiny}, "),
    ):
        assert program.count(written) == 1, f"{written} is to be replaced"
        program = program.replace(written, small)
    program += "print(row['step'], metrics['step'], len(states), folder)\n"
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "3", "2", str(tmp_path / "run" / "step_00000003")]
