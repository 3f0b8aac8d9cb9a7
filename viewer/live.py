"""What watch.py shows of runs in a terminal: a few runs side by side, or a table of many."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from utils.text import for_a_terminal, in_words
from viewer.curves import names_of
from viewer.status import LOSSES, Watched, is_number

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
    """Return a panel of a run, as high as _PANEL_LINES.

    Args:
        width: columns inside the border and its padding.
    """
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
        Text(f"saved {_or_dash(run.checkpoint, ',')}{best}", overflow="ellipsis", no_wrap=True),
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
    """Draw values as columns of blocks.

    Args:
        values: in order; more than `width` are averaged with their neighbours.
        least, most: the values at the lower and the upper edge; None: those of the data.

    Returns:
        The lines from top to bottom, each with `width` characters. A value always leaves a mark.
    """
    parts = np.array_split(np.array(values), min(len(values), width) or 1)
    means = np.array([part.mean() for part in parts if len(part)])
    low = means.min(initial=math.inf) if least is None else least
    high = means.max(initial=-math.inf) if most is None else most
    levels = num_lines * (len(_BLOCKS) - 1)
    heights = ((means - low) / (high - low) * levels if high > low else 0 * means).round().clip(1, levels).astype(int)
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
