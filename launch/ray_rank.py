"""A rank of a run on Ray: what Ray Train calls in each of its workers.

The function starts pretrain.py as a program of its own. Ray calls the function in a thread, where
Python refuses the signal handlers of a graceful stop. And a fault that ends the program leaves the
worker alive to report it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.callback import UserCallback

from records.checkpoint.format import read_name
from records.history import logged_rows
from utils.errors import UserError
from utils.processes import ending_with_parent
from utils.programs import ENVIRONMENT, PRETRAIN
from utils.ranks.launch import LAUNCH, REQUEUES, without_launcher

_LOOK_EVERY_S = 1.0
# After rank 0 has ended well or by a stop, the others have nothing left to do.
_PATIENCE_S = 30.0
MISTAKE = 2  # the exit status after a mistake of the user


class RankFailed(RuntimeError):
    """A rank of pretrain.py ended by a fault. Ray Train then starts all ranks again."""


class Desk:
    """An actor through which the ranks and the program of the user tell each other things.

    The lines that the ranks print go this way, because Ray's own would print each of them twice,
    with a prefix and between Ray's warnings.
    """

    def __init__(self) -> None:
        self._attempts, self._stop, self._mistake = 0, False, False
        self._lines: list[str] = []

    def begin_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    def request_stop(self) -> bool:
        """Note that a stop was requested, and return whether there are ranks that save."""
        self._stop = True
        return self._attempts > 0

    def look(self, mistake: bool) -> tuple[bool, bool]:
        """Return whether a stop was requested, and whether any rank found a mistake of the user."""
        self._mistake |= mistake
        return self._stop, self._mistake

    def tell(self, line: str) -> None:
        self._lines.append(line)

    def take_lines(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


def rank_environment(
    rank: int, size: int, local_rank: int, meeting: tuple[str, int], *, has_device: bool
) -> dict[str, str]:
    """Return the variables by which pretrain.py finds its rank, named as torchrun names them.

    A CUDA device that Ray gave the worker is its number 0.
    """
    values = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0" if has_device else str(local_rank),
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
    }
    # Otherwise device=auto would take a GPU that others have reserved.
    return values if has_device else values | {"CUDA_VISIBLE_DEVICES": ""}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def run_rank(job: dict[str, Any]) -> int:
    """Run one rank of one attempt, and return the exit status of pretrain.py. Every rank.

    `job` has the arguments of pretrain.py, its working directory (cwd), the folder of the run, the
    name of the launch, and the handle of the desk.
    """
    desk, run, context = job["desk"], Path(job["cwd"], job["run"]), ray.train.get_context()
    rank = context.get_world_rank()
    attempt, *meeting = broadcast_from_rank_zero(
        (ray.get(desk.begin_attempt.remote()), ray.util.get_node_ip_address(), free_port()) if rank == 0 else None
    )
    if rank == 0 and attempt > 1:
        desk.tell.remote(f"attempt {attempt}: all ranks begin again, in {job['run']}")
    size, local_rank, has_device = context.get_world_size(), context.get_local_rank(), bool(ray.get_gpu_ids())
    environment = rank_environment(rank, size, local_rank, tuple(meeting), has_device=has_device)
    program = subprocess.Popen(
        [sys.executable, str(PRETRAIN), *job["arguments"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        # Without the variables of the launcher that started Ray.
        env=without_launcher(os.environ)
        | ENVIRONMENT
        | environment
        | {LAUNCH: job["name"], REQUEUES: str(attempt - 1)},
        cwd=job["cwd"],
        start_new_session=True,  # Ctrl-C reaches the program of the user alone, which asks for a stop
        # Not SIGTERM: a rank can save only together with the others, and the next attempt needs the
        # folder of the run.
        preexec_fn=ending_with_parent(signal.SIGKILL),
    )
    reader = Thread(target=_pass_on, args=(program, desk), name="output", daemon=True)
    reader.start()
    try:
        return _follow(program, run, desk, rank)
    finally:
        program.kill()
        reader.join(_PATIENCE_S)


def _pass_on(program: "subprocess.Popen[str]", desk: Any) -> None:
    assert program.stdout is not None
    for line in program.stdout:
        desk.tell.remote(line.rstrip())


def _follow(program: "subprocess.Popen[str]", run: Path, desk: Any, rank: int) -> int:
    """Report checkpoints and pass on a stop, until the program of rank 0 has ended. Every rank.

    Return the exit status of this rank, or MISTAKE if any rank found one.
    """
    stopping, reported = False, ""
    while True:
        time.sleep(_LOOK_EVERY_S)
        status = program.poll()
        stop, mistake = ray.get(desk.look.remote(status == MISTAKE))
        if status and not (stopping or mistake):
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise RankFailed(f"pretrain.py on {socket.gethostname()} {how}")
        newest = read_name(run / "latest") if rank == 0 else ""
        is_new = newest not in ("", reported)
        ends = status is not None or mistake
        # What rank 0 tells all ranks to do, every second. Ray allows a kilobyte for it.
        is_new, stop, ends = broadcast_from_rank_zero((is_new, stop, ends))
        if is_new and rank == 0:
            reported = newest
            _report(run, newest)
        elif is_new:  # Ray waits for the reports of all ranks
            ray.train.report({})
        if stop and not stopping:
            stopping = True
            program.send_signal(signal.SIGTERM)
        if ends:
            with suppress(subprocess.TimeoutExpired):
                status = program.wait(_PATIENCE_S)
            return MISTAKE if mistake else status or 0


def _report(run: Path, checkpoint: str) -> None:
    """Report the newest value of each metric to Ray, with a small file that names a checkpoint.

    Ray keeps metrics only together with a checkpoint, and would copy the files of ours.
    """
    with tempfile.TemporaryDirectory() as folder:
        named = {"run": str(run), "checkpoint": str(run / checkpoint)}
        (Path(folder) / "pretrain.json").write_text(json.dumps(named) + "\n", encoding="utf-8")
        ray.train.report(newest_metrics(run), Checkpoint.from_directory(folder))


def newest_metrics(run: Path) -> dict[str, Any]:
    with suppress(UserError):  # what Ray is told is no reason to end the run
        return {name: value for row in logged_rows(run) for name, value in row.items()}
    return {}


class TellFailures(UserCallback):
    """Tells the desk a line for each rank that failed. Ray's controller calls it."""

    def __init__(self, desk: Any) -> None:
        self._desk = desk

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for rank, error in sorted(worker_exceptions.items()):
            line = str(error).strip().partition("\n")[0]
            self._desk.tell.remote(f"rank {rank} failed: {line}")
