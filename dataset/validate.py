"""Check a dataset of any task, and list everything that is wrong, with its place.

Examples are read in chunks. Only the index arrays and the keys of examples grow with the data. By
the keys, test examples are found in the training split, and two answers to one question.
"""
# N = examples (of a set, or of a chunk of it), S = tokens of an example

import math
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset.answers import Answers, digests, row_texts
from dataset.builder import SPLITS, progress
from dataset.schema import (
    CHUNK_BYTES,
    Findings,
    Split,
    SplitName,
    check_contents,
    let_go,
    locate,
    open_split,
    read_names,
)
from dataset.tasks import TASKS, task_of_shape
from dataset.tasks.base import BoardTask, Fault, count, joined
from dataset.text.schema import kind_of_data
from dataset.text.validate import validate_text
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


def validate(path: Path, *, allow_leak: bool = False, any_task: bool = False) -> tuple[Findings, str]:
    """Check a dataset in three stages: its files, its values, its examples.

    A stage lists all that is wrong. The next stage checks the splits without errors, and leaks,
    duplicates and second answers are looked for if no split has any.

    Args:
        allow_leak: report leaks as warnings.
        any_task: leave out the checks of known tasks.

    Returns:
        The findings, and some lines that describe the dataset.

    Raises:
        UserError: There is no dataset at `path`.
    """
    findings = Findings()
    most_leaks = 1.0 if allow_leak else MAX_LEAK
    if kind_of_data(path) == "text":
        return findings, validate_text(path, most_leaks, findings)
    described = [name for name in SPLITS if (path / name / "dataset.json").is_file()]
    if not described:
        open_split(path, "train")  # raises an error that says what is there
    if "train" not in described:
        findings.errors.append(f"{path}: has no train/dataset.json; rebuild the dataset")
    if "test" not in described:
        findings.warnings.append(f"{path}: has no test split, so nothing can be evaluated on it")
    splits: dict[SplitName, Split] = {}
    for name in described:
        with findings.collecting():
            splits[name] = open_split(path, name)
            _check_groups(splits[name], findings)
    if len(splits) == 2:
        _compare(splits["train"], splits["test"], findings)
    for split in list(splits.values())[:1]:
        _check_names(path, split.metadata.num_puzzle_identifiers, findings)

    lines: list[str] = []
    keys: dict[SplitName, np.ndarray] = {}
    answers: Answers | None = None
    num_examples = sum(sum(split.num_examples(None).values()) for split in splits.values())
    with progress("checking", num_examples, "examples") as bar:
        for name, split in splits.items():
            task = None if any_task else task_of_shape(*split.metadata.shape)
            lines.append(_description(split, task))
            with findings.collecting():
                lines.append(f"       sha256 {check_contents(split)}")
                answers = answers or Answers(task)
                parts = [_scan_set(split, set_name, task, findings, answers, bar.update) for set_name in split.sets]
                keys[name] = np.concatenate(parts)
    if answers is None or (len(keys) < len(SPLITS) and findings.errors):
        lines.append("leaks, duplicates and second answers were not looked for; correct the errors first")
        return findings, "\n".join(lines)
    _check_answers(list(splits.values()), answers, findings)
    if "test" in splits:
        _check_duplicates(splits["test"], keys["test"], findings)
        if "train" in splits:
            _check_leaks(splits["test"], keys["test"], splits["train"], keys["train"], most_leaks, findings)
    return findings, "\n".join(lines)


def _sizes(split: Split) -> tuple[int, int]:
    """Return the numbers of examples and of puzzles."""
    return sum(split.num_examples(None).values()), sum(len(each.puzzle_identifiers) for each in split.sets.values())


def _description(split: Split, task: BoardTask | None) -> str:
    metadata = split.metadata
    num_examples, num_puzzles = _sizes(split)
    sizes = (
        f"{count(num_examples, 'example')}, {count(num_puzzles, 'puzzle')}, {count(metadata.total_groups, 'group')}, "
        f"{count(metadata.num_puzzle_identifiers, 'identifier')}"
    )
    known = f" ({task.title})" if task is not None else ""
    return f"{split.path.name:<6} {sizes}, {metadata.seq_len} tokens of {metadata.vocab_size} kinds{known}"


# ---- files, groups, names ------------------------------------------------------------------------


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
    with findings.collecting():
        names = read_names(path)
        if len(names) != num_identifiers:
            findings.errors.append(
                f"{file}: holds {len(names):,} names, but num_puzzle_identifiers is {num_identifiers:,}; rebuild the "
                "dataset"
            )
        for name, times in Counter(names).most_common(1):
            if times > 1:
                findings.warnings.append(f"{file}: names {name!r} twice; puzzles are told apart by it")


# ---- examples ------------------------------------------------------------------------------------


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


# ---- duplicates and leaks ------------------------------------------------------------------------


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
    """Warn of test examples that occur twice.

    The same example with another identifier is not a duplicate, because each augmentation has its
    own vote.
    """
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


def _check_leaks(
    test: Split, test_keys_N: np.ndarray, train: Split, train_keys_N: np.ndarray, most: float, findings: Findings
) -> None:
    leaked_N = np.isin(test_keys_N, train_keys_N)
    if leaked_N.any():
        in_test, share = int(leaked_N.argmax()), float(leaked_N.mean())
        in_train = int((train_keys_N == test_keys_N[in_test]).argmax())
        line = (
            f"{_place([test], in_test)} is in the training data too, {_place([train], in_train)} "
            f"({int(leaked_N.sum()):,} of {len(leaked_N):,} test examples are, {share:.2%})"
        )
        findings.add_leak(line, share > most)


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
    """Run the program and return its exit status.

    The status is 0 for a correct dataset, 1 for a wrong dataset, 2 after a mistake of the user, and
    130 after Ctrl-C.
    """
    return run_command(_program, argv, interrupted="interrupted; not all was checked")


if __name__ == "__main__":
    sys.exit(main())
