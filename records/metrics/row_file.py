"""Write metrics.jsonl: a line of JSON for each logged step."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from records.metrics.sink import Row
from utils.files import plain, without_following, write_atomically, writing


class RowFile:
    """Appends rows to metrics.jsonl, after removing those after `first_step`; `kept` are others.

    `time_s` counts the seconds since the run began, without pauses and repeated steps. A row that
    the disk refuses waits in memory, and is written before the next row. The file never ends with
    half a row.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        with writing(path):
            self.kept = keep_rows(path, first_step)
        self._waiting: list[str] = []
        self._lock = threading.Lock()  # the thread that saves writes the waiting rows, too
        # Rows of older versions have no time.
        before_s = next((row["time_s"] for row in reversed(self.kept) if "time_s" in row), 0.0)
        self._began = time.monotonic() - before_s

    def write(self, step: int, row: Row) -> None:
        """Append a row. Raise OSError if the disk refuses the row, which waits now."""
        time_s = round(time.monotonic() - self._began, 3)
        with self._lock:
            self._waiting.append(json.dumps({"step": step, "time_s": time_s, **row}) + "\n")
        self.write_waiting()

    def write_waiting(self) -> None:
        """Append the rows that wait. Raise OSError if the disk refuses them."""
        with self._lock:
            if not self._waiting:
                return
            rest = "".join(self._waiting).encode()
            # Without a buffer, which would be written once more when the file is closed.
            with open(self.path, "ab", buffering=0, opener=without_following) as file:
                end = file.tell()
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(end)
                    raise
            self._waiting.clear()


def keep_rows(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Remove the rows after a step, and lines that are no whole row. Return the other rows."""
    if not plain(path).exists():
        return []
    kept, lines = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row["step"] <= last_step:
                kept.append(row)
                lines.append(line + "\n")
        except (ValueError, RecursionError, TypeError, KeyError):  # cut off while it was written
            continue
    write_atomically(path, "".join(lines))
    return kept
