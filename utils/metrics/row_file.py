"""Write metrics.jsonl: a line of JSON for each logged step."""

import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.files import plain, without_following, write_atomically, writing
from utils.metrics.sink import Row


class RowFile:
    """Appends rows to metrics.jsonl.

    A line has the step, `time_s` and the row. `time_s` counts the seconds since the run began. A
    resumed run and a branch go on from the `time_s` of the last line that they keep, so that
    neither the pause nor the steps that are repeated count.

    A row that the disk refuses waits in memory, and is written before the next row. The file never
    ends with half a row.

    Attributes:
        path: the file.
        kept: the rows that were there already, each with its `step`. A stranger may have written
            them.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        """Remove the rows after `first_step`, because the run repeats those steps.

        Raises:
            UserError: The file can't be written.
        """
        self.path = path
        with writing(path):
            self.kept = keep_rows(path, first_step)
        self._waiting: list[str] = []
        self._lock = threading.Lock()  # the thread that saves writes the waiting rows, too
        self._before_s, self._began = _last_time(self.kept), time.monotonic()

    def write(self, step: int, row: Row) -> None:
        """Append a row. It survives the end of the process, but perhaps not a loss of power.

        Raises:
            OSError: The disk refuses the row, which waits now.
        """
        time_s = round(self._before_s + time.monotonic() - self._began, 3)
        with self._lock:
            self._waiting.append(json.dumps({"step": step, "time_s": time_s, **row}) + "\n")
        self.write_waiting()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
        except (ValueError, RecursionError):
            continue
        logged = row.get("step") if isinstance(row, dict) else None
        if isinstance(logged, int) and logged <= last_step:
            kept.append(row)
            lines.append(line + "\n")
    write_atomically(path, "".join(lines))
    return kept


def _last_time(rows: Sequence[dict[str, Any]]) -> float:
    """Return the last `time_s`; 0 if there is none, as in rows of older versions."""
    for row in reversed(rows):
        time_s = row.get("time_s")
        if isinstance(time_s, float) and 0 <= time_s < math.inf:  # the file may be forged
            return time_s
    return 0.0
