"""launch/skypilot.yaml has only the keys of SkyPilot's tasks, and its commands are bash.

SkyPilot itself is not installed for this: it pins packages that the tests need in other versions.
"""

import subprocess
import sys
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


def _run(tmp_path: Path, *, status: int, before: bool = False, stopped: bool = False, **typed: str) -> tuple[int, str]:
    """Run the commands with a torchrun that prints its arguments.

    Args:
        before: whether the run's folder has the marker of an earlier stop.
        stopped: whether torchrun leaves a marker.
        typed: variables of the environment.
    """
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


@pytest.mark.parametrize(
    ("version", "is_fine"), [("3.10.9", False), ("3.11.0", True), ("3.13.2", True), ("3.14.0", False)]
)
def test_a_wrong_python_is_one_line(tmp_path: Path, version: str, *, is_fine: bool) -> None:
    python3 = tmp_path / "python3"
    numbers = tuple(map(int, version.split(".")))
    pretended = f"import sys; sys.version_info, sys.version = {numbers}, '{version} (main)'; "
    python3.write_text(f"""#!/bin/bash
if [ "$1" = -c ]; then exec {sys.executable} -c "{pretended}${{2#import sys; }}"; fi
mkdir -p .venv/bin; ln -sf /bin/true .venv/bin/python
""")
    python3.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", TASK["setup"]],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    expected = f"error: Python is {version}; the trainer needs 3.11 to 3.13: choose an image that has it "
    assert (done.returncode == 0) == is_fine == (tmp_path / ".venv").exists(), done.stderr
    assert done.stderr == ("" if is_fine else f"{expected}(resources: image_id)\n")


@pytest.mark.parametrize(("gpus", "ranks"), [("8", 8), ("0", 1)])
def test_torchrun_gets_the_place_of_the_node(tmp_path: Path, gpus: str, ranks: int) -> None:
    _, printed = _run(tmp_path, status=0, SKYPILOT_NUM_GPUS_PER_NODE=gpus)
    assert printed.split() == [
        *("--nnodes=2", "--node-rank=1", f"--nproc-per-node={ranks}", "--master-addr=10.0.0.1", "--master-port=29500"),
        *(
            "--rdzv-conf=timeout=1800",
            "pretrain.py",
            "lr=1",
            "epochs=2",
            f"checkpoint_path={tmp_path / 'run'}",
            "resume=auto",
        ),
    ]
