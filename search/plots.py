"""Draw what a sweep has found: pictures with matplotlib, and one page with plotly."""

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from search.figures import Axis, Curve, Figures, figures_of
from search.report import broken, require_trials
from search.study import Study
from utils.drawing import plotly, pyplot, save_figure
from utils.files import file_errors, refuse_links, write_atomically

_BEST, _OTHER, _BAR = "#d55e00", "#9aa0a8", "#0072b2"
_COLOURS = "viridis"
_LACKS = -0.14  # place of the trials without a value, below an axis from 0 to 1
_MOST_COLUMNS = 4
_GOLDEN = 0.618034
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
    folder = folder or study.sweep.path
    plt, (graphs, subplots) = pyplot(), plotly()
    figures = figures_of(study)
    sections = _sections(figures)
    with file_errors():
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, _, _, draw, _ in sections:
            if draw is None:
                continue
            path = folder / f"{name}.png"
            save_figure(draw(plt, figures), path)
            written.append(path)
        body = [f"<h1>{html.escape(study.sweep.name)}</h1>", f"<p>{html.escape(_summary(figures))}</p>"]
        for _, heading, text, _, show in sections:
            body += [f"<h2>{heading}</h2>", f"<p>{html.escape(text)}</p>"]
            if show is not None:
                body.append(_embedded(show(graphs, subplots, figures), is_first=not any("<script" in b for b in body)))
        page = folder / "plots.html"
        refuse_links([page])
        write_atomically(page, _PAGE.format(title=html.escape(study.sweep.name), body="\n".join(body)))
    return "\n".join(map(str, [page, *written]))


Section = tuple[str, str, str, Callable[..., Any] | None, Callable[..., Any] | None]


def _sections(figures: Figures) -> list[Section]:
    """Return for each figure its file, heading and text, and what draws it, if anything."""
    num = len(figures.value_T)
    found = figures.importances
    if found is None:
        importance = "This needs 10 complete trials, and two parameters with different values."
    else:
        importance = (
            f"How much each parameter decides whether a trial is among the best {found.num_best} of "
            f"{found.num_complete + found.num_pruned} (PED-ANOVA). {found.num_complete} trials are complete; "
            f"{found.num_pruned} were pruned and count as not among the best. The best group is small: trust the "
            "order more than the numbers."
        )
    left_out = f"the other {figures.num_trials - num} were pruned, failed or have not ended"
    which = f"The {num} complete trials" + (f"; {left_out}." if num < figures.num_trials else ".")
    lacking = any(np.isnan(axis.place_T).any() for axis in figures.axes)
    note = " Points at “not set” are trials whose other parameters leave this one out." if lacking else ""
    shown = _importance_png, _importance_html
    has_axes = bool(figures.axes) and num > 0
    drawn = sum(len(curves) for curves in list(figures.curves.values())[:1])
    seeds = max((curve.num_seeds for curves in figures.curves.values() for curve in curves), default=1)
    band = f" Lines are means over {seeds} seeds, bands reach from the lowest to the highest seed." if seeds > 1 else ""
    curves = (
        f"{drawn} trials that have logged {figures.metric}; grey lines are trials that were pruned, failed or have not "
        f"ended.{band}"
        if figures.curves
        else "No run of the sweep has logged anything yet, or the folders of the runs are gone."
    )
    nothing = "No trial has a value yet."
    return [
        ("importance", "Importance of the parameters", importance, *(shown if found else (None, None))),
        (
            "parallel",
            "Parallel coordinates",
            f"{which} Each line is a trial, and its colour is the value.{note}" if has_axes else nothing,
            *((_parallel_png, _parallel_html) if has_axes else (None, None)),
        ),
        (
            "slices",
            "Slices",
            f"{which} Each panel shows the values over one parameter.{note}" if has_axes else nothing,
            *((_slices_png, _slices_html) if has_axes else (None, None)),
        ),
        ("curves", "Curves", curves, *((_curves_png, _curves_html) if figures.curves else (None, None))),
    ]


