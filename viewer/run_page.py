"""Collect the data for the page of a run: its curves, reasoning, results and votes."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.builder import SPLITS
from dataset.pictures import board_of, wrong_cells
from dataset.schema import open_split
from dataset.tasks import TASKS, task_of_shape, task_of_tokens
from dataset.tasks.base import BoardTask
from utils.checkpoint.format import read_name, step_folders
from utils.errors import UserError
from utils.overrides import typed_override
from utils.run.folder import located_paths
from utils.run.history import METRICS_FILE, read_run_config
from utils.text import for_shell
from viewer.arc_votes import read_votes
from viewer.curves import Panel, for_page, logged_rows, panels_of_run
from viewer.pages import Page, Settings, from_text, label_of, names_of, read_json
from viewer.saved_examples import holds_answers, read_examples
from viewer.text_page import answers_of, is_text_run

SAVE_OUTPUTS = "[inputs,labels,puzzle_identifiers,predictions_at_step,q_halt_at_step]"
_OUTPUTS = re.compile(r"step_(?P<step>\d+)(?:_.+)?")  # evaluate.py appends the name of other data
_AT_STEP = re.compile(r"eval/(?P<set>[^/]+)/exact_accuracy_at_step/(?P<count>\d+)")


def page_of_run(run_folder: Path, settings: Settings, shared: Mapping[str, np.ndarray] | None = None) -> Page:
    """Return the data for the page.

    Args:
        shared: the rows of each set from which examples are chosen; None: all that were saved.

    Raises:
        UserError: a file in the folder is damaged.
    """
    config = read_run_config(run_folder)
    arch = config.get("arch")
    rows = read_rows(run_folder)
    panels = panels_of_page(rows)
    # The answers of a run of text are not saved outputs.
    texts = {"texts": answers_of(run_folder, settings.step)} if is_text_run(config) else {}
    outputs = outputs_folder(run_folder, None if texts else settings.step)
    results = read_results(outputs)
    data = data_of(config, results)
    notes: list[str] = []
    examples: list[Page] = []
    sets: dict[str, int] = {}
    if outputs is not None:
        examples, sets, missing = read_examples(outputs, settings, names_of(data) if data else [], shared)
        if missing:
            notes.append(missing)
    saving = for_shell([f"save_outputs={SAVE_OUTPUTS}"])
    command = f"python evaluate.py {typed_override('checkpoint', str(run_folder))} {saving}"
    votes = read_votes(outputs, data)
    resolved = run_folder.resolve()
    by_set: dict[str, list[Page]] = {}
    for example in examples:
        by_set.setdefault(example["set"], []).append(example)
    tasks = [task_of_run(some, data) for some in by_set.values() or [[]]]
    sizes = [len(some[0]["input"]) for some in by_set.values()]
    boards = [board_of(task, size) for task, size in zip(tasks, sizes, strict=False)]
    return {
        "kind": "run",
        "title": resolved.name,
        "project": resolved.parent.name,
        "board": boards[0] if boards else None,
        **({"boards": dict(zip(by_set, boards, strict=True))} if any(each != boards[0] for each in boards) else {}),
        "facts": facts_of(config, tasks, outputs, results),
        "notes": notes,
        "command": command,
        "step": step_of(outputs),
        "sets": sets,
        "examples": examples,
        "opens": max(range(len(examples)), key=lambda n: _how_telling(examples[n]), default=0),
        "values_going_on": isinstance(arch, dict) and arch.get("no_ACT_continue") is False,
        "curves": for_page(panels),
        "over_steps": _over_steps(rows),
        "results": results,
        "votes": votes,
        **texts,
        "summary": f"{len(panels)} curves" + (f", votes on {len(votes)} ARC tasks" if votes else ""),
    }


def _how_telling(example: Page) -> tuple[bool, int]:
    """Return a key that is larger the more the answers of an example teach.

    Solved examples come first, by the number of wrong cells over all steps. Then come failed
    examples and those solved at once, by how many cells the steps mend.
    """
    label_S = label_of(example)
    num_wrong_T = [int(wrong_cells(from_text(answer), label_S).sum()) for answer in example["answers"]]
    if num_wrong_T[-1] == 0 and any(num_wrong_T):
        return True, sum(num_wrong_T)
    return False, num_wrong_T[0] - num_wrong_T[-1]


def facts_of(config: Page, tasks: Sequence[BoardTask | None], outputs: Path | None, results: Page | None) -> Page:
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
        "data": ", ".join(Path(path).name for path in data_paths_of(config)) or None,
        "outputs": None if outputs is None else outputs.name,
    }
    for name, value, *_ in results["rows"] if results else []:
        if name.endswith(("/exact_accuracy", "/pass@2")) and math.isfinite(value):
            facts[name.removeprefix("eval/")] = f"{value:.4f}"
    return {name: str(value) for name, value in facts.items() if value is not None}


def data_paths_of(config: Page) -> list[str]:
    """Return the datasets that the run is tested on."""
    return located_paths(
        config.get("started_in"), config.get("data_paths_test") or config.get("data_paths") or [config.get("data_path")]
    )


def data_of(config: Page, results: Page | None) -> Path | None:
    """Return the dataset that the outputs belong to; None for several datasets or a missing one."""
    paths = (
        located_paths(config.get("started_in"), [results["data"]])
        if results and results["data"]
        else data_paths_of(config)
    )
    folders = {Path(path).parent if Path(path).name in SPLITS else Path(path) for path in paths}
    # Datasets that are scored together share one numbering of puzzles: names would be wrong.
    if len(folders) != 1:
        return None
    (folder,) = folders
    return folder if (folder / "test" / "dataset.json").is_file() else None


def task_of_run(examples: list[Page], data: Path | None) -> BoardTask | None:
    """Return the task that the dataset's metadata tells, or the examples' tokens if it is gone.

    Args:
        examples: of one set, or of several with boards of one size.
        data: the dataset; None for several, which may have boards of several sizes.

    Raises:
        UserError: The dataset is damaged, and there are examples, which need its names.
    """
    if data is not None:
        try:
            metadata = open_split(data, "test").metadata
        except UserError:
            if examples:
                raise
            return None
        if not examples or metadata.seq_len == len(examples[0]["input"]):
            return task_of_shape(metadata.seq_len, metadata.vocab_size)
    if not examples:
        return None
    texts = (text for one in examples for text in (one["input"], one.get("label", ""), *one["answers"]))
    largest = max(int(from_text(text).max(initial=0)) for text in texts)
    return task_of_tokens(len(examples[0]["input"]), largest)


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; none if there is no such file.

    Raises:
        UserError: the file is empty, or a line of it (which the message names) is no row.
    """
    rows = logged_rows(run)
    if not rows and (run / METRICS_FILE).exists():
        raise UserError(f"{run / METRICS_FILE}: is empty, so the run has logged nothing; train it for some steps first")
    return rows


