"""Two hosts that share only a cable and a disk train together, and resume after a fault."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, Launched, two_hosts, why_no_two_hosts
from tests.runs import assert_same_run, latest, rows, settings, train, until

# There are enough steps for a fault to come in the middle of the run.
LONGER = {"max_steps": 150, "log_interval": 1, "checkpoint_every_n_steps": 10, "eval_every_n_steps": 50}
RESTARTS = ["--max-restarts", "3"]

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if (reason := why_no_two_hosts()) is not None:
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def quiet_longer(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quiet_longer")
    train(settings(data, folder / "run", **LONGER), folder / "log", ranks=2).ok()
    return folder / "run"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_two_hosts_train_together(data: Path, tmp_path: Path, log: Path, hosts: list[Host], strategy: str) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    train(settings(data, alone, log_interval=1), log).ok()
    launched = Launched(hosts, settings(data, run, log_interval=1, parallel=strategy), log)
    try:
        launched.wait().ok()
    finally:
        launched.kill()
    expected = [row["train/lm_loss"] for row in rows(alone)]
    assert [row["train/lm_loss"] for row in rows(run)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("rank", "static"), [(0, False), (1, False), (1, True)])
def test_killed_on_one_host(
    data: Path, quiet_longer: Path, tmp_path: Path, log: Path, hosts: list[Host], rank: int, static: bool
) -> None:
    run = tmp_path / "run"
    launched = Launched(hosts, settings(data, run, **LONGER), log, options=RESTARTS, static=static)
    try:
        until(lambda: latest(run) >= 20, launched)
        launched.worker(rank).send_signal(signal.SIGKILL)
        output = launched.wait().ok()
    finally:
        launched.kill()
    assert "resuming" in output
    assert_same_run(run, quiet_longer)


@pytest.mark.parametrize("timeout_s", [600, 5])
def test_cable_out_for_ten_seconds(
    data: Path, quiet_longer: Path, tmp_path: Path, log: Path, hosts: list[Host], timeout_s: int
) -> None:
    """With a long timeout the ranks wait."""
    run = tmp_path / "run"
    launched = Launched(hosts, settings(data, run, **LONGER, dist__timeout_s=timeout_s), log, options=RESTARTS)
    try:
        until(lambda: latest(run) >= 20, launched)
        hosts[1].set_cable("down")
        time.sleep(10)
        hosts[1].set_cable("up")
        output = launched.wait().ok()
    finally:
        launched.kill()
    assert ("resuming" in output) == ("fault on rank" in output) == (timeout_s == 5)
    assert_same_run(run, quiet_longer)
