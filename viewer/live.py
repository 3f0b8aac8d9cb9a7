"""What watch.py shows of runs in a terminal: a few runs side by side, or a table of many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from utils.run.status import RunStatus, Watched, in_words
from utils.text import for_a_terminal
from viewer.curves import names_of

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


@dataclass(frozen=True)
class Shown:
    """The state of a run under the name that tells it from the others."""

    name: str
    status: RunStatus


def read_statuses(runs: Sequence[Watched]) -> list[Shown]:
    """Return the runs in the order of display: running ones, then the newest."""
    names = names_of([run.path for run in runs])
    shown = [Shown(for_a_terminal(name), run.status()) for name, run in zip(names, runs, strict=True)]
    return sorted(shown, key=lambda each: (each.status.state != "running", -each.status.began_at))


def screen(shown: Sequence[Shown], width: int, height: int) -> RenderableType:
    """Return what fills a screen: panels side by side if all runs fit, otherwise a table.

    Args:
        width, height: columns and lines of the terminal.
    """
    hint = Text("q or Ctrl-C: leave", style="dim")
    per_row = max(1, min(len(shown), width // _LEAST_PANEL))
    num_rows = -(-len(shown) // per_row)
    if shown and num_rows * _PANEL_LINES < height:
        per_row = -(-len(shown) // num_rows)  # 4 runs where 3 fit side by side: 2 and 2
        grid = Table.grid(expand=True)
        for _ in range(per_row):
            grid.add_column(ratio=1)
        inside = width // per_row - 4
        for first in range(0, len(shown), per_row):
            grid.add_row(*(panel(each, inside) for each in shown[first : first + per_row]))
        return Group(grid, hint)
    room = height - 3  # without the counts, the titles and the hint
    if len(shown) > room:
        room = max(1, room - 1)  # the line that counts the others
    parts: list[RenderableType] = [counts(shown), table(shown[:room], width)]
    if len(shown) > room:
        parts.append(Text(f"and {len(shown) - room} more", style="dim"))
    return Group(*parts, hint)


def counts(shown: Sequence[Shown]) -> Text:
    """Return a line that counts the runs in each state."""
    states = [each.status.state for each in shown]
    line = Text(f"{len(shown)} runs" if len(shown) != 1 else "1 run", no_wrap=True, overflow="ellipsis")
    for state, colour in COLOURS.items():
        if state in states:
            line.append(f"  {states.count(state)} {state}", style=colour)
    return line


# ---- a table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of the table.

    Attributes:
        rank: where the width does not suffice, columns of the highest rank are left out first, and
            those of rank 0 never.
        least: the characters to which its text may be shortened; None: it is never shortened.
    """

    title: str
    rank: int
    text_of: Callable[[Shown], str]
    least: int | None = None


_COLUMNS = (
    _Column("run", 0, lambda each: each.name, least=14),
    _Column("state", 0, lambda each: each.status.state),
    _Column("step", 0, lambda each: f"{each.status.step:,}"),
    _Column("of", 3, lambda each: _or_dash(each.status.last_step, ",")),
    _Column("loss", 0, lambda each: _or_dash(each.status.loss, ".4g")),
    _Column("exact", 1, lambda each: _or_dash(each.status.train.get("exact_accuracy"), ".3f")),
    _Column("test", 0, lambda each: _or_dash(_first(each.status.test), ".3f")),
    _Column("/s", 2, lambda each: _or_dash(each.status.speed and each.status.speed[0], ",.0f")),
    _Column("ETA", 0, lambda each: "-" if each.status.eta_s is None else in_words(each.status.eta_s)),
    _Column("saved", 4, lambda each: _or_dash(each.status.checkpoint, ",")),
    _Column("best", 6, lambda each: _or_dash(each.status.best, ",")),
    _Column("ranks", 5, lambda each: _machine(each.status)),
    _Column("note", 0, lambda each: each.status.note, least=12),
)


