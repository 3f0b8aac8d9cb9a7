"""A rank of a run on Ray: what Ray Train calls in each of its workers.

The function starts pretrain.py as a program of its own. It is then the same program as under any
other launcher. Ray calls the function in a thread, where Python refuses the signal handlers of a
graceful stop. And a fault that ends the program leaves the worker alive to report it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.train
from ray.train import Checkpoint
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.callback import UserCallback

from launch.ray_job import free_port, rank_environment
from records.checkpoint.format import read_name, step_folders
from records.history import METRICS_FILE, History
from utils.errors import UserError
from utils.processes import ending_with_parent
from utils.programs import ENVIRONMENT, PRETRAIN
from utils.ranks.launch import without_launcher

_NUM_LAST_LINES = 25
_LOOK_EVERY_S = 1.0
# After rank 0 has ended well or by a stop, the others have nothing left to do.
_PATIENCE_S = 30.0


class RankFailed(RuntimeError):
    """A rank of pretrain.py ended by a fault. Ray Train then starts all ranks again."""


class Desk:
    """An actor through which the ranks and the program of the user tell each other things.

    The lines that the ranks print go this way, because Ray's own would print each of them twice,
    with a prefix and between Ray's warnings.
    """

    def __init__(self) -> None:
        self._attempts, self._stop, self._mistake = 0, False, ""
        self._beginning: tuple[int, int] | None = None
        self._lines: list[str] = []

    def begin_attempt(self, beginning: tuple[int, int] | None) -> tuple[int, bool]:
        """Return the number of the attempt, and whether an earlier one has begun to train."""
        self._attempts += 1
        if self._attempts == 1:
            self._beginning = beginning
        return self._attempts, beginning != self._beginning

    def request_stop(self) -> bool:
        """Note that a stop was requested, and return whether there are ranks that save."""
        self._stop = True
        return self._attempts > 0

    def note_mistake(self, line: str) -> None:
        self._mistake = self._mistake or line

    def look(self) -> tuple[bool, str]:
        """Return whether a stop was requested, and the mistake of the user, if any."""
        return self._stop, self._mistake

    def tell(self, line: str) -> None:
        self._lines.append(line)

    def take_lines(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


class Outcome(NamedTuple):
    status: int  # of pretrain.py; not 0 if it could not save after a stop
    mistake: str  # the user's, as pretrain.py prints it; empty for none


class Program:
    """pretrain.py as a program below this process. The program is killed if this process ends."""

    def __init__(self, arguments: list[str], environment: dict[str, str], cwd: str, tell: Callable[[str], Any]) -> None:
        """Start the program. `tell` gets each line that it prints, but the user's mistake."""
        self.mistake = ""  # the line that begins with "error: ", if the exit status is 2
        self._tell = tell
        self._last: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, str(PRETRAIN), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**without_launcher(os.environ), **ENVIRONMENT, **environment},  # of the launcher that started Ray
            cwd=cwd,
            start_new_session=True,  # Ctrl-C reaches the program of the user alone, which asks for a stop
            # Not SIGTERM: a rank can save only together with the others, and the next attempt needs
            # the folder of the run.
            preexec_fn=ending_with_parent(signal.SIGKILL),
        )
        self.poll = self._process.poll
        self._reader = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        held = ""
        for line in map(str.rstrip, self._process.stdout):
            self._last.append(line)
            if line.startswith("error: ") and not held:
                held = line
            else:
                self._tell(line)
        if self._process.wait() == 2:
            self.mistake = held
        elif held:
            self._tell(held)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end, kill the program if it takes longer, and return the exit status."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._reader.join(timeout_s)
        return status

    def stop(self) -> None:
        """Ask for a checkpoint and the end."""
        self._process.send_signal(signal.SIGTERM)

    def failure(self, rank: int, status: int) -> RankFailed:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._reader.join(_PATIENCE_S)
        last = "\n".join(self._last)
        return RankFailed(f"pretrain.py on {socket.gethostname()} {how}\nthe last lines of rank {rank}:\n{last}")


