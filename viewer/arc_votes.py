"""Read the votes on ARC tasks, and the training pairs of these tasks."""

from pathlib import Path
from typing import Any

from utils.errors import UserError
from viewer.pages import Page, read_json


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
            {
                "task": name,
                "train": [
                    [_rows_of(pair["input"]), _rows_of(pair["output"])] for pair in tasks.get(name, {}).get("train", [])
                ],
                "tests": [_test_of(test) for test in tests],
            }
            for name, tests in read_json(file).items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{file}: isn't what evaluation writes; run evaluate.py again") from None


def _test_of(test: dict[str, Any]) -> Page:
    return {
        "input": _rows_of(test["input"]),
        "solution": _rows_of(test["solution"]),
        "num_votes": int(test["num_votes"]),
        "num_empty": int(test["num_empty"]),
        "candidates": [
            {
                "grid": _rows_of(candidate["grid"]),
                "count": int(candidate["count"]),
                "confidence": round(float(candidate["confidence"]), 4),
                "right": candidate["right"],
            }
            for candidate in test["candidates"]
        ],
    }


def _rows_of(grid: list[list[int]] | None) -> list[str] | None:
    """Return the rows of a grid, one character per cell; None for an unknown solution."""
    return None if grid is None else ["".join(str(int(colour)) for colour in row) for row in grid]
