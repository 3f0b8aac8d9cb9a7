"""Collect the data for the page that compares runs: configs, curves, numbers, answers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.tasks import TASKS
from records.history import read_run_config
from utils.errors import UserError
from utils.text import for_shell
from viewer.curves import (
    Group,
    LoggedRun,
    differences_of,
    for_page,
    groups_of,
    metrics_in,
    names_of,
    panels_of,
)
from viewer.outputs import holds_answers, is_text_run, outputs_folder, read_results, rows_of, shards_of
from viewer.pages import Page, Settings
from viewer.run_page import data_folders, page_of_run, rank_of
from viewer.status import is_number

_MOST_KEYS = 3  # below the name of a run: "What differs" has all


def page_of_runs(folders: Sequence[Path], settings: Settings) -> Page:
    """Return the data for the page."""
    runs = [LoggedRun(folder) for folder in folders]
    names = names_of(folders)
    with_rows = [run for run in runs if run.rows]
    if not with_rows:
        raise UserError("none of these runs has logged anything yet; train one of them for some steps first")
    data = []  # the name of what each run's answers are to: rows of other data don't compare
    for folder in folders:
        results = read_results(outputs_folder(folder, settings.step))
        data.append(", ".join(path.name for path in data_folders(read_run_config(folder), results)))
    shared = _shared_rows(folders, data, settings)
    pages = [
        page_of_run(folder, settings, shared[name]) if run.rows else None
        for folder, name, run in zip(folders, data, runs, strict=True)
    ]
    answered = {number: page for number, page in enumerate(pages) if page and page["examples"]}
    boards = [{key: page[key] for key in ("board", "boards") if key in page} for page in answered.values()]
    # Puzzles of other tasks than the first run's are not compared.
    examples = {
        number: page["examples"]
        for (number, page), own in zip(answered.items(), boards, strict=True)
        if own == boards[0]
    }
    puzzles = _merged(examples)
    facts = [page["facts"] for page in pages if page]
    groups = groups_of(with_rows)
    labels = {run.path: _label(group, run) for group in groups for run in group.runs}
    logged = metrics_in(row for run in runs for row in run.rows)
    metrics = sorted(logged, key=lambda name: (rank_of(name), not name.startswith("eval/"), name))
    panels = [panels_of(groups, metrics, "step", lambda run: run.x("steps"))]
    if all(is_number(row.get("time_s")) for run in runs for row in run.rows):
        panels.append(panels_of(groups, metrics, "seconds", lambda run: run.x("seconds")))
    return {
        "kind": "runs",
        "title": f"{len(folders)} runs",
        **(boards[0] if boards else {"board": None}),
        "facts": {name: value for name, value in facts[0].items() if all(each.get(name) == value for each in facts)},
        "notes": _notes(names, pages, answered.keys() - examples.keys()),
        "runs": [
            {"name": name, "label": labels.get(folder, "")}
            | {key: page and page[key] for key in ("command", "step", "values_going_on")}
            for name, folder, page in zip(names, folders, pages, strict=True)
        ],
        "differences": [[key, values] for key, values in differences_of(runs).items()],
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
        "curves": for_page(*panels),
        "over_steps": [],
        "summary": f"{len(folders)} runs, {len(metrics)} metrics",
    }


def _label(group: Group, run: LoggedRun) -> str:
    """Return what stands below the name of a run."""
    seed = f"seed {run.config.get('seed')}" if len(group.runs) > 1 else ""
    return ", ".join(filter(None, (" ".join(group.marks[:_MOST_KEYS]), seed)))


def _notes(names: Sequence[str], pages: Sequence[Page | None], others: set[int]) -> list[str]:
    """Return what keeps the runs from being compared. `others` have puzzles of another task."""
    notes = [f"{name} has logged nothing yet." for name, page in zip(names, pages, strict=True) if page is None]
    notes += [f"{names[n]} has answers to puzzles of another task, which are not compared." for n in sorted(others)]
    steps = {name: page["step"] for name, page in zip(names, pages, strict=True) if page and page["step"] is not None}
    if len(set(steps.values())) > 1:
        listed = ", ".join(f"{name} at {step:,}" for name, step in steps.items())
        notes.append(f"The answers and the evaluations are of different training steps: {listed}.")
    return notes


def _shared_rows(folders: Sequence[Path], data: Sequence[str], settings: Settings) -> dict[str, dict[str, np.ndarray]]:
    """Return for each data and set the rows that all of its runs with answers have answered."""
    shared_of: dict[str, dict[str, np.ndarray]] = {name: {} for name in data}
    for folder, data_name in zip(folders, data, strict=True):
        outputs, shared = outputs_folder(folder, settings.step), shared_of[data_name]
        for name, files in shards_of(outputs).items() if outputs and holds_answers(outputs) else ():
            rows = rows_of(files)
            both = np.intersect1d(shared[name], rows) if name in shared else rows
            # Data of one name may differ: without a shared row, each run shows its own.
            shared[name] = both if len(both) else shared[name]
    return shared_of


def _merged(examples: dict[int, list[Page]]) -> list[Page]:
    """Return each puzzle once, with the answers of the runs under their numbers."""
    merged: dict[tuple[str, int, bytes], Page] = {}
    for number, of_run in examples.items():
        for example in of_run:
            key = (example["set"], example["row"], example["input"].tobytes())
            own = {name: example[name] for name in ("answers", "confidence") if name in example}
            rest = {name: value for name, value in example.items() if name not in own}
            merged.setdefault(key, rest | {"runs": {}})["runs"][str(number)] = own
    return list(merged.values())


# ---- numbers -------------------------------------------------------------------------------------


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
        points = [(float(row[metric]), row["step"]) for row in run.rows if is_number(row.get(metric))]
        points = [point for point in points if np.isfinite(point[0])]
        number = {"last": points[-1][0], "step": points[-1][1]} if points else None
        if number and better:
            choose = max if better == "max" else min
            number["best"], number["best_step"] = choose(points, key=lambda point: point[0])
        of_runs.append(number)
    return {"metric": metric, "better": better, "runs": of_runs}


def _results(pages: Sequence[Page | None]) -> list[Page]:
    """Return the metrics of results.json: for each run its value and perhaps its interval.

    The numbers of examples are not among them: `evaluated` has them.
    """
    tables = [page["results"]["rows"] if page and page["results"] else [] for page in pages]
    rows = [{name: rest for name, *rest in table} for table in tables]
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        {"metric": name, "better": _better(name), "runs": [row.get(name) for row in rows]}
        for name in names
        if "_at_step/" not in name and not name.endswith("/num_examples")
    ]
