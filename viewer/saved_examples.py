"""Read the puzzles and answers that evaluate.py saved with save_outputs=[...]."""
# N = examples of a shard, T = reasoning steps, S = tokens of an example

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from utils.errors import UserError
from utils.files import plain
from utils.text import one_line
from viewer.pages import Page, Settings, name_at, spread, to_text

_SHARD = re.compile(r"(?P<set>.+)_rank\d+_\d+\.safetensors")


def shards_of(outputs: Path) -> dict[str, list[Path]]:
    """Return the files of each set in a folder of outputs."""
    shards: dict[str, list[Path]] = {}
    for file in sorted(outputs.glob("*.safetensors")):
        if match := _SHARD.fullmatch(file.name):
            shards.setdefault(match["set"], []).append(file)
    return shards


def shows_answers(file: Path) -> bool:
    """Return whether a shard holds puzzles with their answers.

    Raises:
        UserError: the shard is damaged.
    """
    keys = keys_of(file)
    return "inputs" in keys and bool(keys & {"predictions", "predictions_at_step"})


def holds_answers(outputs: Path) -> bool:
    """Return whether the shards of all ranks hold puzzles with their answers.

    Raises:
        UserError: a shard is damaged.
    """
    shards = [file for files in shards_of(outputs).values() for file in files]
    return bool(shards) and all(map(shows_answers, shards))


def rows_of(files: Sequence[Path]) -> np.ndarray:
    """Return the numbers of the rows that the shards of a set hold.

    Raises:
        UserError: a shard is damaged.
    """
    return np.concatenate([read_tensor(file, "rows", 1) for file in files])


def read_examples(
    outputs: Path, settings: Settings, names: list[str], shared: Mapping[str, np.ndarray] | None = None
) -> tuple[list[Page], dict[str, int], str | None]:
    """Read examples that are spread evenly over each set.

    At any time, memory holds only the chosen examples and one shard.

    Args:
        shared: the rows of each set from which examples are chosen; None: all that were saved.

    Returns:
        The examples, the number of saved examples by set, and a note on what was not saved if the
        examples cannot be shown without it.

    Raises:
        UserError: a shard is damaged, or there is no set of the chosen name.
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
            if not shows_answers(file):
                saved = ", ".join(sorted(keys_of(file) - {"rows"}))
                return [], {}, f"{outputs.name} holds {saved}, which doesn't show how puzzles were answered."
        rows = rows_of(files)
        sizes[set_name] = len(rows)
        if shared is not None and set_name in shared:
            rows = np.intersect1d(rows, shared[set_name])
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
    except (OSError, SafetensorError, AttributeError, TypeError) as error:  # TypeError: a dtype that NumPy lacks
        raise damaged(file, one_line(error)) from None
    if array.ndim != num_axes:
        raise damaged(file, f"{key} has shape {array.shape}, but {num_axes} axes are needed")
    assert isinstance(array, np.ndarray)
    return array


def damaged(file: Path, reason: str) -> UserError:
    return UserError(f"{file}: cannot be read ({reason}); it is damaged: delete it and run evaluate.py again")


def examples_of_shard(set_name: str, file: Path, wanted: set[int], names: list[str]) -> list[Page]:
    """Return the examples of a shard whose rows are wanted."""
    axes = {"inputs": 2, "labels": 2, "puzzle_identifiers": 1, "predictions": 2, "predictions_at_step": 3}
    axes |= {"q_halt": 1, "q_halt_at_step": 2, "steps": 1}
    rows_N = read_tensor(file, "rows", 1)
    chosen = [number for number, row in enumerate(rows_N.tolist()) if row in wanted]
    if not chosen:
        return []
    arrays = {key: read_tensor(file, key, axes[key]) for key in sorted(keys_of(file) & axes.keys())}
    seq_len = arrays["inputs"].shape[1]
    for key, array in arrays.items():
        is_per_token = key in ("inputs", "labels", "predictions", "predictions_at_step")
        if len(array) != len(rows_N) or (is_per_token and array.shape[-1] != seq_len):
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
            if "steps" in arrays:  # a sequence repeats its last answer after it has halted
                answers_TS = answers_TS[: max(1, int(arrays["steps"][n]))]
            q_halt_T = arrays["q_halt_at_step"][n][: len(answers_TS)] if "q_halt_at_step" in arrays else None
        else:
            answers_TS = arrays["predictions"][n][None]
            q_halt_T = arrays["q_halt"][n][None] if "q_halt" in arrays else None
        example["answers"] = [to_text(answer_S) for answer_S in answers_TS]
        if q_halt_T is not None:
            # Beyond 60 the sigmoid of the logit is 0 or 1, and exp would overflow.
            confidence_T = 1 / (1 + np.exp(-np.clip(q_halt_T.astype(np.float64), -60, 60)))
            example["confidence"] = confidence_T.round(4).tolist()
        examples.append(example)
    return examples
