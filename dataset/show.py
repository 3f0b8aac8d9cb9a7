"""Show a dataset: counts, fingerprints, how it was built, and some examples with their labels."""
# N = examples, S = tokens of an example, P = puzzles

import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset.builder import SPLITS
from dataset.schema import Split, SplitName, check_contents, locate, open_split, read_names, read_record
from dataset.tasks import TASKS, task_of_shape
from dataset.tasks.base import joined
from dataset.tasks.tokens import TokensTask
from dataset.text.schema import BYTES, UNKNOWN, TextSplit, check_text_contents, has_split, kind_of_data, open_text_split
from dataset.text.tokenizer import open_tokenizer
from utils.arguments import Parser, check_at_least, typed_path
from utils.errors import UserError
from utils.shell import run_command

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# A sample of text is cut to so many characters.
_MOST_CHARACTERS = 600

EXAMPLES = f"""
examples:
  python -m dataset.show data/sudoku-6x6
  python -m dataset.show data/sudoku-6x6 --split test --row 17 --num 1
  python -m dataset.show data/arc-aug-1000 --seed 3 --color | less -R

{joined([task.plural for task in TASKS])} are recognised by their shapes and shown as boards.
Other puzzles are shown as token numbers, and text as text. Labels that do not count are padding.
"""


def describe(argv: list[str] | None) -> str:
    """Return the whole page about a dataset."""
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
    add("--fingerprint", action="store_true", help="read everything and compute the fingerprints")
    add("--color", action="store_true", help="use ANSI colours even if the output is not a terminal")
    typed = parser.parse_args(argv)
    check_at_least(typed, num=0, seed=0, row=0)
    path: Path = typed.path
    # The split to show is opened in any case: that raises an error that names what is missing.
    names = [name for name in SPLITS if name == typed.split or has_split(path, name)]
    computed: dict[str, str] = {}
    if kind_of_data(path) == "text":
        texts = {name: open_text_split(path, name) for name in names}
        about, examples = _about_text(texts), _text_samples(typed, texts[typed.split])
        if typed.fingerprint:
            computed = {name: check_text_contents(split) for name, split in texts.items()}
    else:
        splits = {name: open_split(path, name) for name in names}
        about, examples = _about(splits, typed.split), _examples(typed, splits[typed.split])
        if typed.fingerprint:
            computed = {name: check_contents(split) for name, split in splits.items()}

    record = read_record(path)
    lines = [str(path), *about]
    for name in names:
        known = f"{record[name]} (recorded)" if name in record else "not recorded; --fingerprint computes it"
        lines.append(f"  sha256   {name:<5} {f'{computed[name]} (computed)' if computed else known}")
    if isinstance(builder := record.get("builder"), dict):
        given = [f"{key}={value}" for key, value in builder.items() if key != "program" and value is not None]
        lines.append(" ".join([f"  built by {builder.get('program')}", *given]))
    return "\n".join([*lines, *examples])


# ---- text ----------------------------------------------------------------------------------------


def _about_text(splits: Mapping[SplitName, TextSplit]) -> list[str]:
    metadata = next(iter(splits.values())).metadata
    kinds = metadata.tokenizer if metadata.tokenizer in (BYTES, UNKNOWN) else f"tokenizer {metadata.tokenizer[:12]}"
    lines = [f"  text     {metadata.vocab_size:,} tokens ({kinds}), max_len {metadata.max_len:,}"]
    for name, split in splits.items():
        lines.append(f"  {name:<8} {split}")
        tasks, numbers_N = split.metadata.tasks, split.epochs[0].task
        if numbers_N is not None and len(tasks) > 1:
            counts = np.bincount(numbers_N, minlength=len(tasks)).tolist()
            lines.append(f"  {'':<8} {', '.join(f'{task} {num:,}' for task, num in zip(tasks, counts, strict=False))}")
    return lines


def _text_samples(typed: Namespace, split: TextSplit) -> list[str]:
    """Return samples as text if the tokenizer is known, and else as numbers."""
    if not typed.num:
        return []
    tokenizer = None if split.metadata.tokenizer == UNKNOWN else open_tokenizer(split)
    numbers = _rows(typed, len(split.epochs[0]), split.path)
    lines = []
    for number, place in zip(numbers, split.epochs[0].take(np.array(numbers)).tolist(), strict=True):
        start, prefix_len, response_start, response_len, task = place
        parts = [split.tokens[start : start + prefix_len], split.tokens[response_start : response_start + response_len]]
        if len(parts[0]) != prefix_len or len(parts[1]) != response_len or not 0 <= task < len(split.metadata.tasks):
            raise UserError(f"{split.path}: sample {number} is wrong; python -m dataset.validate says where")
        title = f"{typed.split} sample {number}: {_cut(split.metadata.tasks[task])}"
        decode = tokenizer.decode if tokenizer is not None else lambda tokens: " ".join(map(str, tokens))
        instruction, response = (decode(part.tolist()) for part in parts)
        shown = [_cut(instruction), "-> " + _cut(response)] if prefix_len > 1 else [_cut(instruction + response)]
        lines += ["", f"{title}, {prefix_len} + {response_len} tokens", *shown]
    return lines


