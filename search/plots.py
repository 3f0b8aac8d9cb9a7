"""Draw what a sweep has found with Optuna's figures, on a page and as pictures."""

import html
import warnings
from pathlib import Path

from optuna import visualization

from dataset.tasks.base import count
from search.report import best_first, shown_best
from search.study import Study
from utils.drawing import pyplot, save_figure
from utils.errors import UserError
from utils.files import file_errors, refuse_links, write_atomically

_LEAST_FOR_IMPORTANCE = 10  # complete trials
_MOST_IN_LEGEND = 20  # trials
# The name of the picture, Optuna's function, the heading, and what is drawn.
_FIGURES = (
    (
        *("importance", "plot_param_importances", "Importance of the parameters"),
        "How much each parameter decides whether a complete trial is among the best tenth. It needs 10 of them.",
    ),
    (
        *("parallel", "plot_parallel_coordinate", "Parallel coordinates"),
        "Each line is a complete trial. A trial that lacks a parameter stands at None.",
    ),
    (
        *("slices", "plot_slice", "Slices"),
        "Each panel shows the values of the complete trials over one parameter, without the trials that lack it.",
    ),
    (
        *("curves", "plot_intermediate_values", "Curves"),
        "The metric of the first seed of each trial over the training steps. watch.py --plot draws the means of seeds.",
    ),
)
_PICTURE = {"figure.figsize": (9, 4.8), "savefig.bbox": "tight"}  # labels may reach beyond the axes
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #24292f; }}
</style>
{body}
</html>
"""


def write_plots(study: Study, folder: Path | None) -> str:
    """Write plots.html and a PNG for each figure, and return the paths of the files, one a line.

    Args:
        folder: None: the folder of the sweep.
    """
    sweep, trials = study.sweep, study.trials()
    if not trials:
        raise UserError(f"no trial of {sweep.path} has begun yet; start the sweep, or wait for it")
    if not visualization.is_available():  # asked first, because plotly's requirements have matplotlib too
        raise UserError("an HTML plot needs plotly; pip install -r requirements-plot.txt")
    plt = pyplot()
    folder, name = folder or sweep.path, html.escape(sweep.name)
    page, files = folder / "plots.html", list[Path]()
    summary = f"{count(len(trials), 'trial')}; the best of {sweep.config.metric}: {shown_best(sweep, trials)}"
    body = [f"<h1>{name}</h1>", f"<p>{html.escape(summary)}</p>"]
    with file_errors():
        folder.mkdir(parents=True, exist_ok=True)
        # Optuna warns that its pictures are experimental, and of values that one trial alone has.
        with warnings.catch_warnings(action="ignore"), plt.rc_context(_PICTURE):
            for file, function, heading, text in _FIGURES:
                body += [f"<h2>{heading}</h2>", f"<p>{text}</p>"]
                named = {} if file == "curves" else {"target_name": sweep.config.metric}
                is_early = file == "importance" and len(best_first(sweep, trials)) < _LEAST_FOR_IMPORTANCE
                figure = None if is_early else getattr(visualization, function)(study.optuna, **named)
                if figure is None or not figure.data:
                    body.append("<p>There is nothing to draw yet.</p>")
                    continue
                # The logo would be a link.
                config = {"displaylogo": False, "responsive": True}
                body.append(
                    figure.update_layout(title=None).to_html(include_plotlyjs=not files, full_html=False, config=config)
                )
                getattr(visualization.matplotlib, function)(study.optuna, **named)
                if file == "curves" and len(trials) > _MOST_IN_LEGEND:
                    plt.gca().get_legend().remove()
                files.append(folder / f"{file}.png")
                save_figure(plt.gcf(), files[-1])
        refuse_links([page])
        write_atomically(page, _PAGE.format(title=name, body="\n".join(body)))
    return "\n".join(map(str, [page, *files]))
