"""Read the votes on ARC tasks, and the training pairs of these tasks."""

from pathlib import Path
from typing import Any

from utils.errors import UserError
from viewer.pages import Page, read_json

Grid = list[list[int]]


def read_votes(outputs: Path | None, data: Path | None) -> list[Page]:
    """Read arc_votes.json, and the training pairs of its tasks if the dataset exists.

    Raises:
        UserError: evaluation did not write this file.
    """
    if outputs is None or not (outputs / "arc_votes.json").exists():
        return []
    file = outputs / "arc_votes.json"
    puzzles = data / "test_puzzles.json" if data else None
    tasks = read_json(puzzles) if puzzles and puzzles.exists() else {}
    try:
        return [
            {"task": name, "train": _pairs_of(tasks.get(name, {})), "tests": [_test_of(test) for test in tests]}
            for name, tests in read_json(file).items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{file}: isn't what evaluation writes; run evaluate.py again") from None


def _pairs_of(task: dict[str, Any]) -> list[list[list[str] | None]]:
    return [[_rows_of(pair["input"]), _rows_of(pair["output"])] for pair in task.get("train", [])]


def _test_of(test: dict[str, Any]) -> Page:
    candidates = [
        {
            "grid": _rows_of(candidate["grid"]),
            "count": int(candidate["count"]),
            "confidence": round(float(candidate["confidence"]), 4),
            "right": candidate["right"],
        }
        for candidate in test["candidates"]
    ]
    return {
        "input": _rows_of(test["input"]),
        "solution": _rows_of(test["solution"]),
        "num_votes": int(test["num_votes"]),
        "num_empty": int(test["num_empty"]),
        "candidates": candidates,
    }


def _rows_of(grid: Grid | None) -> list[str] | None:
    """Return the rows of a grid, one character per cell; None for an unknown solution."""
    return None if grid is None else ["".join(str(int(colour)) for colour in row) for row in grid]
