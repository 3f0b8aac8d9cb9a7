"""What the variables of each launcher say about a process, and which ones are not enough.

The environments are those that Slurm 22.05, Open MPI 4.1, MPICH 4.0 and torchrun 2.13 set.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.runs import REPOSITORY
from utils.errors import UserError
from utils.ranks.launch import Launch, LauncherName, may_be_first, without_launcher

_SLURM_BATCH = {
    **{"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    **{"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"},
}
_SLURM_STEP = {
    **{"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
    **{"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"},
    **{"SLURM_STEP_NODELIST": "n[07-08]", "SLURM_JOB_NODELIST": "n[07-08]"},
}
_OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1588789249"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
_MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
_TORCHRUN = {
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "job-7"},
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        monkeypatch.delenv(name)


def _launch(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], launcher: LauncherName | None = None
) -> Launch:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Launch.from_environment(launcher or "auto")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("single", 0, 1, None, None)),
        (_TORCHRUN, ("torchrun", 1, 2, 1, "localhost")),
        (_TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, 1, "localhost")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ("torchrun", 1, 2, None, "a")),
        (_SLURM_STEP, ("slurm", 3, 4, 1, "n07")),
        (_SLURM_STEP | {"MASTER_ADDR": "10.0.0.1"}, ("slurm", 3, 4, 1, "10.0.0.1")),
        (_SLURM_STEP | {"SLURM_STEP_NODELIST": "r[1-2]n[09,11]-ib,x"}, ("slurm", 3, 4, 1, "r1n09-ib")),
        (_SLURM_BATCH, ("single", 0, 1, None, None)),
        (_SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("single", 0, 1, None, None)),
        (_OPEN_MPI, ("mpi", 1, 2, 1, "127.0.0.1")),
        (_OPEN_MPI | {"MASTER_ADDR": "a", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ("mpi", 1, 2, 1, "a")),
        (_MPICH, ("mpi", 1, 2, 1, "127.0.0.1")),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MASTER_ADDR": "a"}, ("mpi", 5, 8, None, "a")),
        # The launcher does not say where ranks of several hosts meet; require_meeting_point asks.
        (_OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ("mpi", 1, 2, 1, None)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ("mpi", 1, 2, None, None)),
        # Inside a step of Slurm, other launchers start ranks of their own.
        (_SLURM_STEP | _TORCHRUN | {"GROUP_WORLD_SIZE": "4"}, ("torchrun", 1, 2, 1, "localhost")),
        (_SLURM_STEP | _OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ("mpi", 1, 2, 1, "n07")),
        # srun --mpi=pmi2 sets PMI's variables beside its own, and for other hosts than one.
        (_SLURM_STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, ("slurm", 3, 4, 1, "n07")),
    ],
)
def test_a_rank_finds_itself(
    environment: dict[str, str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _launch(monkeypatch, environment)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.host) == expected


@pytest.mark.parametrize(
    ("environment", "launcher", "expected"),
    [
        ({"WORLD_SIZE": "2"}, None, "did not set RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, None, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None, "rank 2 of 2"),
        (_TORCHRUN | {"MASTER_PORT": "99999"}, None, "MASTER_PORT 99999"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "a"}, None, "PMIX_RANK=1"),
        ({}, "slurm", "dist.launcher=slurm"),
        (_SLURM_STEP, "mpi", "dist.launcher=mpi"),
        (_SLURM_STEP | _TORCHRUN, None, "srun started 4 torchruns, but 1 of them met"),
        (_OPEN_MPI | _TORCHRUN, None, "mpirun started 2 torchruns, but 1 of them met"),
        (_SLURM_STEP | _OPEN_MPI, None, "srun started 4 mpiruns, but 1 of them met"),
    ],
)
def test_what_is_missing_is_named(
    environment: dict[str, str], launcher: LauncherName | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each process would train alone, beside the others."""
    with pytest.raises(UserError, match=expected):
        _launch(monkeypatch, environment, launcher)


def test_the_config_may_choose_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[LauncherName, int] = {"single": 1, "torchrun": 2, "slurm": 4}
    for launcher, size in sizes.items():
        assert _launch(monkeypatch, _SLURM_STEP | _TORCHRUN, launcher).size == size