def _summary(figures: Figures) -> str:
    direction = "highest" if figures.maximizes else "lowest"
    if figures.best is None:
        return f"{figures.num_trials} trials, none of them with a value yet."
    value = figures.value_T[figures.number_T.index(figures.best)]
    return (
        f"{figures.num_trials} trials, {len(figures.value_T)} of them complete. The best is trial {figures.best} with "
        f"{figures.sweep.config.metric} {value:.4f}, the {direction}."
    )


def _embedded(figure: Any, *, is_first: bool) -> str:
    """Return a figure as HTML. The first one brings plotly.js. The logo would be a link."""
    text = figure.to_html(full_html=False, include_plotlyjs=is_first, config={"displaylogo": False, "responsive": True})
    assert isinstance(text, str)
    return text


# ---- importance --------------------------------------------------------------------------------


def _importance_png(plt: Any, figures: Figures) -> Any:
    assert figures.importances is not None
    shares = figures.importances.shares
    figure, axis = plt.subplots(figsize=(7.0, 0.34 * len(shares) + 1.1), constrained_layout=True)
    bars = axis.barh(range(len(shares)), [*shares.values()], color=_BAR, height=0.65)
    axis.set_yticks(range(len(shares)), [_shortened(name) for name in shares], parse_math=False)
    axis.bar_label(bars, [f"{share:.2f}" for share in shares.values()], padding=3, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * max(shares.values()))
    axis.set_xlabel(f"importance for {figures.metric}", parse_math=False)
    _plain(axis)
    return figure


def _importance_html(graphs: Any, _subplots: Any, figures: Figures) -> Any:
    assert figures.importances is not None
    shares = figures.importances.shares
    names = [html.escape(_shortened(name)) for name in shares]
    labels = [f"{share:.2f}" for share in shares.values()]
    bar = graphs.Bar(x=[*shares.values()], y=[*range(len(shares))], orientation="h", marker_color=_BAR, text=labels)
    figure = graphs.Figure(bar)
    figure.update_layout(template="plotly_white", height=28 * len(shares) + 120, margin={"t": 40, "l": 10, "r": 20})
    figure.update_yaxes(autorange="reversed", automargin=True, tickvals=[*range(len(shares))], ticktext=names)
    figure.update_xaxes(title_text=html.escape(f"importance for {figures.metric}"))
    return figure


# ---- parallel coordinates ----------------------------------------------------------------------


def _columns(figures: Figures) -> list[tuple[str, np.ndarray, list[tuple[float, str]]]]:
    """Return the name, the places and the ticks of each axis, from 0 to 1. The value is last."""
    columns = []
    for axis in figures.axes:
        lacks_T = np.isnan(axis.place_T)
        ticks = [*([(_LACKS, "not set")] if lacks_T.any() else []), *axis.unit_ticks()]
        columns.append((axis.key, np.where(lacks_T, _LACKS, axis.unit_T), ticks))
    value = Axis(figures.sweep.config.metric, figures.value_T, None, False)
    return [*columns, (value.key, value.unit_T, value.unit_ticks())]


