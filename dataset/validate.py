"""Check a dataset of any task, and list what is wrong, with its place.

Examples are read in chunks. Only the index arrays and the keys of examples grow with the data. By
the keys, test examples are found in the training split, and two answers to one question.
"""
# N = examples (of a set, or of a chunk of it), S = tokens of an example

import hashlib
import math
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset.answers import Answers, digests, row_texts
from dataset.builder import SPLITS, progress
from dataset.schema import (
    CHUNK_BYTES,
    Split,
    SplitName,
    check_contents,
    collecting,
    let_go,
    locate,
    open_split,
    read_names,
)
from dataset.tasks import TASKS, task_of_shape
from dataset.tasks.base import BoardTask, Fault, count, joined
from dataset.text.schema import (
    TextSplit,
    check_text_contents,
    has_split,
    kind_of_data,
    open_text_split,
    require_same_tokens,
)
from utils.arguments import Parser, typed_path
from utils.shell import run_command

# The largest share of test examples that may occur in the training data. With more the accuracy
# means little.
MAX_LEAK = 0.01
# The keys of symmetries are made from so many examples at a time, which a core's cache holds.
_ANSWERS_AT_ONCE = 1024

_TASK_CHECKS = textwrap.fill(
    f"{' '.join(task.checked for task in TASKS)} The shape tells the task (81 tokens of 11 kinds are a Sudoku). "
    "If a new task has the shape of a known task, leave these checks out with --any-task",
    width=100,
    initial_indent="  task      ",
    subsequent_indent=" " * 12,
)
CHECKS = f"""
The files of both splits are checked first, then the values, then the examples.

errors (exit status 1):
  files     a missing, damaged or wrong file; counts, indices, names or splits that disagree
  values    tokens, labels or identifiers out of range; a change after the build
  examples  a training example without any label; labels that all equal their inputs; two answers
            to one question, also after symmetries of the task (datasets without identifiers);
            over {MAX_LEAK:.0%} of the test examples in train too (--allow-leak: a warning)
{_TASK_CHECKS}
  text      a wrong token, sample or tokenizer; leaks: an instruction, or the beginning of a text,
            that is in both splits

warnings (exit status 0):
  fewer leaks; a test example twice; test examples without any label (they are not scored); labels
  that equal their inputs; no test split; no identifiers.json, or a name twice in it; a wrong
  mean_puzzle_examples; all puzzles in one group (an epoch draws one puzzle of each group); test
  puzzles with an identifier that no training puzzle has

Without puzzle identifiers, examples are the same if their inputs are; otherwise if their inputs and
labels are. In ARC the place of the grids on the canvas does not matter.
"""


Opened = TypeVar("Opened", Split, TextSplit)