def test_launches_differ_in_port_and_name_and_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches on one host must not meet one another."""
    for environment, rank, job in (
        (_SLURM_STEP, "SLURM_PROCID", "SLURM_STEP_ID"),
        (_SLURM_STEP, "SLURM_PROCID", "SLURM_JOB_ID"),
        (_SLURM_BATCH | {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID"),
        (_OPEN_MPI, "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
    ):
        with monkeypatch.context() as patch:
            launches = [
                _launch(patch, environment | changes) for changes in ({rank: "0"}, {rank: "1"}, {rank: "0", job: "99"})
            ]
        ports, names = [launch.port for launch in launches], [launch.name for launch in launches]
        assert ports[0] == ports[1] != ports[2] and names[0] == names[1] != names[2]
        assert all(port is not None and 1024 < port < 32768 for port in ports), "systems give clients higher ports"
    assert _launch(monkeypatch, _SLURM_STEP | {"MASTER_PORT": "29501"}).port == 29501


def _name_below(wrappers: int) -> list[str]:
    code = "from utils.ranks.launch import Launch; print(f'NAME {Launch.from_environment().name}\\n', end='')"
    script = f'"{sys.executable}" -c "{code}"; true'
    for _ in range(wrappers - 1):
        script = f"sh -c {shlex.quote(script)}; true"
    done = subprocess.run(
        ["mpirun.mpich", "-n", "2", "sh", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    names = re.findall(r"NAME (.*)", done.stdout)
    assert len(names) == 2, f"a rank did not say its name: {done}"
    return names


@pytest.mark.launch
@pytest.mark.skipif(shutil.which("mpirun.mpich") is None, reason="there is no mpirun.mpich here")
def test_ranks_behind_scripts_know_their_launch() -> None:
    """Each rank has a parent of its own then, but Hydra's daemon is above them all."""
    one, other = _name_below(1), _name_below(2)
    assert one[0] == one[1] != other[0] == other[1]


def test_the_innermost_launcher_decides_who_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_be_first()
    names = ("SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "RANK")
    for name, value, expected in zip(names, "10101", (False, True, False, True, False), strict=True):
        monkeypatch.setenv(name, value)
        assert may_be_first() == expected, name


def test_torchruns_attempts_have_one_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for run_id in ("job-7", "none"):  # torchrun sets "none" if it has no rendezvous id
        attempts = [
            _launch(monkeypatch, _TORCHRUN | {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(n)})
            for n in range(2)
        ]
        assert [attempt.restarts for attempt in attempts] == [0, 1]
        assert [attempt.is_later_attempt for attempt in attempts] == [False, True]
        assert attempts[0].identity == attempts[1].identity not in (None, "", "none")


def test_a_requeued_job_is_the_same_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --standalone draws another run id in each attempt; another step may come before."""
    for environment in (
        *(_SLURM_STEP, _SLURM_BATCH, _OPEN_MPI | {"SLURM_JOB_ID": "12"}, _TORCHRUN | {"SLURM_JOB_ID": "12"}),
        {"SLURM_JOB_ID": "12", "RANK": "0", "WORLD_SIZE": "2"},
    ):
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", ["pretrain.py", "lr=1e-4"])
            other_id = {"TORCHELASTIC_RUN_ID": "x"} if "GROUP_WORLD_SIZE" in environment else {}
            requeued = {"SLURM_RESTART_COUNT": "1"} | other_id
            first, again = (_launch(patch, environment | more) for more in ({}, requeued))
            assert not first.is_later_attempt and again.is_later_attempt and again.requeues == 1
            assert first.identity == again.identity is not None
            patch.setattr("sys.argv", ["pretrain.py", "lr=2e-4"])  # the next run of the same batch script
            assert _launch(patch, environment).identity != first.identity


def test_an_attempt_on_ray_is_the_same_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "TRAINER_LAUNCH": "run_20260101", "TRAINER_REQUEUES": "1"}
    launch = _launch(monkeypatch, told)
    assert (launch.identity, launch.requeues, launch.is_later_attempt) == ("run_20260101", 1, True)
    assert without_launcher(told) == {}


def test_a_new_run_gets_nothing_of_the_launcher() -> None:
    own = {"HOME": "/home/a", "OMP_NUM_THREADS": "2"}
    for environment in (_SLURM_STEP, _SLURM_BATCH, _OPEN_MPI, _MPICH, _TORCHRUN):
        assert without_launcher(environment | own) == own
