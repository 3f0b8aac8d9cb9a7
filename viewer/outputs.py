"""Read what evaluate.py saved of a run: its results, and puzzles with the answers to them."""
# N = examples of a shard, T = reasoning steps, S = tokens of an example

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from records.checkpoint.format import read_name, step_folders
from utils.errors import UserError
from utils.files import plain
from utils.text import one_line
from viewer.pages import Page, Settings, name_at, read_json, spread, to_text

SAVING = "save_outputs=[inputs,labels,puzzle_identifiers,predictions_at_step,q_halt_at_step]"
_OUTPUTS = re.compile(r"step_(?P<step>\d+)(?:_.+)?")  # evaluate.py appends the name of other data
_SHARD = re.compile(r"(?P<set>.+)_rank\d+_\d+\.safetensors")
# The number of axes of each array that the page shows. The last one of some is that of the tokens.
_AXES = {"rows": 1, "inputs": 2, "labels": 2, "puzzle_identifiers": 1, "predictions": 2, "predictions_at_step": 3}
_AXES |= {"q_halt": 1, "q_halt_at_step": 2, "steps": 1}
_OF_TOKENS = ("inputs", "labels", "predictions", "predictions_at_step")


# ---- folders -------------------------------------------------------------------------------------


def newest_checkpoint(run: Path) -> Path | None:
    """Return the step folder that evaluate.py takes for a run."""
    steps = step_folders(run)
    named = run / read_name(run / "latest")
    return named if named in steps else next(reversed(steps), None)


def step_of(folder: Path | None) -> int | None:
    """Return the training step that a folder's name tells; None if it tells none."""
    match = _OUTPUTS.fullmatch(folder.name) if folder else None
    return int(match["step"]) if match else None


def outputs_folder(run: Path, step: int | None) -> Path | None:
    """Return the folder with the outputs of a training step.

    Outputs for the run's own data come before outputs for other data. A folder that holds
    results.json is such a folder itself.

    Args:
        step: None: the step of the newest checkpoint. If its answers are not there, the newest step
            that has answers, and if none has, the newest outputs.

    Raises:
        UserError: nothing was saved at this step.
    """
    if (run / "results.json").exists():
        if step is not None:
            raise UserError(f"--step is for runs, and {run} holds the results of one step; leave it out")
        return run
    # The last folder of a step is the one for the run's own data.
    folders = sorted((run / "eval_outputs").glob("step_*"), reverse=True)
    found = {at: folder for folder in folders if (at := step_of(folder)) is not None}
    if step is None:
        newest = step_of(newest_checkpoint(run))
        ordered = [found[at] for at in sorted(found, key=lambda at: (at == newest, at), reverse=True)]
        return next(filter(holds_answers, ordered), ordered[0] if ordered else None)
    if step not in found:
        has = ", ".join(map(str, sorted(found))) or "none"
        raise UserError(f"{run} has no outputs of step {step}, but of: {has}; choose one of them")
    return found[step]


# ---- results -------------------------------------------------------------------------------------


