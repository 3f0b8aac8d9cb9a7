"""Find out from the environment which rank this process is and who started it.

A process of many that does not learn its rank must not train: it would train alone, beside others
that do the same.
"""

import os
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from utils.errors import UserError
from utils.terminal import tell

LauncherName = Literal["torchrun", "slurm", "mpi", "single"]

# The names of rank, number of ranks, rank on this host and number of ranks there.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# Ports for ranks that nobody gave a port. They lie below those that systems give to clients.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000
_THIS_HOST = "127.0.0.1"

# Variables of launch/ray_rank.py: the identity of the launch, and how often all ranks began again.
LAUNCH, REQUEUES = "TRAINER_LAUNCH", "TRAINER_REQUEUES"


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process."""

    launcher: LauncherName = "single"  # torchrun stands for all that set RANK, as people do by hand
    rank: int = 0
    size: int = 1
    local_rank: int | None = None  # on this host; None: the launcher does not tell
    host: str | None = None  # where rank 0 opens the store in which ranks meet; None: nobody tells
    port: int | None = None  # of that store
    name: str = ""  # tells this launch from others that may use the same port; empty under torchrun
    is_elastic: bool = False  # whether torchrun itself started the process, and may start it again
    restarts: int = 0  # torchrun's count of restarts; on rank 0, how often training began before
    requeues: int = 0  # how often Slurm has put the job back into the queue, or Ray began again
    identity: str | None = None  # of all attempts of this launch; None: there is only one

    @property
    def is_later_attempt(self) -> bool:
        return self.restarts + self.requeues > 0

    @property
    def teller(self) -> str:
        """Who told the ranks their numbers, for a person."""
        return "RANK and WORLD_SIZE" if self.launcher == "torchrun" and not self.is_elastic else self.launcher

    @staticmethod
    def from_environment(launcher: LauncherName | Literal["auto"] = "auto") -> "Launch":
        """Read the environment, of the innermost launcher that says that there are several ranks.

        Raises:
            UserError: The variables are missing, wrong or contradict one another.
        """
        launch = _innermost() if launcher == "auto" else _READERS[launcher]()
        if launch is None:
            raise UserError(
                f"dist.launcher={launcher}, but no {_COMMANDS[launcher]} has started this process; start with "
                f"{_COMMANDS[launcher]}, or leave dist.launcher out"
            )
        if not 0 <= launch.rank < launch.size or not (launch.port is None or 0 < launch.port < 2**16):
            where = "" if launch.port is None else f", MASTER_PORT {launch.port}"
            raise UserError(
                f"the environment says rank {launch.rank} of {launch.size}{where}; ranks count from 0 to one less than "
                "their number, and ports from 1 to 65535"
            )
        if LAUNCH in os.environ:
            return replace(launch, requeues=int(os.environ[REQUEUES]), identity=os.environ[LAUNCH])
        if (job := os.environ.get("SLURM_JOB_ID")) is None:
            return launch
        # A job may start several runs one after the other, so the identity has the command line.
        command = zlib.crc32("\0".join(sys.argv[1:]).encode())
        identity = f"slurm-{os.environ.get('SLURM_CLUSTER_NAME', 'cluster')}-{job}-{command:08x}"
        return replace(launch, requeues=int(os.environ.get("SLURM_RESTART_COUNT", 0)), identity=identity)


def may_be_first() -> bool:
    """Return whether this process may be rank 0, for a message before the launch is read."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    whole = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    begins = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "TRAINER_")
    return {name: value for name, value in environment.items() if name not in whole and not name.startswith(begins)}


def end_with_launcher(launch: Launch) -> None:
    """End this process within a second after its launcher is gone.

    Otherwise the worker would go on beside the run that somebody starts in its place.
    """
    # Somebody who sets RANK by hand may leave the shell, and the ranks go on.
    if not launch.is_elastic and launch.launcher not in ("slurm", "mpi"):
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        tell(f"rank {launch.rank}: its launcher is gone; ending")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _innermost() -> Launch:
    # Inside a job of Slurm, torchrun and mpirun start ranks of their own. Slurm's variables are
    # then those of its task, which holds several ranks.
    found = [launch for read in (_by_torchrun, _by_mpi, _by_slurm) if (launch := read()) is not None]
    for number, launch in enumerate(found):
        if launch.size != 1 or launch.is_elastic:
            for outer in found[number + 1 :]:
                _require_one_run(launch, outer)
            return launch
    num_tasks = os.environ.get("SLURM_NTASKS", "1")
    if num_tasks != "1" and "SLURM_STEP_ID" not in os.environ:
        tell(
            f"this job of Slurm has {num_tasks} tasks, but the program was started without srun or torchrun: this "
            "process works alone"
        )
    return Launch()


