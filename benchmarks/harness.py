"""What the benchmarks share: the command line, the machine, tables, and Sudokus to train on."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]


def parser_of(page: str | None, *, overrides: bool = True) -> argparse.ArgumentParser:
    """Return a parser with `--json` and, as positional arguments, the overrides of pretrain.py.

    Args:
        page: what --help prints above the options.
    """
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    if overrides:
        parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of pretrain.py, such as arch=trm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser


def machine() -> dict[str, Any]:
    """Return what a figure depends on besides the code, and print it to standard error."""
    cuda = torch.cuda.is_available()
    found = {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print("  ".join(f"{name} {value}" for name, value in found.items()), file=sys.stderr)
    return found


def write(file: Path | None, found: object) -> None:
    """Write figures as JSON, if there is a file for them."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def pretrain_command(num_ranks: int, *overrides: str) -> list[str]:
    """Return the command that runs pretrain.py, under torchrun if there are several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *(torchrun if num_ranks > 1 else []), "pretrain.py", *overrides]


def spread(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """Return the median, then the lowest and the highest of the values that are not None.

    Args:
        show: writes a number, such as `"{:.2f}".format`.
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    median, lowest, highest = map(show, (statistics.median(known), min(known), max(known)))
    return f"{median} ({lowest} to {highest})"


def table(titles: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def build_sudoku(folder: Path, *arguments: str) -> Path:
    """Build a dataset with the builder's arguments, and return its folder."""
    builder = [sys.executable, "dataset/build_sudoku_dataset.py", "--output-dir", str(folder), *arguments]
    subprocess.run(builder, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return folder
