"""Draw curves into a picture: those of a run, of several runs, or of an evaluation."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.drawing import GREY, pyplot, save_figure
from viewer.curves import Panel

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008), the darkest first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8f98")
# When all colours are used, the next lines are dashed.
_DASHES = ("-", "--", ":", "-.")
_PANEL_WIDTH, _PANEL_HEIGHT, _LEGEND_LINE = 5.2, 3.4, 0.2  # inches
_MOST_COLUMNS = 3


def draw_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw a panel for each metric, with one legend below them.

    Raises:
        UserError: matplotlib is not installed, or the file can't be written.
    """
    plt = pyplot()
    num_columns = min(len(panels), _MOST_COLUMNS)
    num_rows = -(-len(panels) // num_columns)
    width = _PANEL_WIDTH * num_columns
    names = dict.fromkeys(series.name for panel in panels for series in panel.series)
    wrapped = [textwrap.fill(name, int(width * 11)) for name in names]
    below = _LEGEND_LINE * sum(text.count("\n") + 1 for text in wrapped) + 0.4
    size = (width, _PANEL_HEIGHT * num_rows + below)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False, constrained_layout=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    places = {name: place for place, name in enumerate(name for name in names if name != "train")}
    lines: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for series in panel.series:
            place = places.get(series.name, 0)
            colour = COLOURS[place % len(COLOURS)] if series.name in places else GREY
            look = {"color": colour, "linestyle": _DASHES[place // len(COLOURS) % len(_DASHES)]}
            marker = {"marker": "o", "markersize": 3.2} if len(series.x) <= 30 else {}
            (lines[series.name],) = axis.plot(series.x, series.values, linewidth=1.6, **look, **marker)
            if series.low is not None:
                axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)
        _style_axis(axis, panel)
    has_bands = any(series.low is not None for panel in panels for series in panel.series)
    title = "lines: means over seeds; bands: lowest to highest seed" if has_bands else None
    handles = [lines[name] for name in names]
    legend = figure.legend(handles, wrapped, title=title, frameon=False, loc="outside lower center")
    for text in legend.get_texts():
        text.set_parse_math(False)
    save_figure(figure, path)


def _style_axis(axis: Any, panel: Panel) -> None:
    axis.set_title(panel.metric, parse_math=False)
    axis.set_xlabel(panel.x_name)
    axis.xaxis.get_major_locator().set_params(integer=True)  # there is no step 12.5
    _lighten(axis)
    if "accuracy" in panel.metric:
        axis.set_ylim(-0.02, 1.02)
        return
    # Losses are logarithmic if they are far enough apart for labelled ticks.
    low, high = axis.dataLim.intervaly
    if "loss" in panel.metric and low > 0 and 3 * low < high < math.inf:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")


def _lighten(axis: Any) -> None:
    axis.grid(alpha=0.25, which="both")
    axis.spines[["top", "right"]].set_visible(False)


# ---- evaluations ---------------------------------------------------------------------------------


def draw_accuracy_over_steps(accuracy: Mapping[str, Sequence[float]], trained_steps: int, path: Path) -> None:
    """Draw the share of puzzles that are solved exactly after 1, 2, ... steps, a line per set.

    A vertical line is drawn at the number of steps in training.
    """
    figure, axis = pyplot().subplots(figsize=(5.5, 3.4), constrained_layout=True)
    for name, values in accuracy.items():
        steps = range(1, len(values) + 1)
        axis.plot(steps, values, marker="o", markersize=4, label=f"{name}: {values[-1]:.3f} at the last")
    most_steps = max(map(len, accuracy.values()), default=0)
    if most_steps > 64:
        axis.set_xscale("log", base=2)
    if trained_steps < most_steps:
        axis.axvline(trained_steps, color=GREY, linewidth=1, linestyle="--", label="as many as in training")
    axis.set(xlabel="steps of reasoning", ylabel="puzzles solved exactly", ylim=(-0.02, 1.02))
    _lighten(axis)
    axis.legend(frameon=False, loc="best")
    save_figure(figure, path)


def draw_reliability(bins: Mapping[str, Sequence[tuple[float, ...]]], path: Path) -> None:
    """Draw accuracy over confidence, a line per set, above the number of answers.

    Args:
        bins: for each set the lower and the upper limit of each bin of confidence, and of its
            answers the number, the mean confidence and the accuracy.
    """
    figure, (axis, counts) = pyplot().subplots(
        2, 1, figsize=(4.4, 5.2), height_ratios=(4, 1), sharex=True, constrained_layout=True
    )
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="confidence = accuracy")
    for place, (name, of_set) in enumerate(bins.items()):
        low, high, num, confidence, accuracy = zip(*of_set, strict=True)
        (line,) = axis.plot(confidence, accuracy, marker="o", markersize=5, label=name)
        width = (high[0] - low[0]) / len(bins)  # side by side, a bar of each set
        left = [each + place * width for each in low]
        counts.bar(left, num, width=0.9 * width, align="edge", color=line.get_color())
    axis.set(ylabel="share of right answers", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    counts.set(xlabel="confidence, sigmoid(q_halt)", ylabel="answers", yscale="log")
    # In a range of few powers of ten, Matplotlib would write numbers between them that overlap.
    counts.tick_params(axis="y", which="minor", labelleft=False)
    _lighten(axis)
    _lighten(counts)
    axis.legend(frameon=False, loc="best")
    save_figure(figure, path)
