"""Read the config of a run, and what it has logged, also while the run writes."""

from pathlib import Path
from typing import Any, TypeGuard

from utils.errors import UserError
from utils.files import plain, read_yaml
from utils.json_files import parse_json
from utils.text import one_line

METRICS_FILE = "metrics.jsonl"
# A float can hold every integer below this one.
_MOST_STEPS = 2**53


class History:
    """The rows of a metrics.jsonl, in order. `step` is an int, all other numbers are floats.

    Rows that are added lengthen the list. A replaced file begins a new list.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        self._num_bytes = self._num_lines = 0
        self._last_line = b""

    def refresh(self) -> bool:
        """Read the lines that were added since the last call, and return whether there were any.

        A missing file has no rows. A line without a line break at its end is left for the next
        call. After a UserError the rows are those of the last call that could read the file.
        """
        rows, num_bytes, num_lines, last_line = self.rows, self._num_bytes, self._num_lines, self._last_line
        try:
            with open(plain(self.file), "rb") as file:
                file.seek(num_bytes - len(last_line))
                replaced = file.read(len(last_line)) != last_line
                if replaced:  # a resumed run drops the rows of the steps that it repeats
                    file.seek(0)
                text = file.read()
        except FileNotFoundError:
            text, replaced = b"", bool(last_line)
        except OSError as error:
            raise UserError(f"{self.file}: cannot be read ({one_line(error)}); get the file again") from None
        if replaced:
            rows, num_bytes, num_lines, last_line = [], 0, 0, b""
        added = [line + b"\n" for line in text.split(b"\n")[:-1]]
        rows += [self._row(line, number) for number, line in enumerate(added, num_lines + 1) if line.strip()]
        self.rows, self._num_lines, self._num_bytes = rows, num_lines + len(added), num_bytes + sum(map(len, added))
        self._last_line = added[-1] if added else last_line
        return replaced or bool(added)

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        fix = "correct or remove the line"
        # A stranger's integer may be too large for a float.
        row = parse_json(line, f"{self.file}:{number}", fix, parse_int=float)
        step = row.get("step") if isinstance(row, dict) else None
        if not (isinstance(step, float) and 0 <= step < _MOST_STEPS and step.is_integer()):
            raise UserError(f"{self.file}:{number}: is no JSON object with a step; {fix}")
        return row | {"step": int(step)}


def logged_rows(run: Path) -> list[dict[str, Any]]:
    """Return what a run has logged so far, a dict for each row."""
    history = History(run / METRICS_FILE)
    history.refresh()
    return history.rows


def read_run_config(run: Path) -> dict[str, Any]:
    """Return the run's config.yaml as it stands there; {} if there is no such file."""
    file = run / "config.yaml"
    return read_yaml(file, "restore it from the run's checkpoint") if file.exists() else {}


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
