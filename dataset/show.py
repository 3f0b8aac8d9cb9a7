"""Show a dataset: counts, fingerprints, how it was built, and some examples with their labels."""
# N = examples, S = tokens of an example, P = puzzles, G = groups

import re
import shutil
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset.builder import SPLITS
from dataset.schema import PuzzleSet, Split, SplitName, check_contents, locate, open_split, read_names
from dataset.tasks import TASKS, task_of_shape
from dataset.tasks.base import BoardTask, joined
from dataset.tasks.tokens import TokensTask
from dataset.text.schema import check_text_contents, has_split, kind_of_data, open_text_split
from dataset.text.show import describe_text, show_samples
from utils.arguments import Parser, check_at_least, typed_path
from utils.errors import UserError
from utils.json_files import read_json
from utils.shell import run_command

# The fingerprint of a larger dataset is only computed on request, because it takes long.
MAX_HASHED_BYTES = 10**9
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

_BOARDS = textwrap.fill(
    "A label is shown beside its input, or below it where the terminal is too narrow. "
    f"{joined([task.plural for task in TASKS])} are recognised by their shapes and shown as boards. Anything else is "
    "shown as token numbers. A label that does not count is shown as padding. "
    "A dataset of text is shown as text: instructions, and responses behind an arrow.",
    width=99,
)
EXAMPLES = f"""
examples:
  python -m dataset.show data/sudoku-6x6
  python -m dataset.show data/sudoku-6x6 --split test --row 17 --num 1
  python -m dataset.show data/arc-aug-1000 --seed 3 --color | less -R

{_BOARDS}
"""


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    path: Path
    num: int
    split: SplitName
    seed: int
    row: int | None  # None: rows are drawn at random
    fingerprint: bool
    color: bool


def parse_settings(argv: list[str] | None) -> Settings:
    """Parse the command line.

    Raises:
        UserError: An option is unknown, malformed or in conflict with another.
    """
    parser = Parser(
        "python -m dataset.show",
        "Show a dataset: counts, fingerprints, how it was built, and some examples.",
        EXAMPLES,
        path_keys=("data_path",),
    )
    add = parser.add_argument
    add("path", type=typed_path, metavar="PATH", help="the folder that holds train and test")
    add("--num", type=int, metavar="N", default=3, help="examples to show (default: %(default)s; 0: none)")
    add("--split", choices=SPLITS, default="train", help="split of the examples (default: %(default)s)")
    add("--seed", type=int, metavar="N", default=0, help="seed of the random examples (default: %(default)s)")
    add("--row", type=int, metavar="R", help="show N rows from row R on instead, counted from 0 over all sets")
    add("--fingerprint", action="store_true", help="compute fingerprints even if recorded or if the data is over 1 GB")
    add("--color", action="store_true", help="use ANSI colours even if the output is not a terminal")
    settings = Settings(**vars(parser.parse_args(argv)))
    check_at_least(settings, num=0, seed=0, row=0)
    return settings


def describe(settings: Settings) -> str:
    """Return the whole page about a dataset.

    Raises:
        UserError: The dataset is missing, damaged, or changed since it was built.
    """
    if kind_of_data(settings.path) == "text":
        return _describe_text(settings)
    # The split to show is opened in any case: that raises an error that names what is missing.
    splits: dict[SplitName, Split] = {
        name: open_split(settings.path, name)
        for name in SPLITS
        if name == settings.split or (settings.path / name).exists()
    }
    shown = splits[settings.split]
    metadata = shown.metadata
    task = task_of_shape(*metadata.shape)
    record = _record(settings.path)
    labels = "all labels count" if metadata.ignore_label_id is None else f"label {metadata.ignore_label_id} is ignored"
    lines = [
        str(settings.path),
        f"  task     {task.name if task else 'unknown'}: {metadata.seq_len} tokens of {metadata.vocab_size} kinds, "
        f"padding {metadata.pad_id}, {labels}",
        *_counts(splits),
        *(f"  sha256   {line}" for line in _fingerprints(settings, splits, record)),
        *_builder(record.get("builder")),
    ]
    names: list[str] = []
    if settings.num:
        with suppress(FileNotFoundError):
            names = read_names(settings.path)
        for row in _rows(settings, sum(shown.num_examples(None).values()), shown.path):
            lines += ["", *_example(shown, row, task, names, settings.color or sys.stdout.isatty())]
    return "\n".join(lines)


def _describe_text(settings: Settings) -> str:
    record = _record(settings.path)
    lines = [str(settings.path), *describe_text(settings.path)]
    for name in SPLITS:
        if settings.fingerprint and has_split(settings.path, name):
            lines.append(f"  sha256   {name:<5} {check_text_contents(open_text_split(settings.path, name))} (computed)")
        elif name in record:
            lines.append(f"  sha256   {name:<5} {record[name]} (recorded)")
    lines += _builder(record.get("builder"))
    if settings.num:
        text = open_text_split(settings.path, settings.split)
        lines += show_samples(text, settings.split, _rows(settings, len(text.epochs[0]), text.path))
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# The summary


