"""Two hosts on one machine that share only a cable and a disk, and torchrun on one or both of them.

The hosts are network namespaces, joined by a veth pair.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tests import spawn
from tests.runs import REPOSITORY, Finished


@dataclass(frozen=True)
class Host:
    """A host in its own network namespace or, if `namespace` is None, this machine."""

    namespace: str | None = None
    address: str = "127.0.0.1"
    cable: str = "lo"

    def set_cable(self, state: Literal["up", "down"]) -> None:
        assert self.namespace is not None, "this machine's own cable must not be pulled"
        _ip("-n", self.namespace, "link", "set", self.cable, state)


def why_no_two_hosts() -> str | None:
    """Return why this machine can't make two hosts, or None if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "making network namespaces takes root and iproute2"
    name = f"trainer-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Make two hosts that can reach each other and nothing else, and remove them at the end."""
    hosts = [
        Host(f"trainer-{letter}-{os.getpid()}", f"10.77.0.{number}", f"cable-{letter}")
        for number, letter in enumerate("ab", start=1)
    ]
    first, second = hosts
    try:
        for host in hosts:
            _ip("netns", "add", str(host.namespace))
        ends = [[end.cable, "netns", str(end.namespace)] for end in hosts]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in hosts:
            _ip("-n", str(host.namespace), "addr", "add", f"{host.address}/24", "dev", host.cable)
            _ip("-n", str(host.namespace), "link", "set", "lo", "up")
            host.set_cable("up")
        yield [first, second]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", str(host.namespace)], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Launched:
    """A run of two ranks under torchrun, on one host or on two."""

    def __init__(
        self,
        hosts: Sequence[Host],
        arguments: list[str],
        log: Path,
        *,
        options: Sequence[str] = (),
        static: bool = False,
    ) -> None:
        self._log = log
        log.unlink(missing_ok=True)
        port = spawn.free_port()
        self.agents = []
        for number, host in enumerate(hosts):
            words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(2 // len(hosts)), *options]
            if static:
                words += ["--nnodes", str(len(hosts)), "--node-rank", str(number)]
                words += ["--master-addr", hosts[0].address, "--master-port", str(port)]
            elif len(hosts) == 1:
                words += ["--standalone"]
            else:
                words += ["--nnodes", str(len(hosts)), "--rdzv-backend", "c10d", "--rdzv-id", "cables"]
                words += ["--rdzv-endpoint", f"{hosts[0].address}:{port}", "--local-addr", host.address]
                # torchrun would choose the host of the meeting point by its name, but here all
                # hosts have the machine's name.
                words += ["--rdzv-conf", f"is_host={int(number == 0)}"]
            enter = ["ip", "netns", "exec", host.namespace] if host.namespace else []
            with log.open("a") as output:
                self.agents.append(
                    psutil.Popen(
                        [*enter, *words, str(REPOSITORY / "pretrain.py"), *arguments],
                        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host.cable},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Return whether torchrun is alive on every host."""
        return all(agent.poll() is None for agent in self.agents)

    def worker(self, rank: int) -> psutil.Process:
        """Return the worker of a rank in the present attempt."""
        children = [child for agent in self.agents for child in agent.children()]
        (found,) = (child for child in children if child.environ().get("RANK") == str(rank))
        return found

    def wait(self, timeout_s: float = 180) -> Finished:
        """Wait for the end of torchrun on all hosts, and return the first status that isn't 0."""
        end = time.monotonic() + timeout_s
        while any(agent.poll() is None for agent in self.agents):
            assert time.monotonic() < end, f"torchrun is still alive after {timeout_s} s:\n{self.output}"
            time.sleep(0.02)
        return Finished(next(filter(None, (agent.poll() for agent in self.agents)), 0), self.output)

    def kill(self) -> None:
        """Kill torchrun and its workers, each by its own id."""
        for agent in self.agents:
            workers = agent.children(recursive=True) if agent.poll() is None else []
            for process in [*workers, agent]:
                with suppress(psutil.NoSuchProcess):  # the process has ended by itself
                    process.kill()
        psutil.wait_procs(self.agents)
