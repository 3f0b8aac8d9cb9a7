"""Times the Sudoku builder as users run it: 1,000 puzzles with 1,000 augmentations each, in a process of its own.

python -m benchmarks.build_sudoku --source-dir DIR    (a folder with train and test .csv or .csv.gz of 9x9 puzzles)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]


class Run(NamedTuple):
    seconds: float
    peak_rss_gb: float
    size_gb: float


def measure(builder_args: list[str]) -> Run:
    """One build into a temporary folder; memory is the peak resident set, mapped pages included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "dataset.build_sudoku_dataset",
            "--output-dir",
            f"{folder}/data",
            *builder_args,
        ]
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        messages = process.stderr.read()
        # Not process.wait(): only wait4 tells what this child used.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.stderr.close()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(messages.strip().splitlines()[-1])
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    rss_unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return Run(seconds, usage.ru_maxrss * rss_unit / 1e9, size / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--source-dir", type=Path, help="subsampled to 1,000 training puzzles")
    source.add_argument("--generate", type=int, metavar="N", help="without files: times generating N puzzles as well")
    parser.add_argument("--num-aug", type=int, default=1000)
    parser.add_argument("--num-runs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()

    if args.source_dir is not None:
        builder_args = ["--source-dir", str(args.source_dir.resolve()), "--subsample-size", "1000"]
    else:
        builder_args = ["--generate", str(args.generate)]
    builder_args += ["--num-aug", str(args.num_aug)]
    runs = [measure(builder_args) for _ in range(args.num_runs)]

    print(f"build_sudoku_dataset {' '.join(builder_args)}, {os.cpu_count()} CPUs")
    print("run     seconds  peak RSS GB  on disk GB")
    for number, run in enumerate(runs, start=1):
        print(f"{number:<6} {run.seconds:>8.2f} {run.peak_rss_gb:>12.2f} {run.size_gb:>11.2f}")
    median = Run(*(statistics.median(column) for column in zip(*runs, strict=True)))
    print(f"median {median.seconds:>8.2f} {median.peak_rss_gb:>12.2f} {median.size_gb:>11.2f}")
    if args.json is not None:
        figures = {
            "builder_args": builder_args,
            "cpus": os.cpu_count(),
            "median": median._asdict(),
            "runs": [run._asdict() for run in runs],
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