class NewestMetrics:
    """Follows metrics.jsonl, and keeps the newest value of each metric."""

    def __init__(self, run: Path) -> None:
        self.values: dict[str, Any] = {}
        self.checkpoint = ""  # the name of the newest step folder, once it is whole
        self.run, self._history = run, History(run / METRICS_FILE)

    def read(self) -> bool:
        changed = False
        with suppress(UserError):  # what Ray is told is no reason to end the run
            changed = self._history.refresh()
        for row in self._history.rows if changed else ():
            self.values |= row
        return changed

    def report(self, *, saved: bool) -> None:
        """Report to Ray, with the name of a new checkpoint.

        Ray keeps metrics only together with a checkpoint, and would copy its files. So the
        checkpoint that Ray gets is a small file that names ours.
        """
        if not saved:
            ray.train.report(self.values)
            return
        with tempfile.TemporaryDirectory() as folder:
            named = {"run": str(self.run), "checkpoint": str(self.run / self.checkpoint)}
            (Path(folder) / "pretrain.json").write_text(json.dumps(named) + "\n", encoding="utf-8")
            ray.train.report(self.values, Checkpoint.from_directory(folder))


def run_rank(settings: dict[str, Any]) -> Outcome:
    """Run one rank of one attempt, and return how the run ended. Every rank.

    Args:
        settings: the `job` and the handle of the `desk`.
    """
    job, desk, context = settings["job"], settings["desk"], ray.train.get_context()
    rank = context.get_world_rank()
    attempt, has_begun, *meeting = broadcast_from_rank_zero(
        (*ray.get(desk.begin_attempt.remote(job.beginning())), ray.util.get_node_ip_address(), free_port())
        if rank == 0
        else None
    )
    run = Path(job.cwd) / job.run
    if rank == 0 and attempt > 1:
        desk.tell.remote(f"attempt {attempt}: all ranks begin again, in {job.run}")
    environment = rank_environment(
        rank=rank,
        size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_size=context.get_local_world_size(),
        meeting=tuple(meeting),
        has_device=bool(ray.get_gpu_ids()),
    )
    arguments = job.arguments(has_begun=has_begun, has_checkpoints=bool(step_folders(run)))
    program = Program(arguments, environment, job.cwd, desk.tell.remote)
    try:
        stopping, mistake = _follow(program, NewestMetrics(run) if rank == 0 else None, desk, rank)
    except BaseException:
        program.wait(0)
        raise
    status = program.wait(_PATIENCE_S)
    if status != 0 and not (stopping or mistake):
        raise program.failure(rank, status)
    return Outcome(status, mistake)


def _follow(program: Program, metrics: NewestMetrics | None, desk: Any, rank: int) -> tuple[bool, str]:
    """Report metrics and pass on a stop, until the program of rank 0 has ended. Every rank.

    Returns:
        Whether a stop was requested, and the mistake of the user, if any.
    """
    stopping, mistake = False, ""
    while True:
        time.sleep(_LOOK_EVERY_S)
        status = program.poll()
        if status == 2:  # only the rank that found the mistake knows it
            program.wait(_PATIENCE_S)
            if program.mistake:
                ray.get(desk.note_mistake.remote(program.mistake))
        elif status and not stopping:
            raise program.failure(rank, status)
        saved, order = False, None
        if metrics is not None:
            stop, mistake = ray.get(desk.look.remote())
            before, metrics.checkpoint = metrics.checkpoint, read_name(metrics.run / "latest")
            saved = metrics.checkpoint not in ("", before)
            order = (metrics.read() or saved, stop, status is not None or bool(mistake))
        # What rank 0 tells all ranks to do, every second. Ray allows a kilobyte for it.
        report, stop, end = broadcast_from_rank_zero(order)
        if report and metrics is not None:
            metrics.report(saved=saved)
        elif report:  # Ray waits for the reports of all ranks; only that of rank 0 counts
            ray.train.report({})
        if stop and not stopping:
            stopping = True
            program.stop()
        if end:
            return stopping, mistake or ray.get(desk.look.remote())[1]


class TellFailures(UserCallback):
    """Tells the desk a line for each rank that failed. Ray's controller calls it."""

    def __init__(self, desk: Any) -> None:
        self._desk = desk

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for rank, error in sorted(worker_exceptions.items()):
            # Only the first line: the desk has told what the rank printed last.
            line = str(error).strip().partition("\n")[0]
            self._desk.tell.remote(f"rank {rank} failed: {line}")
