"""Check a dataset of any task, and list everything that is wrong, with its place.

Examples are read in chunks. Only the index arrays and the keys of examples grow with the data. By
the keys, test examples are found in the training split, and two answers to one question.
"""
# N = examples (of a set, or of a chunk of it), S = tokens of an example, L = side of a grid

import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset.answers import Answers, digests, row_texts
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
    read_names,
)
from dataset.tasks import TASKS, task_of_shape
from dataset.tasks.base import BoardTask, Fault, joined
from dataset.text.schema import kind_of_data
from dataset.text.validate import validate_text
from utils.arguments import Parser, typed_path
from utils.errors import UserError
from utils.shell import run_command
from utils.text import one_line

# The largest share of test examples that may occur in the training data. With more the accuracy
# means little.
MAX_LEAK = 0.01
# The keys of symmetries are made from so many examples at a time, which a core's cache holds.
_ANSWERS_AT_ONCE = 1024
# The arrays of a set, with their numbers of axes.
_ARRAYS = {"inputs": 2, "labels": 2, "puzzle_identifiers": 1, "puzzle_indices": 1, "group_indices": 1}

_TASKS = joined([task.plural for task in TASKS], "or")
_TASK_CHECKS = textwrap.fill(
    f"{' '.join(task.checked for task in TASKS)} The shape tells the task (81 tokens of 11 kinds are a Sudoku). "
    "If a new task has the shape of a known task, leave these checks out with --any-task",
    width=100,
    initial_indent="  task      ",
    subsequent_indent=" " * 12,
)
_SAME = [
    "if their inputs and labels are the same",
    "without puzzle identifiers, if their inputs are the same",
    *(f"and {task.same_examples}" for task in TASKS if task.same_examples),
]
_FOOT = textwrap.fill(
    f"Examples are the same {'; '.join(_SAME)}. The exit status is 2 if there is no dataset, or after a mistake on the "
    "command line. The program needs memory for the index arrays, 8 bytes for each example, and some MB. The check of "
    "answers needs about 70 bytes for each example and each of its images.",
    width=100,
)

CHECKS = f"""
errors (exit status 1):
  files     a file that is missing or damaged, or has a wrong type or shape; counts, indices or
            splits that disagree; a wrong number of names in identifiers.json; a fingerprint that
            differs from the recorded one
  values    tokens, labels or identifiers out of range; a training example without any label; labels
            that equal the inputs in all examples of a set
  answers   two answers to one question, in datasets without puzzle identifiers; also if the inputs
            become equal by symmetries of the task that training may use
  leak      over {MAX_LEAK:.0%} of the test examples are in train too (--allow-leak: a warning)
{_TASK_CHECKS}

  text      a token outside of the vocabulary; a sample that is empty, too long or outside of the
            tokens; another tokenizer than the one that made the tokens; leaks: an instruction, or
            the beginning of a text, that is in both splits

warnings (exit status 0):
  fewer leaks; a test example twice; test examples without any label (they are not scored); labels
  that equal their inputs; no test split; no identifiers.json, or a name that occurs twice in it; a
  wrong mean_puzzle_examples; all puzzles in one group (an epoch draws one puzzle of each group);
  test puzzles with an identifier that no training puzzle has

{_FOOT}
"""


@dataclass
class Findings:
    """The errors and warnings, in the order in which they were found.

    Each is a line that begins with a file or folder.
    """

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
    """The part of a split that could be opened."""

    name: SplitName
    folder: Path
    metadata: DatasetMetadata
    # The arrays of each set by name. Inputs and labels are memory maps, the others int64.
    sets: dict[str, dict[str, np.ndarray]]
    whole: bool  # no file is missing, and no count, index or value was found to be wrong so far

    def file(self, set_name: str, array: str) -> Path:
        return array_file(self.folder, set_name, array)

    def num_rows(self, array: str) -> int:
        return sum(len(arrays[array]) for arrays in self.sets.values() if array in arrays)


