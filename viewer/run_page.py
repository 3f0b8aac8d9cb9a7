"""Collect the data for the page of a run: its curves, reasoning, results and votes."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dataset.builder import SPLITS
from dataset.pictures import board_of, wrong_cells
from dataset.schema import open_split
from dataset.tasks import TASKS, task_of_shape, task_of_tokens
from dataset.tasks.base import BoardTask
from records.folder import located_paths
from records.history import METRICS_FILE, read_run_config
from utils.errors import UserError
from utils.overrides import typed_override
from viewer.curves import for_page, logged_rows, panels_of_run, short_name
from viewer.outputs import (
    SAVING,
    answers_of,
    is_text_run,
    outputs_folder,
    read_examples,
    read_results,
    read_votes,
    step_of,
)
from viewer.pages import Page, Settings, label_of, names_of

_AT_STEP = re.compile(r"eval/(?P<set>[^/]+)/exact_accuracy_at_step/(?P<count>\d+)")
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
    panels = sorted(panels_of_run(rows), key=lambda panel: rank_of(panel.metric))
    # The answers of a run of text are not saved outputs.
    texts = {"texts": answers_of(run_folder, settings.step)} if is_text_run(config) else {}
    outputs = outputs_folder(run_folder, None if texts else settings.step)
    results = read_results(outputs)
    folders = data_folders(config, results)
    # Datasets that are scored together share one numbering of puzzles: names would be wrong.
    data = folders[0] if len(folders) == 1 and (folders[0] / "test" / "dataset.json").is_file() else None
    examples: list[Page] = []
    sets: dict[str, int] = {}
    note = None
    if outputs is not None:
        examples, sets, note = read_examples(outputs, settings, names_of(data) if data else [], shared)
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
    votes = read_votes(outputs, data)
    return {
        "kind": "run",
        "title": resolved.name,
        "project": resolved.parent.name,
        "board": board,
        **({"boards": boards} if any(each != board for each in boards.values()) else {}),
        "facts": _facts_of(config, tasks, outputs, results),
        "notes": [note] if note else [],
        "command": f"python evaluate.py {typed_override('checkpoint', str(run_folder))} '{SAVING}'",
        "step": step_of(outputs),
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
    """Return a key that is larger the more the answers of an example teach.

    Solved examples come first, by the number of wrong cells over all steps. Then come failed
    examples and those solved at once, by how many cells the steps mend.
    """
    label_S = label_of(example)
    num_wrong_T = [int(wrong_cells(answer_S, label_S).sum()) for answer_S in example["answers"]]
    if num_wrong_T[-1] == 0 and any(num_wrong_T):
        return True, sum(num_wrong_T)
    return False, num_wrong_T[0] - num_wrong_T[-1]


def _facts_of(config: Page, tasks: Sequence[BoardTask | None], outputs: Path | None, results: Page | None) -> Page:
    """Return the facts that stand at the head of the page.

    Args:
        tasks: one for each set of examples.
    """
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
        "outputs": None if outputs is None else outputs.name,
    }
    for name, value, *_ in results["rows"] if results else []:
        if name.endswith(("/exact_accuracy", "/pass@2")) and math.isfinite(value):
            facts[name.removeprefix("eval/")] = f"{value:.4f}"
    return {name: str(value) for name, value in facts.items() if value is not None}


def data_folders(config: Page, results: Page | None) -> list[Path]:
    """Return the datasets that the results are of, or else those that the run is tested on."""
    paths = config.get("data_paths_test") or config.get("data_paths") or [config.get("data_path")]
    if results and results["data"]:
        paths = [results["data"]]
    found = map(Path, located_paths(config.get("started_in"), paths))
    return list(dict.fromkeys(path.parent if path.name in SPLITS else path for path in found))


def _task_of(examples: list[Page], data: Path | None) -> BoardTask | None:
    """Return the task that the dataset's metadata tells, or the examples' tokens if it is gone.

    Args:
        examples: of one set.
    """
    if data is not None:
        metadata = open_split(data, "test").metadata
        if not examples or metadata.seq_len == len(examples[0]["input"]):
            return task_of_shape(metadata.seq_len, metadata.vocab_size)
    if not examples:
        return None
    arrays = (array for one in examples for array in (one["input"], label_of(one), one["answers"]))
    largest = max(int(array.max(initial=0)) for array in arrays)
    return task_of_tokens(len(examples[0]["input"]), largest)