def _counts(splits: dict[SplitName, Split]) -> list[str]:
    table: list[tuple[str, ...]] = [("", "groups", "puzzles", "examples", "examples in a puzzle", "identifiers")]
    for name, split in splits.items():
        for set_name, puzzle_set in split.sets.items():
            sizes_P = np.diff(puzzle_set.puzzle_indices)
            used = len(np.unique(puzzle_set.puzzle_identifiers))
            numbers = [len(puzzle_set.group_indices) - 1, len(sizes_P), len(puzzle_set.inputs)]
            table.append(
                (
                    f"{name}/{set_name}",
                    *(f"{number:,}" for number in numbers),
                    f"{sizes_P.min()} to {sizes_P.max()}",
                    f"{used:,} of {split.metadata.num_puzzle_identifiers:,}",
                )
            )
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return ["  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]


def _fingerprints(settings: Settings, splits: dict[SplitName, Split], record: dict[str, Any]) -> list[str]:
    num_bytes = sum(s.inputs.nbytes + s.labels.nbytes for split in splits.values() for s in split.sets.values())
    lines = []
    for name, split in splits.items():
        if name in record and not settings.fingerprint:
            lines.append(f"{name:<5} {record[name]} (recorded)")
        elif num_bytes < MAX_HASHED_BYTES or settings.fingerprint:
            lines.append(f"{name:<5} {check_contents(split)} (computed)")
        else:
            lines.append(f"{name:<5} not recorded; --fingerprint computes it from {num_bytes / 1e9:.1f} GB")
    return lines


def _builder(settings: object) -> list[str]:
    """Return the line about the builder and its settings, from fingerprint.json."""
    if not isinstance(settings, dict):
        return []
    given = [f"{key}={value}" for key, value in settings.items() if key != "program" and value is not None]
    return [" ".join([f"  built by {settings.get('program')}", *given])]


def _record(path: Path) -> dict[str, Any]:
    """Return fingerprint.json, or an empty record if there is none."""
    file = path / "fingerprint.json"
    try:
        record = read_json(file, "python -m dataset.validate checks the rest")
    except FileNotFoundError:
        return {}
    if not isinstance(record, dict):
        raise UserError(f"{file}: is no dict; rebuild the dataset")
    return record


# --------------------------------------------------------------------------------------------------
# Examples


def _rows(settings: Settings, num_rows: int, path: Path) -> list[int]:
    """Return the numbers of the rows to show. The rows of all sets are numbered consecutively."""
    if settings.row is None:
        rng = np.random.default_rng(settings.seed)
        return sorted(rng.choice(num_rows, min(settings.num, num_rows), replace=False).tolist())
    if settings.row >= num_rows:
        raise UserError(f"--row is {settings.row}, but {path} has rows 0 to {num_rows - 1}; give one of them")
    return list(range(settings.row, min(settings.row + settings.num, num_rows)))


def _example(split: Split, row: int, task: BoardTask | None, names: list[str], color: bool) -> list[str]:
    _, set_name, row = locate([split], row)
    puzzle_set = split.sets[set_name]
    inputs_S, labels_S, labelled_S = _tokens(split, puzzle_set, row)
    task = task or TokensTask(*split.metadata.shape)
    label = task.show(labels_S, question_S=inputs_S, color=color) if labelled_S.any() else "(no label counts)"
    boards = (task.show(inputs_S, color=color).splitlines(), label.splitlines())

    puzzle = int(np.searchsorted(puzzle_set.puzzle_indices, row, side="right")) - 1
    group = int(np.searchsorted(puzzle_set.group_indices, puzzle, side="right")) - 1
    identifier = int(puzzle_set.puzzle_identifiers[puzzle])
    name = f" {names[identifier]}" if identifier < len(names) else ""
    title = (
        f"{split.path.name}/{puzzle_set.name} row {row}: group {group}, puzzle {puzzle}, identifier {identifier}{name}"
    )
    return [title, *_side_by_side(*boards)]


def _tokens(split: Split, puzzle_set: PuzzleSet, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an input, its label with padding in place of ignored tokens, and which labels count.

    Returns:
        (S,) each; the last one is bool.
    """
    metadata = split.metadata
    inputs_S, labels_S = (array[row].astype(np.int64) for array in (puzzle_set.inputs, puzzle_set.labels))
    labelled_S = np.ones(len(labels_S), bool)
    if metadata.ignore_label_id is not None:
        labelled_S = labels_S != metadata.ignore_label_id
    labels_S = np.where(labelled_S, labels_S, metadata.pad_id)
    for tokens_S in (inputs_S, labels_S):
        if tokens_S.min() < 0 or tokens_S.max() >= metadata.vocab_size:
            raise UserError(
                f"{split.path}: row {row} of {puzzle_set.name} has tokens outside of 0 to {metadata.vocab_size - 1}; "
                "python -m dataset.validate says where"
            )
    return inputs_S, labels_S, labelled_S


def _side_by_side(left: list[str], right: list[str]) -> list[str]:
    """Join two boards side by side, or one below the other if the terminal is too narrow."""
    width = max(map(_width, left))
    if width + 3 + max(map(_width, right)) > shutil.get_terminal_size().columns:
        return [line.rstrip() for line in (*left, "", *right)]
    return [f"{a}{' ' * (width - _width(a))}   {b}".rstrip() for a, b in zip_longest(left, right, fillvalue="")]


def _width(line: str) -> int:
    return len(_ANSI.sub("", line))


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status.

    The status is 0, 2 after a mistake of the user or for a damaged dataset, or 130 after Ctrl-C.
    """
    return run_command(lambda arguments: describe(parse_settings(arguments)), argv)


if __name__ == "__main__":
    sys.exit(main())
