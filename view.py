"""One HTML page, which needs no network, of a dataset's puzzles or of a run: its curves, how it reasons, its votes.

python view.py checkpoints/<project>/<run> -o view.html
"""
# N = examples of a shard, T = reasoning steps, S = tokens of an example, P = puzzles, G = groups

import base64
import hashlib
import html
import json
import math
import os
import re
import shlex
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import SafetensorError, safe_open

from dataset import arc, maze
from dataset.augment import box_of
from dataset.builder import SPLITS, Parser, check_at_least, one_line, run, size_mb
from dataset.schema import PuzzleSet, Split, open_split
from dataset.tasks import task_of_shape
from utils.files import plain, read_plain_yaml

TEMPLATE = Path(__file__).with_name("view_page.html")
EXAMPLES = """
examples:
  # a dataset: browse its puzzles, their solutions and their augmentations
  python view.py data/sudoku-extreme-1k-aug-1000 -o sudoku.html

  # a run: first save what the model answers at every reasoning step, then look at it
  python evaluate.py checkpoint=checkpoints/my-project/my-run \\
      "save_outputs=[inputs,labels,predictions_at_step,q_halt_at_step]"
  python view.py checkpoints/my-project/my-run

  # what evaluate.py saved elsewhere: out=..., or of data that isn't the run's own
  python view.py checkpoints/my-project/my-run/eval_outputs/step_00001000_other

The page is one file that opens in any current browser, offline; `?` in it shows the keys. A run without saved outputs
shows its curves. Examples beyond --max-examples are left out evenly, so that those shown stand for all.
"""
SAVE_OUTPUTS = "[inputs,labels,predictions_at_step,q_halt_at_step]"
# A token is one character, its place in here; an ignored label is IGNORED. Larger vocabularies are lists of numbers.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
IGNORED = "-"
# No screen shows more, and a run may have logged a million.
MAX_POINTS = 1500
# Of a group, which has a thousand puzzles at times.
MAX_PUZZLES_OF_GROUP, MAX_EXAMPLES_OF_PUZZLE = 4, 5
# Of examples that are no square.
MAX_COLUMNS = 24
_OUTPUTS = re.compile(r"step_(?P<step>\d+)(?:_.+)?")  # evaluate.py adds the name of data that isn't the run's own
_SHARD = re.compile(r"(?P<set>.+)_rank\d+_\d+\.safetensors")

Page = dict[str, Any]
"""What the page shows, as JSON: view_page.html says how."""


@dataclass(frozen=True)
class Settings:
    """What the command line said."""

    path: Path
    output: Path
    max_examples: int
    step: int | None
    set: str | None


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Raises ValueError for unknown or malformed options."""
    parser = Parser(
        "view.py", "Write one HTML page of a dataset's puzzles, or of a run and what it predicted.", EXAMPLES
    )
    add = parser.add_argument
    add(
        "path",
        type=Path,
        metavar="RUN_OR_DATASET",
        help="folder of a run, of what evaluate.py saved, or of a dataset in the published format",
    )
    add("-o", "--output", type=Path, metavar="FILE", default=Path("view.html"), help="default: %(default)s")
    add("--max-examples", type=int, metavar="N", default=200, help="of each set, evenly spread (default: %(default)s)")
    add("--step", type=int, metavar="N", help="outputs saved at this training step (default: the newest)")
    add("--set", metavar="NAME", help="show this set only (default: all)")
    settings = Settings(**vars(parser.parse_args(argv)))
    check_at_least(settings, max_examples=1, step=0)
    return settings


def view(argv: list[str] | None = None) -> str:
    """Writes the page and returns a summary. Raises ValueError for what is neither a run nor a dataset, or damaged."""
    settings = parse_settings(argv)
    path = settings.path
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}; give the folder of a run or of a dataset")
    if any((path / split).is_dir() for split in SPLITS):
        if settings.step is not None:
            raise ValueError(f"--step is for runs, and {path} is a dataset; leave it out")
        page = page_of_dataset(settings)
    elif any((path / name).exists() for name in ("metrics.jsonl", "eval_outputs", "results.json")):
        page = page_of_run(settings)
    else:
        raise ValueError(
            f"{path} is neither a run (no metrics.jsonl, no eval_outputs), nor what evaluate.py saved (no "
            "results.json), nor a dataset (no train, no test); give the folder of one"
        )
    write_page(page, settings.output)
    megabytes = settings.output.stat().st_size / 1e6
    return f"wrote {settings.output} ({megabytes:.1f} MB): {len(page['examples']):,} examples, {page['summary']}"


def write_page(page: Page, output: Path) -> None:
    """The template with the page's data in it, under its name only when it is whole. Raises ValueError."""
    template = TEMPLATE.read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        # The browser runs this script and this style only: nothing that might come with a dataset's names.
        body = template.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
        return base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()

    data = json.dumps(page, separators=(",", ":"), allow_nan=False).encode()
    values = {
        "TITLE": html.escape(page["title"]),
        "STYLE_HASH": digest("style"),
        "SCRIPT_HASH": digest("script"),
        # A tenth of the text, and without a character that HTML could misread.
        "DATA": base64.b64encode(zlib.compress(data, 9)).decode(),
    }
    # In one pass, since a title may look like a placeholder.
    text = re.sub("@@([A-Z_]+)@@", lambda match: values[match[1]], template)
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(output)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {output} ({one_line(error)}); choose another --output") from None


