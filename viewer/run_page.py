"""Collect the data for the page of a run, or for the page that compares runs."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dataset.builder import SPLITS
from dataset.pictures import board_of, wrong_cells
from dataset.schema import open_split
from dataset.tasks import TASKS, task_of_shape, task_of_tokens
from dataset.tasks.base import BoardTask
from records.folder import located_paths
from records.history import METRICS_FILE, is_number, logged_rows, read_run_config
from utils.errors import UserError
from utils.overrides import typed_override
from utils.text import for_shell
from viewer import curves, outputs
from viewer.curves import LoggedRun, for_page, short_name
from viewer.pages import Page, Settings, label_of, names_of_puzzles

_AT_STEP = re.compile(r"eval/(?P<set>[^/]+)/exact_accuracy_at_step/(?P<count>\d+)")
_MOST_KEYS = 3  # below the name of a run: "What differs" has all
_FIRST = ("exact_accuracy", "lm_loss", "loss", "perplexity", "bits_per_byte", "accuracy")


def page_of_run(run_folder: Path, settings: Settings, shared: Mapping[str, np.ndarray] | None = None) -> Page:
    """Return the data for the page.

    Args:
        shared: the rows of each set from which examples are chosen; None: all that were saved.
    """
    config, resolved = read_run_config(run_folder), run_folder.resolve()
    arch, rows = config.get("arch"), logged_rows(run_folder)
    if not rows and (file := run_folder / METRICS_FILE).exists():
        raise UserError(f"{file}: is empty, so the run has logged nothing; train it for some steps first")
    panels = sorted(curves.panels_of_run(rows), key=lambda panel: rank_of(panel.metric))
    # The answers of a run of text are not saved outputs.
    texts = {"texts": outputs.answers_of(run_folder, settings.step)} if outputs.is_text_run(config) else {}
    saved = outputs.outputs_folder(run_folder, None if texts else settings.step)
    results = outputs.read_results(saved)
    folders = data_folders(config, results)
    # Datasets that are scored together share one numbering of puzzles: names would be wrong.
    data = folders[0] if len(folders) == 1 and (folders[0] / "test" / "dataset.json").is_file() else None
    examples: list[Page] = []
    sets: dict[str, int] = {}
    if saved is not None and outputs.holds_answers(saved):
        examples, sets = outputs.read_examples(saved, settings, names_of_puzzles(data) if data else {}, shared)
    by_set: dict[str, list[Page]] = {}
    for example in examples:
        by_set.setdefault(example["set"], []).append(example)
    tasks = [_task_of(some, data) for some in by_set.values() or [[]]]
    boards = {name: board_of(task, len(by_set[name][0]["input"])) for name, task in zip(by_set, tasks, strict=False)}
    board = next(iter(boards.values()), None)
    over_steps: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if match := _AT_STEP.fullmatch(name):
                over_steps.setdefault((match["set"], row["step"]), {})[int(match["count"])] = value
    votes = outputs.read_votes(saved, data)
    return {
        "kind": "run",
        "title": resolved.name,
        "project": resolved.parent.name,
        "board": board,
        **({"boards": boards} if any(each != board for each in boards.values()) else {}),
        "facts": _facts_of(config, tasks, saved, results),
        "command": f"python evaluate.py {typed_override('checkpoint', str(run_folder))} '{outputs.SAVING}'",
        "step": outputs.step_of(saved),
        "sets": sets,
        "examples": examples,
        "opens": max(range(len(examples)), key=lambda n: _how_telling(examples[n]), default=0),
        "values_going_on": isinstance(arch, dict) and arch.get("no_ACT_continue") is False,
        "curves": for_page(panels),
        "over_steps": [
            {"set": name, "step": step, "counts": sorted(values), "values": [values[count] for count in sorted(values)]}
            for (name, step), values in over_steps.items()
        ],
        "results": results,
        "votes": votes,
        **texts,
        "summary": f"{len(panels)} curves" + (f", votes on {len(votes)} ARC tasks" if votes else ""),
    }


def rank_of(metric: str) -> int:
    """Return the place of a metric among the curves. Metrics with the same place stay in order."""
    first = [*_FIRST, *(name for task in TASKS for name in task.metrics)]
    short = short_name(metric)
    return first.index(short) if short in first else len(first) + metric.startswith("perf/")


def _how_telling(example: Page) -> tuple[bool, int]:
    """Return a key that is larger the more the answers of an example teach: see docs/solving.md."""
    num_wrong_T = wrong_cells(example["answers"], label_of(example)).sum(axis=1).tolist()
    if num_wrong_T[-1] == 0 and any(num_wrong_T):
        return True, sum(num_wrong_T)
    return False, num_wrong_T[0] - num_wrong_T[-1]


def _facts_of(config: Page, tasks: Sequence[BoardTask | None], saved: Path | None, results: Page | None) -> Page:
    """Return the facts at the head of the page. `tasks` has one for each set of examples."""
    arch, optim = (config[key] if isinstance(config.get(key), dict) else {} for key in ("arch", "optim"))
    facts = {
        "architecture": arch.get("name"),
        "hidden size": arch.get("hidden_size"),
        "optimizer": optim.get("name"),
        "learning rate": config.get("lr"),
        "batch": config.get("global_batch_size"),
        "seed": config.get("seed"),
        "task": ", ".join(dict.fromkeys(task.title for task in tasks if task)) or None,
        "data": ", ".join(path.name for path in data_folders(config, None)) or None,
        "outputs": None if saved is None else saved.name,
    }
    for name, value, *_ in results["rows"] if results else []:
        if name.endswith(("/exact_accuracy", "/pass@2")) and math.isfinite(value):
            facts[name.removeprefix("eval/")] = f"{value:.4f}"
    return {name: str(value) for name, value in facts.items() if value is not None}


def data_folders(config: Page, results: Page | None) -> list[Path]:
    """Return the datasets that the results are of, or else those that the run is tested on."""
    paths = config.get("data_paths_test") or config.get("data_paths") or [config.get("data_path")]
    if results and results["data"]:
        paths = results["data"].split(" + ")
    found = map(Path, located_paths(config.get("started_in"), paths))
    return list(dict.fromkeys(path.parent if path.name in SPLITS else path for path in found))


def _task_of(examples: list[Page], data: Path | None) -> BoardTask | None:
    """Return the task of a set that the dataset's metadata tells, or else the examples' tokens."""
    if data is not None:
        metadata = open_split(data, "test").metadata
        if not examples or metadata.seq_len == len(examples[0]["input"]):
            return task_of_shape(metadata.seq_len, metadata.vocab_size)
    if not examples:
        return None
    largest = max(one[key].max(initial=0) for one in examples for key in ("input", "label", "answers") if key in one)
    return task_of_tokens(len(examples[0]["input"]), int(largest))


# ---- several runs --------------------------------------------------------------------------------


def page_of_runs(folders: Sequence[Path], settings: Settings) -> Page:
    """Return the data for the page."""
    runs = [LoggedRun(folder) for folder in folders]
    names = curves.names_of(folders)
    with_rows = [run for run in runs if run.rows]
    if not with_rows:
        raise UserError("none of these runs has logged anything yet; train one of them for some steps first")
    data, shared = _shared_rows(folders, settings)
    pages = [
        page_of_run(folder, settings, shared[name]) if run.rows else None
        for folder, name, run in zip(folders, data, runs, strict=True)
    ]
    answered = {number: page for number, page in enumerate(pages) if page and page["examples"]}
    boards: dict[int, Page] = {
        number: {key: page[key] for key in ("board", "boards") if key in page} for number, page in answered.items()
    }
    # Puzzles of other tasks than the first run's are not compared.
    board: Page = next(iter(boards.values()), {"board": None})
    examples = {number: page["examples"] for number, page in answered.items() if boards[number] == board}
    puzzles = _merged(examples)
    facts = [page["facts"] for page in pages if page]
    groups = curves.groups_of(with_rows)
    labels = {}
    for group in groups:
        for run in group.runs:
            seed = [f"seed {run.config.get('seed')}"] if len(group.runs) > 1 else []
            labels[run.path] = ", ".join(filter(None, [" ".join(group.marks[:_MOST_KEYS]), *seed]))
    logged = curves.metrics_in(row for run in runs for row in run.rows)
    metrics = sorted(logged, key=lambda name: (rank_of(name), not name.startswith("eval/"), name))
    panels = [curves.panels_of(groups, metrics, "step", {run.path: run.x("steps") for run in runs})]
    if all(is_number(row.get("time_s")) for run in runs for row in run.rows):
        panels.append(curves.panels_of(groups, metrics, "seconds", {run.path: run.x("seconds") for run in runs}))
    return {
        "kind": "runs",
        "title": f"{len(folders)} runs",
        **board,
        "facts": {name: value for name, value in facts[0].items() if all(each.get(name) == value for each in facts)},
        "notes": _notes(names, pages, answered.keys() - examples.keys()),
        "runs": [
            {"name": name, "label": labels.get(folder, "")}
            | {key: page and page[key] for key in ("command", "step", "values_going_on")}
            for name, folder, page in zip(names, folders, pages, strict=True)
        ],
        "differences": [[key, values] for key, values in curves.differences_of(runs).items()],
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
            if number not in answered and not outputs.is_text_run(read_run_config(folder))
        ],
        "command": f"python view.py {for_shell([*map(str, folders), '-o', str(settings.output)])}",
        "examples": puzzles,
        "opens": next((answered[number]["opens"] for number in examples), 0),
        "curves": for_page(*panels),
        "over_steps": [],
        "summary": f"{len(folders)} runs, {len(metrics)} metrics",
    }


def _notes(names: Sequence[str], pages: Sequence[Page | None], others: set[int]) -> list[str]:
    """Return what keeps the runs from being compared. `others` have puzzles of another task."""
    notes = [f"{name} has logged nothing yet." for name, page in zip(names, pages, strict=True) if page is None]
    notes += [f"{names[n]} has answers to puzzles of another task, which are not compared." for n in sorted(others)]
    steps = {name: page["step"] for name, page in zip(names, pages, strict=True) if page and page["step"] is not None}
    if len(set(steps.values())) > 1:
        listed = ", ".join(f"{name} at {step:,}" for name, step in steps.items())
        notes.append(f"The answers and the evaluations are of different training steps: {listed}.")
    return notes


def _shared_rows(folders: Sequence[Path], settings: Settings) -> tuple[list[str], dict[str, dict[str, np.ndarray]]]:
    """Return the name of each run's data, and by name and set the rows that all have answered."""
    data, shared_of = list[str](), dict[str, dict[str, np.ndarray]]()
    for folder in folders:
        saved = outputs.outputs_folder(folder, settings.step)
        tested_on = data_folders(read_run_config(folder), outputs.read_results(saved))
        data.append(", ".join(path.name for path in tested_on))
        shared = shared_of.setdefault(data[-1], {})
        for name, files in outputs.shards_of(saved).items() if saved and outputs.holds_answers(saved) else ():
            rows = outputs.rows_of(files)
            both = np.intersect1d(shared[name], rows) if name in shared else rows
            # Data of one name may differ: without a shared row, each run shows its own.
            shared[name] = both if len(both) else shared[name]
    return data, shared_of


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
        found = ((row.get(metric), row["step"]) for row in run.rows)
        points = [(value, step) for value, step in found if is_number(value) and math.isfinite(value)]
        number = {"last": points[-1][0], "step": points[-1][1]} if points else None
        if number and better:
            choose = max if better == "max" else min
            number["best"], number["best_step"] = choose(points, key=lambda point: point[0])
        of_runs.append(number)
    return {"metric": metric, "better": better, "runs": of_runs}


def _results(pages: Sequence[Page | None]) -> list[Page]:
    """Return the metrics of results.json: for each run its value and perhaps its interval."""
    tables = [page["results"]["rows"] if page and page["results"] else [] for page in pages]
    rows = [{name: rest for name, *rest in table} for table in tables]
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        {"metric": name, "better": _better(name), "runs": [row.get(name) for row in rows]}
        for name in names
        if "_at_step/" not in name and not name.endswith("/num_examples")  # which `evaluated` has
    ]