def panels_of_page(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return the curves of a run. The metrics that a reader looks for first come first."""
    return sorted(panels_of_run(rows), key=lambda panel: rank_of(panel.metric))


def _over_steps(rows: Sequence[Mapping[str, Any]]) -> list[Page]:
    """Return for each evaluation of each set the exact accuracy after each reasoning step."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if match := _AT_STEP.fullmatch(name):
                found.setdefault((match["set"], row["step"]), {})[int(match["count"])] = value
    return [
        {"set": name, "step": step, "counts": sorted(values), "values": [values[count] for count in sorted(values)]}
        for (name, step), values in found.items()
    ]


def rank_of(metric: str) -> int:
    """Return the place of a metric among the curves. Metrics with the same place stay in order."""
    first = ["exact_accuracy", "lm_loss", "loss", "perplexity", "bits_per_byte", "accuracy"]
    first += [name for task in TASKS for name in task.metrics]
    if metric in first:
        return first.index(metric)
    return len(first) + metric.startswith("perf/")


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Return the step folder that evaluate.py takes for a run; None if there is none."""
    steps = step_folders(run_folder)
    named = run_folder / read_name(run_folder / "latest")
    return named if named in steps else next(reversed(steps), None)


def step_of(outputs: Path | None) -> int | None:
    """Return the training step that a folder's name tells; None if it tells none."""
    match = _OUTPUTS.fullmatch(outputs.name) if outputs else None
    return int(match["step"]) if match else None


def older_answers(run_folder: Path) -> str | None:
    """Return a line if a run's page shows answers of another step than its newest checkpoint."""
    newest, outputs = newest_checkpoint(run_folder), outputs_folder(run_folder, None)
    if newest is None or outputs is None or not holds_answers(outputs) or step_of(outputs) == step_of(newest):
        return None
    return (
        f"the page shows the answers of {run_folder} at step {step_of(outputs)}, but its newest checkpoint is step "
        f"{step_of(newest)}"
    )


def outputs_folder(run_folder: Path, step: int | None) -> Path | None:
    """Return the folder with the outputs of a training step.

    None takes the step of the newest checkpoint. If its answers are not there, None takes the
    newest step that has answers, and if none has, the newest outputs.

    Outputs for the run's own data come before outputs for other data. A folder that holds
    results.json is such a folder itself.

    Raises:
        UserError: nothing was saved at this step, or a file of outputs is damaged.
    """
    if (run_folder / "results.json").exists():
        if step is not None:
            raise UserError(f"--step is for runs, and {run_folder} holds the results of one step; leave it out")
        return run_folder
    found: dict[int, Path] = {}
    for folder in sorted((run_folder / "eval_outputs").glob("step_*"), reverse=True):
        if match := _OUTPUTS.fullmatch(folder.name):
            found[int(match["step"])] = folder  # the last of a step is for the run's own data
    if step is None:
        newest = step_of(newest_checkpoint(run_folder))
        ordered = [found[number] for number in sorted(found, key=lambda at: (at == newest, at), reverse=True)]
        return next(filter(holds_answers, ordered), ordered[0] if ordered else None)
    if step not in found:
        has = ", ".join(map(str, sorted(found))) or "none"
        raise UserError(f"{run_folder} has no outputs of step {step}, but of: {has}; choose one of them")
    return found[step]


def read_results(outputs: Path | None) -> Page | None:
    """Read results.json as a table; return None if there is no such file.

    Raises:
        UserError: evaluate.py did not write this file.
    """
    if outputs is None or not (outputs / "results.json").exists():
        return None
    file = outputs / "results.json"
    results = read_json(file)
    try:
        intervals = results.get("intervals", {})
        rows = [[name, *map(float, [value, *intervals.get(name, [])])] for name, value in results["metrics"].items()]
        return {
            "checkpoint": str(results.get("checkpoint", "")),
            "data": str(results.get("data", "")),
            "num_examples": {str(name): int(num) for name, num in results.get("num_examples", {}).items()},
            "rows": rows,
            "tables": [*_compute_tables(results), *_reliability_tables(results)],
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{file}: isn't what evaluate.py writes; run evaluate.py again") from None


def _compute_tables(results: Page) -> list[Page]:
    """Return the table of accuracy against compute, if the evaluation has one."""
    rows = [
        [str(row["method"]), str(row["set_name"]), row["segments"], row["exact_accuracy"]]
        for row in results.get("compute", [])
    ]
    columns = ["method", "set", "segments of an example", "exact_accuracy"]
    return [{"title": "Accuracy against compute", "columns": columns, "rows": rows}] if rows else []


def _reliability_tables(results: Page) -> list[Page]:
    """Return a table for each set: the accuracy of answers of each bin of confidence."""
    columns = ["confidence", "examples", "mean confidence", "accuracy"]
    return [
        {
            "title": f"Is the confidence the accuracy? Set {set_name}",
            "columns": columns,
            "rows": [
                [f"{one['low']:.1f} to {one['high']:.1f}", one["count"], one["confidence"], one["accuracy"]]
                for one in bins
            ],
        }
        for set_name, bins in results.get("reliability", {}).items()
    ]
