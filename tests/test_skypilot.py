"""launch/skypilot.yaml has only the keys of SkyPilot's tasks, and its commands are bash.

SkyPilot itself is not installed for this: it pins packages that the tests need in other versions.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TASK: dict[str, Any] = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())


def test_it_starts_a_rank_for_each_gpu_and_resumes() -> None:
    assert set(TASK) <= {"name", "num_nodes", "resources", "volumes", "workdir", "envs", "setup", "run"}
    assert (ROOT / TASK["workdir"]).is_dir() and "requirements.txt" in TASK["setup"]
    assert TASK["envs"]["RUN"].startswith(tuple(TASK["volumes"])), "the run must outlive the machines"
    assert 75 in TASK["resources"]["job_recovery"]["recover_on_exit_codes"]


def _run(tmp_path: Path, *, status: int, stopped: bool, **environment: str) -> tuple[int, str]:
    """Run the commands with a torchrun that only prints its arguments."""
    torchrun = tmp_path / ".venv/bin/torchrun"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text(f'#!/bin/bash\necho "$@"\nexit {status}\n')
    torchrun.chmod(0o755)
    run = tmp_path / "run"
    run.mkdir()
    if stopped:
        (run / "stopped").touch()
    given = {"PATH": "/usr/bin:/bin", "RUN": str(run), "OVERRIDES": "lr=1 epochs=2", "SKYPILOT_NUM_NODES": "2"}
    given |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"} | environment
    ended = subprocess.run(
        ["bash", "-e", "-c", TASK["run"]], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(
    ("status", "stopped", "expected"), [(0, False, 0), (1, False, 1), (0, True, 75), (1, True, 75)]
)
def test_a_graceful_stop_is_no_success(tmp_path: Path, status: int, stopped: bool, expected: int) -> None:
    assert _run(tmp_path, status=status, stopped=stopped)[0] == expected


@pytest.mark.parametrize(("gpus", "ranks"), [("8", 8), ("0", 1)])
def test_torchrun_gets_the_place_of_the_node(tmp_path: Path, gpus: str, ranks: int) -> None:
    _, printed = _run(tmp_path, status=0, stopped=False, SKYPILOT_NUM_GPUS_PER_NODE=gpus)
    assert printed.split() == [
        *("--nnodes=2", "--node-rank=1", f"--nproc-per-node={ranks}", "--master-addr=10.0.0.1", "--master-port=29500"),
        *("pretrain.py", "lr=1", "epochs=2", f"checkpoint_path={tmp_path / 'run'}", "resume=auto"),
    ]
