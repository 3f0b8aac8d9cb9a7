"""Measure the time and the peak memory of the dataset builders, each run in its own process.

python -m benchmarks.build_datasets --sudoku DIR --maze DIR --arc PREFIX --generate 1000

Each flag adds builds. --sudoku and --maze take a folder with train and test .csv or .csv.gz files,
and --arc takes the combined Kaggle files. With --generate the builders make the puzzles. The
datasets are written into a temporary folder, which TMPDIR chooses. ARC with 1,000 augmentations
takes 7 GB.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import REPOSITORY, machine, parser_of, spread, table, write

FIGURES = ("seconds", "peak_rss_gb", "size_gb")


def measure(builder: str, builder_args: list[str]) -> dict[str, float]:
    """Run one build in a temporary folder. Memory is the peak resident set with mapped pages."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"dataset.{builder}", "--output-dir", f"{folder}/data", *builder_args]
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        # Unlike process.wait(), wait4 returns the memory that this child used.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{builder} ended with status {process.returncode}")
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    rss_unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return dict(zip(FIGURES, (seconds, usage.ru_maxrss * rss_unit / 1e9, size / 1e9), strict=True))


def builds(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the builders that the flags ask for, with their options."""
    found = []
    num_aug = ["--num-aug", str(args.num_aug)]
    if args.sudoku is not None:
        options = ["--source-dir", str(args.sudoku.resolve()), "--subsample-size", "1000", *num_aug]
        found.append(("build_sudoku_dataset", options))
    if args.maze is not None:
        found.append(("build_maze_dataset", ["--source-dir", str(args.maze.resolve())]))
    if args.arc is not None:
        subsets = ["--subsets", "training", "evaluation", "concept", "--test-set-name", "evaluation"]
        found.append(("build_arc_dataset", ["--input-file-prefix", str(args.arc.resolve()), *subsets, *num_aug]))
    if args.generate is not None:
        generate = ["--generate", str(args.generate)]
        found.append(("build_sudoku_dataset", [*generate, "--box", "2x3"]))
        found.append(("build_sudoku_dataset", [*generate, "--box", "3x3"]))
        found.append(("build_maze_dataset", [*generate, "--size", "30"]))
    return found


def main() -> None:
    parser = parser_of(__doc__, overrides=False)
    add = parser.add_argument
    add("--sudoku", type=Path, metavar="DIR", help="9x9 puzzles, of which 1,000 are drawn for training")
    add("--maze", type=Path, metavar="DIR", help="mazes")
    add("--arc", type=Path, metavar="PREFIX", help="<PREFIX>_<subset>_challenges.json: ARC-AGI-1 and ConceptARC")
    add("--generate", type=int, metavar="N", help="make N + N/10 Sudokus of 6x6 and of 9x9, and mazes of 30x30")
    add("--num-aug", type=int, default=1000, help="augmentations for --sudoku and --arc (default: %(default)s)")
    add("--num-runs", type=int, default=3, help="runs of each build (default: %(default)s)")
    args = parser.parse_args()
    about, rows, found = machine(), [], []
    for builder, builder_args in builds(args):
        runs = [measure(builder, builder_args) for _ in range(args.num_runs)]
        cells = [spread([run[figure] for run in runs], "{:.2f}".format) for figure in FIGURES]
        rows.append([" ".join([builder, *builder_args]), *cells])
        found.append({"builder": builder, "builder_args": builder_args, "runs": runs})
        write(args.json, {**about, "builds": found})
    print(table(["build", "seconds", "peak RSS, GB", "on disk, GB"], rows))


if __name__ == "__main__":
    main()