def validate(path: Path, *, allow_leak: bool = False, any_task: bool = False) -> tuple[Findings, str]:
    """Check a dataset.

    Args:
        path: the folder that holds train and test.
        allow_leak: report leaks as warnings.
        any_task: leave out the checks of known tasks.

    Returns:
        The findings, and some lines that describe the dataset.

    Raises:
        UserError: There is no dataset at `path`.
    """
    findings = Findings()
    if kind_of_data(path) == "text":
        most_leaks = 1.0 if allow_leak else MAX_LEAK
        warn = findings.warnings.append
        summary, errors = validate_text(path, most_leaks=most_leaks, collect=findings.collect, warn=warn)
        findings.errors += errors
        return findings, summary
    splits = _open_splits(path, findings)
    for split in splits.values():
        _check_puzzles(split, findings)
    if len(splits) == 2:
        _compare(splits["train"], splits["test"], findings)
    if splits:
        _check_names(path / "identifiers.json", next(iter(splits.values())).metadata, findings)

    lines: list[str] = []
    keys: dict[SplitName, np.ndarray] = {}
    answers: Answers | None = None
    with progress("checking", sum(split.num_rows("inputs") for split in splits.values()), "examples") as bar:
        for name, split in splits.items():
            task = None if any_task else task_of_shape(split.metadata.seq_len, split.metadata.vocab_size)
            answers = answers or Answers(task)
            parts = [_scan_set(split, set_name, task, findings, answers, bar.update) for set_name in split.sets]
            keys[name] = np.concatenate(parts)
            # The fingerprint comes after the scan, because the first value out of range ends it.
            fingerprint = findings.collect(partial(_fingerprint, path, name)) if split.whole else None
            lines += _describe(split, task, fingerprint)
    if not all(split.whole for split in splits.values()):
        lines.append("leaks, duplicates and second answers were not looked for; correct the errors first")
        return findings, "\n".join(lines)
    if answers is not None:
        _check_answers(list(splits.values()), answers, findings)
    if "test" in splits:
        _check_duplicates(splits["test"], keys["test"], findings)
        if "train" in splits:
            _check_leaks(splits["test"], keys["test"], splits["train"], keys["train"], allow_leak, findings)
    return findings, "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Files, shapes, indices


def _open_splits(path: Path, findings: Findings) -> dict[SplitName, Split]:
    """Open the splits that have a readable dataset.json."""
    described = [name for name in SPLITS if (path / name / "dataset.json").is_file()]
    if not described:
        if (path / "dataset.json").is_file():
            raise UserError(f"{path} is a split of a dataset; give the folder above it, {path.parent}")
        what = "holds neither train/dataset.json nor test/dataset.json" if path.exists() else "does not exist"
        raise UserError(f"no dataset at {path}: it {what}; correct the path")
    if "train" not in described:
        findings.errors.append(f"{path}: has no train/dataset.json; rebuild the dataset")
    if "test" not in described:
        findings.warnings.append(f"{path}: has no test split, so nothing can be evaluated on it")
    splits = {name: findings.collect(partial(_open, path, name, findings)) for name in described}
    return {name: split for name, split in splits.items() if split is not None}


def _open(path: Path, name: SplitName, findings: Findings) -> Split:
    """Open as much of a split as possible, and add its faults to the findings.

    Raises:
        UserError: dataset.json is wrong.
    """
    folder = path / name
    split = Split(name, folder, read_metadata(path, folder), {}, whole=True)
    num_before = len(findings.errors)
    for set_name in dict.fromkeys(split.metadata.sets):
        split.sets[set_name] = _open_set(split, set_name, findings)
    if len(findings.errors) == num_before:
        # The function with which training opens a split decides. It also compares the sets.
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
    """Check the identifiers, the groups, and the counts that decide the length of an epoch."""
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
            f"{num_examples:,} examples of {num_puzzles:,} puzzles are {mean:.6g}; other trainers count steps by it"
        )
    if split.name == "train" and split.metadata.total_groups == 1 and num_puzzles > 1:
        findings.warnings.append(
            f"{split.folder}: one group holds all {num_puzzles:,} puzzles, but an epoch visits one of each group; "
            "give a group to each puzzle and its augmentations"
        )


def _compare(train: Split, test: Split, findings: Findings) -> None:
    """Check that a model that was trained on one split can read the other split."""
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
    """Check identifiers.json, which holds the name of each identifier."""
    try:
        names = read_names(file.parent)
    except FileNotFoundError:
        findings.warnings.append(f"{file}: is missing, so nobody can tell which puzzle an identifier means")
        return
    except UserError as error:
        findings.errors.append(str(error))
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


