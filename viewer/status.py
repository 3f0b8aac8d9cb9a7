"""Tell how a run is doing from its folder, without changing anything there.

The run may be on another machine: only its files are read, and the lock of the folder.
"""

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeGuard

from records.checkpoint.format import read_name, read_state
from records.checkpoint.names import is_run
from records.history import METRICS_FILE, History
from records.launched import LAUNCH_FILE, Launched
from records.lock import is_locked
from utils.errors import UserError
from utils.files import plain
from utils.text import for_a_terminal, in_words, one_line

State = Literal["running", "stopped", "finished", "dead", "ended", "not begun", "damaged"]

LOSSES = ("train/lm_loss", "train/loss")  # of puzzles and of text
_SPEEDS = {"perf/tokens_per_second": "tokens", "perf/examples_per_second": "examples"}
# How many of the newest rows tell the speed of a run, and its usual time between two rows.
_RECENT = 20
# A run is silent after this many of its longest recent waits for a row, at the earliest after a
# minute.
_LONG_WAITS, _LEAST_SILENCE_S = 3, 60.0


class Watched:
    """A run that is looked at again and again. Each look reads only the rows that are new.

    Attributes: those that no file tells are None.
        state: see docs/watching.md.
        note: what else a person should know, in a few words; "" for nothing.
        step: the last step that was logged or saved; 0 before the first.
        loss, exact, test: the newest values; `test` by the name of the test set.
        speed: how many examples, or tokens of text, a second trains on, and which of them.
        checkpoint, best: the steps that `latest` and `best` name.
        rows: what was logged.
        began_at: when the run was started last, in seconds since the epoch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._history = History(path / METRICS_FILE)
        self._values: dict[str, float] = {}  # the newest of each metric
        self.look()

    def look(self) -> None:
        """Read the run again. Nothing in its folder is an error: it may be half written."""
        run, damage = self.path, ""
        try:
            if self._history.refresh():
                newest: dict[str, Any] = {}
                for row in self._history.rows:
                    newest |= row
                self._values = {name: value for name, value in newest.items() if is_number(value)}
        except UserError as error:
            damage = one_line(error).replace(f"{run}{os.sep}", "")
        self.rows, values = self._history.rows, self._values
        self.launched = launched = Launched.read(run)
        self.checkpoint, self.best = _step_named(run / "latest"), _step_named(run / "best")
        self.step: int = max(self.rows[-1]["step"] if self.rows else 0, self.checkpoint or 0)
        self.last_step = (launched.finished_at or launched.last_step) if launched else None
        self.loss = next((values[name] for name in LOSSES if name in values), None)
        self.exact = values.get("train/exact_accuracy")
        parts = ((name.split("/"), value) for name, value in values.items())
        self.test = {for_a_terminal(of[1]): value for of, value in parts if of[::2] == ["eval", "exact_accuracy"]}
        self.speed = next(((values[name], unit) for name, unit in _SPEEDS.items() if name in values), None)
        self.began_at = _changed_at(run / "config.yaml") or _changed_at(run / METRICS_FILE)
        self.state, note = ("damaged", damage) if damage else self._state()
        self.eta_s: float | None = None
        if self.state == "running":
            waits = self._waits()
            waited_s = max(0.0, time.time() - max(_changed_at(run / METRICS_FILE), _changed_at(run / LAUNCH_FILE)))
            if waited_s > max(_LEAST_SILENCE_S, _LONG_WAITS * max((seconds for _, seconds in waits), default=0.0)):
                note = f"silent {in_words(waited_s)}"
            elif self.last_step is not None and waits:
                step_s = sum(seconds for _, seconds in waits) / sum(steps for steps, _ in waits)
                self.eta_s = max(0.0, (self.last_step - self.step) * step_s - waited_s)
        self.note = for_a_terminal(note)

    def _state(self) -> tuple[State, str]:
        """Return the state, and a note on it."""
        run, locked = self.path, is_locked(self.path)
        if locked:
            return "running", ""
        with suppress(OSError), open(plain(run / "stopped"), "rb") as reason:
            return "stopped", " ".join(reason.read(200).decode(errors="replace").split())[:40]
        if self.last_step is not None and self.step >= self.last_step:
            return "finished", ""
        with suppress(UserError):
            saved = None if self.checkpoint is None else read_state(run / f"step_{self.checkpoint:08d}")
            patience = saved and saved.config.get("early_stop_patience")
            if saved and is_number(patience) and saved.evaluations_since_best >= patience:
                return "finished", "out of patience"
        if locked is None:  # without locks, nobody can tell
            return "running", ""
        if self.last_step is None:
            return ("ended", "") if self.step > 0 else ("not begun", "")
        return "dead", ""

    def _waits(self) -> list[tuple[int, float]]:
        """Return the steps and the seconds between neighbouring recent rows."""
        timed = [row for row in self.rows[-_RECENT:] if is_number(row.get("time_s"))]  # old versions: no time
        waits = [
            (after["step"] - before["step"], after["time_s"] - before["time_s"]) for before, after in pairwise(timed)
        ]
        return [(steps, seconds) for steps, seconds in waits if steps > 0 and 0 <= seconds < math.inf]


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, sorted by name. A run is its own only run."""
    if is_run(folder):
        return [folder]
    paths: list[Path] = []
    with suppress(OSError):  # the folder has vanished, or it may not be read
        paths = sorted(folder.iterdir())
    return [path for path in paths if not path.name.startswith(".") and is_run(path)]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the runs that the paths name: themselves, or those in their folders. Each once."""
    found: dict[Path, Path] = {}
    for run in (run for path in paths for run in runs_in(path)):
        found.setdefault(run.resolve(), run)
    return list(found.values())


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _step_named(file: Path) -> int | None:
    with suppress(UserError):  # may not be read
        name = read_name(file)
        return int(name[5:]) if name and len(name) < 25 else None  # a stranger may have written it
    return None


def _changed_at(file: Path) -> float:
    """Return when a file was changed, in seconds since the epoch; 0 if there is none."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0
