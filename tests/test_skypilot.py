"""The commands of launch/skypilot.yaml are bash, and tell a graceful stop from the end.

SkyPilot itself is not installed for this: it pins packages that the tests need in other versions.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TASK: dict[str, Any] = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())


def _run(tmp_path: Path, *, status: int, before: bool = False, stopped: bool = False, **typed: str) -> tuple[int, str]:
    """Run the commands with a torchrun that prints its arguments, and may leave a marker."""
    run, torchrun = tmp_path / "run", tmp_path / ".venv/bin/torchrun"
    torchrun.parent.mkdir(parents=True)
    # As pretrain.py does: clear the old marker, and write a new one.
    stop = 'rm -f "$RUN/stopped"; touch "$RUN/stopped"' if stopped else ":"
    torchrun.write_text(f'#!/bin/bash\necho "$@"\n{stop}\nexit {status}\n')
    torchrun.chmod(0o755)
    run.mkdir()
    if before:
        (run / "stopped").touch()
    given = {"PATH": "/usr/bin:/bin", "RUN": str(run), "OVERRIDES": "lr=1 epochs=2", "SKYPILOT_NUM_NODES": "2"}
    given |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"} | typed
    ended = subprocess.run(
        ["bash", "-e", "-c", TASK["run"]], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("before", [False, True], ids=["first start", "after a stop"])
@pytest.mark.parametrize(
    ("status", "stopped", "expected"), [(0, False, 0), (1, False, 1), (0, True, 75), (1, True, 75)]
)
def test_a_graceful_stop_is_no_success(
    tmp_path: Path, status: int, expected: int, *, stopped: bool, before: bool
) -> None:
    """A failure with the marker of an earlier stop would otherwise never count."""
    assert _run(tmp_path, status=status, stopped=stopped, before=before)[0] == expected


@pytest.mark.parametrize(("gpus", "ranks"), [("8", 8), ("0", 1)])
def test_torchrun_gets_the_place_of_the_node(tmp_path: Path, gpus: str, ranks: int) -> None:
    _, printed = _run(tmp_path, status=0, SKYPILOT_NUM_GPUS_PER_NODE=gpus)
    assert printed.split() == [
        *("--nnodes=2", "--node-rank=1", f"--nproc-per-node={ranks}", "--master-addr=10.0.0.1", "--master-port=29500"),
        *("--rdzv-conf=timeout=1800", "pretrain.py", "lr=1", "epochs=2"),
        *(f"checkpoint_path={tmp_path / 'run'}", "resume=auto"),
    ]
