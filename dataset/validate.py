"""Checks a dataset in the published format, of any task, and says all that is wrong with it and where.

Examples are read in chunks. What grows with the data are the index arrays, and eight bytes for each example by which
those of the test split are found again in the training split.
"""
# N = examples (of a set, or of a chunk of it), S = tokens of an example, L = side of a grid

import hashlib
import json
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, for which Python looks for modules in dataset/ and not in the folder above
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset.builder import SPLITS, progress
from dataset.schema import (
    CHUNK_BYTES,
    DatasetMetadata,
    SplitName,
    array_file,
    check_contents,
    check_indices,
    open_array,
    open_split,
    read_metadata,
)
from dataset.tasks import TASKS, task_of_shape
from dataset.tasks.base import BoardTask, Fault, joined
from utils.arguments import Parser, typed_path
from utils.errors import UserError
from utils.files import plain
from utils.shell import run_command
from utils.text import one_line

# Of the test examples, the share that may stand in the training data before the accuracy on them means little.
MAX_LEAK = 0.01
_ARRAYS = {"inputs": 2, "labels": 2, "puzzle_identifiers": 1, "puzzle_indices": 1, "group_indices": 1}  # and their axes

_TASKS = joined([task.plural for task in TASKS], "or")
_TASK_CHECKS = textwrap.fill(
    f"{' '.join(task.checked for task in TASKS)} The task is told by its shape (81 tokens of 11 kinds are a Sudoku); "
    "--any-task leaves this out, for another task that happens to have such a shape",
    width=102,
    initial_indent="  task      ",
    subsequent_indent=" " * 12,
)
_SAME = [
    "if inputs and labels are",
    "if the inputs are, where puzzles have no identifiers",
    *(f"and {task.same_examples}" for task in TASKS if task.same_examples),
]
_FOOT = textwrap.fill(
    f"Examples are the same {'; '.join(_SAME)}. Exit status 2: there is no dataset, or a mistake on the command line. "
    "Memory: the index arrays, 8 bytes for each example, and some MB.",
    width=102,
)

CHECKS = f"""
errors (exit status 1):
  files     missing or damaged, of a wrong type or shape; counts and indices that disagree; train and
            test that disagree; identifiers.json of another length; another fingerprint than recorded
  values    tokens, labels or identifiers out of range; a training example without any label; all
            labels of a set the same as its inputs
  leak      over {MAX_LEAK:.0%} of the test examples stand in train as well (--allow-leak: a warning)
{_TASK_CHECKS}

warnings (exit status 0):
  fewer leaks than that; the same test example twice; test examples without any label (they are not
  scored); some labels the same as their inputs; no test split; no identifiers.json, or a name twice
  in it; a wrong mean_puzzle_examples; all puzzles in one group (an epoch draws one of each group);
  test puzzles with an identifier that no training puzzle has

{_FOOT}
"""


