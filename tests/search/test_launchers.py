"""Launchers start the command line that they show, with its threads, devices and ranks."""

import json
import time
from pathlib import Path

import pytest

from search import launchers
from search.config import LauncherConfig
from search.launchers import ProcessLauncher, SeedRun, command_line, environment_of, runs_at_once

# Takes the place of pretrain.py: it notes its surroundings and waits for SIGTERM.
PROGRAM = """
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
seen = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")}
with open(sys.argv[1] + os.environ.get("RANK", "0"), "w") as file:
    json.dump(seen | {"arguments": sys.argv[2:], "leads a session": os.getsid(0) == os.getpid()}, file)
print("begun", flush=True)
while True:
    signal.pause()
"""


def _config(**options: object) -> LauncherConfig:
    defaults: dict[str, object] = {"name": "local", "at_once": None, "threads": 1, "ranks": 1, "gpus": []}
    return LauncherConfig.model_validate(defaults | {"slurm": None} | options)


def _run(folder: Path, config: LauncherConfig, place: int) -> tuple[list[dict[str, object]], int]:
    """Return what each rank of a run has seen, and the status after it was asked to stop."""
    run = SeedRun([str(folder / "seen_"), "lr=1e-3"], folder, folder / "log", place=place)
    ProcessLauncher(config).start([run])
    job = run.job
    assert job is not None
    files, end = [folder / f"seen_{rank}" for rank in range(config.ranks)], time.monotonic() + 60
    while not all(file.exists() and file.read_text().endswith("}") for file in files):
        assert time.monotonic() < end, "the run does not begin"
        time.sleep(0.01)
    assert job.poll() is None
    job.terminate()
    while (status := job.poll()) is None:
        assert time.monotonic() < end, "the run does not stop"
        time.sleep(0.01)
    return [json.loads(file.read_text()) for file in files], status


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pretrain.py").write_text(PROGRAM)
    monkeypatch.setattr(launchers, "PRETRAIN", tmp_path / "pretrain.py")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "5")  # the sweep itself may run in a job
    return tmp_path


def test_a_run_has_its_threads_and_the_devices_of_its_place(folder: Path) -> None:
    (folder / "log").write_text("of an earlier start\n")
    (seen,), status = _run(folder, _config(threads=3, gpus=[3, 5]), place=1)
    assert status == 7, "the run gets SIGTERM, which lets it save"
    assert seen.pop("leads a session"), "Ctrl-C reaches the sweep alone"
    assert seen == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5", "WORLD_SIZE": None, "arguments": ["lr=1e-3"]}
    assert (folder / "log").read_text() == "of an earlier start\nbegun\n"


def test_a_run_of_two_ranks_is_started_by_torchrun(folder: Path) -> None:
    config = _config(name="torchrun", ranks=2, at_once=1)
    seen, _ = _run(folder, config, place=0)
    assert [each["WORLD_SIZE"] for each in seen] == ["2", "2"]
    assert all(each["CUDA_VISIBLE_DEVICES"] is None for each in seen), "without gpus every run sees all devices"
    command = "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 pretrain.py lr=1e-3 \"a='b c'\""
    assert command_line(config, ["lr=1e-3", "a='b c'"]) == command


def test_runs_at_once_share_the_cores_and_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    options: tuple[dict[str, object], ...] = ({"threads": 2}, {"threads": 64}, {"at_once": 7}, {"ranks": 2})
    assert [runs_at_once(_config(**{"name": "torchrun"} | each)) for each in options] == [2, 1, 7, 2]
    for ranks, devices in ((1, ["3", "5", "6", "7"]), (2, ["3,5", "6,7"])):
        config = _config(name="torchrun", ranks=ranks, gpus=[3, 5, 6, 7])
        places = range(runs_at_once(config))
        assert [environment_of(config, place)["CUDA_VISIBLE_DEVICES"] for place in places] == devices
