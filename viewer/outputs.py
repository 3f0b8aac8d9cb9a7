"""Read what evaluations saved of a run, and let its model answer puzzles if none was saved."""
# N = examples of a shard, T = reasoning steps, S = tokens of an example

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from records.checkpoint.format import newest_first
from records.history import read_run_config
from utils.errors import UserError
from utils.files import plain, refuse_links
from utils.overrides import as_override
from utils.programs import started
from utils.terminal import tell
from utils.text import for_shell, one_line
from viewer.pages import Names, Page, Settings, read_json, spread

SAVING = "save_outputs=[inputs,labels,puzzle_identifiers,predictions_at_step,q_halt_at_step]"
_OUTPUTS = re.compile(r"step_(?P<step>\d+)(?:_.+)?")  # evaluate.py appends the name of other data
_SHARD = re.compile(r"(?P<set>.+)_rank\d+_\d+\.safetensors")
# The number of axes of each array that the page shows. The last one of some is that of the tokens.
_AXES = {"rows": 1, "inputs": 2, "labels": 2, "puzzle_identifiers": 1, "predictions": 2, "predictions_at_step": 3}
_AXES |= {"q_halt": 1, "q_halt_at_step": 2, "steps": 1}
_SAMPLES = re.compile(r"step_(\d+)\.json")
_MOST_STEPS = 50  # whose answers to text are shown
_OF_TOKENS = ("inputs", "labels", "predictions", "predictions_at_step")


# ---- folders -------------------------------------------------------------------------------------


def step_of(folder: Path | None) -> int | None:
    """Return the training step that a folder's name tells; None if it tells none."""
    match = folder and _OUTPUTS.fullmatch(folder.name)
    return int(match["step"]) if match else None


def outputs_folder(run: Path, step: int | None) -> Path | None:
    """Return the folder with the outputs of a training step; `run` itself if it is such a folder.

    Args:
        step: None: the step of the newest checkpoint. If its answers are not there, the newest step
            that has answers, and if none has, the newest outputs.
    """
    if (run / "results.json").exists():
        if step is not None:
            raise UserError(f"--step is for runs, and {run} holds the results of one step; leave it out")
        return run
    # The last folder of a step is the one for the run's own data.
    folders = sorted((run / "eval_outputs").glob("step_*"), reverse=True)
    found = {at: folder for folder in folders if (at := step_of(folder)) is not None}
    if step is None:
        newest = next(map(step_of, newest_first(run)), None)
        ordered = [found[at] for at in sorted(found, key=lambda at: (at == newest, at), reverse=True)]
        return next(filter(holds_answers, ordered), ordered[0] if ordered else None)
    if step not in found:
        has = ", ".join(map(str, sorted(found))) or "none"
        raise UserError(f"{run} has no outputs of step {step}, but of: {has}; choose one of them")
    return found[step]


# ---- results -------------------------------------------------------------------------------------

# For each table of results.json the titles of its columns.
_COMPUTE = {"method": "method", "set_name": "set", "segments": "segments of an example"}
_COMPUTE |= {"exact_accuracy": "exact_accuracy"}
_RELIABILITY = {"between": "confidence", "count": "examples", "confidence": "mean confidence", "accuracy": "accuracy"}


def read_results(outputs: Path | None) -> Page | None:
    """Read results.json as tables; return None if there is no such file."""
    if outputs is None or not (outputs / "results.json").exists():
        return None
    return read_json(outputs / "results.json", _tables_of)


def _tables_of(results: Page) -> Page:
    intervals = results.get("intervals", {})
    tables = []
    if compute := results.get("compute"):
        tables.append(_table("Accuracy against compute", _COMPUTE, compute))
    for name, bins in results.get("reliability", {}).items():
        between = [one | {"between": f"{one['low']:.1f} to {one['high']:.1f}"} for one in bins]
        tables.append(_table(f"Is the confidence the accuracy? Set {name}", _RELIABILITY, between))
    return {
        "checkpoint": str(results.get("checkpoint", "")),
        "data": str(results.get("data", "")),
        "num_examples": {name: int(num) for name, num in results.get("num_examples", {}).items()},
        "rows": [[name, *map(float, [x, *intervals.get(name, [])])] for name, x in results["metrics"].items()],
        "tables": tables,
    }


def _table(title: str, columns: dict[str, str], rows: list[Page]) -> Page:
    return {"title": title, "columns": [*columns.values()], "rows": [[row[key] for key in columns] for row in rows]}