def _cut(text: str) -> str:
    """Return the beginning of a text, with ? in place of control characters but line breaks."""
    cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in cut)


# ---- puzzles -------------------------------------------------------------------------------------


def _about(splits: Mapping[SplitName, Split], shown: SplitName) -> list[str]:
    """Return the task, and a table of the sets."""
    metadata = splits[shown].metadata
    task = task_of_shape(*metadata.shape)
    labels = "all labels count" if metadata.ignore_label_id is None else f"label {metadata.ignore_label_id} is ignored"
    table: list[tuple[str, ...]] = [("", "groups", "puzzles", "examples", "examples in a puzzle", "identifiers")]
    for name, split in splits.items():
        for set_name, puzzle_set in split.sets.items():
            sizes_P = np.diff(puzzle_set.puzzle_indices)
            used = len(np.unique(puzzle_set.puzzle_identifiers))
            numbers = [len(puzzle_set.group_indices) - 1, len(sizes_P), len(puzzle_set.inputs)]
            in_puzzle = f"{sizes_P.min()} to {sizes_P.max()}"
            identifiers = f"{used:,} of {split.metadata.num_puzzle_identifiers:,}"
            table.append((f"{name}/{set_name}", *(f"{number:,}" for number in numbers), in_puzzle, identifiers))
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return [
        f"  task     {task.name if task else 'unknown'}: {metadata.seq_len} tokens of {metadata.vocab_size} kinds, "
        f"padding {metadata.pad_id}, {labels}",
        *("  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table),
    ]


def _rows(typed: Namespace, num_rows: int, path: Path) -> list[int]:
    """Return the numbers of the rows to show. The rows of all sets are numbered consecutively."""
    if typed.row is None:
        rng = np.random.default_rng(typed.seed)
        return sorted(rng.choice(num_rows, min(typed.num, num_rows), replace=False).tolist())
    if typed.row >= num_rows:
        raise UserError(f"--row is {typed.row}, but {path} has rows 0 to {num_rows - 1}; give one of them")
    return list(range(typed.row, min(typed.row + typed.num, num_rows)))


def _examples(typed: Namespace, split: Split) -> list[str]:
    metadata = split.metadata
    task = task_of_shape(*metadata.shape) or TokensTask(*metadata.shape)
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = read_names(typed.path)
    color = typed.color or sys.stdout.isatty()
    lines: list[str] = []
    numbers = _rows(typed, sum(split.num_examples(None).values()), split.path) if typed.num else []
    for number in numbers:
        _, set_name, row = locate([split], number)
        puzzle_set = split.sets[set_name]
        puzzle = int(np.searchsorted(puzzle_set.puzzle_indices, row, side="right")) - 1
        group = int(np.searchsorted(puzzle_set.group_indices, puzzle, side="right")) - 1
        identifier = int(puzzle_set.puzzle_identifiers[puzzle])
        name = f" {names[identifier]}" if identifier < len(names) else ""
        lines += [
            "",
            f"{split.path.name}/{set_name} row {row}: group {group}, puzzle {puzzle}, identifier {identifier}{name}",
        ]
        inputs_S, labels_S = (array[row].astype(np.int64) for array in (puzzle_set.inputs, puzzle_set.labels))
        labelled_S = labels_S != metadata.ignore_label_id
        labels_S = np.where(labelled_S, labels_S, metadata.pad_id)
        for tokens_S in (inputs_S, labels_S):
            if tokens_S.min() < 0 or tokens_S.max() >= metadata.vocab_size:
                raise UserError(
                    f"{split.path}: row {row} of {set_name} has tokens outside of 0 to {metadata.vocab_size - 1}; "
                    "python -m dataset.validate says where"
                )
        label = task.show(labels_S, question_S=inputs_S, color=color) if labelled_S.any() else "(no label counts)"
        left, right = task.show(inputs_S, color=color).splitlines(), label.splitlines()
        # The codes of colours take no width on the terminal.
        width, other_width = (max(len(_ANSI.sub("", line)) for line in board) for board in (left, right))
        if width + 3 + other_width > shutil.get_terminal_size().columns:
            lines += [line.rstrip() for line in (*left, "", *right)]
            continue
        padded = [line + " " * (width - len(_ANSI.sub("", line))) for line in left]
        lines += [f"{a}   {b}".rstrip() for a, b in zip_longest(padded, right, fillvalue=" " * width)]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the program. Return 0, 2 after a mistake of the user, or 130 after Ctrl-C."""
    return run_command(describe, argv)


if __name__ == "__main__":
    sys.exit(main())