@dataclass
class Findings:
    """What was found, in that order: lines that begin with a file or folder."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def collect(self, check: Callable[[], Any]) -> Any:
        """Return what `check` returns. If it raises UserError, note the error and return None."""
        try:
            return check()
        except UserError as error:
            self.errors.append(one_line(error))
            return None


@dataclass
class Split:
    """As much of a split as could be opened."""

    name: SplitName
    folder: Path
    metadata: DatasetMetadata
    sets: dict[str, dict[str, np.ndarray]]  # arrays by name; inputs and labels are memory maps, the others int64
    whole: bool  # everything is there, and no count, index or value is wrong so far

    def file(self, set_name: str, array: str) -> Path:
        return array_file(self.folder, set_name, array)

    def num_rows(self, array: str) -> int:
        return sum(len(arrays[array]) for arrays in self.sets.values() if array in arrays)


def validate(path: Path, *, allow_leak: bool = False, any_task: bool = False) -> tuple[Findings, str]:
    """Checks the dataset at `path`; returns what is wrong with it, and some lines about what is in it.

    Raises UserError, one line, where there is no dataset.
    """
    findings = Findings()
    splits = _open_splits(path, findings)
    for split in splits.values():
        _check_puzzles(split, findings)
    if len(splits) == 2:
        _compare(splits["train"], splits["test"], findings)
    if splits:
        _check_names(path / "identifiers.json", next(iter(splits.values())).metadata, findings)

    lines: list[str] = []
    keys: dict[SplitName, np.ndarray] = {}
    with progress("checking", sum(split.num_rows("inputs") for split in splits.values()), "examples") as bar:
        for name, split in splits.items():
            task = None if any_task else task_of_shape(split.metadata.seq_len, split.metadata.vocab_size)
            parts = [_scan_set(split, set_name, task, findings, bar.update) for set_name in split.sets]
            keys[name] = np.concatenate(parts)
            # Only now, because the first value out of range would end it.
            fingerprint = findings.collect(partial(_fingerprint, path, name)) if split.whole else None
            lines += _describe(split, task, fingerprint)
    if not all(split.whole for split in splits.values()):
        lines.append("leaks and duplicates were not looked for: there are errors to be corrected first")
    elif "test" in splits:
        _check_duplicates(splits["test"], keys["test"], findings)
        if "train" in splits:
            _check_leaks(splits["test"], keys["test"], splits["train"], keys["train"], allow_leak, findings)
    return findings, "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Files, shapes, indices


def _open_splits(path: Path, findings: Findings) -> dict[SplitName, Split]:
    """The splits that have a readable dataset.json."""
    described = [name for name in SPLITS if (path / name / "dataset.json").is_file()]
    if not described:
        if (path / "dataset.json").is_file():
            raise UserError(f"{path} is a split of a dataset; give the folder above it, {path.parent}")
        what = "holds neither train/dataset.json nor test/dataset.json" if path.exists() else "is not there"
        raise UserError(f"no dataset at {path}: it {what}; correct the path")
    if "train" not in described:
        findings.errors.append(f"{path}: has no train/dataset.json; rebuild the dataset")
    if "test" not in described:
        findings.warnings.append(f"{path}: has no test split, so nothing can be evaluated on it")
    splits = {name: findings.collect(partial(_open, path, name, findings)) for name in described}
    return {name: split for name, split in splits.items() if split is not None}


def _open(path: Path, name: SplitName, findings: Findings) -> Split:
    """Raises UserError only if dataset.json is wrong; of all else that is, each is a finding."""
    folder = path / name
    split = Split(name, folder, read_metadata(path, folder), {}, whole=True)
    num_before = len(findings.errors)
    for set_name in dict.fromkeys(split.metadata.sets):
        split.sets[set_name] = _open_set(split, set_name, findings)
    if len(findings.errors) == num_before:
        # What training opens has the last word; also about what concerns several sets.
        findings.collect(partial(open_split, path, name))
    split.whole = len(findings.errors) == num_before
    return split


def _open_set(split: Split, set_name: str, findings: Findings) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for array, num_axes in _ARRAYS.items():
        opened = findings.collect(partial(open_array, split.file(set_name, array), num_axes))
        if opened is not None:
            arrays[array] = opened if num_axes == 2 else opened.astype(np.int64)

    def disagree(array: str, what: str) -> None:
        findings.errors.append(f"{split.file(set_name, array)}: {what}; rebuild the dataset")

    for array in ("inputs", "labels"):
        if array in arrays and arrays[array].shape[1] != split.metadata.seq_len:
            num_tokens = arrays.pop(array).shape[1]
            disagree(array, f"rows have {num_tokens} tokens, but seq_len in dataset.json is {split.metadata.seq_len}")
    if "inputs" in arrays and "labels" in arrays and len(arrays["inputs"]) != len(arrays["labels"]):
        disagree("labels", f"{len(arrays.pop('labels'))} rows, but inputs has {len(arrays['inputs'])}")
    for array, counted, what in (
        ("puzzle_indices", "inputs", "rows in inputs"),
        ("group_indices", "puzzle_identifiers", "puzzles in puzzle_identifiers"),
    ):
        if array in arrays and counted in arrays:
            check = partial(check_indices, split.file(set_name, array), arrays[array], len(arrays[counted]), what)
            findings.collect(check)
    if "puzzle_indices" in arrays and "puzzle_identifiers" in arrays:
        num, num_puzzles = len(arrays["puzzle_identifiers"]), len(arrays["puzzle_indices"]) - 1
        if num != num_puzzles:
            disagree("puzzle_identifiers", f"{num} entries, but puzzle_indices has {num_puzzles} puzzles")
    return arrays


def _fingerprint(path: Path, name: SplitName) -> str:
    return check_contents(open_split(path, name))


def _check_puzzles(split: Split, findings: Findings) -> None:
    """Identifiers, groups, and the counts that say how long an epoch is."""
    limit = split.metadata.num_puzzle_identifiers
    for set_name, arrays in split.sets.items():
        identifiers_P = arrays.get("puzzle_identifiers", np.zeros(0, np.int64))
        (wrong,) = np.nonzero((identifiers_P < 0) | (identifiers_P >= limit))
        if len(wrong):
            findings.errors.append(
                f"{split.file(set_name, 'puzzle_identifiers')}: puzzle {wrong[0]} has identifier "
                f"{identifiers_P[wrong[0]]}, but 0 to {limit - 1} are possible{_others(len(wrong))}; rebuild the "
                "dataset or correct num_puzzle_identifiers in dataset.json"
            )
            split.whole = False
    if not split.whole:
        return
    num_examples, num_puzzles = split.num_rows("inputs"), split.num_rows("puzzle_identifiers")
    mean = num_examples / num_puzzles
    if not math.isclose(mean, split.metadata.mean_puzzle_examples, rel_tol=1e-3):
        findings.warnings.append(
            f"{split.folder / 'dataset.json'}: mean_puzzle_examples is {split.metadata.mean_puzzle_examples:.6g}, but "
            f"{num_examples:,} examples of {num_puzzles:,} puzzles are {mean:.6g}; other trainers count steps with it"
        )
    if split.name == "train" and split.metadata.total_groups == 1 and num_puzzles > 1:
        findings.warnings.append(
            f"{split.folder}: one group holds all {num_puzzles:,} puzzles, and an epoch visits one of each group; "
            "give a group to each puzzle and its augmentations"
        )


def _compare(train: Split, test: Split, findings: Findings) -> None:
    """A model trained on one split must be able to read the other."""
    for key in (
        "seq_len",
        "vocab_size",
        "num_puzzle_identifiers",
        "pad_id",
        "ignore_label_id",
        "blank_identifier_id",
    ):
        value, expected = getattr(test.metadata, key), getattr(train.metadata, key)
        if value != expected:
            findings.errors.append(
                f"{test.folder / 'dataset.json'}: {key} is {value}, but {expected} in train; build both splits alike"
            )
    if train.whole and test.whole and train.metadata.num_puzzle_identifiers > 1:
        known = np.unique(np.concatenate([arrays["puzzle_identifiers"] for arrays in train.sets.values()]))
        for set_name, arrays in test.sets.items():
            (new,) = np.nonzero(~np.isin(arrays["puzzle_identifiers"], known))
            if len(new):
                findings.warnings.append(
                    f"{test.file(set_name, 'puzzle_identifiers')}: puzzle {new[0]} has identifier "
                    f"{arrays['puzzle_identifiers'][new[0]]}, which no training puzzle has{_others(len(new))}; its "
                    "embedding is never trained"
                )


def _check_names(file: Path, metadata: DatasetMetadata, findings: Findings) -> None:
    """identifiers.json: the name of each identifier."""
    try:
        names = json.loads(plain(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        findings.warnings.append(f"{file}: is missing, so nobody can tell which puzzle an identifier means")
        return
    except (OSError, ValueError, RecursionError) as error:
        findings.errors.append(f"{file}: cannot be read ({one_line(error)}); rebuild the dataset")
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        findings.errors.append(f"{file}: is no list of names; rebuild the dataset")
        return
    num = metadata.num_puzzle_identifiers
    if len(names) != num:
        findings.errors.append(
            f"{file}: holds {len(names):,} names, but num_puzzle_identifiers is {num:,}; rebuild the dataset"
        )
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        findings.warnings.append(f"{file}: names {twice!r} twice; puzzles are told apart by it")


def _others(num: int) -> str:
    return "" if num == 1 else f" (and so {num - 1:,} others)"


# ---------------------------------------------------------------------------------------------------------------------
# Examples


def _scan_set(
    split: Split, set_name: str, task: BoardTask | None, findings: Findings, advance: Callable[[int], object]
) -> np.ndarray:
    """Reads every example once. Returns a key for each, (N,) uint64, equal for equal examples."""
    arrays, metadata = split.sets[set_name], split.metadata
    if "inputs" not in arrays or "labels" not in arrays:
        return np.zeros(0, np.uint64)
    inputs, labels = arrays["inputs"], arrays["labels"]
    first: dict[Fault, str] = {}  # the first row with each fault,
    num: Counter[Fault] = Counter()  # and how many rows have it

    def note(kind: Fault, rows_N: np.ndarray, detail: str = "") -> None:
        if rows_N.any():
            array, what = kind
            where = f"{split.file(set_name, array)}: row {start + int(rows_N.argmax())}"
            first.setdefault(kind, f"{where} {what}{detail}")
            num[kind] += int(np.count_nonzero(rows_N))

    unlabelled, same = ("labels", "has no label that counts"), ("labels", "is the same as its input")
    keys = []
    num_rows = max(1, CHUNK_BYTES // max(array.nbytes // len(array) for array in (inputs, labels)))
    for start in range(0, len(inputs), num_rows):
        # Mapped anew for every chunk: pages that were read would otherwise stay with the process.
        mapped = (open_array(split.file(set_name, array), 2) for array in ("inputs", "labels"))
        inputs_NS, labels_NS = (np.asarray(array[start : start + num_rows]) for array in mapped)
        labelled_NS = np.ones(labels_NS.shape, bool)
        if metadata.ignore_label_id is not None:
            labelled_NS = labels_NS != metadata.ignore_label_id
            labels_NS = np.where(labelled_NS, labels_NS, 0)
        right_N1 = np.ones((len(inputs_NS), 1), bool)
        for array, tokens_NS in (("inputs", inputs_NS), ("labels", labels_NS)):
            if tokens_NS.min() >= 0 and tokens_NS.max() < metadata.vocab_size:
                continue
            wrong_NS = (tokens_NS < 0) | (tokens_NS >= metadata.vocab_size)
            value = tokens_NS.flat[int(wrong_NS.argmax())]
            what = f"has a token outside of 0 to {metadata.vocab_size - 1}"
            note((array, what), np.logical_or.reduce(wrong_NS, axis=1), f", {value}")
            right_N1 &= ~wrong_NS.any(axis=1, keepdims=True)
            split.whole = False
        if not right_N1.all():  # what follows looks up tokens in tables
            inputs_NS, labels_NS, labelled_NS = inputs_NS * right_N1, labels_NS * right_N1, labelled_NS & right_N1
        note(unlabelled, right_N1[:, 0] & (~labelled_NS).all(axis=1))
        note(same, right_N1[:, 0] & np.logical_and.reduce(inputs_NS == labels_NS, axis=1))
        if task is not None:
            for kind, rows_N in task.faults(inputs_NS, labels_NS, labelled_NS).items():
                note(kind, right_N1[:, 0] & rows_N)
        keys.append(_keys(inputs_NS, labels_NS, metadata, task))
        advance(len(inputs_NS))

    for kind, line in first.items():
        harmless = (kind == unlabelled and split.name == "test") or (kind == same and num[kind] < len(inputs))
        others = f" ({num[kind]:,} rows of {len(inputs):,} in all)" if num[kind] > 1 else ""
        (findings.warnings if harmless else findings.errors).append(line + others)
    return np.concatenate(keys)


def _keys(
    inputs_NS: np.ndarray, labels_NS: np.ndarray, metadata: DatasetMetadata, task: BoardTask | None
) -> np.ndarray:
    """(N,) uint64, equal for equal examples and hardly ever for others: in one ARC dataset of ten million."""
    # Where puzzles have no identifiers, the input is the whole question, and which answer it has doesn't matter.
    parts = (inputs_NS,) if metadata.num_puzzle_identifiers == 1 else (inputs_NS, labels_NS)
    dtype = np.uint8 if metadata.vocab_size <= 256 else np.int32
    texts = zip(*(_texts(part_NS.astype(dtype, copy=False), task) for part_NS in parts), strict=True)
    digests = (hashlib.blake2b(b"\xff".join(text), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), np.uint64)


def _texts(tokens_NS: np.ndarray, task: BoardTask | None) -> list[bytes]:
    text = tokens_NS.tobytes()
    size = len(text) // len(tokens_NS)
    texts = [text[start : start + size] for start in range(0, len(text), size)]
    return texts if task is None else [task.identity(text) for text in texts]


# ---------------------------------------------------------------------------------------------------------------------
# What the splits hold twice


def _place(split: Split, example: int) -> str:
    """Where an example stands, from its number among those of all sets."""
    ends = np.cumsum([len(arrays["inputs"]) for arrays in split.sets.values()])
    number = int(np.searchsorted(ends, example, side="right"))
    row = example - (ends[number - 1] if number else 0)
    return f"row {row} of {split.file(list(split.sets)[number], 'inputs')}"


def _check_duplicates(test: Split, keys_N: np.ndarray, findings: Findings) -> None:
    """The same example under another identifier is another question: augmentations vote, each for itself."""
    identifiers_N = np.concatenate(
        [np.repeat(arrays["puzzle_identifiers"], np.diff(arrays["puzzle_indices"])) for arrays in test.sets.values()]
    )
    order_N = np.lexsort((identifiers_N, keys_N))  # stable: of equal ones the first comes first
    same_N = (np.diff(keys_N[order_N]) == 0) & (np.diff(identifiers_N[order_N]) == 0)
    if same_N.any():
        at = int(same_N.argmax())
        findings.warnings.append(
            f"{_place(test, order_N[at + 1])} is the example of {_place(test, order_N[at])} again "
            f"({int(same_N.sum()):,} of {len(keys_N):,} are such copies); each counts in the accuracy"
        )


def _check_leaks(
    test: Split, test_keys_N: np.ndarray, train: Split, train_keys_N: np.ndarray, allowed: bool, findings: Findings
) -> None:
    leaked_N = np.isin(test_keys_N, train_keys_N)
    if not leaked_N.any():
        return
    in_test = int(leaked_N.argmax())
    in_train = int((train_keys_N == test_keys_N[in_test]).argmax())
    share = float(leaked_N.mean())
    line = (
        f"{_place(test, in_test)} stands in the training data, {_place(train, in_train)} "
        f"({int(leaked_N.sum()):,} of {len(leaked_N):,} test examples do, {share:.2%})"
    )
    if share > MAX_LEAK and not allowed:
        findings.errors.append(f"{line}; leave them out of one of the two, or allow it with --allow-leak")
    else:
        findings.warnings.append(line)


# ---------------------------------------------------------------------------------------------------------------------
# What the user sees


def _describe(split: Split, task: BoardTask | None, fingerprint: str | None) -> list[str]:
    metadata = split.metadata
    sizes = [
        _count(split.num_rows("inputs"), "example"),
        _count(split.num_rows("puzzle_identifiers"), "puzzle"),
        _count(metadata.total_groups, "group"),
        _count(metadata.num_puzzle_identifiers, "identifier"),
        f"{metadata.seq_len} tokens of {metadata.vocab_size} kinds",
    ]
    known = "" if task is None else f" ({task.title})"
    return [
        f"{split.name:<6} {', '.join(sizes)}{known}",
        *([] if fingerprint is None else [f"       sha256 {fingerprint}"]),
    ]


def _count(num: int, what: str) -> str:
    return f"{num:,} {what}{'' if num == 1 else 's'}"


def _program(argv: list[str] | None) -> tuple[str, int]:
    parser = Parser(
        "python -m dataset.validate",
        "Check a dataset in the published format, of any task: all that is wrong with it, line by line, and where.",
        CHECKS,
    )
    parser.add_argument("path", type=typed_path, metavar="PATH", help="the folder that holds train and test")
    parser.add_argument("--allow-leak", action="store_true", help="test examples may stand in the training data")
    parser.add_argument("--any-task", action="store_true", help=f"check nothing that only {_TASKS} have")
    args = parser.parse_args(argv)
    findings, summary = validate(args.path, allow_leak=args.allow_leak, any_task=args.any_task)
    lines = [f"error: {line}" for line in findings.errors] + [f"warning: {line}" for line in findings.warnings]
    num_errors, num_warnings = len(findings.errors), len(findings.warnings)
    verdict = f"{'wrong' if num_errors else 'ok'}: {_count(num_errors, 'error')}, {_count(num_warnings, 'warning')}"
    return "\n".join([*lines, summary, verdict]), 1 if findings.errors else 0


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 for a dataset in order, 1 for one that is not, 2 after a mistake, 130 after Ctrl-C."""
    return run_command(_program, argv, interrupted="interrupted; not all was checked")


if __name__ == "__main__":
    sys.exit(main())
