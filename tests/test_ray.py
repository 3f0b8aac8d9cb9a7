"""launch.ray_train and TrainWorker on a real Ray cluster of two nodes, with real faults.

Ray's own processes take half a minute for each run, so that these tests are a group of their own
(make test-ray).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs
from tests.runs import REPOSITORY, Row, until

ray = pytest.importorskip("ray", reason="Ray is not installed (requirements-ray.txt)")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

LAST_STEP = 240
# Enough steps to strike in between.
LONG: dict[str, Any] = {
    "max_steps": LAST_STEP,
    "log_interval": 20,
    "eval_every_n_steps": None,
    "eval_interval": None,
    "checkpoint_every_n_steps": 20,
    "best_metric": None,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Return the address of a cluster of two nodes on this machine. The second pretends a GPU."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # The workers import what the tests' runs import.
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    small = {"num_cpus": 2, "object_store_memory": 80 * 1024**2, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args={**small, "num_gpus": 0})
    nodes.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 * 1024**2)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture(scope="module")
def quiet_long(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quiet_long")
    runs.train(runs.settings(data, folder / "run", **LONG), folder / "log", ranks=2).ok()
    return folder / "run"


class OnRay:
    """A command `python -m launch.ray_train` in a process of its own."""

    def __init__(self, cluster: str, run: Path, arguments: list[str], *options: str) -> None:
        self.run, self._log = run, run.parent / f"{run.name}.log"
        self.store = run.parent / "store"
        words = [f"ray.address={cluster}", f"ray.storage={self.store}", "ray.num_workers=2", *options, *arguments]
        with open(self._log, "w") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "launch.ray_train", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def program(self, rank: int) -> psutil.Process:
        found = self.find(rank)
        assert found is not None, f"rank {rank} does not run:\n{self.output}"
        return found

    def find(self, rank: int) -> psutil.Process | None:
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                if "pretrain.py" in words and str(self.run) in words and process.environ()["RANK"] == str(rank):
                    return process
            except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
                continue
        return None

    def wait(self) -> runs.Finished:
        try:
            return runs.Finished(self.process.wait(400), self.output)
        except psutil.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it does not end:\n{self.output}") from None


def test_workers_on_two_nodes_have_the_curve_of_torchrun(
    cluster: str, data: Path, tmp_path: Path, quiet_2: Path
) -> None:
    run = tmp_path / "run"
    done = OnRay(cluster, run, runs.settings(data, run), "ray.placement=STRICT_SPREAD")
    output = done.wait().ok()
    runs.assert_same_run(run, quiet_2)
    assert output.count("step 12/12") == 1, "each line is printed once"
    # What Ray was told can be read with Ray's own tools.
    from ray.train import Result

    result = Result.from_path(next(done.store.iterdir()))
    assert result.metrics is not None and result.checkpoint is not None
    last = runs.rows(run)[-1]
    assert {name: result.metrics[name] for name in last} == last
    with result.checkpoint.as_directory() as folder:
        named = json.loads((Path(folder) / "pretrain.json").read_text())
    assert Path(named["checkpoint"]) == run / "step_00000012"


def test_killed_ranks_begin_again_from_the_last_checkpoint(
    cluster: str, data: Path, tmp_path: Path, quiet_long: Path
) -> None:
    run = tmp_path / "run"
    started = OnRay(cluster, run, runs.settings(data, run, **LONG), "ray.placement=STRICT_SPREAD")
    until(lambda: runs.latest(run) >= 40, started, timeout_s=300)
    program = started.program(1)
    worker = psutil.Process(program.ppid())
    assert "RayTrainWorker" in " ".join(worker.cmdline())
    worker.kill()
    program.wait(10)  # it ends with its worker
    until(lambda: runs.latest(run) >= 120, started, timeout_s=300)
    started.program(0).kill()
    output = started.wait().ok()
    assert "attempt 2: " in output and "attempt 3: " in output and "attempt 4: " not in output
    assert "rank 1 failed: A worker health check failed." in output
    assert re.search(r"rank 0 failed: pretrain.py on \S+ was killed by SIGKILL\n", output)
    assert output.count("resuming ") == 2
    runs.assert_same_run(run, quiet_long, metrics=False)
    assert runs.rows(run) == runs.rows(quiet_long)


def test_a_stopped_run_saves_and_goes_on(cluster: str, data: Path, tmp_path: Path, quiet_long: Path) -> None:
    run, arguments = tmp_path / "run", runs.settings(data, tmp_path / "run", **LONG)
    started = OnRay(cluster, run, arguments)
    until(lambda: runs.latest(run) >= 40, started, timeout_s=300)
    started.process.send_signal(signal.SIGTERM)
    output = started.wait().ok()
    assert (run / "stopped").read_text() == "SIGTERM\n" and 40 <= runs.latest(run) < LAST_STEP
    assert output.count("SIGTERM: the ranks save a checkpoint and end") == 1 and "attempt 2" not in output
    OnRay(cluster, run, [*arguments, "resume=auto"]).wait().ok()
    runs.assert_same_run(run, quiet_long, metrics=False)
    assert runs.rows(run) == runs.rows(quiet_long)


def test_a_stop_before_the_run_has_begun_is_no_success(cluster: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = OnRay(cluster, run, runs.settings(data, run, **LONG))
    until(lambda: started.find(0) is not None, started, timeout_s=300)
    program = started.program(0)
    program.suspend()  # it imports PyTorch, and does not handle signals yet
    started.process.send_signal(signal.SIGTERM)
    status = Path(f"/proc/{program.pid}/status")
    until(
        lambda: int(re.findall(r"ShdPnd:\s*(\w+)", status.read_text())[0], 16) & 1 << signal.SIGTERM - 1 != 0,
        started,
        timeout_s=300,
    )
    program.resume()
    finished = started.wait()
    assert finished.status == 1 and "attempt 2" not in finished.output and not (run / "stopped").exists()


def test_a_stop_while_ray_waits_for_a_place_ends_at_once(cluster: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = OnRay(cluster, run, runs.settings(data, run), "ray.num_workers=64", "ray.placement_timeout_s=3000")
    until(started.store.exists, started, timeout_s=300)  # Ray Train has begun
    started.process.send_signal(signal.SIGINT)
    finished = started.wait()
    assert (finished.status, finished.output) == (130, "error: interrupted; nothing runs\n")


def test_a_second_interrupt_ends_a_run_that_does_not_save(cluster: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = OnRay(cluster, run, runs.settings(data, run, **LONG))
    until(lambda: runs.latest(run) >= 20, started, timeout_s=300)
    program = started.program(1)
    program.suspend()
    started.process.send_signal(signal.SIGINT)
    until(lambda: "Ctrl-C ends them at once" in started.output, started, timeout_s=300)
    started.process.send_signal(signal.SIGINT)
    finished = started.wait()
    assert finished.status == 130 and finished.output.endswith("error: interrupted; nothing runs\n")
    program.wait(10)


def test_a_lost_desk_is_one_line(cluster: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = OnRay(cluster, run, runs.settings(data, run, **LONG))
    until(lambda: runs.latest(run) >= 20, started, timeout_s=300)
    program = started.program(0)
    (desk,) = (each for each in psutil.process_iter(["cmdline"]) if "ray::Desk" in str(each.info["cmdline"]))
    desk.kill()
    finished = started.wait()
    assert finished.status == 1 and "Traceback" not in finished.output
    assert "fault: Ray lost the actor" in finished.output.splitlines()[-1]
    program.wait(10)


def test_a_later_attempt_does_not_take_over_another_run(
    cluster: str, data: Path, tmp_path: Path, quiet_2: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(quiet_2, run)
    started = OnRay(cluster, run, runs.settings(data, run, max_steps=20))
    until(lambda: started.find(0) is not None, started, timeout_s=300)
    started.program(0).kill()  # before it has looked into the folder
    finished = started.wait()
    assert "attempt 2: " in finished.output and "already holds checkpoints" in finished.output
    assert finished.status == 2 and runs.latest(run) == 12


def test_a_failing_run_ends_after_max_failures(cluster: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = OnRay(cluster, run, runs.settings(data, run, **LONG), "ray.max_failures=0")
    until(lambda: runs.latest(run) >= 20, started, timeout_s=300)
    started.program(1).kill()
    finished = started.wait()
    assert finished.status == 1 and finished.output.endswith("failed in attempt 1 of 1\n")
    assert "ray/train" not in finished.output, "there is a traceback of Ray's"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"data_path": "nowhere"}, "no dataset at nowhere"),  # the ranks find it
        ({"ray.num_workers": 64, "ray.placement_timeout_s": 3}, "Ray found no place for 64 workers"),
        ({"ray.address": "127.0.0.1:1"}, "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_mistakes_are_one_line(
    typed: dict[str, object], message: str, cluster: str, data: Path, tmp_path: Path
) -> None:
    words = [*runs.settings(data, tmp_path / "run"), *(f"{key}={value}" for key, value in typed.items())]
    finished = OnRay(cluster, tmp_path / "run", words).wait()
    assert message in finished.error() and "attempt 2" not in finished.output


# ---- TrainWorker -------------------------------------------------------------------------------


@pytest.fixture
def connected(cluster: str) -> Iterator[None]:
    ray.init(address=cluster, log_to_driver=False)
    yield
    ray.shutdown()


def _settings(data: Path, run: Path) -> list[str]:
    return runs.settings(data, run, log_interval=1, eval_every_n_steps=12, checkpoint_every_n_steps=None)


def _numbers(row: Row) -> Row:
    return {name: value for name, value in row.items() if not name.startswith("perf/")}


def test_train_workers_have_the_curve_of_pretrain(connected: None, data: Path, tmp_path: Path, log: Path) -> None:
    from launch.ray_worker import start_train_workers

    quiet, run = tmp_path / "quiet", tmp_path / "run"
    runs.train(_settings(data, quiet), log, ranks=2).ok()

    def on_all(group: list[Any], method: str, *arguments: list[Any]) -> list[Any]:
        each = zip(*arguments, strict=True) if arguments else [()] * len(group)
        return ray.get([getattr(worker, method).remote(*given) for worker, given in zip(group, each, strict=True)])

    words = [*_settings(data, run), "dist.start_timeout_s=200"]  # the workers need it when they meet
    group = start_train_workers(words, 2, memory_gb=0.1, placement="STRICT_SPREAD")
    expected = runs.rows(quiet)
    assert [_numbers(on_all(group, "train_step")[0]) for _ in range(4)] == expected[:4]
    states = on_all(group, "get_state")
    on_all(group, "train_step")
    group.close()
    other = start_train_workers(_settings(data, tmp_path / "other"), 2)
    on_all(other, "set_state", states)
    rows = [_numbers(on_all(other, "train_step")[0]) for _ in range(8)]
    rows[-1] |= _numbers(on_all(other, "evaluate")[0])
    assert rows == expected[4:]
    (folder, *_) = on_all(other, "save")
    other.close()
    states_of_groups = [of["state"] for of in ray.util.placement_group_table().values()]
    assert set(states_of_groups) == {"REMOVED"}, "their place is free again"
    mine, theirs = runs.tensors(folder.parent, 12), runs.tensors(quiet, 12)
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    resumed = runs.train([f"resume={folder}", "max_steps=14"], log, ranks=2).ok()
    assert f"resuming {folder} at step 12" in resumed and runs.latest(folder.parent) == 14
