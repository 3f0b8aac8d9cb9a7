"""Tell how runs are doing, and show them in a terminal: a few side by side, or a table of many.

A run may be on another machine: only its files are read, and the lock of its folder.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from records.checkpoint.format import folders_in, is_run, read_name, read_state
from records.folder import LAUNCH_FILE, Launched, stopped_by
from records.history import METRICS_FILE, History, is_number
from records.lock import is_locked
from utils.errors import UserError
from utils.text import for_a_terminal, in_words, one_line
from viewer.curves import LOSSES, names_of

State = Literal["running", "stopped", "finished", "dead", "ended", "not begun", "damaged"]

_SPEEDS = {"perf/tokens_per_second": "tokens", "perf/examples_per_second": "examples"}
# How many of the newest rows tell the speed of a run, and its usual time between two rows.
_RECENT = 20
# A run is silent after this many of its longest recent waits for a row, at the earliest after a
# minute.
_LONG_WAITS, _LEAST_SILENCE_S = 3, 60.0

COLOURS = {
    "running": "green",
    "finished": "blue",
    "stopped": "yellow",
    "ended": "blue",
    "dead": "red",
    "damaged": "red",
    "not begun": "bright_black",
}
"""The colour of each state. The state is also written, for terminals and people without colours."""

_LEAST_PANEL, _PANEL_LINES = 38, 15  # columns and lines of a panel, with its border
_CURVE_LINES = 3
_BLOCKS = " ▁▂▃▄▅▆▇█"


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
        tests = (name for name in values if name.startswith("eval/") and name.endswith("/exact_accuracy"))
        self.test = {for_a_terminal(name.split("/")[1]): values[name] for name in tests}
        self.goodput = values.get("perf/goodput")
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
            sampled: dict[str, Any] = next((row for row in reversed(self.rows) if "perf/imbalance" in row), {})
            if not note and is_number(slow := sampled.get("perf/slow_rank")):
                note = f"rank {slow:.0f} is slow"
        self.note = for_a_terminal(note)

    def _state(self) -> tuple[State, str]:
        """Return the state, and a note on it."""
        run, locked = self.path, is_locked(self.path)
        if locked:
            return "running", ""
        if reason := stopped_by(run):
            return "stopped", reason
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
    return [folder] if is_run(folder) else list(filter(is_run, folders_in(folder)))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the runs that the paths name: themselves, or those in their folders. Each once."""
    found: dict[Path, Path] = {}
    for run in (run for path in paths for run in runs_in(path)):
        found.setdefault(run.resolve(), run)
    return list(found.values())


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


# ---- the screen ----------------------------------------------------------------------------------


def in_order(runs: Sequence[Watched]) -> dict[str, Watched]:
    """Return the runs by name in the order of display: running ones, then the newest."""
    names = map(for_a_terminal, names_of([run.path for run in runs]))
    return dict(sorted(zip(names, runs, strict=True), key=lambda each: (each[1].state != "running", -each[1].began_at)))