def read_votes(outputs: Path | None, data: Path | None) -> list[Page]:
    """Read arc_votes.json, and the training pairs of its tasks if the dataset exists."""
    if outputs is None or not (outputs / "arc_votes.json").exists():
        return []
    puzzles = data / "test_puzzles.json" if data else None
    tasks = read_json(puzzles, dict) if puzzles and puzzles.exists() else {}

    def votes_of(votes: Page) -> list[Page]:
        found = []
        for name, tests in votes.items():
            pairs = tasks.get(name, {}).get("train", [])
            train = [[_rows_of_grid(pair["input"]), _rows_of_grid(pair["output"])] for pair in pairs]
            found.append({"task": name, "train": train, "tests": [*map(_test_of, tests)]})
        return found

    return read_json(outputs / "arc_votes.json", votes_of)


def _test_of(test: Page) -> Page:
    candidates = [
        {
            "grid": _rows_of_grid(one["grid"]),
            "count": int(one["count"]),
            "confidence": round(float(one["confidence"]), 4),
            "right": one["right"],
        }
        for one in test["candidates"]
    ]
    grids = {key: _rows_of_grid(test[key]) for key in ("input", "solution")}
    return grids | {key: int(test[key]) for key in ("num_votes", "num_empty")} | {"candidates": candidates}


def _rows_of_grid(grid: list[list[int]] | None) -> list[str] | None:
    """Return the rows of a grid, one character per cell; None for an unknown solution."""
    return None if grid is None else ["".join(str(int(colour)) for colour in row) for row in grid]


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
    for file in shards:
        with _opened(file) as tensors:
            keys = set(tensors.keys())
        if "inputs" not in keys or keys.isdisjoint(("predictions", "predictions_at_step")):
            return False
    return bool(shards)


def rows_of(files: Sequence[Path]) -> np.ndarray:
    """Return the numbers of the rows that the shards of a set hold."""
    return np.concatenate([_read(file, "rows")["rows"] for file in files])


def read_examples(
    outputs: Path, settings: Settings, names: Names, shared: Mapping[str, np.ndarray] | None = None
) -> tuple[list[Page], dict[str, int]]:
    """Return examples that are spread evenly over each set, and the number of saved ones by set.

    Args:
        shared: the rows of each set from which examples are chosen; None: all that were saved.
    """
    shards = shards_of(outputs)
    chosen = {name: files for name, files in shards.items() if settings.set in (None, name)}
    if shards and not chosen:
        raise UserError(f"{outputs} has no set {settings.set}; it has {', '.join(shards)}")
    examples: list[Page] = []
    sizes: dict[str, int] = {}
    for name, files in chosen.items():
        rows = rows_of(files)
        sizes[name] = len(rows)
        if shared is not None and name in shared:
            rows = np.intersect1d(rows, shared[name])
        wanted = np.sort(rows)[spread(len(rows), settings.max_examples)]
        of_set = [example for file in files for example in _examples_of(name, file, wanted, names)]
        examples += sorted(of_set, key=lambda example: example["row"])
    return examples, sizes


def _examples_of(set_name: str, file: Path, wanted: np.ndarray, names: Names) -> Iterator[Page]:
    """Yield the examples of a shard whose rows are wanted."""
    arrays = _read(file)
    for n in np.flatnonzero(np.isin(arrays["rows"], wanted)):
        of_row = {key: array[n].astype(np.int64) if key in _OF_TOKENS else array[n] for key, array in arrays.items()}
        example: Page = {"set": set_name, "row": int(of_row["rows"]), "input": of_row["inputs"]}
        if "labels" in of_row:
            example["label"] = of_row["labels"].clip(-1)
        if "puzzle_identifiers" in of_row:
            example |= names.get(int(of_row["puzzle_identifiers"]), {})
        if "predictions_at_step" in of_row:
            # A sequence repeats its last answer after it has halted.
            num = max(1, int(of_row["steps"])) if "steps" in of_row else None
            answers_TS, q_halt_T = of_row["predictions_at_step"][:num], of_row.get("q_halt_at_step")
        else:
            answers_TS, q_halt_T = of_row["predictions"][None], of_row.get("q_halt")
        example["answers"] = answers_TS
        if q_halt_T is not None:
            # Beyond 60 the sigmoid of the logit is 0 or 1, and exp would overflow.
            logits_T = np.clip(np.atleast_1d(q_halt_T)[: len(answers_TS)].astype(np.float64), -60, 60)
            example["confidence"] = (1 / (1 + np.exp(-logits_T))).round(4).tolist()
        yield example


