"""Draw the curves of several runs: a PNG with matplotlib, an HTML page with plotly."""

import html
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.drawing import plotly, pyplot
from utils.errors import UserError
from utils.files import refuse_links, write_atomically
from viewer.curves import Panel, Series

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008), the darkest first.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8f98")
# When all colours are used, the next lines are dashed.
_DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))
_BAND = 0.18  # opacity
_PANEL_WIDTH, _PANEL_HEIGHT, _LEGEND_LINE = 5.2, 3.4, 0.2  # inches
_MOST_COLUMNS = 3
_NOTE = "lines: means over seeds; bands: lowest to highest seed"


def draw_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw a panel for each metric, with one legend below them.

    Raises:
        UserError: matplotlib is not installed, or the file can't be written.
    """
    plt = pyplot()
    num_columns = min(len(panels), _MOST_COLUMNS)
    num_rows = -(-len(panels) // num_columns)
    styles = _styles(panels)
    width = _PANEL_WIDTH * num_columns
    labels = {label: "\n".join(textwrap.wrap(label, int(width * 11))) for label in styles}
    below = _LEGEND_LINE * sum(text.count("\n") + 1 for text in labels.values()) + 0.4
    height = _PANEL_HEIGHT * num_rows + below
    figure = plt.figure(figsize=(width, height), constrained_layout=True)
    top, bottom = figure.subfigures(2, 1, height_ratios=(_PANEL_HEIGHT * num_rows, below))
    axes = top.subplots(num_rows, num_columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    lines: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for series in panel.series:
            colour, (dash, _) = styles[series.label]
            marker = {"marker": "o", "markersize": 3} if _has_markers(series) else {}
            (line,) = axis.plot(series.x_P, series.mean_P, color=colour, linestyle=dash, linewidth=1.6, **marker)
            lines.setdefault(series.label, line)
            if series.num_runs > 1:
                axis.fill_between(series.x_P, series.low_P, series.high_P, color=colour, alpha=_BAND, linewidth=0)
        axis.set_title(panel.metric, parse_math=False)
        axis.set_xlabel(panel.x_name)
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
        if _is_accuracy(panel.metric):
            axis.set_ylim(-0.02, 1.02)
        elif _is_logarithmic(panel):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    legend = bottom.legend(list(lines.values()), [labels[label] for label in lines], frameon=False, loc="upper center")
    for text in legend.get_texts():
        text.set_parse_math(False)
    if _has_bands(panels):
        bottom.text(0.5, 0.02, _NOTE, fontsize=9, color="#626973", ha="center", va="bottom")
    refuse_links([path])
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}); choose another file") from None
    finally:
        plt.close(figure)


def draw_html(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Write a page with the same panels, whose values a pointer reads off. It needs no network.

    Raises:
        UserError: plotly is not installed, or the file can't be written.
    """
    graphs, subplots = plotly()
    num_columns = min(len(panels), _MOST_COLUMNS)
    num_rows = -(-len(panels) // num_columns)
    styles = _styles(panels)
    figure = subplots.make_subplots(
        num_rows, num_columns, subplot_titles=[html.escape(panel.metric) for panel in panels]
    )
    in_legend: set[str] = set()
    for number, panel in enumerate(panels):
        row, column = number // num_columns + 1, number % num_columns + 1
        for series in panel.series:
            colour, (_, dash) = styles[series.label]
            label = html.escape(series.label)  # plotly shows some tags of a name, links among them
            shared = {"x": series.x_P, "legendgroup": label, "mode": "lines", "showlegend": False}
            if series.num_runs > 1:
                edge = {"line": {"width": 0}, "hoverinfo": "skip"}
                figure.add_trace(graphs.Scatter(y=series.low_P, **shared, **edge), row, column)
                fill = {"fill": "tonexty", "fillcolor": f"rgba{(*bytes.fromhex(colour[1:]), _BAND)}"}
                figure.add_trace(graphs.Scatter(y=series.high_P, **shared, **edge, **fill), row, column)
            drawn = shared | {"showlegend": series.label not in in_legend}
            drawn["mode"] = "lines+markers" if _has_markers(series) else "lines"
            line = {"color": colour, "dash": dash}
            figure.add_trace(graphs.Scatter(y=series.mean_P, name=label, line=line, **drawn), row, column)
            in_legend.add(series.label)
        figure.update_xaxes(title_text=panel.x_name, row=row, col=column)
        if _is_accuracy(panel.metric):
            figure.update_yaxes(range=[-0.02, 1.02], row=row, col=column)
        elif _is_logarithmic(panel):
            figure.update_yaxes(type="log", row=row, col=column)
    below = 24 * len(styles) + 90
    figure.update_layout(
        title=html.escape(title) + (f"<br><sup>{_NOTE}</sup>" if _has_bands(panels) else ""),
        height=380 * num_rows + below + 90,
        margin={"b": below, "t": 90},
        template="plotly_white",
        hovermode="x unified",
        legend={"orientation": "v", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    # Without its logo the page has no link to anywhere.
    text = figure.to_html(include_plotlyjs=True, config={"displaylogo": False})
    refuse_links([path])
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}); choose another file") from None


def _styles(panels: Sequence[Panel]) -> dict[str, tuple[str, tuple[str, str]]]:
    """Return the colour and the dash of each group, the same in all panels."""
    labels = dict.fromkeys(series.label for panel in panels for series in panel.series)
    return {
        label: (_COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)])
        for number, label in enumerate(labels)
    }


def _has_markers(series: Series) -> bool:
    """Return whether each logged point is marked: only where they are few and lie at its mean."""
    return len(series.x_P) <= 30 and not series.is_interpolated


def _is_accuracy(metric: str) -> bool:
    return "accuracy" in metric


def _is_logarithmic(panel: Panel) -> bool:
    """Return whether the values are losses, all above 0."""
    values = [float(series.low_P.min()) for series in panel.series]
    return "loss" in panel.metric and bool(values) and min(values) > 0 and all(map(math.isfinite, values))


def _has_bands(panels: Sequence[Panel]) -> bool:
    return any(series.num_runs > 1 for panel in panels for series in panel.series)
