"""Measure how long programs take to start: a page of help, a mistake, the first step of training.

python -m benchmarks.startup [--rounds 5] [--data-path data/sudoku-6x6] [--json FILE] [OVERRIDE...]

Each round runs every command once, one after the other, so that other work of the machine disturbs
them equally. The first command only imports torch, and the table compares the others with it. The
last command is a run of experiment=trm_sudoku_6x6 with the overrides. Its time ends when the first
step is logged. The program prints a table and, with --json, writes it.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harness import REPOSITORY, machine, parser_of, pretrain_command, spread, table, write
from records.history import METRICS_FILE, History

Times = dict[str, float]
"""Seconds of a command: `wall`, and `cpu` of all its processors together."""

_PROGRAMS = ("pretrain.py", "evaluate.py", "solve.py", "view.py", "watch.py")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data-path", default="data/sudoku-6x6", help="for the run (default: data/sudoku-6x6)")
    args = parser.parse_intermixed_args()

    commands: dict[str, Callable[[], Times]] = {
        "import torch": partial(timed, ["-c", "import torch"]),
        **{f"{program} --help": partial(timed, [program, "--help"]) for program in _PROGRAMS},
        "pretrain.py with a wrong key": partial(timed, ["pretrain.py", "lrr=1"], status=2),
        "the first step of a run": partial(first_step, [f"data_path={args.data_path}", *args.overrides]),
    }
    times: dict[str, list[Times]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, run in commands.items():
            times[name].append(run())
    machine()
    print(shown(times))
    write(args.json, times)


def timed(arguments: list[str], *, status: int = 0) -> Times:
    """Run a Python command until it ends, and return its times."""
    began, cpu_began = time.perf_counter(), _cpu_of_children()
    done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != status:
        sys.exit(f"{' '.join(arguments)} ended with status {done.returncode}:\n{done.stderr}")
    return {"wall": time.perf_counter() - began, "cpu": _cpu_of_children() - cpu_began}


def first_step(overrides: list[str]) -> Times:
    """Train one step, and return the times until it is logged. The CPU time is of the whole run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = pretrain_command(1, "experiment=trm_sudoku_6x6", "max_steps=1", "eval_every_n_steps=null")
        command += [f"checkpoint_path={run}", *overrides]
        began, cpu_began = time.perf_counter(), _cpu_of_children()
        process = subprocess.Popen(command, cwd=REPOSITORY)
        history = History(run / METRICS_FILE)
        while not history.refresh() and process.poll() is None:
            time.sleep(0.01)
        wall = time.perf_counter() - began
        if process.wait() != 0:
            sys.exit(f"the run ended with status {process.returncode}")
        return {"wall": wall, "cpu": _cpu_of_children() - cpu_began}


def _cpu_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shown(times: dict[str, list[Times]]) -> str:
    """Return medians, the lowest and the highest times as Markdown.

    What a command takes more than the first one is computed in each round. Other work of the
    machine changes the CPU seconds less than the others.
    """
    first, show = next(iter(times.values())), "{:.2f}".format
    rows = []
    for name, rounds in times.items():
        row = [name]
        for clock in ("wall", "cpu"):
            row.append(spread([each[clock] for each in rounds], show))
            row.append(spread([each[clock] - base[clock] for each, base in zip(rounds, first, strict=True)], show))
        rows.append(row)
    more = "more than the first"
    return table(["command", "seconds", more, "CPU seconds", more], rows)


if __name__ == "__main__":
    main()