def _read(file: Path, *keys: str) -> dict[str, np.ndarray]:
    """Read arrays of a shard, by default all that the page shows. Check that they fit."""
    with _opened(file) as tensors:
        of_page = sorted({"rows"} | _AXES.keys() & set(tensors.keys()))
        arrays: dict[str, np.ndarray] = {key: tensors.get_tensor(key) for key in keys or of_page}
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


# ---- answers to text -----------------------------------------------------------------------------


def is_text_run(config: Mapping[str, Any]) -> bool:
    """Return whether the config of a run is that of a model of text."""
    arch = config.get("arch")
    return isinstance(arch, dict) and arch.get("attention") in ("prefixlm", "causal")


def answers_of(run: Path, step: int | None) -> list[Page]:
    """Return the answers of a run of text at a step or, for None, at a few, newest first."""
    found = {int(match[1]): file for file in (run / "samples").glob("*") if (match := _SAMPLES.fullmatch(file.name))}
    if step is not None and step not in found:
        has = ", ".join(map(str, sorted(found))) or "none"
        raise UserError(f"{run} has no answers of step {step}, but of: {has}; choose one of them")
    steps = sorted(found) if step is None else [step]
    texts: list[Page] = []
    for place in reversed(spread(len(steps), _MOST_STEPS)):
        of_step = read_json(found[steps[place]], lambda answers: [*map(_answer_of, answers)])
        texts += [answer | {"set": f"step {steps[place]:,}"} for answer in of_step]
    return texts


def _answer_of(answer: Page) -> Page:
    is_problem = bool(answer["is_problem"])
    titles = ("instruction", "answer", "right answer")
    if not is_problem:
        titles = ("text", "the model goes on", "the text goes on")
    told = [str(answer[key]) for key in ("prompt", "answer", "right")]
    return {
        "row": int(answer["row"]),
        "task": str(answer["task"]),
        **({"is_right": told[1] == told[2]} if is_problem else {}),
        "parts": [{"title": title, "pieces": [text]} for title, text in zip(titles, told, strict=True)],
    }


# ---- answers that are not saved yet --------------------------------------------------------------


def save_missing_answers(run: Path, settings: Settings) -> list[str]:
    """Save the answers of the chosen step, or of the newest checkpoint, unless it has some.

    Saved outputs that lack the answers may be the work of hours, and are not replaced.

    Returns:
        Lines that say why there are no answers.
    """
    if is_text_run(read_run_config(run)):
        return []  # its evaluations write answers
    # That which evaluate.py takes for a run.
    step = next(iter(newest_first(run)), None) if settings.step is None else run / f"step_{settings.step:08d}"
    if step is None or not step.is_dir():
        return []
    outputs = run / "eval_outputs"
    # The first folder of a step is the one for the run's own data.
    saved = next((each for each in sorted(outputs.glob("step_*")) if step_of(each) == step_of(step)), None)
    if saved is not None and holds_answers(saved):
        return []
    typed = [f"checkpoint={as_override(str(step))}", SAVING, f"max_examples={settings.max_examples}"]
    command = f"python evaluate.py {for_shell(typed)}"
    nothing = f"{run} has no saved answers of step {step_of(step)}"
    elsewhere = f"this saves answers in another folder, for view.py: {command} out=answers"
    target = outputs / step.name
    if shards_of(target):
        return [f"{nothing}: {target} holds outputs without the puzzles or the answers; {elsewhere}"]
    to = target if target.is_dir() else outputs  # asked before the work: the folder of a step may be read-only, too
    try:
        refuse_links([outputs, target])  # the run may come from somebody else
        outputs.mkdir(exist_ok=True)
        temporary = TemporaryDirectory(dir=to, prefix=".view-")
    except OSError as error:
        return [f"{nothing}: {to} can't be written ({error.strerror}); {elsewhere}"]
    tell(f"{nothing}; its model answers up to {settings.max_examples} puzzles of each test set now")
    tell(f"(Ctrl-C leaves them out): {command}")
    with temporary as folder:
        evaluate = [*started("evaluate"), *typed, f"out={as_override(folder)}"]
        try:
            # In a process of its own: the page itself needs no PyTorch, whose import takes seconds.
            status = subprocess.run(evaluate, stdout=subprocess.DEVNULL).returncode
        except KeyboardInterrupt:  # the process has got the signal too
            return [f"{nothing}: interrupted"]
        if status:
            return [f"{nothing}: evaluate.py ended with status {status}, and said why; {elsewhere}"]
        target.mkdir(exist_ok=True)
        for file in Path(folder).iterdir():
            if not (target / file.name).exists():  # results of an earlier evaluation stay
                file.rename(target / file.name)
    return []
