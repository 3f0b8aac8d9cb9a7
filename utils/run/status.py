"""Tell how a run is doing from its folder, without changing anything there.

The run may be on another machine: only its files are read. The lock of the folder tells whether the
run is alive, because the operating system releases the lock when the process ends, even if it was
killed.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeGuard

from utils.checkpoint.format import read_name, read_state
from utils.errors import UserError
from utils.run.history import METRICS_FILE, History
from utils.run.launched import LAUNCH_FILE, Launched
from utils.run.lock import is_locked
from utils.text import for_a_terminal, one_line

State = Literal["running", "stopped", "finished", "dead", "ended", "not begun", "damaged"]

# How many of the newest rows tell the speed of a run, and its usual time between two rows.
_RECENT = 20
# A run is silent after this many of its longest recent waits for a row, at the earliest after a
# minute.
_LONG_WAITS, _LEAST_SILENCE_S = 3, 60.0
# The metrics whose course is kept.
_LOSSES = ("train/lm_loss", "train/loss")  # of puzzles and of text
CURVES = (*_LOSSES, "train/exact_accuracy")
_SPEEDS = {"perf/tokens_per_second": "tokens", "perf/examples_per_second": "examples"}


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, read from its folder. A field is None if no file holds it.

    Attributes:
        state: running: a process holds the lock. stopped: asked to stop, and it saved. finished: at
            its last step, or out of patience. dead: killed or failed. ended: finished or dead; a
            run of an older version does not tell which. not begun: nothing logged, and nobody at
            work. damaged: a file can't be read; `note` says which.
        note: what else a person should know, in a few words; "" for nothing.
        step: the last step that was logged or saved; 0 before the first.
        train: the newest value of each metric train/<name>, by name.
        test: the newest value of each metric eval/<set>/exact_accuracy, by set.
        checkpoint: the step that `latest` names.
        best: the step that `best` names.
        speed: how many examples, or tokens of text, a second trains on, and which of them.
        curves: the finite values of each metric in CURVES, in order.
        began_at: when the run was started last, in seconds since the epoch.
    """

    path: Path
    state: State
    note: str
    step: int
    last_step: int | None
    train: dict[str, float]
    test: dict[str, float]
    speed: tuple[float, str] | None
    eta_s: float | None
    checkpoint: int | None
    best: int | None
    curves: Mapping[str, Sequence[float]]
    launched: Launched | None
    began_at: float

    @property
    def loss(self) -> float | None:
        """The newest cross-entropy of training for each token."""
        return self.train.get("lm_loss", self.train.get("loss"))

    @property
    def loss_curve(self) -> Sequence[float]:
        return next((self.curves[name] for name in _LOSSES if self.curves[name]), ())


