"""Show runs while they train, several side by side, and draw the curves of several runs.

python watch.py checkpoints/<project>/<run>
"""

import os
import select
import signal
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console
from rich.live import Live

from records.checkpoint.format import run_folder_of
from utils.arguments import Parser, typed_path
from utils.errors import UserError
from utils.shell import run_command
from utils.text import for_a_terminal
from viewer.curve_pictures import draw_png
from viewer.curves import LoggedRun, choose_metrics, for_page, groups_of, panels_of
from viewer.live import Watched, counts, find_runs, in_order, runs_in, screen, table
from viewer.pages import write_page

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

q or Ctrl-C leaves. If the output is no terminal, a table is printed once. Only --plot writes: the
one file that it names. A .png needs pip install -r requirements-demo.txt.
"""

X = Literal["steps", "examples", "epochs", "seconds", "flops"]

_WIDEST = 10_000  # columns that suffice for every table
_LONGEST_WAIT_S = 0.2  # after a signal


def parse_settings(argv: list[str] | None = None) -> Namespace:
    """Read the command line."""
    about = "Show runs while they train, or draw their curves."
    parser = Parser("watch.py", about, EXAMPLES, path_keys=("checkpoint", "run"))
    add = parser.add_argument
    add("paths", type=typed_path, nargs="+", metavar="RUN_OR_FOLDER", help="folder of a run, or of several runs")
    add("--every", type=float, metavar="SECONDS", default=1.0, help="seconds between two looks (default: 1)")
    add("--plot", type=typed_path, metavar="FILE", help="draw curves into FILE.png or FILE.html instead")
    add(
        "--metric",
        action="append",
        metavar="NAME",
        default=[],
        help="with --plot: draw this metric, such as eval/all/accuracy or only accuracy; may be repeated "
        "(default: the loss in training, exact accuracy in training and on each test set)",
    )
    add("--x", choices=get_args(X), help="with --plot: what the curves are drawn over (default: steps)")
    settings = parser.parse_args(argv)
    if settings.plot is None and (settings.metric or settings.x):
        raise UserError("--metric and --x say what --plot draws; give --plot FILE too")
    if settings.plot is not None and settings.plot.suffix not in (".png", ".html"):
        raise UserError(f"--plot is {settings.plot}; give a file that ends in .png or .html")
    if not 0.05 <= settings.every <= 86400:
        raise UserError(f"--every is {settings.every:g}; give a number of seconds from 0.05 to 86400")
    return settings


def watch(argv: list[str] | None = None) -> str:
    """Show or draw the runs, and return what remains to be said."""
    settings = parse_settings(argv)
    paths = [run_folder_of(path) for path in settings.paths]  # of <run>/best, too
    for path in paths:
        if not runs_in(path):
            raise UserError(f"{path} is no run and holds none; give the folder of a run, a project or a sweep")
    if settings.plot is not None:
        return plot(find_runs(paths), settings.plot, settings.metric, settings.x or "steps")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another locale may lack the characters of the bars
    console = Console()
    # A dumb terminal can neither be cleared nor put back as it was.
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        watch_live(paths, settings.every, console)
        return ""
    shown = in_order([Watched(path) for path in find_runs(paths)])
    console = Console(width=_WIDEST, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table(shown, console.width))
        console.print(counts(shown))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


# ---- live ----------------------------------------------------------------------------------------


def watch_live(paths: Sequence[Path], every_s: float, console: Console) -> None:
    """Show the runs until somebody leaves. The terminal is left as it was found."""
    watched: dict[Path, Watched] = {}
    with until_quit() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            for run in watched.values():
                run.look()
            watched = {run: watched.get(run) or Watched(run) for run in find_runs(paths)}
            live.update(screen(in_order([*watched.values()]), console.width, console.height), refresh=True)
            if wait(every_s):
                break


@contextmanager
def until_quit() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits some seconds and returns whether q or a signal asked to leave.

    Signals are only noted. They raise nothing, so that they can't interrupt the code that restores
    the terminal.
    """
    asked: list[object] = []
    keyboards = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not asked and (left := end - time.monotonic()) > 0:
            for keyboard in select.select(keyboards, [], [], min(left, _LONGEST_WAIT_S))[0]:
                keys = os.read(keyboard, 1024)
                is_other_key = keys.startswith(b"\x1b")  # such as F2, which sends ESC O Q
                if not keys or (b"q" in keys.lower() and not is_other_key):  # no keys: the terminal is gone
                    asked.append(keys)
        return bool(asked)

    with ExitStack() as undo:  # takes every step back, in reverse order, also if one of them fails
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            undo.callback(signal.signal, number, signal.signal(number, lambda *noted: asked.append(noted)))
        # Ctrl-Z would leave the terminal as it is now.
        undo.callback(signal.signal, signal.SIGTSTP, signal.signal(signal.SIGTSTP, signal.SIG_IGN))
        for keyboard in keyboards:
            undo.callback(termios.tcsetattr, keyboard, termios.TCSAFLUSH, termios.tcgetattr(keyboard))
            tty.setcbreak(keyboard, termios.TCSADRAIN)  # a key arrives at once, and is not shown
        yield wait


# ---- curves --------------------------------------------------------------------------------------


def plot(paths: Sequence[Path], output: Path, asked: Sequence[str], x: X) -> str:
    """Draw the curves of runs, and return a summary."""
    if not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent} for {output.name}; create it, or choose another file")
    opened = [LoggedRun(path) for path in paths]
    runs = [run for run in opened if run.rows]
    if not runs:
        raise UserError("none of these runs has logged anything yet; train one of them for some steps first")
    groups = groups_of(runs)
    if x == "flops":
        from training.flops import flops_until  # imports PyTorch, which a table needs not wait for

        x_name = "floating-point operations"
        places = {run.path: flops_until(run.path, [row["step"] for row in run.rows]) for run in runs}
    else:
        x_name, places = x, {run.path: run.x(x) for run in runs}
    panels = panels_of(groups, choose_metrics(runs, asked), x_name, places)
    if output.suffix == ".png":
        draw_png(panels, output)
    else:
        title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].path.resolve().name
        page = {"kind": "curves", "title": title, "facts": {}, "examples": [], "over_steps": []}
        write_page(page | {"curves": for_page(panels)}, output)
    notes = [f"{run.path} has logged nothing yet, and is left out" for run in opened if not run.rows]
    notes += dict.fromkeys(series.note for panel in panels for series in panel.series if series.note)
    drew = f"drew {output}: {', '.join(panel.metric for panel in panels)} over {x_name}; "
    drew += f"runs: {len(runs)}, groups: {len(groups)}"
    return "\n".join(map(for_a_terminal, [*notes, drew]))


if __name__ == "__main__":
    sys.exit(run_command(watch, None))
