"""A run's rows are read while it writes them, and again from the start after it was resumed."""

import math
from pathlib import Path

import pytest

from records.history import History
from utils.errors import UserError


def _steps(history: History) -> list[int]:
    return [row["step"] for row in history.rows]


def test_rows_are_read_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    history = History(file)
    assert not history.refresh(), "there is no file yet"
    file.write_text('{"step": 1, "train/lr": 5, "a": ' + "9" * 5000 + '}\n{"step": 2')
    assert history.refresh() and history.rows == [{"step": 1, "train/lr": 5.0, "a": math.inf}], "a torn line is no row"
    assert isinstance(history.rows[0]["step"], int) and isinstance(history.rows[0]["train/lr"], float)
    assert not history.refresh()
    file.write_text(file.read_text() + '}\n\n{"step": 3}\n')
    assert history.refresh() and _steps(history) == [1, 2, 3]
    file.write_text(file.read_text() + "[]\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:5: is no JSON"):
        history.refresh()


@pytest.mark.parametrize("rows_after", ["", '{"step": 1}\n{"step": 3, "a": 1}\n', '{"step": 9}\n' * 9, None])
def test_a_replaced_file_is_read_from_its_start(tmp_path: Path, rows_after: str | None) -> None:
    """A file that is gone has no rows. A damaged replacement leaves the rows."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    history = History(file)
    history.refresh()
    file.write_text('{"step": 7}\n[]\n')
    for _ in range(2):
        with pytest.raises(UserError, match=r"metrics.jsonl:2: is no JSON"):
            history.refresh()
    assert _steps(history) == [1, 2]
    if rows_after is None:
        file.unlink()
    else:
        file.write_text(rows_after)
    assert history.refresh()
    assert len(history.rows) == len((rows_after or "").splitlines())


@pytest.mark.parametrize(
    "line",
    ["[1]", "{}", "{", "[" * 100_000, '{"step": "a"}', '{"step": -1}', '{"step": NaN}', '{"step": 9007199254740993}'],
    ids=lambda line: line[:20],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: is no JSON.*; correct or remove"):
        History(file).refresh()