def board_of(seq_len: int, vocab_size: int) -> Page:
    """How the page draws an example: Sudoku boards, mazes, ARC grids, or else the numbers of the tokens."""
    task, box = task_of_shape(seq_len, vocab_size), box_of(seq_len, vocab_size)
    if task is None:
        side = math.isqrt(seq_len)
        columns = side if side * side == seq_len else min(seq_len, MAX_COLUMNS)
        return {"kind": "numbers", "rows": math.ceil(seq_len / columns), "columns": columns}
    board = {"kind": task.name.split()[0], "rows": task.side, "columns": task.side}
    return board if box is None else board | {"box": [box.rows, box.columns]}


def to_text(tokens_S: np.ndarray) -> str | list[int]:
    """Tokens for the page; negative ones are ignored labels."""
    if tokens_S.max(initial=0) >= len(ALPHABET):
        return [max(int(token), -1) for token in tokens_S]
    characters = np.frombuffer((ALPHABET + IGNORED).encode(), dtype=np.uint8)
    places_S = np.where(tokens_S < 0, len(ALPHABET), tokens_S).astype(np.intp)
    return characters[places_S].tobytes().decode()


def spread(num: int, most: int) -> np.ndarray:
    """At most so many of the numbers 0 to num - 1, evenly spread, the first and the last among them."""
    return np.arange(num) if num <= most else np.linspace(0, num - 1, most).round().astype(np.int64)