def _parallel_png(plt: Any, figures: Figures) -> Any:
    columns = _columns(figures)
    figure, axis = plt.subplots(figsize=(1.35 * len(columns) + 1.0, 5.0), constrained_layout=True)
    places_TC = np.stack([places for _, places, _ in columns], axis=1)
    value_T = places_TC[:, -1]
    best_last = np.argsort(value_T if figures.maximizes else -value_T)
    colours = plt.get_cmap(_COLOURS if figures.maximizes else f"{_COLOURS}_r")
    steps = np.linspace(0, 1, 30)
    ease = 3 * steps**2 - 2 * steps**3  # lines that meet at a value part again as curves
    for trial in best_last:
        xs = np.concatenate([column + steps for column in range(len(columns) - 1)])
        ends = zip(places_TC[trial, :-1], places_TC[trial, 1:], strict=True)
        ys = np.concatenate([begin + (end - begin) * ease for begin, end in ends])
        is_best = figures.number_T[trial] == figures.best
        colour = _BEST if is_best else colours(value_T[trial])
        axis.plot(xs, ys, color=colour, linewidth=2.2 if is_best else 1.1, alpha=1.0 if is_best else 0.65)
    for column, (_, _, ticks) in enumerate(columns):
        axis.axvline(column, color="#24292f", linewidth=0.8)
        for place, label in ticks:
            box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
            axis.text(column, place, f" {_short(label)}", fontsize=8, va="center", bbox=box, zorder=3, parse_math=False)
    names = ["\n".join(broken(name, 11)) for name, _, _ in columns]
    axis.set_xticks(range(len(columns)), names, fontsize=9, parse_math=False)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.set_yticks([])
    axis.set_ylim(-0.2 if places_TC.min() < 0 else -0.05, 1.05)
    axis.set_xlim(-0.1, len(columns) - 0.45)
    axis.spines[:].set_visible(False)
    axis.set_xlabel(f"orange: the best, trial {figures.best}")
    return figure


def _parallel_html(graphs: Any, _subplots: Any, figures: Figures) -> Any:
    columns = _columns(figures)
    dimensions = [
        {
            "label": "<br>".join(map(html.escape, broken(name, 16))),
            "values": places,
            "range": [_LACKS - 0.04 if places.min() < 0 else 0.0, 1.0],
            "tickvals": [place for place, _ in ticks],
            "ticktext": [html.escape(_short(label)) for _, label in ticks],
        }
        for name, places, ticks in columns
    ]
    scale = {"colorscale": _COLOURS, "reversescale": not figures.maximizes, "showscale": True}
    title = {"title": {"text": html.escape(figures.sweep.config.metric)}}
    line = {"color": figures.value_T, "colorbar": title, **scale}
    figure = graphs.Figure(graphs.Parcoords(dimensions=dimensions, line=line, labelside="top"))
    figure.update_layout(template="plotly_white", height=520, margin={"t": 90, "b": 30, "l": 110, "r": 40})
    return figure


# ---- slices ------------------------------------------------------------------------------------


