"""Measure how long programs take to start: a page of help, a mistake, the first step of training.

python -m benchmarks.startup [--rounds 5] [--data-path data/sudoku-6x6] [--json FILE] [OVERRIDE...]

Each round runs every command once, one after the other, so that other work of the machine disturbs
them equally. The first command only imports torch, and the table compares the others with it. The
last command is a run of experiment=trm_sudoku_6x6 with the overrides. Its time ends when the first
step is logged. The program prints a table and, with --json, writes it.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.on_request import REPOSITORY
from benchmarks.spread import spread
from utils.run.history import METRICS_FILE

Times = dict[str, float]
"""Seconds of a command: `wall`, and `cpu` of all its processors together."""

_PROGRAMS = ("pretrain.py", "evaluate.py", "solve.py", "view.py", "watch.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data-path", default="data/sudoku-6x6", help="for the run (default: data/sudoku-6x6)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the run")
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
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads\n")
    print(table(times))
    if args.json is not None:
        args.json.write_text(json.dumps(times, indent=1) + "\n")


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
        command = [
            "pretrain.py",
            "experiment=trm_sudoku_6x6",
            "max_steps=1",
            "eval_every_n_steps=null",
            f"checkpoint_path={run}",
        ]
        began, cpu_began = time.perf_counter(), _cpu_of_children()
        with (Path(folder) / "said").open("w+") as said:
            process = subprocess.Popen(
                [sys.executable, *command, *overrides], cwd=REPOSITORY, stdout=said, stderr=subprocess.STDOUT
            )
            wall = None
            while wall is None and process.poll() is None:
                if _has_a_row(run / METRICS_FILE):
                    wall = time.perf_counter() - began
                time.sleep(0.01)
            if process.wait() != 0 or wall is None:
                said.seek(0)
                sys.exit(f"the run ended with status {process.returncode}:\n{said.read()}")
        return {"wall": wall, "cpu": _cpu_of_children() - cpu_began}


def _has_a_row(file: Path) -> bool:
    return file.exists() and "train/lm_loss" in file.read_text(encoding="utf-8")


def _cpu_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(times: dict[str, list[Times]]) -> str:
    """Return medians, the lowest and the highest times as Markdown.

    What a command takes more than the first one is computed in each round. Other work of the
    machine changes the CPU seconds less than the others.
    """
    first, show = next(iter(times.values())), "{:.2f}".format
    lines = ["| command | seconds | more than the first | CPU seconds | more than the first |", "|---|---|---|---|---|"]
    for name, rows in times.items():
        cells = []
        for clock in ("wall", "cpu"):
            cells.append(spread([row[clock] for row in rows], show))
            cells.append(spread([row[clock] - base[clock] for row, base in zip(rows, first, strict=True)], show))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
