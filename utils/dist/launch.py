"""Find out from the environment which rank this process is and who started it.

torchrun, Slurm, Open MPI, MPICH and Ray all start many processes, and each tells a process its rank
in environment variables of its own. This is the only place that reads them. If many processes are
meant and one of them does not find out which rank it is, it must not train: it would train alone,
beside others that do the same.
"""

import os
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from utils.errors import UserError
from utils.terminal import tell

LauncherName = Literal["torchrun", "slurm", "mpi", "single"]

Environment = Mapping[str, str]

# Ports for ranks that nobody gave a port. They lie below those that systems give to clients.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process.

    Attributes:
        launcher: torchrun stands for all that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
            Ray Train does and people by hand.
        local_rank: the number of this rank on its host; None: the launcher does not tell.
        host: where rank 0 opens the store in which ranks meet; None for a single process.
        port: of that store.
        name: tells this launch from others that may use the same port; empty under torchrun, which
            gives each launch a port of its own.
        restarts: torchrun's count of restarts; on rank 0, how often training began before.
        requeues: how often Slurm has put the job back into the queue.
        identity: the same for all attempts of a launch; None: there will be no further attempt.
    """

    launcher: LauncherName = "single"
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    host: str | None = None
    port: int | None = None
    name: str = ""
    restarts: int = 0
    requeues: int = 0
    identity: str | None = None

    @property
    def began_before(self) -> bool:
        """Whether an earlier attempt of this launch may have left something to resume from."""
        return self.restarts + self.requeues > 0

    @staticmethod
    def from_environment(launcher: LauncherName | Literal["auto"] = "auto") -> "Launch":
        """Read the environment.

        Args:
            launcher: whose variables to read (`dist.launcher`); auto: those of the innermost
                launcher that says that there are several ranks.

        Raises:
            UserError: The variables say that there are several ranks, but not which one this is, or
                the launcher that was asked for has set no variables. The message says what to set.
        """
        environment = os.environ
        if launcher != "auto":
            launch = _READERS[launcher](environment)
            if launch is None:
                raise UserError(
                    f"dist.launcher={launcher}, but the environment holds nothing of {_MARKS[launcher]}; start with "
                    f"{_COMMANDS[launcher]}, or leave dist.launcher out"
                )
            return launch
        # The innermost launcher comes first. Inside a job of Slurm, torchrun and mpirun start ranks
        # of their own; Slurm's variables are then those of its task, which holds several ranks.
        for read in (_by_torchrun, _by_mpirun, _by_slurm, _by_pmi):
            launch = read(environment)
            if launch is not None and (launch.size > 1 or launch.launcher == "torchrun"):
                _require_one_torchrun(launch, environment)
                return launch
        return _single(environment)


def may_be_first() -> bool:
    """Return whether no launcher gives this process a rank above 0.

    For a message that all ranks would print, before it is known which rank this is.
    """
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)


def without_launcher(environment: Environment) -> dict[str, str]:
    """Return the environment for a new run, without what a launcher says about this process.

    Otherwise runs that two ranks start would take each other for ranks of one run.
    """
    whole = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    begins = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL")
    return {name: value for name, value in environment.items() if name not in whole and not name.startswith(begins)}


# ---- each launcher ------------------------------------------------------------------------------


def _by_torchrun(environment: Environment) -> Launch | None:
    """Read RANK and WORLD_SIZE, which torchrun sets, Ray Train, and people who need no launcher."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environment:
            raise UserError(
                f"{other}={environment[other]} is set, but {name} is not; set both for each rank, or unset both"
            )
    restarts, (requeues, identity) = 0, _requeues(environment)
    if "TORCHELASTIC_RESTART_COUNT" in environment:
        run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
        # Static rendezvous has no run id. Rank 0 then stays under the same torchrun process through
        # all restarts, so that this process can serve as the identity, except when Slurm requeues
        # the job.
        identity = run_id if run_id != "none" else identity or f"{socket.gethostname()}-{os.getppid()}"
        restarts = int(environment["TORCHELASTIC_RESTART_COUNT"])
    return Launch(
        launcher="torchrun",
        rank=_number(environment, "RANK"),
        size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else None,
        host=environment.get("MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else None,
        restarts=restarts,
        requeues=requeues,
        identity=identity,
    )


def _by_slurm(environment: Environment) -> Launch | None:
    """Read the variables of a task that srun started.

    The batch script itself and the shell of salloc have SLURM_PROCID or SLURM_NTASKS, too, but no
    step: there is one process, however many tasks the job has.
    """
    if "SLURM_STEP_ID" not in environment:
        return None
    requeues, identity = _requeues(environment)
    host = environment.get("MASTER_ADDR") or _first_host(
        environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    )
    name = f"slurm {environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"
    return Launch(
        launcher="slurm",
        rank=_number(environment, "SLURM_PROCID"),
        size=_number(environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"),
        local_rank=_number(environment, "SLURM_LOCALID"),
        host=host,
        port=_port(environment, name),
        name=name,
        requeues=requeues,
        identity=identity,
    )


def _by_mpirun(environment: Environment) -> Launch | None:
    """Read the variables of Open MPI's mpirun, or of Hydra, which starts MPICH and Intel MPI."""
    for rank, size, local_rank, local_size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if rank in environment and local_rank in environment:
            return Launch(
                launcher="mpi",
                rank=_number(environment, rank),
                size=_number(environment, size),
                local_rank=_number(environment, local_rank),
                **_mpi_meeting(environment, _number(environment, size), _number(environment, local_size)),
            )
    return None


def _by_pmi(environment: Environment) -> Launch | None:
    """Read PMI's own variables, which is all that other launchers of MPI programs set.

    Nothing says how many ranks are on this host, so the meeting point has to be given.
    """
    if "PMI_RANK" not in environment:
        return None
    size = _number(environment, "PMI_SIZE")
    return Launch("mpi", _number(environment, "PMI_RANK"), size, **_mpi_meeting(environment, size, local_size=1))


def _mpi_meeting(environment: Environment, size: int, local_size: int) -> dict[str, Any]:
    """Return host, port and name of an MPI launch.

    MPI tells no host. Without MASTER_ADDR, only ranks on one host or in one job of Slurm know where
    to meet. Ranks of one host have the same parent, which tells this launch from others there.
    """
    on_one_host = local_size == size
    in_slurm = _first_host(environment.get("SLURM_JOB_NODELIST", ""))
    host = environment.get("MASTER_ADDR") or ("127.0.0.1" if on_one_host else in_slurm)
    if host is None:
        raise UserError(
            f"an MPI launcher started {size} ranks on several hosts, but nothing says where they meet; set MASTER_ADDR "
            "to a name or address of rank 0's host, for Open MPI with mpirun -x MASTER_ADDR=..., for MPICH with -genv "
            "MASTER_ADDR ..."
        )
    job = environment.get("PMIX_NAMESPACE") or environment.get("SLURM_JOB_ID")
    name = f"mpi {job or (os.getppid() if on_one_host else host)}"
    return {"host": host, "port": _port(environment, name), "name": name}


def _single(environment: Environment) -> Launch:
    requeues, identity = _requeues(environment)
    num_tasks = environment.get("SLURM_NTASKS", "1")
    if num_tasks != "1" and "SLURM_STEP_ID" not in environment:
        tell(
            f"this job of Slurm has {num_tasks} tasks, but the program was started without srun or torchrun: this "
            "process works alone"
        )
    return Launch(requeues=requeues, identity=identity)


_READERS: dict[str, Callable[[Environment], Launch | None]] = {
    "torchrun": _by_torchrun,
    "slurm": _by_slurm,
    "mpi": lambda environment: _by_mpirun(environment) or _by_pmi(environment),
    "single": lambda _: Launch(),
}
_MARKS = {
    "torchrun": "torchrun (RANK, WORLD_SIZE)",
    "slurm": "a step of Slurm (SLURM_STEP_ID, SLURM_PROCID)",
    "mpi": "MPI (OMPI_COMM_WORLD_RANK or PMI_RANK)",
}
_COMMANDS = {"torchrun": "torchrun", "slurm": "srun", "mpi": "mpirun"}


# ---- what they have in common -------------------------------------------------------------------


def _number(environment: Environment, name: str) -> int:
    if name not in environment:
        raise UserError(
            f"the launcher did not set {name}, so this process does not know which rank it is; set {name}, or type "
            "dist.launcher=single for a run of one process"
        )
    try:
        return int(environment[name])
    except ValueError as error:
        raise UserError(f"the environment variable {name} is {environment[name]!r}; set it to a number") from error


def _require_one_torchrun(launch: Launch, environment: Environment) -> None:
    """Raise UserError if srun or mpirun started several torchruns that know nothing of one another.

    Each of them would train alone.
    """
    groups = environment.get("GROUP_WORLD_SIZE")
    if launch.launcher != "torchrun" or groups is None:
        return
    for name, command in (("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpirun")):
        num_torchruns = environment.get(name, "1")
        if num_torchruns not in ("1", groups):
            raise UserError(
                f"{command} started {num_torchruns} torchruns, but {groups} of them met, so that several runs would "
                f"train side by side; give torchrun --nnodes={num_torchruns} and a common --rdzv-endpoint, start it "
                "with one task for each node, or type dist.launcher=torchrun if they are to train apart"
            )


def _port(environment: Environment, name: str) -> int:
    """Return MASTER_PORT, or a port that follows from the name of the launch.

    All ranks compute the same port, and two launches on one host rarely the same.
    """
    if "MASTER_PORT" in environment:
        return _number(environment, "MASTER_PORT")
    return _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS


def _first_host(nodes: str) -> str | None:
    """Return the first host of a list of nodes in Slurm's notation, such as gpu[003-006,9],login1.

    Slurm starts rank 0 there.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else None


def _requeues(environment: Environment) -> tuple[int, str | None]:
    """Return how often Slurm has requeued the job, and an identity of the launch inside the job.

    A job may start several runs one after the other, so the identity contains the step and the
    command line. A requeued job has the same number and starts the same commands.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return 0, None
    command = zlib.crc32("\0".join(sys.argv[1:]).encode())
    step = environment.get("SLURM_STEP_ID", "batch")
    return int(environment.get("SLURM_RESTART_COUNT", 0)), f"slurm-{job}-{step}-{command:08x}"


def end_with_launcher(launch: Launch) -> Callable[[], bool]:
    """End this process within a second after its launcher is gone.

    Otherwise the worker would go on beside the run that somebody starts in its place.

    Returns:
        A function that tells whether the launcher is gone. A fault during that second is most
        likely a consequence.
    """
    # Somebody who sets RANK by hand may leave the shell, and the ranks go on.
    is_by_hand = launch.launcher == "torchrun" and "TORCHELASTIC_RESTART_COUNT" not in os.environ
    if launch.launcher == "single" or is_by_hand:
        return lambda: False
    launcher = os.getppid()

    def is_gone() -> bool:
        return os.getppid() != launcher

    def watch() -> None:
        while not is_gone():
            time.sleep(1)
        tell(f"rank {launch.rank}: its launcher is gone; ending")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    return is_gone
