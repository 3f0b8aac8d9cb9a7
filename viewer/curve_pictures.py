"""Draw curves: those of a run, of several runs, or of the trials of a sweep."""

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.drawing import GREY, plotly, pyplot, save_figure
from viewer.curves import Panel, Series

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008), the darkest first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8f98")
# When all colours are used, the next lines are dashed.
_DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))
_BAND = 0.18  # opacity
_PANEL_WIDTH, _PANEL_HEIGHT, _LEGEND_LINE = 5.2, 3.4, 0.2  # inches
_MOST_COLUMNS = 3
_NOTE = "lines: means over seeds; bands: lowest to highest seed"


@dataclass(frozen=True)
class Style:
    """How a series is drawn.

    Attributes:
        legend: what the legend says of it. Several series may share a line of the legend.
        dash: its name in matplotlib, and its name in plotly.
    """

    legend: str
    colour: str
    dash: tuple[str, str] = _DASHES[0]
    width: float = 1.6
    opacity: float = 1.0


def draw_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw a panel for each metric, with one legend below them.

    Raises:
        UserError: matplotlib is not installed, or the file can't be written.
    """
    save_figure(png_figure(panels, _styles(panels)), path)


def png_figure(panels: Sequence[Panel], styles: Mapping[str, Style]) -> Any:
    """Return a figure of matplotlib with a panel for each metric, and one legend below them.

    Args:
        styles: by the label of the series. Their order is that of the legend; a series covers those
            before it in its panel.

    Raises:
        UserError: matplotlib is not installed.
    """
    plt = pyplot()
    num_rows, num_columns = grid(len(panels), _MOST_COLUMNS)
    width = _PANEL_WIDTH * num_columns
    wrapped = {style.legend: "\n".join(textwrap.wrap(style.legend, int(width * 11))) for style in styles.values()}
    below = _LEGEND_LINE * sum(text.count("\n") + 1 for text in wrapped.values()) + 0.4
    height = _PANEL_HEIGHT * num_rows + below
    figure = plt.figure(figsize=(width, height), constrained_layout=True)
    top, bottom = figure.subfigures(2, 1, height_ratios=(_PANEL_HEIGHT * num_rows, below))
    axes = top.subplots(num_rows, num_columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    lines: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for series in panel.series:
            style = styles[series.label]
            drawn = {"color": style.colour, "alpha": style.opacity, "linestyle": style.dash[0]}
            marker = {"marker": "o", "markersize": 2 * style.width} if _has_markers(series) else {}
            (line,) = axis.plot(series.x_P, series.mean_P, linewidth=style.width, **drawn, **marker)
            lines.setdefault(style.legend, line)
            if series.num_runs > 1:
                band = {"color": style.colour, "alpha": _BAND * style.opacity, "linewidth": 0}
                axis.fill_between(series.x_P, series.low_P, series.high_P, **band)
        axis.set_title(panel.metric, parse_math=False)
        axis.set_xlabel(panel.x_name)
        axis.xaxis.get_major_locator().set_params(integer=True)  # there is no step 12.5
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
        if _is_accuracy(panel.metric):
            axis.set_ylim(-0.02, 1.02)
        elif _is_logarithmic(panel):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    named = [text for text in wrapped if text in lines]
    handles, names = [lines[text] for text in named], [wrapped[text] for text in named]
    for text in bottom.legend(handles, names, frameon=False, loc="upper center").get_texts():
        text.set_parse_math(False)
    if _has_bands(panels):
        bottom.text(0.5, 0.02, _NOTE, fontsize=9, color="#626973", ha="center", va="bottom")
    return figure


def html_figure(panels: Sequence[Panel], styles: Mapping[str, Style]) -> Any:
    """Return a figure of plotly with the same panels.

    Raises:
        UserError: plotly is not installed.
    """
    graphs, subplots = plotly()
    num_rows, num_columns = grid(len(panels), _MOST_COLUMNS)
    titles = [html.escape(panel.metric) for panel in panels]
    figure = subplots.make_subplots(num_rows, num_columns, subplot_titles=titles)
    legend = list(dict.fromkeys(style.legend for style in styles.values()))
    in_legend: set[str] = set()
    for number, panel in enumerate(panels):
        row, column = number // num_columns + 1, number % num_columns + 1
        for series in panel.series:
            style = styles[series.label]
            name = html.escape(style.legend)  # plotly shows some tags of a name, links among them
            shared = {"x": series.x_P, "legendgroup": name, "mode": "lines", "showlegend": False}
            if series.num_runs > 1:
                edge = {"line": {"width": 0}, "hoverinfo": "skip"}
                figure.add_trace(graphs.Scatter(y=series.low_P, **shared, **edge), row, column)
                colour = f"rgba{(*bytes.fromhex(style.colour[1:]), _BAND * style.opacity)}"
                band = {"fill": "tonexty", "fillcolor": colour}
                figure.add_trace(graphs.Scatter(y=series.high_P, **shared, **edge, **band), row, column)
            drawn = shared | {
                "name": name,
                "meta": html.escape(series.label),
                "showlegend": style.legend not in in_legend,
                "legendrank": legend.index(style.legend),
                "mode": "lines+markers" if _has_markers(series) else "lines",
                "marker": {"size": 2 * style.width + 3},
                "line": {"color": style.colour, "dash": style.dash[1], "width": style.width + 0.4},
                "opacity": style.opacity,
            }
            figure.add_trace(graphs.Scatter(y=series.mean_P, **drawn), row, column)
            in_legend.add(style.legend)
        figure.update_xaxes(title_text=panel.x_name, row=row, col=column)
        if _is_accuracy(panel.metric):
            figure.update_yaxes(range=[-0.02, 1.02], row=row, col=column)
        elif _is_logarithmic(panel):
            figure.update_yaxes(type="log", row=row, col=column)
    below = 24 * len(legend) + 90
    figure.update_layout(
        height=380 * num_rows + below + 90,
        margin={"b": below, "t": 90},
        template="plotly_white",
        legend={"orientation": "v", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    return figure


def grid(num_panels: int, most_columns: int) -> tuple[int, int]:
    """Return the number of rows and of columns of a figure."""
    num_columns = min(num_panels, most_columns)
    return -(-num_panels // num_columns), num_columns


def _styles(panels: Sequence[Panel]) -> dict[str, Style]:
    """Return the style of each group, the same in all panels."""
    labels = dict.fromkeys(series.label for panel in panels for series in panel.series)
    coloured = [label for label in labels if label != "train"]
    styles = {
        label: Style(label, COLOURS[number % len(COLOURS)], _DASHES[number // len(COLOURS) % len(_DASHES)])
        for number, label in enumerate(coloured)
    }
    return ({"train": Style("train", GREY, width=1.0)} if "train" in labels else {}) | styles


def _has_markers(series: Series) -> bool:
    """Return whether each logged point is marked: only where they are few and lie at its mean."""
    return len(series.x_P) <= 30 and not series.is_interpolated


def _is_accuracy(metric: str) -> bool:
    return "accuracy" in metric


def _is_logarithmic(panel: Panel) -> bool:
    """Return whether the values are losses above 0 that are far enough apart for labelled ticks."""
    low = min((float(series.low_P.min(initial=math.inf)) for series in panel.series), default=0.0)
    high = max((float(series.high_P.max(initial=0.0)) for series in panel.series), default=0.0)
    return "loss" in panel.metric and low > 0 and 3 * low < high < math.inf


def _has_bands(panels: Sequence[Panel]) -> bool:
    return any(series.num_runs > 1 for panel in panels for series in panel.series)