def _grid(number: int) -> tuple[int, int]:
    num_columns = min(number, _MOST_COLUMNS)
    return -(-number // num_columns), num_columns


def _slice(axis: Axis) -> tuple[np.ndarray, list[float] | None, list[str] | None]:
    """Return the places of the trials on the x axis, and its ticks; no ticks: those of numbers.

    Trials with the same value of a list stand side by side, so that none hides another.
    """
    places_T = axis.place_T.copy()
    lacks_T = np.isnan(places_T)
    if axis.ticks is None:
        return places_T, None, None
    ticks, labels = [float(place) for place in range(len(axis.ticks))], [_short(tick) for tick in axis.ticks]
    if lacks_T.any():
        places_T[lacks_T] = -1.0
        ticks, labels = [-1.0, *ticks], ["not set", *labels]
    for place in ticks:
        same_T = places_T == place
        # Spread evenly, but not in the order of the trials, which would look like a trend.
        shifts = 0.36 * ((np.arange(same_T.sum()) * _GOLDEN + 0.5) % 1 - 0.5)
        places_T[same_T] += shifts
    return places_T, ticks, labels


def _slices_png(plt: Any, figures: Figures) -> Any:
    num_rows, num_columns = _grid(len(figures.axes))
    figure, axes = plt.subplots(
        num_rows,
        num_columns,
        figsize=(max(4.0, 2.9 * num_columns), 2.5 * num_rows),
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    is_best_T = np.array([number == figures.best for number in figures.number_T])
    for panel, axis in zip(axes.flat, figures.axes, strict=False):
        places_T, ticks, labels = _slice(axis)
        panel.scatter(places_T, figures.value_T, s=22, color=_BAR, alpha=0.65, linewidth=0)
        panel.scatter(places_T[is_best_T], figures.value_T[is_best_T], s=55, color=_BEST, marker="*", zorder=3)
        if ticks is not None and labels is not None:
            is_long = max(map(len, labels)) * len(labels) > 24
            panel.set_xticks(ticks, labels, rotation=30 if is_long else 0, ha="right" if is_long else "center")
            panel.set_xlim(ticks[0] - 0.5, ticks[-1] + 0.5)
        elif axis.is_log:
            ticks = _log_ticks(places_T)
            panel.set_xscale("log")
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
        panel.set_xlabel(axis.key, parse_math=False)
        _plain(panel)
    for panel in axes.flat[len(figures.axes) :]:
        panel.set_axis_off()
    for row in axes:
        row[0].set_ylabel(figures.sweep.config.metric, parse_math=False)
    return figure


def _slices_html(graphs: Any, subplots: Any, figures: Figures) -> Any:
    num_rows, num_columns = _grid(len(figures.axes))
    figure = subplots.make_subplots(num_rows, num_columns, shared_yaxes=True, vertical_spacing=0.5 / (num_rows + 1))
    text = [f"trial {number}: {value:.4f}" for number, value in zip(figures.number_T, figures.value_T, strict=True)]
    colours = [_BEST if number == figures.best else _BAR for number in figures.number_T]
    for number, axis in enumerate(figures.axes):
        row, column = number // num_columns + 1, number % num_columns + 1
        places_T, ticks, labels = _slice(axis)
        marker = {"color": colours, "size": 7, "opacity": 0.75}
        drawn = {"mode": "markers", "marker": marker, "showlegend": False, "text": text, "hoverinfo": "text"}
        figure.add_trace(graphs.Scatter(x=places_T, y=figures.value_T, **drawn), row, column)
        more: dict[str, Any] = _log_axis(places_T) if axis.is_log else {}
        if ticks is not None and labels is not None:
            more = {"tickvals": ticks, "ticktext": [html.escape(label) for label in labels]}
        figure.update_xaxes(title_text=html.escape(axis.key), row=row, col=column, **more)
    figure.update_yaxes(title_text=html.escape(figures.sweep.config.metric), col=1)
    figure.update_layout(template="plotly_white", height=270 * num_rows + 80, margin={"t": 40})
    return figure


# ---- curves ------------------------------------------------------------------------------------

# Colour, width and opacity of a line, and opacity of its band.
_STYLES = {"other": (_OTHER, 0.9, 0.55, 0.06), "complete": (_BAR, 1.0, 0.5, 0.06), "best": (_BEST, 2.4, 1.0, 0.2)}


def _label(kind: str, curves: Sequence[Curve]) -> str:
    same = [curve for curve in curves if curve.kind == kind]
    if kind == "best":
        return f"trial {same[0].number}, the best"
    what = "other complete" if kind == "complete" else "pruned, failed or not ended"
    return f"{len(same)} {what}"


def _curves_png(plt: Any, figures: Figures) -> Any:
    num = len(figures.curves)
    figure, axes = plt.subplots(1, num, figsize=(5.6 * num, 4.0), squeeze=False, constrained_layout=True)
    for panel, (metric, curves) in zip(axes.flat, figures.curves.items(), strict=True):
        for curve in curves:
            colour, width, opacity, band = _STYLES[curve.kind]
            marker = {"marker": "o", "markersize": 1.6 * width} if len(curve.step_P) <= 20 else {}
            panel.plot(curve.step_P, curve.mean_P, color=colour, linewidth=width, alpha=opacity, **marker)
            if curve.num_seeds > 1:
                panel.fill_between(curve.step_P, curve.low_P, curve.high_P, color=colour, alpha=band, linewidth=0)
        for kind in reversed(dict.fromkeys(curve.kind for curve in curves)):
            panel.plot([], [], color=_STYLES[kind][0], linewidth=_STYLES[kind][1], label=_label(kind, curves))
        panel.legend(frameon=False, fontsize=9)
        panel.set_title(metric, fontsize=11, parse_math=False)
        panel.set_xlabel("training step")
        if _is_logarithmic(metric, curves):
            ticks = _log_ticks(_values(curves))
            panel.set_yscale("log")
            panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
        _plain(panel)
    return figure


def _curves_html(graphs: Any, subplots: Any, figures: Figures) -> Any:
    titles = [html.escape(metric) for metric in figures.curves]
    figure = subplots.make_subplots(1, len(titles), subplot_titles=titles)
    for column, (metric, curves) in enumerate(figures.curves.items(), start=1):
        named: set[str] = set()
        for curve in curves:
            colour, width, opacity, band = _STYLES[curve.kind]
            shared = {"x": curve.step_P, "legendgroup": curve.kind, "showlegend": False}
            if curve.num_seeds > 1:
                edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
                figure.add_trace(graphs.Scatter(y=curve.low_P, **shared, **edge), 1, column)
                fill = {"fill": "tonexty", "fillcolor": f"rgba{(*bytes.fromhex(colour[1:]), band)}"}
                figure.add_trace(graphs.Scatter(y=curve.high_P, **shared, **edge, **fill), 1, column)
            shared["showlegend"] = column == 1 and curve.kind not in named
            drawn = {
                "mode": "lines+markers" if len(curve.step_P) <= 20 else "lines",
                "line": {"color": colour, "width": width + 0.4},
                "marker": {"size": 2 * width + 2},
                "opacity": opacity,
                "name": _label(curve.kind, curves),
                "hovertemplate": f"trial {curve.number}, step %{{x}}: %{{y:.4f}}<extra></extra>",
            }
            figure.add_trace(graphs.Scatter(y=curve.mean_P, **shared, **drawn), 1, column)
            named.add(curve.kind)
        figure.update_xaxes(title_text="training step", row=1, col=column)
        if _is_logarithmic(metric, curves):
            figure.update_yaxes(row=1, col=column, **_log_axis(_values(curves)))
    legend = {"orientation": "h", "y": -0.2, "traceorder": "reversed"}
    figure.update_layout(template="plotly_white", height=480, margin={"t": 40}, legend=legend)
    return figure


def _values(curves: Sequence[Curve]) -> np.ndarray:
    return np.concatenate([each for curve in curves for each in (curve.low_P, curve.high_P)])


def _is_logarithmic(metric: str, curves: Sequence[Curve]) -> bool:
    """Return whether the values are losses above 0 that differ by much."""
    values = _values(curves)
    return "loss" in metric and values.min() > 0 and bool(values.max() > 3 * values.min())


# ---- what they share ---------------------------------------------------------------------------


def _plain(axis: Any) -> None:
    axis.grid(alpha=0.25, which="major")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _log_ticks(values: np.ndarray) -> list[float]:
    """Return ticks for values above 0: powers of 10, or more digits if these would be too few."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [tick for power in powers for digit in digits if low <= (tick := float(f"{digit}e{power}")) <= high]
        if len(ticks) > 2:
            break
    # Labels of neighbours would overlap: a few of them, evenly spread, are enough.
    step = math.ceil(len(ticks) / 4)
    return ticks[::step] if ticks else [low]


def _log_axis(values: np.ndarray) -> dict[str, Any]:
    """Return the settings of plotly for a logarithmic axis."""
    ticks = _log_ticks(values)
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _shortened(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"


def _short(label: str) -> str:
    """Return a value's label, with its end alone if it is long: paths differ at their ends."""
    return label if len(label) <= 16 else f"…{label[-15:]}"