def _require_one_run(launch: Launch, outer: Launch) -> None:
    """Raise UserError if a launcher started this one several times, so that each trains alone."""
    if launch.is_elastic:
        num_met = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        remedy = "start one torchrun for each node, with --nnodes and a common --rdzv-endpoint"
    elif launch.launcher == "mpi" and launch.host == _THIS_HOST:
        num_met, remedy = 1, "start mpirun alone, without srun"
    else:  # of several hosts, on each of which the outer launcher may have started a part
        return
    if outer.size not in (1, num_met):
        raise UserError(
            f"{_COMMANDS[outer.launcher]} started {outer.size} {_COMMANDS[launch.launcher]}s, but {num_met} of them "
            f"met, so that several runs would train side by side; {remedy}, or type "
            f"dist.launcher={launch.launcher} if they are to train apart"
        )


def _by_torchrun() -> Launch | None:
    """Read RANK and WORLD_SIZE, which torchrun sets, Ray Train, and people who need no launcher."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    launch = _launch("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return launch
    # Static rendezvous has no run id. Rank 0 then stays under the same torchrun process through all
    # restarts, so that this process can serve as the identity.
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    identity = run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"
    return replace(launch, is_elastic=True, restarts=_number("TORCHELASTIC_RESTART_COUNT"), identity=identity)


def _by_mpi() -> Launch | None:
    """Read the variables of Open MPI's mpirun, or of PMI, which other launchers of MPI set."""
    names = next((each for each in _MPI if each[0] in os.environ or each[1] in os.environ), None)
    in_step = "SLURM_STEP_ID" in os.environ
    if names is None:
        if "PMIX_RANK" in os.environ and not in_step:
            raise UserError(
                f"PMIX_RANK={os.environ['PMIX_RANK']} is set, but nothing says how many ranks there are; set RANK and "
                "WORLD_SIZE for each rank, or type dist.launcher=single for a run of one process"
            )
        return None
    rank, size, local_rank, local_size = names
    if rank == "PMI_RANK" and local_rank not in os.environ and in_step:
        return None  # srun --mpi=pmi2 sets PMI's variables beside its own, which say more
    on_one_host = os.environ.get(local_size) == os.environ.get(size)
    # MPI tells no host. Without MASTER_ADDR, only ranks on one host or in one job of Slurm know
    # where to meet. On one host, all ranks have a daemon of MPI above them.
    host = _THIS_HOST if on_one_host else _first_host(os.environ.get("SLURM_JOB_NODELIST", ""))
    job = os.environ.get("PMIX_NAMESPACE") or (_daemon() if on_one_host else os.environ.get("SLURM_JOB_ID", host))
    return _launch("mpi", rank, size, local_rank, host, f"mpi {job}")


def _daemon() -> int:
    """Return the daemon of MPICH on this host, which starts a session for each rank."""
    leader = Path(f"/proc/{os.getsid(0)}/stat")
    if not leader.exists():
        return os.getppid()
    return int(leader.read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def _by_slurm() -> Launch | None:
    """Read the variables of a task that srun started.

    The batch script itself and the shell of salloc have some of them, too, but no step.
    """
    if "SLURM_STEP_ID" not in os.environ:
        return None
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    name = f"slurm {os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    return _launch("slurm", "SLURM_PROCID", size, "SLURM_LOCALID", _first_host(nodes), name)


_READERS: dict[str, Callable[[], Launch | None]] = {
    "torchrun": _by_torchrun,
    "slurm": _by_slurm,
    "mpi": _by_mpi,
    "single": Launch,
}
_COMMANDS = {"torchrun": "torchrun", "slurm": "srun", "mpi": "mpirun"}


def _launch(
    launcher: LauncherName, rank: str, size: str, local_rank: str, host: str | None = None, name: str = ""
) -> Launch:
    """Read the variables with these names. Without MASTER_PORT, the port follows from `name`."""
    port = _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS if name else None
    return Launch(
        launcher=launcher,
        rank=_number(rank),
        size=_number(size),
        local_rank=_number(local_rank) if local_rank in os.environ else None,
        host=os.environ.get("MASTER_ADDR") or host,
        port=_number("MASTER_PORT") if "MASTER_PORT" in os.environ else port,
        name=name,
    )


def _number(name: str) -> int:
    if name not in os.environ:
        raise UserError(
            f"the launcher did not set {name}, so this process does not know which rank it is; set {name}, or type "
            "dist.launcher=single for a run of one process"
        )
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise UserError(f"the environment variable {name} is {os.environ[name]!r}; set it to a number") from error


def _first_host(nodes: str) -> str | None:
    """Return the first host of a list of nodes such as gpu[003-006,9],login1: that of rank 0."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else None
