"""Show runs while they train, several side by side, and draw the curves of several runs.

python watch.py checkpoints/<project>/<run>
"""

import os
import select
import signal
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

from rich.console import Console
from rich.live import Live

from training.flops import flops_until
from utils.arguments import Parser, typed_path
from utils.errors import UserError
from utils.run.status import Watched, is_run, runs_in
from utils.shell import run_command
from viewer.curve_pictures import draw_html, draw_png
from viewer.curves import (
    LoggedRun,
    Panel,
    XOf,
    choose_metrics,
    groups_of,
    panels_of,
    x_in_examples,
    x_in_seconds,
    x_in_steps,
)
from viewer.live import counts, look_at, screen, table

EXAMPLES = """
examples:
  # one run, or several side by side: loss, accuracy, speed, time left, last checkpoint, ranks
  python watch.py checkpoints/my-project/my-run
  python watch.py checkpoints/my-project/my-run checkpoints/my-project/other-run

  # all runs of a project or a sweep; new ones appear by themselves
  python watch.py checkpoints/my-project

  # curves of several runs. Runs that differ only in their seed become one line with a band
  python watch.py checkpoints/my-project --plot curves.png
  python watch.py checkpoints/my-project --plot curves.html --metric exact_accuracy --x flops

q or Ctrl-C leaves. If the output is no terminal, a table is printed once. Nothing is ever written
into the folder of a run. --plot needs pip install -r requirements-plot.txt.
"""

X = Literal["steps", "examples", "seconds", "flops"]


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    paths: list[Path]
    every: float | None
    plot: Path | None
    metric: list[str] | None
    x: X | None


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Read the command line.

    Raises:
        UserError: An option is unknown, malformed or out of place.
    """
    parser = Parser("watch.py", "Show runs while they train, or draw their curves.", EXAMPLES)
    add = parser.add_argument
    add("paths", type=typed_path, nargs="+", metavar="RUN_OR_FOLDER", help="folder of a run, or of several runs")
    add("--every", type=float, metavar="SECONDS", help="look at the runs so often (default: 1)")
    add("--plot", type=Path, metavar="FILE", help="draw curves into FILE.png or FILE.html instead")
    add(
        "--metric",
        action="append",
        metavar="NAME",
        help="with --plot: draw this metric, such as eval/all/accuracy or only accuracy; may be repeated "
        "(default: the loss in training, exact accuracy in training and on each test set)",
    )
    add("--x", choices=X.__args__, help="with --plot: what the curves are drawn over (default: steps)")  # type: ignore[attr-defined]
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.plot is None and (settings.metric or settings.x):
        raise UserError(f"--{'metric' if settings.metric else 'x'} says what --plot draws; give --plot FILE too")
    if settings.plot is not None and settings.every is not None:
        raise UserError("--every says how often the screen is drawn, and --plot shows none; leave it out")
    if settings.plot is not None and settings.plot.suffix not in (".png", ".html"):
        raise UserError(f"--plot is {settings.plot}; give a file that ends in .png or .html")
    if settings.every is not None and not 0.05 <= settings.every <= 86400:
        raise UserError(f"--every is {settings.every:g}; give a number of seconds from 0.05 to 86400")
    return settings


def watch(argv: list[str] | None = None) -> str:
    """Show or draw the runs, and return what remains to be said.

    Raises:
        UserError: A folder holds no runs, or a picture can't be drawn.
    """
    settings = parse_settings(argv)
    paths = find_runs(settings.paths)
    if settings.plot is not None:
        return plot(paths, settings.plot, settings.metric or [], settings.x or "steps")
    console = Console()
    # A dumb terminal can neither be cleared nor put back as it was.
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        watch_live(settings.paths, settings.every or 1.0, console)
        return ""
    return snapshot(paths)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the runs that the paths name: themselves, or those in their folders. Each once.

    Raises:
        UserError: A path is no folder, or there is no run in it.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}; give the folder of a run, or of several runs")
        runs = runs_in(path)
        if not runs:
            raise UserError(
                f"{path} is no run and holds none (no config.yaml, no metrics.jsonl); give the folder of a run, a "
                "project or a sweep"
            )
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


# ---- live ----------------------------------------------------------------------------------------


def watch_live(paths: Sequence[Path], every_s: float, console: Console) -> None:
    """Show the runs until somebody leaves. The terminal is left as it was found."""
    watched: dict[Path, Watched] = {}
    with Leaving() as leaving, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            found = dict.fromkeys(run for path in paths for run in ([path] if is_run(path) else runs_in(path)))
            watched = {run: watched.get(run) or Watched(run) for run in found}
            shown = look_at(list(watched.values()))
            live.update(screen(shown, console.width, console.height), refresh=True)
            if leaving.within(every_s):
                break


class Leaving:
    """Waits for q, Ctrl-C or SIGTERM. A context manager, outside which the terminal is as before.

    Signals are only noted. They raise nothing, so that they can't interrupt the code that restores
    the terminal.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> "Leaving":
        self._asked = False
        # Python writes a byte here for each signal, which ends the wait in `within`.
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._note) for number in self._SIGNALS}
        self._keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        if self._keyboard is not None:
            self._attributes = termios.tcgetattr(self._keyboard)
            changed = termios.tcgetattr(self._keyboard)
            changed[3] &= ~(termios.ICANON | termios.ECHO)  # a key arrives at once, and is not shown
            changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
            changed[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the terminal as it is now
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, changed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._keyboard is not None:
            termios.tcsetattr(self._keyboard, termios.TCSAFLUSH, self._attributes)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._readable)
        os.close(self._writable)

    def within(self, seconds: float) -> bool:
        """Wait for at most some seconds, and return whether somebody asked to leave."""
        sources = [self._readable, *([] if self._keyboard is None else [self._keyboard])]
        ready, _, _ = select.select(sources, [], [], 0 if self._asked else seconds)
        if self._keyboard in ready and self._keyboard is not None:
            keys = os.read(self._keyboard, 1024)
            self._asked |= not keys or b"q" in keys.lower()  # no keys: the terminal is gone
        return self._asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


