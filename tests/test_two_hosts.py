"""Two hosts that share nothing but a cable and a disk: network namespaces of one machine, joined by a veth pair."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import REPOSITORY, rows, settings, train

ADDRESSES = {"trainer-a": "10.77.0.1", "trainer-b": "10.77.0.2"}
PORT = 29400

pytestmark = pytest.mark.slow


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces that reach each other, and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces takes root and iproute2")
    first, second = ADDRESSES
    try:
        for name in ADDRESSES:
            _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        _ip("link", "add", "cable-a", "netns", first, "type", "veth", "peer", "name", "cable-b", "netns", second)
        for (name, address), cable in zip(ADDRESSES.items(), ("cable-a", "cable-b"), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield list(ADDRESSES)
    finally:
        for name in ADDRESSES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _torchrun(host: str, cable: str, arguments: list[str]) -> "subprocess.Popen[str]":
    """One rank on a host; both find each other at the first one's address."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES['trainer-a']}:{PORT}", "--rdzv-id", "cables"]
    # torchrun finds out which host serves the meeting point by its name, which is the machine's in every namespace.
    launcher += ["--local-addr", ADDRESSES[host], "--rdzv-conf", f"is_host={int(host == 'trainer-a')}"]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *launcher, str(REPOSITORY / "pretrain.py"), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": cable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_two_hosts_train_together(data: Path, tmp_path: Path, log: Path, hosts: list[str], strategy: str) -> None:
    alone = tmp_path / "alone"
    train(settings(data, alone, log_interval=1), log).ok()
    arguments = settings(data, tmp_path / "run", log_interval=1, parallel=strategy)
    both = [_torchrun(host, cable, arguments) for host, cable in zip(hosts, ("cable-a", "cable-b"), strict=True)]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)
    expected = [row["train/lm_loss"] for row in rows(alone)]
    assert [row["train/lm_loss"] for row in rows(tmp_path / "run")] == pytest.approx(expected, abs=1e-4)