# --------------------------------------------------------------------------------------------------
# Examples


def _scan_set(
    split: Split,
    set_name: str,
    task: BoardTask | None,
    findings: Findings,
    answers: Answers,
    advance: Callable[[int], object],
) -> np.ndarray:
    """Read and check every example of a set once.

    Args:
        split, set_name: the set.
        task: the task whose rules are checked; None: no rules are.
        findings: the list to which faults are added.
        answers: the collection to which the examples are added, if there are no puzzle identifiers.
        advance: called with the number of examples after each chunk.

    Returns:
        A key for each example, (N,) uint64. Equal examples have equal keys.
    """
    arrays, metadata = split.sets[set_name], split.metadata
    if "inputs" not in arrays or "labels" not in arrays:
        return np.zeros(0, np.uint64)
    inputs, labels = arrays["inputs"], arrays["labels"]
    first: dict[Fault, str] = {}  # the message about the first row with each fault
    num: Counter[Fault] = Counter()  # the number of rows with each fault

    def note(kind: Fault, rows_N: np.ndarray, detail: str = "") -> None:
        if rows_N.any():
            array, what = kind
            where = f"{split.file(set_name, array)}: row {start + int(rows_N.argmax())}"
            first.setdefault(kind, f"{where} {what}{detail}")
            num[kind] += int(np.count_nonzero(rows_N))

    unlabelled, same = ("labels", "has no label that counts"), ("labels", "is the same as its input")
    keys = []
    dtype = np.uint8 if metadata.vocab_size <= 256 else np.int32
    num_rows = max(1, CHUNK_BYTES // max(array.nbytes // len(array) for array in (inputs, labels)))
    for start in range(0, len(inputs), num_rows):
        # The files are mapped again for every chunk, because pages that were read stay with the
        # process as long as their map does.
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
        if not right_N1.all():
            # The checks below look up tokens in tables, so wrong rows become zeros.
            inputs_NS, labels_NS, labelled_NS = inputs_NS * right_N1, labels_NS * right_N1, labelled_NS & right_N1
        note(unlabelled, right_N1[:, 0] & (~labelled_NS).all(axis=1))
        note(same, right_N1[:, 0] & np.logical_and.reduce(inputs_NS == labels_NS, axis=1))
        if task is not None:
            for kind, rows_N in task.faults(inputs_NS, labels_NS, labelled_NS).items():
                note(kind, right_N1[:, 0] & rows_N)
        inputs_NS, labels_NS = (tokens_NS.astype(dtype, copy=False) for tokens_NS in (inputs_NS, labels_NS))
        keys.append(_keys(inputs_NS, labels_NS, metadata, task))
        if metadata.num_puzzle_identifiers == 1:
            for few in np.array_split(np.arange(len(inputs_NS)), math.ceil(len(inputs_NS) / _ANSWERS_AT_ONCE)):
                answers.add(inputs_NS[few], labels_NS[few], labelled_NS[few])
        advance(len(inputs_NS))

    for kind, line in first.items():
        harmless = (kind == unlabelled and split.name == "test") or (kind == same and num[kind] < len(inputs))
        others = f" ({num[kind]:,} rows of {len(inputs):,} in all)" if num[kind] > 1 else ""
        (findings.warnings if harmless else findings.errors).append(line + others)
    return np.concatenate(keys)


def _keys(
    inputs_NS: np.ndarray, labels_NS: np.ndarray, metadata: DatasetMetadata, task: BoardTask | None
) -> np.ndarray:
    """Return a key for each example, (N,) uint64.

    Equal examples have equal keys. Two different examples of an ARC dataset have equal keys in one
    of ten million datasets.
    """
    # Without identifiers the input is the whole question, so the label does not matter.
    parts = (inputs_NS,) if metadata.num_puzzle_identifiers == 1 else (inputs_NS, labels_NS)
    texts = zip(*(_texts(part_NS, task) for part_NS in parts), strict=True)
    return digests(map(b"\xff".join, texts))


def _texts(tokens_NS: np.ndarray, task: BoardTask | None) -> list[bytes]:
    texts = row_texts(tokens_NS)
    return texts if task is None else [task.identity(text) for text in texts]


# --------------------------------------------------------------------------------------------------
# Duplicates and leaks


def _find(splits: Sequence[Split], example: int) -> tuple[Split, str, int]:
    """Return the split, the set and the row of an example, by its number through all sets."""
    sets = [(split, set_name) for split in splits for set_name in split.sets]
    ends = np.cumsum([len(split.sets[set_name]["inputs"]) for split, set_name in sets])
    number = int(np.searchsorted(ends, example, side="right"))
    return *sets[number], example - int(ends[number - 1] if number else 0)


def _place(splits: Sequence[Split], example: int) -> str:
    split, set_name, row = _find(splits, example)
    return f"row {row} of {split.file(set_name, 'inputs')}"


def _check_answers(splits: Sequence[Split], answers: Answers, findings: Findings) -> None:
    """Find questions that have two answers. The input is the whole question."""

    def example(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        split, set_name, row = _find(splits, number)
        input_S, labels_S = (np.asarray(split.sets[set_name][array][row]) for array in ("inputs", "labels"))
        ignored = split.metadata.ignore_label_id
        return input_S, labels_S, np.ones(len(labels_S), bool) if ignored is None else labels_S != ignored

    pairs = answers.contradictions(example)
    for one, other in pairs[:1]:
        same = (example(one)[0] == example(other)[0]).all()
        findings.errors.append(
            f"{_place(splits, one)} and {_place(splits, other)} {'have the same input' if same else 'are symmetries'}, "
            f"but their labels disagree (questions of this kind: {len(pairs):,}); leave out all answers but one"
        )


def _check_duplicates(test: Split, keys_N: np.ndarray, findings: Findings) -> None:
    """Warn of test examples that occur twice.

    The same example with another identifier is not a duplicate, because each augmentation has its
    own vote.
    """
    identifiers_N = np.concatenate(
        [np.repeat(arrays["puzzle_identifiers"], np.diff(arrays["puzzle_indices"])) for arrays in test.sets.values()]
    )
    order_N = np.lexsort((identifiers_N, keys_N))  # stable, so duplicates stay in the order of rows
    same_N = (np.diff(keys_N[order_N]) == 0) & (np.diff(identifiers_N[order_N]) == 0)
    if same_N.any():
        at = int(same_N.argmax())
        findings.warnings.append(
            f"{_place([test], order_N[at + 1])} repeats {_place([test], order_N[at])} "
            f"({int(same_N.sum()):,} of {len(keys_N):,} test examples are such copies); each counts in the accuracy"
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
        f"{_place([test], in_test)} is in the training data too, {_place([train], in_train)} "
        f"({int(leaked_N.sum()):,} of {len(leaked_N):,} test examples are, {share:.2%})"
    )
    if share > MAX_LEAK and not allowed:
        findings.errors.append(f"{line}; leave them out of train or test, or add --allow-leak")
    else:
        findings.warnings.append(line)


# --------------------------------------------------------------------------------------------------
# The report


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
        "Check a dataset of any task. Each line of the report names a fault and its place.",
        CHECKS,
        path_keys=("data_path",),
    )
    parser.add_argument("path", type=typed_path, metavar="PATH", help="the folder that holds train and test")
    parser.add_argument("--allow-leak", action="store_true", help="only warn if test examples are in the training data")
    parser.add_argument("--any-task", action="store_true", help=f"leave out the checks of {_TASKS}")
    args = parser.parse_args(argv)
    findings, summary = validate(args.path, allow_leak=args.allow_leak, any_task=args.any_task)
    lines = [f"error: {line}" for line in findings.errors] + [f"warning: {line}" for line in findings.warnings]
    num_errors, num_warnings = len(findings.errors), len(findings.warnings)
    verdict = f"{'wrong' if num_errors else 'ok'}: {_count(num_errors, 'error')}, {_count(num_warnings, 'warning')}"
    return "\n".join([*lines, summary, verdict]), 1 if findings.errors else 0


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status.

    The status is 0 for a correct dataset, 1 for a wrong dataset, 2 after a mistake of the user, and
    130 after Ctrl-C.
    """
    return run_command(_program, argv, interrupted="interrupted; not all was checked")


if __name__ == "__main__":
    sys.exit(main())