def snapshot(paths: Sequence[Path]) -> str:
    """Return a table of the runs at this moment, as wide as it needs to be."""
    shown = look_at([Watched(path) for path in paths])
    console = Console(width=240, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table(shown, console.width))
        console.print(counts(shown))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


# ---- curves --------------------------------------------------------------------------------------


def plot(paths: Sequence[Path], output: Path, asked: Sequence[str], x: X) -> str:
    """Draw the curves of runs, and return a summary.

    Raises:
        UserError: No run has logged anything, or the curves can't be drawn.
    """
    places: dict[X, tuple[str, XOf]] = {
        "steps": ("steps", x_in_steps),
        "examples": ("examples", x_in_examples),
        "seconds": ("seconds", x_in_seconds),
        "flops": ("floating-point operations", lambda run: flops_until(run.path, run.steps)),
    }
    opened = [LoggedRun.open(path) for path in paths]
    runs = [run for run in opened if run.rows]
    if not runs:
        raise UserError(f"{paths[0]}: has logged nothing yet; train it for some steps first")
    left_out = [f"{run.path} has logged nothing yet, and is left out" for run in opened if not run.rows]
    groups = groups_of(runs)
    panels = panels_of(groups, choose_metrics(runs, asked), *places[x])
    if output.suffix == ".png":
        draw_png(panels, output)
    else:
        draw_html(panels, f"{len(runs)} runs" if len(runs) > 1 else runs[0].path.resolve().name, output)
    of = f"{len(runs)} {'runs' if len(runs) > 1 else 'run'}"
    grouped = f" in {len(groups)} {'groups' if len(groups) > 1 else 'group'}" if len(groups) < len(runs) else ""
    metrics = ", ".join(panel.metric for panel in panels)
    return "\n".join(
        [*left_out, *notes_on(panels), f"drew {output}: {metrics} of {of}{grouped} over {panels[0].x_name}"]
    )


def notes_on(panels: Sequence[Panel]) -> list[str]:
    """Return a line for each group of which a panel does not show all that was logged."""
    notes: dict[str, str] = {}
    for panel in panels:
        for series in panel.series:
            if series.cut_at is not None:
                end = f"{series.cut_at:,.0f} {panel.x_name}"
                notes[series.label] = f"{series.label}: the mean ends at {end}, where the shortest run ends"
            if series.num_left_out:
                notes[f"{series.label} {panel.metric}"] = (
                    f"{series.label}: {series.num_left_out} of {series.num_runs + series.num_left_out} runs ended "
                    f"before the others logged {panel.metric}, and are left out of its mean"
                )
    return list(notes.values())


if __name__ == "__main__":
    sys.exit(run_command(watch, None))
