"""Start builders of puzzles in this process, and read or damage what they leave."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.schema import Split, SplitName, open_split

HEADER = "source,question,answer,rating"
Main = Callable[[list[str] | None], int]


def build(main: Main, output_dir: Path, *options: object) -> dict[SplitName, Split]:
    assert main(["--output-dir", str(output_dir), *map(str, options)]) == 0
    return {"train": open_split(output_dir, "train"), "test": open_split(output_dir, "test")}


def refused(main: Main, capsys: pytest.CaptureFixture[str], output_dir: Path, *options: object) -> str:
    """Return the line with which the builder refuses the options."""
    before = sorted(output_dir.parent.iterdir())
    assert main(["--output-dir", str(output_dir), *map(str, options)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ";" in line, "the error must say what to do"
    assert sorted(output_dir.parent.iterdir()) == before
    return line


def write_source(folder: Path, rows: Sequence[str]) -> Path:
    """Write 12 rows as train.csv, and the others as test.csv.gz."""
    (folder / "train.csv").write_text("\n".join([HEADER, *rows[:12]]) + "\n")
    with gzip.open(folder / "test.csv.gz", "wt") as stream:
        stream.write("\n".join([HEADER, *rows[12:]]) + "\n")
    return folder


def write_arc_tasks(folder: Path, **subfolders: dict[str, Any]) -> Path:
    """Write tasks as ARC does: a subfolder for each subset, and a file for each task."""
    for subfolder, tasks in subfolders.items():
        (folder / subfolder).mkdir(parents=True)
        for name, task in tasks.items():
            (folder / subfolder / f"{name}.json").write_text(json.dumps(task))
    return folder


def write_combined_arc_tasks(folder: Path, **subsets: dict[str, Any]) -> Path:
    """Write tasks in Kaggle's layout, and return the prefix of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / "arc-agi"
    for subset, tasks in subsets.items():
        challenges = {
            name: {**task, "test": [{"input": pair["input"]} for pair in task["test"]]} for name, task in tasks.items()
        }
        solutions = {name: [pair["output"] for pair in task["test"]] for name, task in tasks.items()}
        Path(f"{prefix}_{subset}_challenges.json").write_text(json.dumps(challenges))
        with gzip.open(f"{prefix}_{subset}_solutions.json.gz", "wt") as stream:
            json.dump(solutions, stream)
    return prefix


def write_small_arc_tasks(folder: Path) -> None:
    """Write two tasks of each subset that pages name, with grids of 3x3, in Kaggle's layout."""
    grids = iter(np.random.default_rng(0).integers(0, 10, (100, 3, 3)).tolist())

    def task() -> dict[str, Any]:
        return {part: [{"input": next(grids), "output": next(grids)}] for part in ("train", "test")}

    subsets = ("training", "evaluation", "concept")
    write_combined_arc_tasks(folder, **{name: {f"{name}{n}": task() for n in range(2)} for name in subsets})


def put(at: Any, value: int | np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that changes a place of an array."""

    def change(array: np.ndarray) -> np.ndarray:
        array[at] = value
        return array

    return change


def fingerprints(folder: Path) -> list[str]:
    recorded = json.loads((folder / "fingerprint.json").read_text())
    return [recorded["train"], recorded["test"]]