def read_results(outputs: Path | None) -> Page | None:
    """Read results.json as tables; return None if there is no such file."""
    if outputs is None or not (outputs / "results.json").exists():
        return None
    file = outputs / "results.json"
    results = read_json(file)
    try:
        intervals = results.get("intervals", {})
        rows = [[name, *map(float, [value, *intervals.get(name, [])])] for name, value in results["metrics"].items()]
        tables: list[Page] = []
        if compute := results.get("compute"):
            keys = ("method", "set_name", "segments", "exact_accuracy")
            columns = ["method", "set", "segments of an example", "exact_accuracy"]
            values = [[row[key] for key in keys] for row in compute]
            tables.append({"title": "Accuracy against compute", "columns": columns, "rows": values})
        for set_name, bins in results.get("reliability", {}).items():
            columns = ["confidence", "examples", "mean confidence", "accuracy"]
            values = [
                [f"{one['low']:.1f} to {one['high']:.1f}", one["count"], one["confidence"], one["accuracy"]]
                for one in bins
            ]
            title = f"Is the confidence the accuracy? Set {set_name}"
            tables.append({"title": title, "columns": columns, "rows": values})
        return {
            "checkpoint": str(results.get("checkpoint", "")),
            "data": str(results.get("data", "")),
            "num_examples": {str(name): int(num) for name, num in results.get("num_examples", {}).items()},
            "rows": rows,
            "tables": tables,
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{file}: isn't what evaluate.py writes; run evaluate.py again") from None


# ---- examples ------------------------------------------------------------------------------------


def shards_of(outputs: Path) -> dict[str, list[Path]]:
    """Return the files of each set in a folder of outputs."""
    shards: dict[str, list[Path]] = {}
    for file in sorted(outputs.glob("*.safetensors")):
        if match := _SHARD.fullmatch(file.name):
            shards.setdefault(match["set"], []).append(file)
    return shards


def holds_answers(outputs: Path) -> bool:
    """Return whether the shards of all ranks hold puzzles with their answers."""
    shards = [file for files in shards_of(outputs).values() for file in files]
    return bool(shards) and all(map(_shows_answers, shards))


def rows_of(files: Sequence[Path]) -> np.ndarray:
    """Return the numbers of the rows that the shards of a set hold."""
    return np.concatenate([_read(file, ["rows"])["rows"] for file in files])


def read_examples(
    outputs: Path, settings: Settings, names: list[str], shared: Mapping[str, np.ndarray] | None = None
) -> tuple[list[Page], dict[str, int], str | None]:
    """Read examples that are spread evenly over each set, one shard at a time.

    Args:
        shared: the rows of each set from which examples are chosen; None: all that were saved.

    Returns:
        The examples, the number of saved examples by set, and a note on what was not saved if the
        examples cannot be shown without it.
    """
    shards = shards_of(outputs)
    if shards and settings.set is not None and settings.set not in shards:
        raise UserError(f"{outputs} has no set {settings.set}; it has {', '.join(shards)}")
    examples: list[Page] = []
    sizes: dict[str, int] = {}
    for set_name, files in shards.items():
        if settings.set not in (None, set_name):
            continue
        for file in files:
            if not _shows_answers(file):
                saved = ", ".join(sorted(_keys_of(file) - {"rows"}))
                return [], {}, f"{outputs.name} holds {saved}, which doesn't show how puzzles were answered."
        rows = rows_of(files)
        sizes[set_name] = len(rows)
        if shared is not None and set_name in shared:
            rows = np.intersect1d(rows, shared[set_name])
        wanted = np.sort(rows)[spread(len(rows), settings.max_examples)]
        of_set = [example for file in files for example in _examples_of(set_name, file, wanted, names)]
        examples += sorted(of_set, key=lambda example: example["row"])
    return examples, sizes, None


def _examples_of(set_name: str, file: Path, wanted: np.ndarray, names: list[str]) -> Iterator[Page]:
    """Yield the examples of a shard whose rows are wanted."""
    chosen = np.isin(_read(file, ["rows"])["rows"], wanted)
    if not chosen.any():
        return
    arrays = {key: array[chosen] for key, array in _read(file, sorted(_keys_of(file) & _AXES.keys())).items()}
    for n, row in enumerate(arrays["rows"].tolist()):
        of_row = {key: array[n] for key, array in arrays.items()}
        example: Page = {"set": set_name, "row": row, "input": to_text(of_row["inputs"])}
        if "labels" in of_row:
            example["label"] = to_text(of_row["labels"])
        if "puzzle_identifiers" in of_row:
            example |= name_at(names, int(of_row["puzzle_identifiers"]))
        if "predictions_at_step" in of_row:
            # A sequence repeats its last answer after it has halted.
            num = max(1, int(of_row["steps"])) if "steps" in of_row else None
            answers_TS, q_halt_T = of_row["predictions_at_step"][:num], of_row.get("q_halt_at_step")
        else:
            answers_TS, q_halt_T = of_row["predictions"][None], of_row.get("q_halt")
        example["answers"] = [to_text(answer_S) for answer_S in answers_TS]
        if q_halt_T is not None:
            # Beyond 60 the sigmoid of the logit is 0 or 1, and exp would overflow.
            logits_T = np.clip(np.atleast_1d(q_halt_T)[: len(answers_TS)].astype(np.float64), -60, 60)
            example["confidence"] = (1 / (1 + np.exp(-logits_T))).round(4).tolist()
        yield example


def _shows_answers(file: Path) -> bool:
    keys = _keys_of(file)
    return "inputs" in keys and bool(keys & {"predictions", "predictions_at_step"})


def _keys_of(file: Path) -> set[str]:
    with _opened(file) as tensors:
        return set(tensors.keys())


def _read(file: Path, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Read arrays of a shard, and check that they belong together."""
    with _opened(file) as tensors:
        arrays: dict[str, np.ndarray] = {key: tensors.get_tensor(key) for key in keys}
    for key, array in arrays.items():
        fits = key not in _OF_TOKENS or array.shape[-1:] == arrays["inputs"].shape[-1:]
        if array.ndim != _AXES[key] or len(array) != len(arrays["rows"]) or not fits:
            raise _damaged(file, f"{key} has shape {array.shape}")
    return arrays


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(plain(file), framework="numpy") as tensors:
            yield tensors
    except (OSError, SafetensorError, AttributeError, TypeError) as error:  # TypeError: a dtype that NumPy lacks
        raise _damaged(file, one_line(error)) from None


def _damaged(file: Path, reason: str) -> UserError:
    return UserError(f"{file}: cannot be read ({reason}); it is damaged: delete it and run evaluate.py again")
