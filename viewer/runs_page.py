"""Collect the data for the page that compares runs: configs, curves, numbers, answers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.builder import SPLITS
from dataset.tasks import TASKS
from utils.errors import UserError
from utils.run.folder import located_paths
from utils.run.history import read_run_config
from utils.run.status import is_number
from utils.text import for_shell
from viewer.curves import (
    Group,
    LoggedRun,
    Panel,
    differences_of,
    for_page,
    groups_of,
    metrics_in,
    names_of,
    panels_of,
    x_in_seconds,
    x_in_steps,
)
from viewer.pages import Page, Settings
from viewer.run_page import data_paths_of, outputs_folder, page_of_run, rank_of, read_results
from viewer.saved_examples import rows_of, shards_of, shows_answers
from viewer.text_page import is_text_run

_OVER_STEPS = "exact_accuracy_at_step/"
_MOST_KEYS = 3  # below the name of a run: "What differs" has all


def page_of_runs(folders: Sequence[Path], settings: Settings) -> Page:
    """Return the data for the page.

    Raises:
        UserError: a file of a run is damaged, or none of the runs has logged anything.
    """
    runs = [LoggedRun.open(folder) for folder in folders]
    names = names_of(folders)
    with_rows = [run for run in runs if run.rows]
    if not with_rows:
        raise UserError("none of these runs has logged anything yet; train one of them for some steps first")
    groups = groups_of(with_rows)
    label_of = {run.path: _column_label(group, run) for group in groups for run in group.runs}
    data = [_data_name(folder, settings) for folder in folders]
    shared = _shared_rows(folders, data, settings)
    pages = [
        page_of_run(folder, settings, shared[name]) if run.rows else None
        for folder, name, run in zip(folders, data, runs, strict=True)
    ]
    answered = {number: page for number, page in enumerate(pages) if page and page["examples"]}
    boards = next((_boards(page) for page in answered.values()), {"board": None})
    notes = [f"{name} has logged nothing yet." for name, run in zip(names, runs, strict=True) if not run.rows]
    notes += [
        f"{names[number]} has answers to puzzles of another task, which are not compared."
        for number, page in answered.items()
        if _boards(page) != boards
    ]
    steps = [(name, page["step"]) for name, page in zip(names, pages, strict=True) if page and page["step"] is not None]
    if len({step for _, step in steps}) > 1:
        listed = ", ".join(f"{name} at {step:,}" for name, step in steps)
        notes.append(f"The answers and the evaluations are of different training steps: {listed}.")
    examples = {number: page["examples"] for number, page in answered.items() if _boards(page) == boards}
    puzzles = _merged(examples)
    metrics = _metrics_of(with_rows)
    branched = [_parent_of(run) for run in runs]
    return {
        "kind": "runs",
        "title": f"{len(folders)} runs",
        **boards,
        "facts": _facts(pages),
        "notes": notes,
        "runs": [
            {
                "name": name,
                "label": label_of.get(folder, ""),
                "command": page and page["command"],
                "step": page and page["step"],
                "values_going_on": page and page["values_going_on"],
            }
            for name, folder, page in zip(names, folders, pages, strict=True)
        ],
        "differences": [[key, values] for key, values in differences_of(runs).items()],
        "branched": branched if any(branched) else None,
        "numbers": [_numbers(metric, runs) for metric in metrics],
        "results": _results(pages),
        "evaluated": [
            {"data": name, "num_examples": page["results"]["num_examples"]} if page and page["results"] else None
            for name, page in zip(data, pages, strict=True)
        ],
        "sets": Counter(puzzle["set"] for puzzle in puzzles),
        "answering": list(examples),
        "unanswered": [
            number
            for number, folder in enumerate(folders)
            if number not in answered and not is_text_run(read_run_config(folder))
        ],
        "command": f"python view.py {for_shell([*map(str, folders), '-o', str(settings.output)])}",
        "examples": puzzles,
        "opens": next((answered[number]["opens"] for number in examples), 0),
        "curves": for_page(*_panels(groups, metrics)),
        "over_steps": [],
        "summary": f"{len(folders)} runs, {len(metrics)} metrics",
    }


def _boards(page: Page) -> Page:
    """Return how a page draws its examples."""
    return {key: page[key] for key in ("board", "boards") if key in page}


def _parent_of(run: LoggedRun) -> str | None:
    """Return the other run, or its step, that a run has gone on from, as it was typed."""
    typed = run.config.get("resume")
    if not typed or typed == "auto":
        return None
    (path,) = located_paths(run.config.get("started_in"), [str(typed)])
    resumed = Path(path).resolve()
    return None if run.path.resolve() in (resumed, resumed.parent) else str(typed)


def _facts(pages: Sequence[Page | None]) -> Page:
    """Return the facts that are the same in all runs."""
    first, *others = [page["facts"] for page in pages if page]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _column_label(group: Group, run: LoggedRun) -> str:
    """Return what a run's column says below its name: at most three keys, and which seed it is."""
    label = " ".join(group.marks[:_MOST_KEYS])
    if len(group.marks) > _MOST_KEYS:
        label += f" and {len(group.marks) - _MOST_KEYS} more"
    seed = f"seed {run.config.get('seed')}" if len(group.runs) > 1 else ""
    return ", ".join(filter(None, (label, seed)))