def table(shown: Sequence[Shown], width: int) -> Table:
    """Return a table with a line for each run.

    The columns that the width has no room for are left out, the least needed ones first.
    """
    texts = {column.title: [column.text_of(each) for each in shown] for column in _COLUMNS}
    used = [column for column in _COLUMNS if any(texts[column.title]) or column.title != "note"]

    longest = {title: max(map(cell_len, [title, *column])) for title, column in texts.items()}
    widths = {column.title: min(longest[column.title], column.least or width) for column in _COLUMNS}

    def spare() -> int:
        return width - sum(widths[column.title] + 2 for column in used)

    while spare() < 0 and (rank := max(column.rank for column in used)):
        used = [column for column in used if column.rank != rank]
    for title in [column.title for column in used if column.least]:
        widths[title] = min(longest[title], widths[title] + max(0, spare()))
    lines = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim", show_edge=False)
    for column in used:
        justify: Literal["left", "right"] = "left" if column.least is not None or column.title == "state" else "right"
        lines.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis", width=widths[column.title])
    for number, each in enumerate(shown):
        colour = COLOURS[each.status.state]
        lines.add_row(
            *(Text(texts[column.title][number], style=colour if column.title == "state" else "") for column in used)
        )
    return lines


# ---- panels ------------------------------------------------------------------------------------


def panel(shown: Shown, width: int) -> Panel:
    """Return a panel of a run, as high as _PANEL_LINES.

    Args:
        width: columns inside the border and its padding.
    """
    status = shown.status
    colour = COLOURS[status.state]
    total = status.last_step
    steps = f"step {status.step:,}" + (f" of {total:,}" if total else "")
    done = min(width, round(status.step / total * width)) if total else 0
    right = f"ETA {in_words(status.eta_s)}" if status.eta_s is not None else ""
    if not right and total:
        right = f"{status.step / total:.0%}"
    tests = "  ".join(f"{'test' if len(status.test) == 1 else name} {value:.3f}" for name, value in status.test.items())
    exact = f"exact {_or_dash(status.train.get('exact_accuracy'), '.3f')}"
    speed = "" if status.speed is None else f"{status.speed[0]:,.0f} {status.speed[1]}/s"
    saved = f"saved {_or_dash(status.checkpoint, ',')}" + ("" if status.best is None else f", best {status.best:,}")
    lines: list[RenderableType] = [
        _two_ends(steps, right, width),
        Text.assemble(("━" * done, colour), ("─" * (width - done), "dim")),
        Text(f"loss {_or_dash(status.loss, '.4g')}"),
        *(Text(line, style="cyan") for line in curve(status.loss_curve, width, _CURVE_LINES)),
        _two_ends(exact, tests, width),
        *(
            Text(line, style="magenta")
            for line in curve(status.curves["train/exact_accuracy"], width, _CURVE_LINES, least=0, most=1)
        ),
        _two_ends(speed, _machine(status) if status.launched else "", width),
        Text(saved, overflow="ellipsis", no_wrap=True),
        Text(_note(status), style="yellow" if status.state == "running" else colour, overflow="ellipsis", no_wrap=True),
    ]
    room = max(4, width - len(status.state) - 4)
    name = shown.name if len(shown.name) <= room else f"{shown.name[: room - 1]}…"
    title = Text.assemble((name, "bold"), " ", (status.state, colour))
    return Panel(Group(*lines), title=title, title_align="left", height=_PANEL_LINES, border_style=colour)


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
    num = min(len(values), width)
    means = []
    for column in range(num):
        part = values[column * len(values) // num : (column + 1) * len(values) // num]
        means.append(sum(part) / len(part))
    low = min(means, default=0.0) if least is None else least
    high = max(means, default=0.0) if most is None else most
    levels = num_lines * (len(_BLOCKS) - 1)
    heights = [
        max(1, min(levels, round((value - low) / (high - low) * levels))) if high > low else 1 for value in means
    ]
    return [
        "".join(_BLOCKS[max(0, min(8, height - 8 * (num_lines - 1 - line)))] for height in heights).ljust(width)
        for line in range(num_lines)
    ]


def _two_ends(left: str, right: str, width: int) -> Text:
    """Return a line with one text at its beginning and one at its end, if there is room."""
    gap = width - len(left) - len(right)
    return Text(left if gap < 2 else left + " " * gap + right, overflow="ellipsis", no_wrap=True)


def _note(status: RunStatus) -> str:
    """Return the note, with the host of a run that should be looked after there."""
    if status.launched is None or (status.state != "dead" and not status.note.startswith("silent")):
        return status.note
    return f"{status.note} on {for_a_terminal(status.launched.host)[:60]}".lstrip()


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _first(values: dict[str, float]) -> float | None:
    return next(iter(values.values()), None)


def _machine(status: RunStatus) -> str:
    launched = status.launched
    return "-" if launched is None else for_a_terminal(f"{launched.ranks} x {launched.device}")[:20]
