"""Read the config of a run, and what it has logged, also while the run writes."""

import json
from pathlib import Path
from typing import Any

import yaml

from utils.errors import UserError
from utils.files import plain, read_plain_yaml
from utils.text import one_line

METRICS_FILE = "metrics.jsonl"


class History:
    """The rows of a metrics.jsonl.

    Attributes:
        rows: a dict for each logged step, in the order of the file. Each has an int under `step`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        self._num_bytes = self._num_lines = 0
        self._last_line = b""

    def refresh(self) -> bool:
        """Read the lines that were added since the last call. A missing file has no rows.

        A line without a line break at its end is left for the next call: the run is writing it, or
        was killed while writing.

        Returns:
            Whether the rows have changed.

        Raises:
            UserError: The file can't be read, or a line of it (which the message names) is no row.
                The rows are those of the last call that could read it.
        """
        try:
            if not plain(self.file).exists():
                return False
            with open(self.file, "rb") as file:
                file.seek(self._num_bytes - len(self._last_line))
                replaced = file.read(len(self._last_line)) != self._last_line
                if replaced:  # a resumed run drops the rows of the steps that it repeats
                    self.rows, self._num_bytes, self._num_lines, self._last_line = [], 0, 0, b""
                    file.seek(0)
                text = file.read()
            added = [line + b"\n" for line in text.split(b"\n")[:-1]]
            numbered = enumerate(added, start=self._num_lines + 1)
            rows = [self._row(line.decode("utf-8"), number) for number, line in numbered if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.file}: cannot be read ({one_line(error)}); get the file again") from None
        if added:
            self.rows += rows
            self._num_lines += len(added)
            self._num_bytes += sum(map(len, added))
            self._last_line = added[-1]
        return replaced or bool(added)

    def _row(self, line: str, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
            return row | {"step": int(row["step"])}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise UserError(
                f"{self.file}:{number}: is no JSON object with a step; correct or remove the line"
            ) from None


def read_run_config(run: Path) -> dict[str, Any]:
    """Return the run's config.yaml as it stands there. A run without the file has an empty config.

    Raises:
        UserError: The file can't be read, or it is no config.
    """
    file = run / "config.yaml"
    if not file.exists():
        return {}
    try:
        config = yaml.safe_load(read_plain_yaml(file))
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: an impossible date
        raise UserError(f"{file}: cannot be read ({one_line(error)}); restore it from the run's checkpoint") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: is no config of a run; restore it from the run's checkpoint")
    return config