def _data_name(folder: Path, settings: Settings) -> str:
    """Return the name of the data that a run's answers are to: rows of other data don't compare."""
    results = read_results(outputs_folder(folder, settings.step))
    paths = [results["data"]] if results and results["data"] else data_paths_of(read_run_config(folder))
    return ", ".join(Path(path).parent.name if Path(path).name in SPLITS else Path(path).name for path in paths)


def _shared_rows(folders: Sequence[Path], data: Sequence[str], settings: Settings) -> dict[str, dict[str, np.ndarray]]:
    """Return for each data and set the rows that all of its runs with answers have answered."""
    shared_of: dict[str, dict[str, np.ndarray]] = {}
    for folder, data_name in zip(folders, data, strict=True):
        outputs = outputs_folder(folder, settings.step)
        shared = shared_of.setdefault(data_name, {})
        for name, files in shards_of(outputs).items() if outputs else ():
            if all(map(shows_answers, files)):
                rows = rows_of(files)
                both = np.intersect1d(shared[name], rows) if name in shared else rows
                # Data of one name may differ: without a shared row, each run shows its own.
                shared[name] = both if len(both) else shared[name]
    return shared_of


def _merged(examples: dict[int, list[Page]]) -> list[Page]:
    """Return each puzzle once, with the answers of the runs under their numbers."""
    merged: dict[tuple[str, int, str], Page] = {}
    for number, of_run in examples.items():
        for example in of_run:
            key = (example["set"], example["row"], str(example["input"]))
            own = {name: example[name] for name in ("answers", "confidence") if name in example}
            rest = {name: value for name, value in example.items() if name not in own}
            merged.setdefault(key, rest | {"runs": {}})["runs"][str(number)] = own
    return list(merged.values())


# ---- numbers -------------------------------------------------------------------------------------


def _metrics_of(runs: Sequence[LoggedRun]) -> list[str]:
    """Return the names of all metrics, those first that a reader looks for first."""

    def place(name: str) -> tuple[int, bool, str]:
        parts = name.split("/")
        short = "/".join(parts[2:] if parts[0] == "eval" else parts[1:] if parts[0] == "train" else parts)
        return rank_of(short), parts[0] != "eval", name

    return sorted(metrics_in(row for run in runs for row in run.rows), key=place)


def _better(metric: str) -> str | None:
    """Return whether larger or smaller values of a metric are better; None if that is not known."""
    short = metric.rpartition("/")[2]
    if "accuracy" in short or "pass@" in short or any(short in task.metrics for task in TASKS):
        return "max"
    return "min" if short.endswith("loss") or short in ("perplexity", "bits_per_byte") else None


def _numbers(metric: str, runs: Sequence[LoggedRun]) -> Page:
    """Return the last value of a metric in each run, and its best value with its step."""
    better = _better(metric)
    of_runs: list[Page | None] = []
    for run in runs:
        points = [(row["step"], float(row[metric])) for row in run.rows if is_number(row.get(metric))]
        points = [(step, value) for step, value in points if np.isfinite(value)]
        if not points:
            of_runs.append(None)
            continue
        number: Page = {"last": points[-1][1], "step": points[-1][0]}
        if better is not None:
            sign = 1 if better == "max" else -1
            step, value = max(points, key=lambda point: (sign * point[1], -point[0]))
            number |= {"best": value, "best_step": step}
        of_runs.append(number)
    return {"metric": metric, "better": better, "runs": of_runs}


def _results(pages: Sequence[Page | None]) -> list[Page]:
    """Return the metrics of results.json: for each run its value and perhaps its interval.

    The numbers of examples are not among them: `evaluated` has them.
    """
    tables = [page["results"]["rows"] if page and page["results"] else [] for page in pages]
    rows = [{name: rest for name, *rest in table} for table in tables]
    names = dict.fromkeys(
        name for row in rows for name in row if _OVER_STEPS not in name and not name.endswith("/num_examples")
    )
    return [{"metric": name, "better": _better(name), "runs": [row.get(name) for row in rows]} for name in names]


def _panels(groups: Sequence[Group], metrics: Sequence[str]) -> list[list[Panel]]:
    """Return each metric's curves over steps and, if all runs tell their time, over seconds."""
    rows = [row for group in groups for run in group.runs for row in run.rows]
    panels = [panels_of(groups, metrics, "step", x_in_steps)]
    if all(is_number(row.get("time_s")) for row in rows):
        panels.append(panels_of(groups, metrics, "seconds", x_in_seconds))
    return panels
