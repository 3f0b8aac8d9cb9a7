"""Run torchrun, and end with status 2 if that is how a rank ended: after a mistake of the user.

torchrun itself ends with status 1, as after a fault. Then whoever starts pods again can't tell that
it is of no use.

python -m launch.torchrun --nproc-per-node=8 pretrain.py ...

With --start-method=fork, the ranks are forks of this process, which has imported the program and
PyTorch. After a fault they are back some seconds earlier than processes that begin with Python.
"""

import argparse
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from utils.terminal import tell


def main(argv: list[str] | None = None) -> int:
    arguments = run.parse_args(argv)
    if arguments.start_method == "fork":
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments.training_script)))
        runpy.run_path(arguments.training_script)  # its imports alone, as it is not __main__
        run.config_from_args = _with_forks(run.config_from_args)
    try:
        run.run(arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode == 2:
            return 2  # a rank has told the mistake, which the report would hide
        tell(str(error))
        return 1
    return 0


def _with_forks(config_from_args: Callable[..., Any]) -> Callable[..., Any]:
    def changed(arguments: argparse.Namespace) -> tuple[Any, ...]:
        config, *_ = config_from_args(arguments)
        return config, _rank, [[arguments.training_script, *arguments.training_script_args]]

    return changed


def _rank(words: list[str]) -> None:
    """Run the program in a fork, as torchrun would run it in a process of its own."""
    # PyTorch sends a fork SIGINT when the agent is killed, which would look like a person's Ctrl-C.
    torch.multiprocessing._prctl_pr_set_pdeathsig(0)  # type: ignore[attr-defined]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    exit_at_once = os._exit

    def leave(status: int) -> None:
        # Where a process of its own would end with 0, torchrun waits for this function to return.
        # After a stop, for which a program keeps its handler, torchrun stops as well.
        is_stopped = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        if status == 0 and not is_stopped and threading.current_thread() is threading.main_thread():
            sys.exit(0)
        exit_at_once(status)

    os._exit = leave  # type: ignore[assignment]
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        os._exit = exit_at_once


if __name__ == "__main__":
    sys.exit(main())
