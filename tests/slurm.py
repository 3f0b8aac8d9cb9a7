"""A real Slurm with two nodes on this machine, each with a host name and /etc/hosts of its own."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import spawn
from tests.runs import REPOSITORY
from utils.ranks.launch import without_launcher

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
"""


def why_no_slurm() -> str | None:
    """Return why this machine can't run a Slurm of its own, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm with two nodes on one machine takes Linux and root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"there is no {missing[0]} here; apt-get install slurm-wlm munge"
    tried = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Cluster:
    """A Slurm that runs. `environment` is that of a user's shell there."""

    folder: Path
    environment: dict[str, str]

    def run(self, line: str, **variables: object) -> str:
        """Run a command of a user in the folder of the cluster, and return what it prints."""
        done = subprocess.run(
            shlex.split(line),
            cwd=self.folder,
            env=self.environment | {name: str(value) for name, value in variables.items()},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, f"{line}: {done.stderr}\n{done.stdout}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as PENDING. scontrol would call a job so too early."""
        return self.run(f"squeue --jobs={job} --noheader --states=all --format=%T")

    def until(self, condition: Callable[[], bool], log: Path, timeout_s: float = 120) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            told = log.read_text(errors="replace") if log.exists() else ""
            assert time.monotonic() < end, f"the condition did not become true in {timeout_s} s:\n{told}"
            time.sleep(0.1)

    def start_requeued(self, job: str, log: Path) -> None:
        """Wait until a job is back in the queue, and start it again."""
        self.until(lambda: self.state(job) == "PENDING", log)
        self._start_soon(job)
        self.until(lambda: self.state(job) != "PENDING", log)

    def _start_soon(self, job: str) -> None:
        """Spare a job the two minutes that Slurm waits."""
        time.sleep(2)  # a node refuses a job in the second in which its earlier attempt was ended
        # Slurm refuses this if the job runs by now.
        words = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
        subprocess.run(words, env=self.environment, capture_output=True, timeout=60)

    def end(self, job: str, log: Path) -> str:
        """Wait for the end of a job, however often it is requeued, and return its state."""

        def has_ended() -> bool:
            if (state := self.state(job)) == "PENDING":
                self._start_soon(job)
            return state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

        self.until(has_ended, log, timeout_s=300)
        return self.state(job)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the cluster and of its jobs, on all nodes."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found.append(process)
        return found


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start munge and Slurm in an empty folder, and end all their processes at the end."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o711)
    config = folder / "slurm.conf"
    environment = without_launcher(os.environ) | {
        "SLURM_CONF": str(config),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    host = socket.gethostname()
    lines = [CONFIG.format(host=host, port=spawn.free_port(), folder=folder)]
    lines += [
        f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={spawn.free_port()} CPUs=2 RealMemory=1000"
        for node in NODES
    ]
    lines += [f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP", ""]
    config.write_text("\n".join(lines))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(NODES)} {host}\n")
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = [
        f"--{name}={folder}/munge/{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "seed-file")
    ]
    enter = "hostname {0} && mount --bind {1}/hosts /etc/hosts && exec slurmd -D -N {0}"
    commands = [["munged", "--foreground", "--force", *files], ["slurmctld", "-D"]]
    commands += [["unshare", "--mount", "--uts", "sh", "-c", enter.format(node, folder)] for node in NODES]
    made = Cluster(folder, environment)
    try:
        for number, words in enumerate(commands):
            with open(folder / f"daemon_{number}.log", "w") as log:
                subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
            if words[0] == "munged":
                made.until((folder / "munge/socket").exists, folder / "daemon_0.log")
        made.until(lambda: _num_idle(made) == len(NODES), folder / "daemon_1.log")
        yield made
    finally:
        # The daemons first: they would report the end of the others, and start no job again.
        for process in sorted(made.processes(), key=lambda each: each.create_time()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(made.processes(), timeout=20)


def _num_idle(made: Cluster) -> int:
    asked = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"], env=made.environment, capture_output=True, text=True
    )
    return asked.stdout.split().count("idle")
