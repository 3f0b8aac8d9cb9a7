"""What watch.py shows of runs in a terminal: a few runs side by side, or a table of many."""

import math
from collections.abc import Callable, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from utils.text import for_a_terminal, in_words
from viewer.curves import names_of
from viewer.status import LOSSES, RunStatus, Watched, is_number

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


def read_statuses(runs: Sequence[Watched]) -> dict[str, RunStatus]:
    """Return the runs by name in the order of display: running ones, then the newest."""
    names = map(for_a_terminal, names_of([run.path for run in runs]))
    found = [(name, run.status()) for name, run in zip(names, runs, strict=True)]
    return dict(sorted(found, key=lambda each: (each[1].state != "running", -each[1].began_at)))


def screen(shown: Mapping[str, RunStatus], width: int, height: int) -> RenderableType:
    """Return what fills a screen of a size: panels side by side if all runs fit, or a table."""
    hint = Text("q or Ctrl-C: leave", style="dim")
    per_row = max(1, min(len(shown), width // _LEAST_PANEL))
    num_rows = -(-len(shown) // per_row)
    if shown and num_rows * _PANEL_LINES < height:
        per_row = -(-len(shown) // num_rows)  # 4 runs where 3 fit side by side: 2 and 2
        grid = Table.grid(expand=True)
        for _ in range(per_row):
            grid.add_column(ratio=1)
        panels = [panel(name, status, width // per_row - 4) for name, status in shown.items()]
        for first in range(0, len(panels), per_row):
            grid.add_row(*panels[first : first + per_row])
        return Group(grid, hint)
    room = height - 3  # without the counts, the titles and the hint
    if len(shown) <= room:
        return Group(counts(shown), table(shown, width), hint)
    room = max(1, room - 1)
    others = Text(f"and {len(shown) - room} more", style="dim")
    return Group(counts(shown), table(dict(list(shown.items())[:room]), width), others, hint)


def counts(shown: Mapping[str, RunStatus]) -> Text:
    """Return a line that counts the runs in each state."""
    states = [status.state for status in shown.values()]
    line = Text(f"{len(shown)} runs" if len(shown) != 1 else "1 run", no_wrap=True, overflow="ellipsis")
    for state, colour in COLOURS.items():
        if state in states:
            line.append(f"  {states.count(state)} {state}", style=colour)
    return line


# ---- a table -----------------------------------------------------------------------------------

# For each column its rank and its text. Where the width does not suffice, columns of the highest
# rank are left out first, and those of rank 0 never.
COLUMNS: dict[str, tuple[int, Callable[[str, RunStatus], str]]] = {
    "run": (0, lambda name, _: name),
    "state": (0, lambda _, run: run.state),
    "step": (0, lambda _, run: f"{run.step:,}"),
    "of": (3, lambda _, run: _or_dash(run.last_step, ",")),
    "loss": (0, lambda _, run: _or_dash(run.loss, ".4g")),
    "exact": (1, lambda _, run: _or_dash(run.exact, ".3f")),
    "test": (0, lambda _, run: _or_dash(next(iter(run.test.values()), None), ".3f")),
    "/s": (2, lambda _, run: _or_dash(run.speed and run.speed[0], ",.0f")),
    "ETA": (0, lambda _, run: "-" if run.eta_s is None else in_words(run.eta_s)),
    "saved": (4, lambda _, run: _or_dash(run.checkpoint, ",")),
    "best": (6, lambda _, run: _or_dash(run.best, ",")),
    "ranks": (5, lambda _, run: _machine(run) or "-"),
    "note": (0, lambda _, run: run.note),
}
# The text of these is shortened to as many characters at least.
_LEAST = {"run": 14, "note": 12}


def table(shown: Mapping[str, RunStatus], width: int) -> Table:
    """Return a table with a line for each run, and with the columns that the width has room for."""
    texts = {title: [text_of(*each) for each in shown.items()] for title, (_, text_of) in COLUMNS.items()}
    longest = {title: max(map(cell_len, [title, *column])) for title, column in texts.items()}
    used = [title for title in COLUMNS if title != "note" or any(texts[title])]
    while (rank := max(COLUMNS[title][0] for title in used)) and width < sum(
        min(longest[title], _LEAST.get(title, width)) + 2 for title in used
    ):
        used = [title for title in used if COLUMNS[title][0] != rank]
    lines = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim", show_edge=False)
    for title in used:
        if title in _LEAST:  # rich shares out what is left
            lines.add_column(title, max_width=longest[title])
        else:
            justify = "left" if title == "state" else "right"
            lines.add_column(title, justify=justify, width=longest[title])  # type: ignore[arg-type]
    for number, status in enumerate(shown.values()):
        style = {"state": COLOURS[status.state]}
        cells = [(texts[title][number], style.get(title, "")) for title in used]
        lines.add_row(*(Text(text, style=look, no_wrap=True, overflow="ellipsis") for text, look in cells))
    return lines


# ---- panels ------------------------------------------------------------------------------------


def panel(name: str, run: RunStatus, width: int) -> Panel:
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
    tests = "  ".join(
        f"{'test' if len(run.test) == 1 else set_name} {value:.3f}" for set_name, value in run.test.items()
    )
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
        _two_ends(f"saved {_or_dash(run.checkpoint, ',')}{best}", "", width),
        Text(note, style="yellow" if run.state == "running" else colour, overflow="ellipsis", no_wrap=True),
    ]
    title = Text.assemble((name[: max(4, width - len(run.state) - 4)], "bold"), " ", (run.state, colour))
    return Panel(Group(*lines), title=title, title_align="left", height=_PANEL_LINES, border_style=colour)


def _curve_of(run: RunStatus, metrics: Sequence[str], width: int, style: str, **ends: float) -> Text:
    values = [row[name] for row in run.rows for name in metrics if is_number(row.get(name))]
    return Text(
        "\n".join(curve([value for value in values if math.isfinite(value)], width, _CURVE_LINES, **ends)), style
    )


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


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _machine(run: RunStatus) -> str:
    launched = run.launched
    return "" if launched is None else for_a_terminal(f"{launched.ranks} x {launched.device}")[:20]