class Watched:
    """A run that is looked at again and again. Each look reads only the rows that are new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._history = History(path / METRICS_FILE)
        self._rows: list[dict[str, Any]] | None = None
        self._patience_at, self._out_of_patience = (0, 0.0), False

    def status(self) -> RunStatus:
        """Look at the run. Nothing in its folder is an error: it may vanish or be half written."""
        run, now, note = self.path, time.time(), ""
        state: State | None = None
        try:
            self._read_rows()
        except UserError as error:
            state, note = "damaged", one_line(error).replace(f"{run}{os.sep}", "")
        rows, values, launched = self._history.rows, self._values, Launched.read(run)
        latest, best = _step_named(run / "latest"), _step_named(run / "best")
        step = max([0, *(row["step"] for row in rows[-1:]), latest or 0])
        last_step = (launched.finished_at or launched.last_step) if launched else None
        if state is None:
            state, note = self._state(step, latest, last_step)
        eta_s = None
        if state == "running":
            waited_s = max(0.0, now - max(_changed_at(run / METRICS_FILE), _changed_at(run / LAUNCH_FILE)))
            recent = rows[-_RECENT:]
            waits = [seconds for _, seconds in _waits(recent)]
            if waited_s > max(_LEAST_SILENCE_S, _LONG_WAITS * max(waits, default=0.0)):
                note = f"silent {in_words(waited_s)}"
            elif last_step is not None and (step_s := seconds_per_step(recent)) is not None:
                eta_s = max(0.0, (last_step - step) * step_s - waited_s)
        tests = [name for name in values if name.startswith("eval/") and name.endswith("/exact_accuracy")]
        return RunStatus(
            path=run,
            state=state,
            note=for_a_terminal(note),
            step=step,
            last_step=last_step,
            train={name[6:]: value for name, value in values.items() if name.startswith("train/")},
            test={for_a_terminal(name.split("/")[1]): values[name] for name in tests},
            speed=next(((values[name], unit) for name, unit in _SPEEDS.items() if name in values), None),
            eta_s=eta_s,
            checkpoint=latest,
            best=best,
            curves=self._curves,
            launched=launched,
            began_at=_changed_at(run / "config.yaml") or _changed_at(run / METRICS_FILE),
        )

    def _read_rows(self) -> None:
        """Take the new rows into the newest value of each metric and into the curves."""
        try:
            self._history.refresh()
        finally:
            rows = self._history.rows
            if rows is not self._rows:
                self._rows, self._num_taken = rows, 0
                self._values: dict[str, float] = {}
                self._curves: dict[str, list[float]] = {name: [] for name in CURVES}
            for row in rows[self._num_taken :]:
                found = {name: value for name, value in row.items() if is_number(value)}
                self._values |= found
                for name, curve in self._curves.items():
                    if math.isfinite(value := found.get(name, math.nan)):
                        curve.append(value)
            self._num_taken = len(rows)

    def _state(self, step: int, latest: int | None, last_step: int | None) -> tuple[State, str]:
        locked = is_locked(self.path)
        if locked:
            return "running", ""
        if os.path.isfile(self.path / "stopped"):
            return "stopped", _beginning(self.path / "stopped")
        if last_step is not None and step >= last_step:
            return "finished", ""
        if latest is not None and self._is_out_of_patience(latest):
            return "finished", "out of patience"
        if locked is None:  # Without locks we can't tell. Report "running".
            return "running", ""
        if last_step is None:
            return ("ended", "") if step > 0 else ("not begun", "")
        return "dead", ""

    def _is_out_of_patience(self, latest: int) -> bool:
        """Return whether early_stop_patience has ended the run at its newest checkpoint."""
        folder = self.path / f"step_{latest:08d}"
        read_at = (latest, _changed_at(folder / "state.json"))
        if read_at != self._patience_at:
            self._patience_at, self._out_of_patience = read_at, False
            with suppress(UserError):
                state = read_state(folder)
                patience = state.config.get("early_stop_patience")
                self._out_of_patience = is_number(patience) and state.evaluations_since_best >= patience
        return self._out_of_patience


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run. An unreadable folder is not a run."""
    return os.path.isfile(folder / "config.yaml") or os.path.isfile(folder / METRICS_FILE)


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
    found: dict[tuple[int, int], Path] = {}
    for run in (run for path in paths for run in runs_in(path)):
        with suppress(OSError):  # the run has vanished
            folder = os.stat(run)
            found.setdefault((folder.st_dev, folder.st_ino), run)
    return list(found.values())


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def seconds_per_step(rows: list[dict[str, Any]]) -> float | None:
    """Return the time of a step over some rows, with what happened between the steps."""
    waits = _waits(rows)
    steps, seconds = sum(steps for steps, _ in waits), sum(seconds for _, seconds in waits)
    return seconds / steps if steps > 0 else None


def _waits(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return for each pair of neighbouring rows the steps and the seconds between them."""
    timed = [row for row in rows if is_number(row.get("time_s"))]  # rows of older versions have no time
    pairs = [(after["step"] - before["step"], after["time_s"] - before["time_s"]) for before, after in pairwise(timed)]
    return [(steps, seconds) for steps, seconds in pairs if steps > 0 and 0 <= seconds < math.inf]


def in_words(seconds: float) -> str:
    """Return a time as text of at most seven characters, such as `3 min`, `2 h 05` or `3.5 d`."""
    if not seconds < 999 * 86_400:  # also if it is not a number
        return "> 999 d"
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d}" if hours < 48 else f"{hours / 24:.1f} d"


def _step_named(file: Path) -> int | None:
    try:
        name = read_name(file)
    except UserError:  # may not be read
        return None
    return int(name[5:]) if name and len(name) < 25 else None  # a stranger may have written it


def _changed_at(file: Path) -> float:
    """Return when a file was changed, in seconds since the epoch; 0 if there is none."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def _beginning(file: Path) -> str:
    """Return the first words of a file."""
    with suppress(OSError), open(file, "rb") as opened:
        return " ".join(opened.read(200).decode(errors="replace").split())[:40]
    return ""
