"""Let a sweep fork its runs, which then need not import PyTorch. That takes seconds for each.

A run is still a process in a session of its own, has its own arguments and environment, and dies
with its sweep. Other than a program, it inherits what the sweep has imported, and functions that
were registered with `atexit` do not run.
"""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import torch


def fork_runs(poll_s: float = 0.02) -> None:
    """Let sweeps of this process fork their runs, look after them often, and wait less long."""
    import pretrain  # noqa: F401  (the forks have it then)
    from search import driver, launchers, study, workload

    driver._POLL_S, study.HEARTBEAT_S, study.SILENT_S = poll_s, 1, 20
    workload.time_steps = lambda sweep, sizes: None  # which would take a while
    streams = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT")}
    launchers.subprocess = SimpleNamespace(Popen=ForkedRun, **streams)  # type: ignore[assignment,attr-defined]


class ForkedRun:
    """Takes the place of subprocess.Popen in search/launchers.py."""

    def __init__(
        self,
        words: list[str],
        *,
        stdout: IO[str],
        env: dict[str, str],
        preexec_fn: Callable[[], None],
        **_the_same_for_all_runs: object,
    ) -> None:
        self._status: int | None = None
        sys.stdout.flush()  # the run would write it too
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _become(words[1:], stdout.fileno(), env, preexec_fn)
            except SystemExit as ended:
                os._exit(int(ended.code or 0))
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self._status is None and (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(ended[1])
        return self._status

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.terminate(signal.SIGKILL)


def _become(words: list[str], output: int, environment: dict[str, str], preexec_fn: Callable[[], None]) -> None:
    """Become a new program, as far as a fork can: with its own signals, files and environment."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    preexec_fn()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1000)  # among them the locks of the sweep
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    assert Path(words[0]).name == "pretrain.py", words
    sys.argv = words
    pretrain = __import__(Path(words[0]).stem)
    pretrain.run(pretrain.main)