class Findings:
    """Collects errors and warnings about a dataset: a line for each, in the order of the checks."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []


def validate(path: Path, *, allow_leak: bool = False, any_task: bool = False) -> tuple[Findings, str]:
    """Check a dataset in three stages: its files, its values, its examples.

    A stage names all that is wrong in both splits; of text, the first fault of each. The next stage
    checks the splits without errors. Leaks, duplicates and second answers are looked for if no
    split has any. Return the findings, and some lines that describe the dataset.
    """
    findings, most_leaks = Findings(), 1.0 if allow_leak else MAX_LEAK
    kind = kind_of_data(path)
    if kind is None:
        open_split(path, "train")  # raises an error that says what is there
    if kind == "text":
        lines = _validate_text(path, most_leaks, findings)
    else:
        lines = _validate_puzzles(path, most_leaks, any_task, findings)
    return findings, "\n".join(lines)


def _open(path: Path, open_one: Callable[[Path, SplitName], Opened], findings: Findings) -> dict[SplitName, Opened]:
    splits: dict[SplitName, Opened] = {}
    for name in SPLITS:
        if name == "test" and not has_split(path, name):
            findings.warnings.append(f"{path}: has no test split, so nothing can be evaluated on it")
            continue
        with collecting(findings.errors):
            splits[name] = open_one(path, name)
    return splits


def _check_leaks(
    keys: dict[SplitName, np.ndarray], most: float, place: Callable[[SplitName, int], str], findings: Findings
) -> None:
    """Find what is in both splits by its keys. `place` says where a key of a split comes from."""
    leaked_N = np.isin(keys["test"], keys["train"])
    if leaked_N.any():
        in_test, share = int(leaked_N.argmax()), float(leaked_N.mean())
        in_train = int((keys["train"] == keys["test"][in_test]).argmax())
        line = (
            f"{place('test', in_test)} is in the training data too, {place('train', in_train)} "
            f"({int(leaked_N.sum()):,} of {len(leaked_N):,} test examples are, {share:.2%})"
        )
        if share > most:
            findings.errors.append(f"{line}; leave them out of train or test, or add --allow-leak")
        else:
            findings.warnings.append(line)


# ---- text ----------------------------------------------------------------------------------------


def _validate_text(path: Path, most_leaks: float, findings: Findings) -> list[str]:
    lines: list[str] = []
    splits = _open(path, open_text_split, findings)
    for name, split in splits.items():
        with collecting(findings.errors):
            lines += [f"{name:<6} {split}", f"       sha256 {check_text_contents(split)}"]
    if len(splits) < len(SPLITS) or findings.errors:
        return [*lines, "samples in both splits were not looked for; that takes two splits without errors"]
    train, test = splits["train"], splits["test"]
    with collecting(findings.errors):
        require_same_tokens(train, test)
    if train.metadata.tasks != test.metadata.tasks:
        file = test.path / "dataset.json"
        findings.errors.append(f"{file}: tasks are not those of train; build both splits together")
    numbers: dict[SplitName, list[int]] = {"train": [], "test": []}
    keys = {name: _document_keys(split, numbers[name]) for name, split in splits.items()}

    def place(name: SplitName, key: int) -> str:
        return f"sample {numbers[name][key]:,} of {splits[name].epochs[0].files[0]}"

    _check_leaks(keys, most_leaks, place, findings)
    return lines


def _document_keys(split: TextSplit, numbers: list[int]) -> np.ndarray:
    """Return a key of each document, uint64, and append the number of its first sample.

    The key of a problem is that of its instruction, and the key of a text that of all its samples.
    """
    samples, special = split.epochs[0], split.metadata.special_tokens
    hashes = list["hashlib.blake2b"]()
    step = CHUNK_BYTES // 40
    for first in range(0, len(samples), step):
        places = samples.take(slice(first, first + step)).tolist()
        for number, (start, prefix_len, _, response_len, _) in enumerate(places, first):
            if prefix_len == 1 and special is not None and split.tokens[start] != special.start:
                contents = split.tokens[start + 1 : start + 1 + response_len]  # goes on where the sample before ends
            else:
                hashes.append(hashlib.blake2b(digest_size=8))
                numbers.append(number)
                contents = split.tokens[start : start + (prefix_len if prefix_len > 1 else 1 + response_len)]
            if hashes:
                hashes[-1].update(contents.astype(np.uint32).tobytes())
    return np.frombuffer(b"".join(each.digest() for each in hashes), np.uint64)


# ---- puzzles -------------------------------------------------------------------------------------


def _validate_puzzles(path: Path, most_leaks: float, any_task: bool, findings: Findings) -> list[str]:
    splits = _open(path, open_split, findings)
    for split in splits.values():
        _check_groups(split, findings)
    if len(splits) == 2:
        _compare(splits["train"], splits["test"], findings)
    for split in list(splits.values())[:1]:
        _check_names(path, split.metadata.num_puzzle_identifiers, findings)

    lines: list[str] = []
    keys: dict[SplitName, np.ndarray] = {}
    answers: Answers | None = None
    with progress("checking", sum(_sizes(split)[0] for split in splits.values()), "examples") as bar:
        for name, split in splits.items():
            task = None if any_task else task_of_shape(*split.metadata.shape)
            metadata, nouns = split.metadata, ("example", "puzzle", "group", "identifier")
            numbers = (*_sizes(split), metadata.total_groups, metadata.num_puzzle_identifiers)
            known = f" ({task.title})" if task is not None else ""
            sizes = ", ".join(map(count, numbers, nouns))
            lines.append(f"{name:<6} {sizes}, {metadata.seq_len} tokens of {metadata.vocab_size} kinds{known}")
            with collecting(findings.errors):
                lines.append(f"       sha256 {check_contents(split)}")
                answers = answers or Answers(task)
                parts = [_scan_set(split, set_name, task, findings, answers, bar.update) for set_name in split.sets]
                keys[name] = np.concatenate(parts)
    if answers is None or (len(keys) < len(SPLITS) and findings.errors):
        return [*lines, "leaks, duplicates and second answers were not looked for; correct the errors first"]
    _check_answers(list(splits.values()), answers, findings)
    if "test" in splits:
        _check_duplicates(splits["test"], keys["test"], findings)
        if "train" in splits:
            _check_leaks(keys, most_leaks, lambda name, example: _place([splits[name]], example), findings)
    return lines


def _sizes(split: Split) -> tuple[int, int]:
    """Return the numbers of examples and of puzzles."""
    return sum(split.num_examples(None).values()), sum(len(each.puzzle_identifiers) for each in split.sets.values())


def _check_groups(split: Split, findings: Findings) -> None:
    """Check the counts that decide the length of an epoch."""
    num_examples, num_puzzles = _sizes(split)
    mean, stated = num_examples / num_puzzles, split.metadata.mean_puzzle_examples
    if not math.isclose(mean, stated, rel_tol=1e-3):
        findings.warnings.append(
            f"{split.path / 'dataset.json'}: mean_puzzle_examples is {stated:.6g}, but {num_examples:,} examples of "
            f"{num_puzzles:,} puzzles are {mean:.6g}; other trainers count steps by it"
        )
    if split.path.name == "train" and split.metadata.total_groups == 1 and num_puzzles > 1:
        findings.warnings.append(
            f"{split.path}: one group holds all {num_puzzles:,} puzzles, but an epoch visits one of each group; "
            "give a group to each puzzle and its augmentations"
        )


def _compare(train: Split, test: Split, findings: Findings) -> None:
    """Check that a model that was trained on one split can read the other split."""
    keys = ("seq_len", "vocab_size", "num_puzzle_identifiers", "pad_id", "ignore_label_id", "blank_identifier_id")
    for key in keys:
        value, expected = getattr(test.metadata, key), getattr(train.metadata, key)
        if value != expected:
            findings.errors.append(
                f"{test.path / 'dataset.json'}: {key} is {value}, but {expected} in train; build both splits alike"
            )
    known = np.unique(np.concatenate([puzzle_set.puzzle_identifiers for puzzle_set in train.sets.values()]))
    for set_name, puzzle_set in test.sets.items() if train.metadata.num_puzzle_identifiers > 1 else ():
        (new,) = np.nonzero(~np.isin(puzzle_set.puzzle_identifiers, known))
        if len(new):
            findings.warnings.append(
                f"{test.file(set_name, 'puzzle_identifiers')}: puzzle {new[0]} has identifier "
                f"{puzzle_set.puzzle_identifiers[new[0]]}, which no training puzzle has ({count(len(new), 'puzzle')} "
                "in all); its embedding is never trained"
            )


def _check_names(path: Path, num_identifiers: int, findings: Findings) -> None:
    """Check identifiers.json, which holds the name of each identifier."""
    file = path / "identifiers.json"
    if not file.exists():
        findings.warnings.append(f"{file}: is missing, so nobody can tell which puzzle an identifier means")
        return
    with collecting(findings.errors):
        names = read_names(path)
        if len(names) != num_identifiers:
            findings.errors.append(
                f"{file}: holds {len(names):,} names, but num_puzzle_identifiers is {num_identifiers:,}; rebuild the "
                "dataset"
            )
        for name, times in Counter(names).most_common(1):
            if times > 1:
                findings.warnings.append(f"{file}: names {name!r} twice; puzzles are told apart by it")


def _scan_set(
    split: Split,
    set_name: str,
    task: BoardTask | None,
    findings: Findings,
    answers: Answers,
    advance: Callable[[int], object],
) -> np.ndarray:
    """Check every example of a set once, and add those without puzzle identifiers to `answers`.

    Returns:
        A key for each example, (N,) uint64. Equal examples have equal keys. Two different examples
        of an ARC dataset have equal keys in one of ten million datasets.
    """
    metadata, inputs, labels = split.metadata, split.sets[set_name].inputs, split.sets[set_name].labels
    are_anonymous = metadata.num_puzzle_identifiers == 1
    identity = bytes if task is None else task.identity
    dtype = np.uint8 if metadata.vocab_size <= 256 else np.int32
    unlabelled, same = ("labels", "has no label that counts"), ("labels", "is the same as its input")
    rows: defaultdict[Fault, list[np.ndarray]] = defaultdict(list)  # the rows with each fault
    keys = []
    num_rows = max(1, CHUNK_BYTES // (inputs.nbytes // len(inputs)))
    for start in range(0, len(inputs), num_rows):
        inputs_NS, labels_NS = (np.asarray(array[start : start + num_rows]) for array in (inputs, labels))
        labelled_NS = np.ones(labels_NS.shape, bool)
        if metadata.ignore_label_id is not None:
            labelled_NS = labels_NS != metadata.ignore_label_id
            labels_NS = np.where(labelled_NS, labels_NS, 0)
        found = {unlabelled: (~labelled_NS).all(axis=1), same: (inputs_NS == labels_NS).all(axis=1)}
        if task is not None:
            found |= task.faults(inputs_NS, labels_NS, labelled_NS)
        for fault, rows_N in found.items():
            if rows_N.any():
                rows[fault].append(start + np.flatnonzero(rows_N))
        inputs_NS, labels_NS = (tokens_NS.astype(dtype, copy=False) for tokens_NS in (inputs_NS, labels_NS))
        # Without identifiers the input is the whole question, so the label does not matter.
        parts = [map(identity, row_texts(part)) for part in ((inputs_NS,) if are_anonymous else (inputs_NS, labels_NS))]
        keys.append(digests(map(b"\xff".join, zip(*parts, strict=True))))
        for first in range(0, len(inputs_NS) if are_anonymous else 0, _ANSWERS_AT_ONCE):
            few = slice(first, first + _ANSWERS_AT_ONCE)
            answers.add(inputs_NS[few], labels_NS[few], labelled_NS[few])
        for array in (inputs, labels):
            let_go(array)
        advance(len(inputs_NS))

    for fault, of_chunks in rows.items():
        numbers = np.concatenate(of_chunks)
        others = f" ({len(numbers):,} rows of {len(inputs):,} in all)" if len(numbers) > 1 else ""
        is_harmless = split.path.name == "test" if fault == unlabelled else fault == same and len(numbers) < len(inputs)
        (findings.warnings if is_harmless else findings.errors).append(
            f"{split.file(set_name, fault[0])}: row {numbers[0]} {fault[1]}{others}"
        )
    return np.concatenate(keys)


def _place(splits: Sequence[Split], example: int) -> str:
    split, set_name, row = locate(splits, example)
    return f"row {row} of {split.file(set_name, 'inputs')}"


def _check_answers(splits: Sequence[Split], answers: Answers, findings: Findings) -> None:
    """Find questions that have two answers. The input is the whole question."""

    def example(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        split, set_name, row = locate(splits, number)
        input_S, labels_S = split.sets[set_name].inputs[row], split.sets[set_name].labels[row]
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
    """Warn of test examples that occur twice with one identifier."""
    identifiers_N = np.concatenate(
        [np.repeat(each.puzzle_identifiers, np.diff(each.puzzle_indices)) for each in test.sets.values()]
    )
    order_N = np.lexsort((identifiers_N, keys_N))  # stable, so duplicates stay in the order of rows
    same_N = (np.diff(keys_N[order_N]) == 0) & (np.diff(identifiers_N[order_N]) == 0)
    if same_N.any():
        at = int(same_N.argmax())
        findings.warnings.append(
            f"{_place([test], order_N[at + 1])} repeats {_place([test], order_N[at])} "
            f"({int(same_N.sum()):,} of {len(keys_N):,} test examples are such copies); each counts in the accuracy"
        )


# ---- the command line ----------------------------------------------------------------------------


def _program(argv: list[str] | None) -> tuple[str, int]:
    parser = Parser(
        "python -m dataset.validate",
        "Check a dataset of any task. Each line of the report names a fault and its place.",
        CHECKS,
        path_keys=("data_path",),
    )
    tasks = joined([task.plural for task in TASKS], "or")
    parser.add_argument("path", type=typed_path, metavar="PATH", help="the folder that holds train and test")
    parser.add_argument("--allow-leak", action="store_true", help="only warn if test examples are in the training data")
    parser.add_argument("--any-task", action="store_true", help=f"leave out the checks of {tasks}")
    args = parser.parse_args(argv)
    findings, summary = validate(args.path, allow_leak=args.allow_leak, any_task=args.any_task)
    lines = [f"error: {line}" for line in findings.errors] + [f"warning: {line}" for line in findings.warnings]
    num_errors, num_warnings = len(findings.errors), len(findings.warnings)
    verdict = f"{'wrong' if num_errors else 'ok'}: {count(num_errors, 'error')}, {count(num_warnings, 'warning')}"
    return "\n".join([*lines, summary, verdict]), 1 if findings.errors else 0


def main(argv: list[str] | None = None) -> int:
    """Run the program. Return 0, 1 for a wrong dataset, 2 after a mistake, or 130 after Ctrl-C."""
    return run_command(_program, argv, interrupted="interrupted; not all was checked")


if __name__ == "__main__":
    sys.exit(main())
