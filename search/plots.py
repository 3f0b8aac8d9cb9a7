"""Draw what a sweep has found: pictures with matplotlib, and one page with plotly."""

import html
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from optuna.trial import TrialState

from search.figures import Axis, Figures, figures_of
from search.report import broken, num_of, require_trials
from search.study import Study
from utils.drawing import plotly, pyplot, save_figure
from utils.files import file_errors, refuse_links, write_atomically
from viewer.curve_pictures import COLOURS, Style, grid, html_figure, png_figure

_BEST, _OTHER, _BAR = "#d55e00", "#9aa0a8", "#0072b2"
_NAMED = [colour for colour in COLOURS[:-1] if colour != _BEST]  # without grey and the colour of the best
_COLOURS = "viridis"
_MOST_COLUMNS = 4
_GOLDEN = 0.618034
_BETWEEN = 6  # pixels between the labels of two ticks
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #24292f; }}
h1, h2 {{ line-height: 1.2; }}
h2 {{ margin-top: 2em; }}
p {{ max-width: 48em; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        file: the name of its picture, without .png.
        picture: a figure of matplotlib; None if there is nothing to draw.
        figure: the same as a figure of plotly.
    """

    file: str
    heading: str
    text: str
    picture: Any = None
    figure: Any = None


def write_plots(study: Study, folder: Path | None) -> str:
    """Write plots.html and a PNG for each figure.

    Args:
        folder: None: the folder of the sweep.

    Returns:
        The paths of the files, one a line.

    Raises:
        UserError: No trial has begun, matplotlib or plotly is not installed, or the folder can't be
            written.
    """
    require_trials(study)
    plotly()  # first, because its requirements have matplotlib too
    folder, figures, name = folder or study.sweep.path, figures_of(study), html.escape(study.sweep.name)
    sections = [_importance(figures), *_over_axes(figures), _curves(figures)]
    drawn = [section for section in sections if section.picture is not None]
    body = [f"<h1>{name}</h1>", f"<p>{html.escape(_summary(figures))}</p>"]
    # The logo would be a link.
    options = {"full_html": False, "config": {"displaylogo": False, "responsive": True}}
    for section in sections:
        body += [f"<h2>{section.heading}</h2>", f"<p>{html.escape(section.text)}</p>"]
        if section in drawn:
            body.append(section.figure.to_html(include_plotlyjs=section is drawn[0], **options))
    page, files = folder / "plots.html", [folder / f"{section.file}.png" for section in drawn]
    with file_errors():
        folder.mkdir(parents=True, exist_ok=True)
        for section, file in zip(drawn, files, strict=True):
            save_figure(section.picture, file)
        refuse_links([page])
        write_atomically(page, _PAGE.format(title=name, body="\n".join(body)))
    return "\n".join(map(str, [page, *files]))


def _summary(figures: Figures) -> str:
    trials = num_of(figures.num_trials, "trial")
    if not figures.complete:
        return f"{trials}, none of them with a value yet."
    extreme = "highest" if figures.sweep.config.direction == "maximize" else "lowest"
    best = figures.complete[0]
    return (
        f"{trials}, {len(figures.complete)} of them complete. The best is trial {best.number} with "
        f"{figures.sweep.config.metric} {best.value:.4f}, the {extreme}."
    )


# ---- importance --------------------------------------------------------------------------------


def _importance(figures: Figures) -> Section:
    file, heading, found = "importance", "Importance of the parameters", figures.importances
    if found is None:
        text = "This needs 10 complete trials whose values differ, and two parameters with different values."
        return Section(file, heading, text)
    text = (
        f"How much each parameter decides whether a trial is among the best {found.num_best} of "
        f"{found.num_complete + found.num_pruned} (PED-ANOVA). {found.num_complete} trials are complete; "
        f"{found.num_pruned} were pruned and count as not among the best. The numbers are rough; trust their order."
    )
    names = [name if len(name) <= 40 else f"{name[:39]}…" for name in found.shares]
    shares, places, title = [*found.shares.values()], range(len(names)), f"importance for {figures.metric}"
    labels = [f"{share:.2f}" for share in shares]

    picture, axis = pyplot().subplots(figsize=(7.0, 0.34 * len(names) + 1.1), constrained_layout=True)
    axis.bar_label(axis.barh(places, shares, color=_BAR, height=0.65), labels, padding=3, fontsize=9)
    axis.set_yticks(places, names, parse_math=False)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * max(shares))
    axis.set_xlabel(title, parse_math=False)
    _plain(axis)

    graphs, _ = plotly()
    figure = graphs.Figure(graphs.Bar(x=shares, y=[*places], orientation="h", marker_color=_BAR, text=labels))
    figure.update_layout(template="plotly_white", height=28 * len(names) + 120, margin={"t": 40, "l": 10, "r": 20})
    named = {"tickvals": [*places], "ticktext": [*map(html.escape, names)]}
    figure.update_yaxes(autorange="reversed", automargin=True, **named)
    figure.update_xaxes(title_text=html.escape(title))
    return Section(file, heading, text, picture, figure)


# ---- parallel coordinates and slices -----------------------------------------------------------


def _over_axes(figures: Figures) -> list[Section]:
    """Return the parallel coordinates and the slices of the complete trials."""
    parallel, slices = ("parallel", "Parallel coordinates"), ("slices", "Slices")
    if not (figures.complete and figures.axes):
        nothing = "The sweep has no parameters." if figures.complete else "No trial has a value yet."
        return [Section(*parallel, nothing), Section(*slices, nothing)]
    which, num_others = num_of(len(figures.complete), "complete trial"), figures.num_trials - len(figures.complete)
    if num_others:
        which += f"; {num_others} more were pruned, failed or have not ended"
    lacking = any(label == "not set" for axis in figures.axes for _, label in axis.ticks)
    note = " Points at “not set” are trials whose other parameters leave this one out." if lacking else ""
    lines = f"{which}. Each line is a trial, and its colour is the value.{note}"
    panels = f"{which}. Each panel shows the values over one parameter.{note}"
    return [
        Section(*parallel, lines, _parallel_png(figures), _parallel_html(figures)),
        Section(*slices, panels, _slices_png(figures), _slices_html(figures)),
    ]


def _parallel_png(figures: Figures) -> Any:
    plt, axes = pyplot(), [*figures.axes, figures.value_axis]
    figure, panel = plt.subplots(figsize=(1.35 * len(axes) + 1.0, 5.0), constrained_layout=True)
    maximizes = figures.sweep.config.direction == "maximize"
    colours = plt.get_cmap(_COLOURS if maximizes else f"{_COLOURS}_r")
    heights_TA = np.stack([_between_0_and_1(axis, axis.place_T) for axis in axes], axis=1)
    steps = np.linspace(0, 1, 30)
    ease = 3 * steps**2 - 2 * steps**3  # lines that meet at a value part again as curves
    xs = np.concatenate([place + steps for place in range(len(axes) - 1)])
    for trial in reversed(range(len(figures.complete))):  # the best one lies on top
        ends = zip(heights_TA[trial, :-1], heights_TA[trial, 1:], strict=True)
        ys = np.concatenate([begin + (end - begin) * ease for begin, end in ends])
        colour, width, opacity = (colours(heights_TA[trial, -1]), 1.1, 0.65) if trial else (_BEST, 2.2, 1.0)
        panel.plot(xs, ys, color=colour, linewidth=width, alpha=opacity)
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
    for place, axis in enumerate(axes):
        panel.axvline(place, color="#24292f", linewidth=0.8)
        for tick, label in axis.ticks:
            height = _between_0_and_1(axis, tick)
            panel.text(place, height, f" {label}", fontsize=8, va="center", bbox=box, zorder=3, parse_math=False)
    names = ["\n".join(broken(axis.key, 11)) for axis in axes]
    panel.set_xticks(range(len(axes)), names, fontsize=9, parse_math=False)
    panel.xaxis.tick_top()
    panel.tick_params(length=0)
    panel.set_yticks([])
    panel.set_ylim(-0.05, 1.05)
    panel.set_xlim(-0.1, len(axes) - 0.45)
    panel.spines[:].set_visible(False)
    panel.set_xlabel(f"orange: the best, trial {figures.complete[0].number}")
    return figure


def _between_0_and_1(axis: Axis, places: Any) -> Any:
    low, high = axis.ends
    return (places - low) / (high - low)


def _parallel_html(figures: Figures) -> Any:
    graphs, _ = plotly()
    dimensions = [
        {
            "label": "<br>".join(map(html.escape, broken(axis.key, 16))),
            "values": axis.place_T,
            "range": axis.ends,
            "tickvals": [place for place, _ in axis.ticks],
            "ticktext": [label for _, label in axis.ticks],  # here plotly reads no HTML
        }
        for axis in [*figures.axes, figures.value_axis]
    ]
    title = {"title": {"text": html.escape(figures.sweep.config.metric)}}
    scale = {"colorscale": _COLOURS, "reversescale": figures.sweep.config.direction == "minimize", "showscale": True}
    line = {"color": figures.value_axis.place_T, "colorbar": title, **scale}
    figure = graphs.Figure(graphs.Parcoords(dimensions=dimensions, line=line, labelside="top"))
    figure.update_layout(template="plotly_white", height=520, margin={"t": 90, "b": 30, "l": 110, "r": 40})
    return figure


def _side_by_side(axis: Axis) -> np.ndarray:
    """Return the places of the trials; equal values of a list stand side by side, none hidden."""
    places_T = axis.place_T.copy()
    for place, _ in axis.ticks if axis.is_list else []:
        same_T = axis.place_T == place
        # Spread evenly, but not in the order of the trials, which would look like a trend.
        places_T[same_T] += 0.36 * ((np.arange(same_T.sum()) * _GOLDEN + 0.5) % 1 - 0.5)
    return places_T


def _limits(axis: Axis) -> tuple[float, float]:
    """Return the ends of a panel, with room beside the outermost trials."""
    low, high = axis.ends
    room = 0.5 if axis.is_list else 0.06 * (high - low)
    return low - room, high + room


def _slices_png(figures: Figures) -> Any:
    num_rows, num_columns = grid(len(figures.axes), _MOST_COLUMNS)
    size = max(4.0, 2.9 * num_columns), 2.5 * num_rows
    figure, panels = pyplot().subplots(
        num_rows, num_columns, figsize=size, sharey=True, squeeze=False, constrained_layout=True
    )
    value_T = figures.value_axis.place_T
    for panel, axis in zip(panels.flat, figures.axes, strict=False):
        places_T = _side_by_side(axis)
        panel.scatter(places_T, value_T, s=22, color=_BAR, alpha=0.65, linewidth=0)
        panel.scatter(places_T[:1], value_T[:1], s=55, color=_BEST, marker="*", zorder=3)
        panel.set_xticks(*zip(*axis.ticks, strict=True), parse_math=False)
        panel.set_xlim(_limits(axis))
        panel.set_xlabel(axis.key, parse_math=False)
        _plain(panel)
    for panel in panels.flat[len(figures.axes) :]:
        panel.set_axis_off()
    for row in panels:
        row[0].set_ylabel(figures.sweep.config.metric, parse_math=False)
    figure.draw_without_rendering()  # which places the labels
    for panel in panels.flat:
        boxes = [label.get_window_extent() for label in panel.get_xticklabels()]
        if any(left.padded(_BETWEEN).x1 > right.x0 for left, right in pairwise(boxes)):
            panel.tick_params(axis="x", labelrotation=30)
            for label in panel.get_xticklabels():
                label.set_horizontalalignment("right")
    return figure


def _slices_html(figures: Figures) -> Any:
    graphs, subplots = plotly()
    num_rows, num_columns = grid(len(figures.axes), _MOST_COLUMNS)
    figure = subplots.make_subplots(num_rows, num_columns, shared_yaxes=True, vertical_spacing=0.5 / (num_rows + 1))
    text = [f"trial {best.number}: {best.value:.4f}" for best in reversed(figures.complete)]  # the best one on top
    marker = {"color": [*[_BAR] * (len(text) - 1), _BEST], "size": 7, "opacity": 0.75}
    drawn = {"mode": "markers", "marker": marker, "showlegend": False, "text": text, "hoverinfo": "text"}
    for number, axis in enumerate(figures.axes):
        place = {"row": number // num_columns + 1, "col": number % num_columns + 1}
        places, labels = zip(*axis.ticks, strict=True)
        figure.add_trace(
            graphs.Scatter(x=_side_by_side(axis)[::-1], y=figures.value_axis.place_T[::-1], **drawn), **place
        )
        ticks = {"tickvals": places, "ticktext": [*map(html.escape, labels)], "range": _limits(axis)}
        figure.update_xaxes(title_text=html.escape(axis.key), **ticks, **place)
    figure.update_yaxes(title_text=html.escape(figures.sweep.config.metric), col=1)
    figure.update_layout(template="plotly_white", height=270 * num_rows + 80, margin={"t": 40})
    return figure


# ---- curves ------------------------------------------------------------------------------------


def _curves(figures: Figures) -> Section:
    if not figures.panels:
        text = "No run of the sweep has logged anything yet, or the folders of the runs are gone."
        return Section("curves", "Curves", text)
    series = [each for panel in figures.panels for each in panel.series]
    num_drawn = next((len(panel.series) for panel in figures.panels if panel.metric == figures.metric), 0)
    num_seeds = max(each.num_runs for each in series)
    text = (
        f"{num_of(num_drawn, 'trial')} {'has' if num_drawn == 1 else 'have'} logged {figures.metric}. Grey lines are "
        "trials that were pruned, failed or have not ended."
    )
    if num_seeds > 1:
        text += (
            f" A line is the mean over the seeds that have logged (up to {num_seeds}), as far as all of these have "
            "come. A band reaches from the lowest to the highest seed."
        )
    styles = _curve_styles(figures, dict.fromkeys(each.label for each in series))
    figure = html_figure(figures.panels, styles)
    for line in figure.select_traces(lambda trace: trace.meta is not None):
        line.hovertemplate = f"{line.meta}, step %{{x}}: %{{y:.4f}}<extra></extra>"
    return Section("curves", "Curves", text, png_figure(figures.panels, styles), figure)


def _curve_styles(figures: Figures, labels: dict[str, None]) -> dict[str, Style]:
    """Return the styles of the curves, the best one first. A few other complete trials have names.

    Many of them share one style.
    """
    front = {f"trial {trial.number}" for trial in figures.complete[:1]}
    best = [label for label in labels if label.split(":")[0] in front]
    complete = [label for label in labels if figures.states[label] == TrialState.COMPLETE and label not in best]
    other = [label for label in labels if label not in best and label not in complete]
    shared = Style(f"{len(complete)} other complete", _BAR, width=1.0, opacity=0.5)
    named = dict(zip(complete, map(Style, complete, _NAMED), strict=False))
    return {
        **{label: Style(f"{label}, the best", _BEST, width=2.4) for label in best},
        **(named if len(complete) <= len(_NAMED) else dict.fromkeys(complete, shared)),
        **dict.fromkeys(other, Style(f"{len(other)} pruned, failed or not ended", _OTHER, width=0.9, opacity=0.55)),
    }


def _plain(axis: Any) -> None:
    axis.grid(alpha=0.25, which="major")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