def screen(shown: Mapping[str, Watched], width: int, height: int) -> RenderableType:
    """Return what fills a screen of a size: panels side by side if all runs fit, or a table."""
    hint = Text("q or Ctrl-C: leave", style="dim")
    per_row = max(1, min(len(shown), width // _LEAST_PANEL))
    num_rows = -(-len(shown) // per_row)
    if shown and num_rows * _PANEL_LINES < height:
        side = width // -(-len(shown) // num_rows)  # 4 runs where 3 fit side by side: 2 and 2
        return Group(Columns([panel(*each, side - 4) for each in shown.items()], padding=0, width=side), hint)
    room = height - 3  # without the counts, the titles and the hint
    if len(shown) <= room:
        return Group(counts(shown), table(shown, width), hint)
    first = dict(list(shown.items())[: max(1, room - 1)])
    others = Text(f"and {len(shown) - len(first)} more", style="dim")
    return Group(counts(shown), table(first, width), others, hint)


def counts(shown: Mapping[str, Watched]) -> Text:
    """Return a line that counts the runs in each state."""
    states = [run.state for run in shown.values()]
    line = Text(f"{len(shown)} runs" if len(shown) != 1 else "1 run", no_wrap=True, overflow="ellipsis")
    for state, colour in COLOURS.items():
        if state in states:
            line.append(f"  {states.count(state)} {state}", style=colour)
    return line


# ---- a table -----------------------------------------------------------------------------------

# For each column the terminal's width from which on it is shown, and its text.
COLUMNS: dict[str, tuple[int, Callable[[str, Watched], str]]] = {
    "run": (0, lambda name, _: name),
    "state": (0, lambda _, run: run.state),
    "step": (0, lambda _, run: f"{run.step:,}"),
    "of": (80, lambda _, run: _or_dash(run.last_step, ",")),
    "loss": (0, lambda _, run: _or_dash(run.loss, ".4g")),
    "exact": (60, lambda _, run: _or_dash(run.exact, ".3f")),
    "test": (0, lambda _, run: _or_dash(next(iter(run.test.values()), None), ".3f")),
    "/s": (80, lambda _, run: _or_dash(run.speed and run.speed[0], ",.0f")),
    "ETA": (0, lambda _, run: "-" if run.eta_s is None else in_words(run.eta_s)),
    "saved": (100, lambda _, run: _or_dash(run.checkpoint, ",")),
    "best": (110, lambda _, run: _or_dash(run.best, ",")),
    "good": (120, lambda _, run: _or_dash(run.goodput, ".1%")),
    "ranks": (110, lambda _, run: _machine(run) or "-"),
    "note": (0, lambda _, run: run.note),
}


def table(shown: Mapping[str, Watched], width: int) -> Table:
    """Return a table with a line for each run. Names and notes are shortened to the width."""
    lines = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim", show_edge=False)
    used = {title: text_of for title, (least, text_of) in COLUMNS.items() if width >= least}
    if not any(run.note for run in shown.values()):
        del used["note"]
    for title in used:
        justify = "left" if title in ("run", "state", "note") else "right"
        lines.add_column(title, justify=justify, no_wrap=title not in ("run", "note"))  # type: ignore[arg-type]
    for name, run in shown.items():
        cells = {title: Text(text_of(name, run), no_wrap=True, overflow="ellipsis") for title, text_of in used.items()}
        cells["state"].stylize(COLOURS[run.state])
        lines.add_row(*cells.values())
    return lines


# ---- panels ------------------------------------------------------------------------------------


def panel(name: str, run: Watched, width: int) -> Panel:
    """Return a panel of a run, with `width` columns inside its border and padding."""
    colour, total, right = COLOURS[run.state], run.last_step, ""
    share = run.step / total if total else 0.0
    if run.eta_s is not None:
        right = f"ETA {in_words(run.eta_s)}"
    elif total:
        right = f"{share:.0%}"
    done = min(width, round(share * width))
    tests = "  ".join(f"{'test' if len(run.test) == 1 else name} {value:.3f}" for name, value in run.test.items())
    speed = "" if run.speed is None else f"{run.speed[0]:,.0f} {run.speed[1]}/s"
    best = "" if run.best is None else f", best {run.best:,}"
    goodput = "" if run.goodput is None else f"goodput {run.goodput:.1%}"
    note = run.note
    if run.launched is not None and (run.state == "dead" or note.startswith("silent")):
        note = f"{note} on {for_a_terminal(run.launched.host)[:60]}".lstrip()
    lines: list[RenderableType] = [
        _two_ends(f"step {run.step:,}" + (f" of {total:,}" if total else ""), right, width),
        Text.assemble(("━" * done, colour), ("─" * (width - done), "dim")),
        Text(f"loss {_or_dash(run.loss, '.4g')}"),
        _curve_of(run, LOSSES, width, "cyan"),
        _two_ends(f"exact {_or_dash(run.exact, '.3f')}", tests, width),
        _curve_of(run, ("train/exact_accuracy",), width, "magenta", least=0, most=1),
        _two_ends(speed, _machine(run), width),
        _two_ends(f"saved {_or_dash(run.checkpoint, ',')}{best}", goodput, width),
        Text(note, style="yellow" if run.state == "running" else colour, overflow="ellipsis", no_wrap=True),
    ]
    title = Text.assemble((name[: max(4, width - len(run.state) - 4)], "bold"), " ", (run.state, colour))
    return Panel(Group(*lines), title=title, title_align="left", height=_PANEL_LINES, border_style=colour)


def _curve_of(run: Watched, metrics: Sequence[str], width: int, style: str, **ends: float) -> Text:
    values = [row[name] for row in run.rows for name in metrics if is_number(row.get(name))]
    return Text("\n".join(curve(list(filter(math.isfinite, values)), width, _CURVE_LINES, **ends)), style)


def curve(
    values: Sequence[float], width: int, num_lines: int, *, least: float | None = None, most: float | None = None
) -> list[str]:
    """Draw values as columns of blocks, and return the lines from top to bottom.

    Args:
        values: more than `width` are averaged with their neighbours.
        least, most: the values at the lower and the upper edge; None: those of the data.
    """
    scale = np.abs(values).max(initial=1.0)  # sums and differences of the largest floats would overflow
    parts = np.array_split(np.array(values) / scale, min(len(values), width) or 1)
    means = np.array([part.mean() for part in parts if len(part)])
    low = means.min(initial=math.inf) if least is None else least / scale
    high = means.max(initial=-math.inf) if most is None else most / scale
    shares = np.zeros(len(means))
    if high > low:
        shares = (means.clip(low, high) - low) / (high - low)
    levels = num_lines * (len(_BLOCKS) - 1)
    heights = [max(1, round(share * levels)) for share in shares]  # a value always leaves a mark
    return [
        "".join(_BLOCKS[min(8, max(0, height - 8 * below))] for height in heights).ljust(width)
        for below in reversed(range(num_lines))
    ]


def _two_ends(left: str, right: str, width: int) -> Text:
    """Return a line with one text at its beginning and one at its end, if there is room."""
    gap = width - len(left) - len(right)
    return Text(left if gap < 2 else left + " " * gap + right, overflow="ellipsis", no_wrap=True)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _machine(run: Watched) -> str:
    launched = run.launched
    return "" if launched is None else for_a_terminal(f"{launched.ranks} x {launched.device}")[:20]
