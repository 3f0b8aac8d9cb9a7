"""Tell how a run is doing from its folder, without changing anything there.

The run may be on another machine: only its files are read. The lock of the folder tells whether the
run is alive, because the operating system releases the lock when the process ends, even if it was
killed.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeGuard

from utils.checkpoint.format import read_name
from utils.checkpoint.reader import read_state
from utils.errors import UserError
from utils.run.history import METRICS_FILE, History, read_run_config
from utils.run.launched import LAUNCH_FILE, Launched
from utils.run.lock import is_locked
from utils.text import one_line

State = Literal["running", "stopped", "finished", "dead", "ended", "not begun", "damaged"]

# How many of the newest rows tell the speed of a run, and its usual time between two rows.
_RECENT = 20
# A run is silent after this many of its longest recent waits for a row, at the earliest after a
# minute.
_LONG_WAITS, _LEAST_SILENCE_S = 3, 60.0


@dataclass(frozen=True)
class RunStatus:
    """What a run's folder tells at one moment. None stands for what it does not tell.

    Attributes:
        state: running: a process holds the lock. stopped: asked to stop, and it saved. finished: at
            its last step, or out of patience. dead: killed or failed. ended: finished or dead; a
            run of an older version does not tell which. not begun: nothing logged, and nobody at
            work. damaged: a file can't be read; `note` says which.
        note: what else a person should know, in a few words; "" for nothing.
        step: the last one of which the run has told anything; 0 before the first.
        train: the newest value of each metric train/<name>, by name.
        test: the newest value of each metric eval/<set>/exact_accuracy, by set.
        checkpoint: the step that `latest` names.
        best: the step that `best` names.
        began_at: when the run was started last, in seconds since the epoch.
    """

    path: Path
    state: State
    note: str
    step: int
    last_step: int | None
    train: dict[str, float]
    test: dict[str, float]
    examples_per_second: float | None
    eta_s: float | None
    checkpoint: int | None
    best: int | None
    launched: Launched | None
    began_at: float


class Watched:
    """A run that is looked at again and again: each look reads only the rows that are new.

    Attributes:
        history: the rows that have been read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = History(path / METRICS_FILE)

    def status(self) -> RunStatus:
        """Look at the run. Nothing in its folder is an error: it may vanish or be half written."""
        run, now, note = self.path, time.time(), ""
        state: State | None = None
        try:
            self.history.refresh()
        except UserError as error:
            state, note = "damaged", one_line(error).replace(f"{run}{os.sep}", "")
        rows, launched = self.history.rows, Launched.read(run)
        latest, best = _step_named(run / "latest"), _step_named(run / "best")
        step = max([0, *(row["step"] for row in rows[-1:]), latest or 0])
        last_step = launched.last_step if launched else None
        if state is None:
            state, note = _state_of(run, step, latest, last_step)
        eta_s = None
        if state == "running":
            waited_s = max(0.0, now - max(_changed_at(run / METRICS_FILE), _changed_at(run / LAUNCH_FILE)))
            recent = rows[-_RECENT:]
            waits = [seconds for _, seconds in _waits(recent)]
            if waited_s > max(_LEAST_SILENCE_S, _LONG_WAITS * max(waits, default=0.0)):
                note = f"silent {in_words(waited_s)}"
            elif last_step is not None and (step_s := seconds_per_step(recent)) is not None:
                eta_s = max(0.0, (last_step - step) * step_s - waited_s)
        return RunStatus(
            path=run,
            state=state,
            note=note,
            step=step,
            last_step=last_step,
            train={name[6:]: value for name, value in newest(rows, "train/").items()},
            test={name.split("/")[1]: value for name, value in newest(rows, "eval/", "/exact_accuracy").items()},
            examples_per_second=newest(rows[-_RECENT:], "perf/examples_per_second").get("perf/examples_per_second"),
            eta_s=eta_s,
            checkpoint=latest,
            best=best,
            launched=launched,
            began_at=_changed_at(run / "config.yaml") or _changed_at(run / METRICS_FILE),
        )


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / "config.yaml").is_file() or (folder / METRICS_FILE).is_file()


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, the newest start first. A run is its own only run."""
    if is_run(folder):
        return [folder]
    found = []
    with suppress(OSError):  # the folder has vanished, or it may not be read
        found = [path for path in folder.iterdir() if not path.name.startswith(".") and is_run(path)]
    return sorted(found, key=lambda path: (-_changed_at(path / "config.yaml"), path.name))


def newest(rows: list[dict[str, Any]], start: str, end: str = "") -> dict[str, float]:
    """Return the newest value of each metric with this start and end of its name.

    Not every row has every metric. At most a few hundred rows are searched.
    """
    found: dict[str, float] = {}
    for row in reversed(rows[-500:]):
        for name, value in row.items():
            if name not in found and name.startswith(start) and name.endswith(end) and is_number(value):
                found[name] = float(value)
    return found


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def seconds_per_step(rows: list[dict[str, Any]]) -> float | None:
    """Return the time of a step over some rows, with what happened between the steps.

    Rows of older runs do not tell the time since the run began. The time of a step is that of
    training alone then.
    """
    waits = _waits(rows)
    steps, seconds = sum(steps for steps, _ in waits), sum(seconds for _, seconds in waits)
    if steps > 0:
        return seconds / steps
    times = [row["perf/step_ms"] for row in rows if is_number(row.get("perf/step_ms"))]
    return fmean(times) / 1e3 if times else None


def _waits(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return for each pair of neighbouring rows the steps and the seconds between them."""
    found = []
    for before, after in pairwise(rows):
        steps = after["step"] - before["step"]
        if is_number(before.get("time_s")) and is_number(after.get("time_s")):
            seconds = after["time_s"] - before["time_s"]
        elif is_number(after.get("perf/step_ms")):
            seconds = steps * after["perf/step_ms"] / 1e3
        else:
            continue
        if steps > 0 and seconds >= 0:
            found.append((steps, seconds))
    return found


def in_words(seconds: float) -> str:
    """Return a time as text of at most seven characters, such as `3 min`, `2 h 05` or `3.5 d`."""
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d}" if hours < 48 else f"{hours / 24:.1f} d"


def _state_of(run: Path, step: int, latest: int | None, last_step: int | None) -> tuple[State, str]:
    if is_locked(run) is not False:  # a dead run that is taken for a silent one does less harm than the opposite
        return "running", ""
    if (run / "stopped").is_file():
        return "stopped", " ".join(_text(run / "stopped").split())[:40]
    if last_step is not None and step >= last_step:
        return "finished", ""
    if latest is not None and _out_of_patience(run, latest):
        return "finished", "out of patience"
    if last_step is None:
        return ("ended", "") if step > 0 else ("not begun", "")
    return "dead", ""


def _out_of_patience(run: Path, latest: int) -> bool:
    """Return whether early_stop_patience has ended the run at its newest checkpoint."""
    try:
        patience = read_run_config(run).get("early_stop_patience")
        if not is_number(patience):
            return False
        return read_state(run / f"step_{latest:08d}").evaluations_since_best >= patience
    except UserError:
        return False


def _step_named(file: Path) -> int | None:
    try:
        name = read_name(file)
    except UserError:  # may not be read
        return None
    return int(name.removeprefix("step_")) if name else None


def _changed_at(file: Path) -> float:
    """Return when a file was changed, in seconds since the epoch; 0 if there is none."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