def read_json(file: Path) -> Any:
    """Raises ValueError, one line, where it isn't JSON."""
    try:
        return json.loads(plain(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({one_line(error)}); remove it or write it again") from None


def names_of(data: Path) -> list[str]:
    """The names of puzzle identifiers; empty where nobody wrote them down."""
    file = data / "identifiers.json"
    names = read_json(file) if file.exists() else []
    if not isinstance(names, list):
        raise ValueError(f"{file}: is no list of names; rebuild the dataset or delete the file")
    return names if len(names) > 1 else []  # the only one is <blank>


def name_at(names: list[str], identifier: int) -> Page:
    """The entry of an example whose puzzle has a name."""
    return {"name": str(names[identifier])} if 0 <= identifier < len(names) else {}


# ---------------------------------------------------------------------------------------------------------------------
# Datasets


def page_of_dataset(settings: Settings) -> Page:
    """Raises ValueError where the dataset is damaged."""
    data = settings.path
    splits = [open_split(data, split) for split in SPLITS if (data / split).is_dir()]
    every = {f"{split.path.name}/{name}": (split, one) for split in splits for name, one in split.sets.items()}
    chosen = {name: pair for name, pair in every.items() if settings.set in (None, pair[1].name, name)}
    if not chosen:
        raise ValueError(f"{data} has no set {settings.set}; it has {', '.join(every)}")
    names = names_of(data)
    examples: list[Page] = []
    for name, (split, puzzle_set) in chosen.items():
        examples += examples_of_set(name, split, puzzle_set, names, settings.max_examples)

    metadata = splits[0].metadata
    counts = {name: f"{len(one.inputs):,} examples" for name, (_, one) in every.items()}
    for name, (_, one) in every.items():
        num_puzzles, num_groups = len(one.puzzle_indices) - 1, len(one.group_indices) - 1
        if num_puzzles != len(one.inputs):
            counts[name] += f" of {num_puzzles:,} puzzles"
        if num_groups != num_puzzles:
            counts[name] += f" in {num_groups:,} groups"
    facts = {**counts, "tokens": f"{metadata.seq_len} of {metadata.vocab_size} kinds"}
    if metadata.num_puzzle_identifiers > 1:
        facts["identifiers"] = f"{metadata.num_puzzle_identifiers:,}"
    return {
        "kind": "dataset",
        "title": data.resolve().name,
        "board": board_of(metadata.seq_len, metadata.vocab_size),
        "facts": facts | {"size": f"{size_mb(data):,.1f} MB"},
        "notes": [],
        "sets": {name: len(one.inputs) for name, (_, one) in chosen.items()},
        "examples": examples,
        "summary": f"sets {', '.join(chosen)}",
    }


def examples_of_set(name: str, split: Split, puzzle_set: PuzzleSet, names: list[str], most: int) -> list[Page]:
    """Groups evenly spread, and of each its first puzzle and a few others: those are its augmentations."""
    puzzles_G = np.diff(puzzle_set.group_indices)
    examples_P = np.diff(puzzle_set.puzzle_indices)
    per_group = min(int(puzzles_G.max()), MAX_PUZZLES_OF_GROUP) - 1 + min(int(examples_P.max()), MAX_EXAMPLES_OF_PUZZLE)
    examples: list[Page] = []
    for group in spread(len(puzzles_G), max(1, most // per_group)):
        first_puzzle = int(puzzle_set.group_indices[group])
        for place in spread(int(puzzles_G[group]), MAX_PUZZLES_OF_GROUP):
            puzzle = first_puzzle + int(place)
            # All examples of the first puzzle (the pairs of an ARC task), of the others one each.
            shown = MAX_EXAMPLES_OF_PUZZLE if place == 0 else 1
            first_row = int(puzzle_set.puzzle_indices[puzzle])
            for row in range(first_row, first_row + min(int(examples_P[puzzle]), shown)):
                label_S = puzzle_set.labels[row].astype(np.int64)
                examples.append(
                    {
                        "set": name,
                        "row": row,
                        "input": to_text(puzzle_set.inputs[row]),
                        "label": to_text(np.where(label_S == split.metadata.ignore_label_id, -1, label_S)),
                        "group": int(group),
                        "puzzle": int(place),
                        "group_size": int(puzzles_G[group]),
                        **name_at(names, int(puzzle_set.puzzle_identifiers[puzzle])),
                    }
                )
    return examples


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def page_of_run(settings: Settings) -> Page:
    """Raises ValueError where something in the folder is damaged."""
    run_folder = settings.path
    config = read_config(run_folder / "config.yaml")
    curves = read_curves(run_folder / "metrics.jsonl")
    outputs = outputs_folder(run_folder, settings.step)
    results = read_results(outputs)
    data = data_of(config, results)
    notes: list[str] = []
    examples: list[Page] = []
    sets: dict[str, int] = {}
    board = None
    if outputs is not None:
        examples, sets, missing = read_examples(outputs, settings, names_of(data) if data else [])
        if examples:
            board = board_of_run(examples, data)
        if missing:
            notes.append(missing)
    command = f'python evaluate.py checkpoint={shlex.quote(str(run_folder))} "save_outputs={SAVE_OUTPUTS}"'
    votes = read_votes(outputs, data)
    resolved = run_folder.resolve()
    return {
        "kind": "run",
        "title": resolved.name,
        "project": resolved.parent.name,
        "board": board,
        "facts": facts_of(config, outputs, results),
        "notes": notes,
        "command": command,
        "sets": sets,
        "examples": examples,
        "curves": curves["metrics"],
        "over_steps": curves["over_steps"],
        "results": results,
        "votes": votes,
        "summary": f"{len(curves['metrics'])} curves, votes on {len(votes)} tasks",
    }


def read_config(file: Path) -> Page:
    """The run's config.yaml; empty where there is none. Raises ValueError."""
    if not file.exists():
        return {}
    try:
        config = yaml.safe_load(read_plain_yaml(file))
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: a date that there isn't
        raise ValueError(f"{file}: cannot be read ({one_line(error)}); restore it from the run's checkpoint") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: is no config of a run; restore it from the run's checkpoint")
    return config


def facts_of(config: Page, outputs: Path | None, results: Page | None) -> Page:
    """What one wants to know of a run first."""
    arch, optim = config.get("arch"), config.get("optim")
    facts = {
        "architecture": arch.get("name") if isinstance(arch, dict) else None,
        "hidden size": arch.get("hidden_size") if isinstance(arch, dict) else None,
        "optimizer": optim.get("name") if isinstance(optim, dict) else None,
        "learning rate": config.get("lr"),
        "batch": config.get("global_batch_size"),
        "seed": config.get("seed"),
        "data": ", ".join(Path(path).name for path in data_paths_of(config)) or None,
        "outputs": None if outputs is None else outputs.name,
    }
    for name, value, *_ in results["rows"] if results else []:
        if name.endswith(("/exact_accuracy", "/pass@2")) and value is not None:
            facts[name.removeprefix("eval/")] = f"{value:.4f}"
    return {name: str(value) for name, value in facts.items() if value is not None}


def data_paths_of(config: Page) -> list[str]:
    """The datasets that the run is tested on."""
    paths = config.get("data_paths_test") or config.get("data_paths") or [config.get("data_path")]
    return [str(path) for path in paths if path]


def data_of(config: Page, results: Page | None) -> Path | None:
    """The folder of the dataset that the outputs are about, if it is one and still there."""
    paths = [results["data"]] if results and results["data"] else data_paths_of(config)
    folders = {Path(path).parent if Path(path).name in SPLITS else Path(path) for path in paths}
    if len(folders) != 1:  # several that are scored as one number their puzzles on, so that names would be wrong
        return None
    (folder,) = folders
    return folder if (folder / "test" / "dataset.json").is_file() else None


def board_of_run(examples: list[Page], data: Path | None) -> Page:
    """By the dataset's metadata, or by the tokens where the dataset is gone."""
    seq_len = len(examples[0]["input"])
    if data is not None:
        metadata = open_split(data, "test").metadata
        if metadata.seq_len == seq_len:
            return board_of(seq_len, metadata.vocab_size)
    largest = 0
    for example in examples:
        for tokens in (example["input"], example.get("label", ""), *example["answers"]):
            places = [ALPHABET.find(token) for token in set(tokens)] if isinstance(tokens, str) else tokens
            largest = max(largest, *places)
    guesses = [largest + 1, *(size for size in (maze.VOCAB_SIZE, arc.VOCAB_SIZE) if size > largest)]
    boards = [board_of(seq_len, vocab_size) for vocab_size in guesses]
    return next((board for board in boards if board["kind"] != "numbers"), boards[0])


def read_curves(file: Path) -> Page:
    """The curves of metrics.jsonl: for each metric its series (train, and eval of each set), and for each set the exact
    accuracy over reasoning steps at every evaluation. Raises ValueError, with the line.
    """
    if not file.exists():
        return {"metrics": [], "over_steps": []}
    try:
        lines = plain(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read ({one_line(error)}); get the file again") from None
    points: dict[str, list[tuple[int, float]]] = {}
    over_steps: list[Page] = []
    num_rows = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            if number == len(lines):  # the run is writing it, or was killed when it did
                continue
            raise ValueError(f"{file}:{number}: is no JSON object with a step; correct or remove the line") from None
        num_rows += 1
        at_step: dict[str, dict[int, float]] = {}
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            metric, last, count = name.rpartition("_at_step/")
            if last and metric.startswith("eval/") and metric.endswith("/exact_accuracy") and count.isdecimal():
                at_step.setdefault(metric.split("/")[1], {})[int(count)] = float(value)
            else:
                points.setdefault(name, []).append((step, float(value)))
        for set_name, values in at_step.items():
            counts = sorted(values)
            over_steps.append(
                {"set": set_name, "step": step, "counts": counts, "values": [finite(values[count]) for count in counts]}
            )
    if not num_rows:
        raise ValueError(f"{file}: is empty, so the run has logged nothing; train it for some steps first")
    metrics: dict[str, list[Page]] = {}
    for name, pairs in points.items():
        parts = name.split("/")
        metric, series = name, name
        if parts[0] == "train" and len(parts) > 1:
            metric, series = "/".join(parts[1:]), "train"
        elif parts[0] == "eval" and len(parts) > 2:
            metric, series = "/".join(parts[2:]), f"eval {parts[1]}"
        metrics.setdefault(metric, []).append({"name": series, **thinned(pairs)})
    return {
        "metrics": [{"metric": metric, "series": series} for metric, series in metrics.items()],
        "over_steps": over_steps,
    }


def finite(value: float) -> float | None:
    """With six digits, which is more than a curve shows; None for what JSON can't say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def thinned(pairs: list[tuple[int, float]]) -> Page:
    """At most MAX_POINTS points; each is the mean of its neighbours, at the last of their steps."""
    steps, values = np.array([step for step, _ in pairs]), np.array([value for _, value in pairs])
    if len(pairs) > MAX_POINTS:
        begins = np.linspace(0, len(pairs), MAX_POINTS, endpoint=False).astype(np.int64)
        ends = np.append(begins[1:], len(pairs))
        steps, values = steps[ends - 1], np.add.reduceat(values, begins) / (ends - begins)
    return {"steps": steps.tolist(), "values": [finite(value) for value in values.tolist()]}


def outputs_folder(run_folder: Path, step: int | None) -> Path | None:
    """The folder with what was saved at this step, or at the newest; on the run's own data rather than on other data.
    A folder with results.json is one itself. Raises ValueError if there is none of this step.
    """
    if (run_folder / "results.json").exists():
        if step is not None:
            raise ValueError(f"--step is for runs, and {run_folder} holds the results of one step; leave it out")
        return run_folder
    found: dict[int, Path] = {}
    for folder in sorted((run_folder / "eval_outputs").glob("step_*"), reverse=True):
        if match := _OUTPUTS.fullmatch(folder.name):
            found[int(match["step"])] = folder  # the last is the one without another name behind it
    if step is None:
        return found[max(found)] if found else None
    if step not in found:
        has = ", ".join(map(str, sorted(found))) or "none"
        raise ValueError(f"{run_folder} has no outputs of step {step}, but of: {has}; choose one of them")
    return found[step]


def read_results(outputs: Path | None) -> Page | None:
    """results.json as a table, if it is there. Raises ValueError."""
    if outputs is None or not (outputs / "results.json").exists():
        return None
    file = outputs / "results.json"
    results = read_json(file)
    try:
        intervals = results.get("intervals", {})
        rows = [[name, *map(finite, [value, *intervals.get(name, [])])] for name, value in results["metrics"].items()]
        return {
            "checkpoint": str(results.get("checkpoint", "")),
            "data": str(results.get("data", "")),
            "num_examples": {str(name): int(num) for name, num in results.get("num_examples", {}).items()},
            "rows": rows,
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{file}: isn't what evaluate.py writes; run evaluate.py again") from None


# ---------------------------------------------------------------------------------------------------------------------
# Saved predictions


def read_examples(outputs: Path, settings: Settings, names: list[str]) -> tuple[list[Page], dict[str, int], str | None]:
    """Examples of every set, evenly spread; how many were saved of each; what is missing, if they can't be shown.

    Only what is shown is kept in memory, beside one shard. Raises ValueError for a damaged shard or an unknown set.
    """
    shards: dict[str, list[Path]] = {}
    for file in sorted(outputs.glob("*.safetensors")):
        if match := _SHARD.fullmatch(file.name):
            shards.setdefault(match["set"], []).append(file)
    if shards and settings.set is not None and settings.set not in shards:
        raise ValueError(f"{outputs} has no set {settings.set}; it has {', '.join(shards)}")
    examples: list[Page] = []
    sizes: dict[str, int] = {}
    for set_name, files in shards.items():
        if settings.set not in (None, set_name):
            continue
        for file in files:
            keys = keys_of(file)
            if "inputs" not in keys or not keys & {"predictions", "predictions_at_step"}:
                saved = ", ".join(sorted(keys - {"rows"}))
                return [], {}, f"{outputs.name} holds {saved}, which doesn't show how puzzles were answered."
        rows = np.concatenate([read_tensor(file, "rows", 1) for file in files])
        sizes[set_name] = len(rows)
        wanted = set(np.sort(rows)[spread(len(rows), settings.max_examples)].tolist())
        of_set: list[Page] = []
        for file in files:
            of_set += examples_of_shard(set_name, file, wanted, names)
        examples += sorted(of_set, key=lambda example: example["row"])
    return examples, sizes, None


def keys_of(file: Path) -> set[str]:
    try:
        with safe_open(plain(file), framework="numpy") as tensors:
            return set(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise damaged(file, one_line(error)) from None


def read_tensor(file: Path, key: str, num_axes: int) -> np.ndarray:
    try:
        with safe_open(file, framework="numpy") as tensors:
            array = tensors.get_tensor(key)
    except (OSError, SafetensorError, AttributeError, TypeError) as error:  # a dtype that numpy has no name for
        raise damaged(file, one_line(error)) from None
    if array.ndim != num_axes:
        raise damaged(file, f"{key} has shape {array.shape}, but {num_axes} axes are needed")
    assert isinstance(array, np.ndarray)
    return array


def damaged(file: Path, reason: str) -> ValueError:
    return ValueError(f"{file}: cannot be read ({reason}); it is damaged: delete it and run evaluate.py again")


def examples_of_shard(set_name: str, file: Path, wanted: set[int], names: list[str]) -> list[Page]:
    """Those of its examples whose row is wanted."""
    axes = {
        "inputs": 2,
        "labels": 2,
        "puzzle_identifiers": 1,
        "predictions": 2,
        "predictions_at_step": 3,
        "q_halt": 1,
        "q_halt_at_step": 2,
        "steps": 1,
    }
    rows_N = read_tensor(file, "rows", 1)
    chosen = [number for number, row in enumerate(rows_N.tolist()) if row in wanted]
    if not chosen:
        return []
    arrays = {key: read_tensor(file, key, axes[key]) for key in sorted(keys_of(file) & axes.keys())}
    seq_len = arrays["inputs"].shape[1]
    for key, array in arrays.items():
        per_token = key in ("inputs", "labels", "predictions", "predictions_at_step")
        if len(array) != len(rows_N) or (per_token and array.shape[-1] != seq_len):
            raise damaged(file, f"{key} has shape {array.shape}, which doesn't go with {len(rows_N)} rows")
    examples = []
    for n in chosen:
        example: Page = {"set": set_name, "row": int(rows_N[n]), "input": to_text(arrays["inputs"][n])}
        if "labels" in arrays:
            example["label"] = to_text(arrays["labels"][n])
        if "puzzle_identifiers" in arrays:
            example |= name_at(names, int(arrays["puzzle_identifiers"][n]))
        if "predictions_at_step" in arrays:
            answers_TS = arrays["predictions_at_step"][n]
            if "steps" in arrays:  # from where the sequence was halted, its last answer is repeated
                answers_TS = answers_TS[: max(1, int(arrays["steps"][n]))]
            q_halt_T = arrays["q_halt_at_step"][n][: len(answers_TS)] if "q_halt_at_step" in arrays else None
        else:
            answers_TS = arrays["predictions"][n][None]
            q_halt_T = arrays["q_halt"][n][None] if "q_halt" in arrays else None
        example["answers"] = [to_text(answer_S) for answer_S in answers_TS]
        if q_halt_T is not None:
            # The logit of halting; beyond 60 its sigmoid is 0 or 1 in any case, and exp would overflow.
            confidence_T = 1 / (1 + np.exp(-np.clip(q_halt_T.astype(np.float64), -60, 60)))
            example["confidence"] = [finite(round(value, 4)) for value in confidence_T.tolist()]
        examples.append(example)
    return examples


# ---------------------------------------------------------------------------------------------------------------------
# ARC votes


def read_votes(outputs: Path | None, data: Path | None) -> list[Page]:
    """arc_votes.json by task, with the task's training pairs where the dataset is at hand. Raises ValueError."""
    if outputs is None or not (outputs / "arc_votes.json").exists():
        return []
    file = outputs / "arc_votes.json"
    votes = read_json(file)
    puzzles = data / "test_puzzles.json" if data else None
    tasks = read_json(puzzles) if puzzles and puzzles.exists() else {}

    def pairs_of(name: str) -> list[list[list[str] | None]]:
        return [[rows_of(pair["input"]), rows_of(pair["output"])] for pair in tasks.get(name, {}).get("train", [])]

    try:
        return [
            {
                "task": name,
                "train": pairs_of(name),
                "tests": [
                    {
                        "input": rows_of(test["input"]),
                        "solution": rows_of(test["solution"]),
                        "num_votes": int(test["num_votes"]),
                        "num_empty": int(test["num_empty"]),
                        "candidates": [
                            {
                                "grid": rows_of(candidate["grid"]),
                                "count": int(candidate["count"]),
                                "confidence": finite(round(float(candidate["confidence"]), 4)),
                                "right": candidate["right"],
                            }
                            for candidate in test["candidates"]
                        ],
                    }
                    for test in tests
                ],
            }
            for name, tests in votes.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{file}: isn't what evaluation writes; run evaluate.py again") from None


def rows_of(grid: list[list[int]] | None) -> list[str] | None:
    """A grid with one character per cell, or None where the solution isn't known."""
    return None if grid is None else ["".join(str(int(colour)) for colour in row) for row in grid]


if __name__ == "__main__":
    sys.exit(run(view, None))
