"""Shared parts of the programs that build datasets: options, progress, and the format on disk.

A dataset is written as a stream. It is read back and checked, and only then appears under its name.
"""
# N = examples, S = tokens of an example, P = puzzles, G = groups

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from tqdm import tqdm

from dataset.schema import DatasetMetadata, SplitName, check_contents, open_split
from dataset.tasks.base import joined
from utils.arguments import Parser, check_at_least, check_exclusive, given, typed_path
from utils.errors import UserError
from utils.files import remove_replaced
from utils.terminal import tell
from utils.text import one_line

SPLITS: tuple[SplitName, ...] = ("train", "test")
# The index arrays are int32, as published.
MAX_ROWS = 2**31 - 1

# --------------------------------------------------------------------------------------------------
# Command line


def builder_parser(program: str, description: str, examples: str, output_dir: str, seed: int = 0) -> Parser:
    """Return a parser with the options that all builders have: --output-dir and --seed.

    Args:
        output_dir, seed: the defaults.
    """
    parser = Parser(f"{program}.py", description=description, epilog=examples)
    add = parser.add_argument
    add("--output-dir", type=typed_path, metavar="DIR", default=Path(output_dir), help="default: %(default)s")
    add("--seed", type=int, metavar="N", default=seed, help="seed of all random choices (default: %(default)s)")
    return parser


Group = argparse._ArgumentGroup


def add_sources(parser: Parser, unit: str, default_repo: str, generate_help: str) -> tuple[Group, Group]:
    """Add the options that say where puzzles come from.

    Args:
        unit: the word for the puzzles, such as "mazes".

    Returns:
        The groups for options that apply to puzzles from files, and to generated puzzles.
    """
    add = parser.add_argument_group(f"where the {unit} come from (one of these)").add_argument
    add("--source-repo", metavar="REPO", help=f"data set on the Hugging Face Hub (default: {default_repo})")
    add("--source-dir", type=typed_path, metavar="DIR", help="folder with train and test, as .csv or .csv.gz")
    add("--generate", type=int, metavar="N", help=generate_help)
    of_files = parser.add_argument_group("with --source-repo or --source-dir")
    of_files.add_argument(
        "--subsample-size", type=int, metavar="N", help=f"draw N of the training {unit} (default: all)"
    )
    of_generate = parser.add_argument_group("with --generate")
    add_generate_test(of_generate, unit)
    return of_files, of_generate


def add_generate_test(group: argparse._ActionsContainer, unit: str) -> None:
    text = f"make M test {unit} (default: a tenth of N, at least 1)"
    group.add_argument("--generate-test", type=int, metavar="M", help=text)


Settings = TypeVar("Settings", bound=Any)
"""The options of a builder, a dataclass."""


def check_sources(
    settings: Settings, unit: str, default_repo: str, *, of_files: Sequence[str] = (), of_generate: Sequence[str] = ()
) -> Settings:
    """Check the options of `add_sources`, and fill in the defaults that depend on other options.

    Args:
        of_files, of_generate: further options that apply to one kind of source.

    Raises:
        UserError: Two sources were given, an option that does not apply to the source, or a number
            that is too small.
    """
    check_at_least(settings, seed=0, generate=1, generate_test=1, subsample_size=1)
    check_exclusive(settings, "source_repo", "source_dir", "generate")
    if settings.generate is not None:
        for option in given(settings, "subsample_size", *of_files):
            raise UserError(f"{option} is for {unit} from files, not for --generate; leave it out")
        return dataclasses.replace(settings, generate_test=settings.generate_test or max(1, settings.generate // 10))
    for option in given(settings, "generate_test", *of_generate):
        raise UserError(f"{option} needs --generate; add --generate N or leave {option} out")
    if settings.source_dir is None:
        return dataclasses.replace(settings, source_repo=settings.source_repo or default_repo)
    return settings


# Files and pipes get a line so often. A stage that takes less time prints none.
_LINE_EVERY_S = 10.0


class _Lines:
    """A stream that prints each update of tqdm on a line of its own, for a file or a pipe.

    The lines are lost if their reader has left.
    """

    def write(self, text: str) -> None:
        if line := text.strip():
            tell(line)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def progress(what: str, total: int | None, unit: str) -> "tqdm[NoReturn]":
    """Return a progress bar. On a file or pipe it prints plain lines, and none in a short time."""
    options: dict[str, Any] = {"desc": what, "total": total, "unit": f" {unit}"}
    if not sys.stderr.isatty():
        of_total = " of {total_fmt}" if total is not None else ""
        options |= {"file": _Lines(), "bar_format": f"{{desc}}: {{n_fmt}}{of_total}{{unit}} after {{elapsed}}"}
        options |= {"delay": _LINE_EVERY_S, "mininterval": _LINE_EVERY_S}
    return tqdm(**options, unit_scale=total is None or total >= 10_000)


# --------------------------------------------------------------------------------------------------
# Puzzles and their solutions


class Boards(NamedTuple):
    """Puzzles and their solutions, (N, S) uint8 each."""

    questions_NS: np.ndarray
    answers_NS: np.ndarray


def generated(
    unit: str, settings: Any, pairs: Iterable[tuple[np.ndarray, np.ndarray]], shuffle: np.random.Generator | None = None
) -> dict[SplitName, Boards]:
    """Return the puzzles that a generator yields, divided into the splits.

    Args:
        settings: `generate` and `generate_test` are the numbers of puzzles.
        pairs: the generator of puzzles with their solutions.
        shuffle: random numbers that order the puzzles before they are divided.
    """
    num = settings.generate + settings.generate_test
    collected = []
    with progress("generating", num, unit) as bar:
        for pair in pairs:
            collected.append(pair)
            bar.update()
    arrays = [np.stack(column) for column in zip(*collected, strict=True)]
    order_N = np.arange(num) if shuffle is None else shuffle.permutation(num)
    parts = zip(SPLITS, np.split(order_N, [settings.generate]), strict=True)
    return {split: Boards(*(array_NS[rows] for array_NS in arrays)) for split, rows in parts}


# --------------------------------------------------------------------------------------------------
# The folder


@contextlib.contextmanager
def new_dataset(output_dir: Path) -> Iterator[Path]:
    """Provide a folder beside `output_dir` in which a dataset is built.

    The folder takes the place of `output_dir` if the block ends without an error, and is removed
    otherwise. It is locked while the build runs. So the rest of a killed build can be told from a
    running build.

    Raises:
        UserError: `output_dir` holds something else than a dataset, another process builds the same
            dataset, or an OSError occurred.
    """
    try:
        with _new_folder(output_dir) as folder:
            yield folder
    except OSError as error:
        reason = f"cannot build {output_dir} ({one_line(error)})"
        raise UserError(f"{reason}; check space and permissions there, or choose another --output-dir") from None


@contextlib.contextmanager
def _new_folder(output_dir: Path) -> Iterator[Path]:
    target = output_dir.resolve()
    _check_replaceable(target, output_dir)
    building = target.with_name(f".{target.name}.building")
    replaced = target.with_name(f".{target.name}.replaced")
    building.mkdir(parents=True, exist_ok=True)
    lock = os.open(building, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{output_dir} is being built by another process; wait for it or stop it") from None
        except OSError as error:
            # Some cluster file systems have no locks. Users must then not run two builds at once.
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        try:
            _settle_replaced(replaced, target)
            if replaced.exists():
                raise UserError(f"{replaced} is left of an earlier build; remove it, or choose another --output-dir")
            for stale in building.iterdir():
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
            yield building
            if target.exists():
                target.rename(replaced)
            building.rename(target)
        except BaseException:  # KeyboardInterrupt too
            shutil.rmtree(building, ignore_errors=True)
            raise
        finally:
            _settle_replaced(replaced, target)
    finally:
        os.close(lock)


def _settle_replaced(replaced: Path, target: Path) -> None:
    """Remove the old dataset; if no new dataset has taken its place, put it back instead."""
    if replaced.exists():
        if target.exists():
            remove_replaced(replaced)
        else:
            replaced.rename(target)


def _check_replaceable(target: Path, shown: Path) -> None:
    """Raise UserError if `target` holds anything but a dataset: a typo must not delete other files.

    Args:
        shown: the path as the user typed it, for the message.
    """
    if not target.exists():
        return
    ours = {*SPLITS, "identifiers.json", "fingerprint.json", "test_puzzles.json", "tokenizer.json"}
    others = sorted(entry.name for entry in target.iterdir() if entry.name not in ours) if target.is_dir() else [""]
    if others:
        raise UserError(f"{shown / others[0]} is no part of a dataset; choose another --output-dir")
    if any(target.iterdir()) and not any((target / split / "dataset.json").is_file() for split in SPLITS):
        raise UserError(f"{shown} is neither empty nor a dataset; choose another --output-dir")


def what_was_left_out(folder: Path, left_out: Mapping[str, Sequence[Path]]) -> str:
    """Return a phrase with the number and the first of the files that were not read, by reason."""
    reasons = [f"{len(files):,} {why} ({files[0].relative_to(folder)})" for why, files in left_out.items() if files]
    return f"; left out: {joined(reasons)}" if reasons else ""


# --------------------------------------------------------------------------------------------------
# The contents


class ArrayFile:
    """A .npy file to which rows are appended. At the end their number is written into the header.

    The rows are written without a memory map, because on a full disk a map kills the process
    without an error.
    """

    def __init__(self, file: Path, dtype: np.dtype[Any], *row_shape: int) -> None:
        self._dtype, self._row_shape = dtype, row_shape
        self._stream = file.open("wb")
        self._num_rows = 0
        self._write_header()

    def append(self, rows: np.ndarray) -> None:
        assert rows.shape[1:] == self._row_shape
        self._stream.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self._num_rows += len(rows)

    def finish(self) -> None:
        self._stream.seek(0)
        # The header keeps its length, because numpy pads headers for any length of the first axis.
        self._write_header()

    def close(self) -> None:
        self._stream.close()

    def _write_header(self) -> None:
        shape = (self._num_rows, *self._row_shape)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._stream, header)


class SplitWriter:
    """Writes one split with one set into a new folder, as a stream. Only counts stay in memory.

        sizes = {"seq_len": 81, "vocab_size": 11, "num_puzzle_identifiers": 1}
        with SplitWriter(folder / "train", **sizes) as writer:
            writer.add(inputs_NS, labels_NS, sizes_P, identifiers_P)
            writer.end_groups(sizes_G)

    dataset.json is written last, if the block ends without an error. Without it the folder is not a
    split. Padding, ignored labels and the blank identifier are 0. There must be at least one group,
    and each puzzle must be in a group.
    """

    def __init__(self, folder: Path, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int) -> None:
        self._folder = folder
        self._seq_len, self._vocab_size, self._num_identifiers = seq_len, vocab_size, num_puzzle_identifiers
        self._num_rows = self._num_puzzles = self._num_grouped = self._num_groups = 0

    def __enter__(self) -> "SplitWriter":
        self._folder.mkdir()
        self._files = contextlib.ExitStack()
        self._inputs = self._open("inputs", np.uint8, self._seq_len)
        self._labels = self._open("labels", np.uint8, self._seq_len)
        self._identifiers = self._open("puzzle_identifiers", np.int32)
        self._puzzle_indices = self._open("puzzle_indices", np.int32)
        self._group_indices = self._open("group_indices", np.int32)
        for indices in (self._puzzle_indices, self._group_indices):
            indices.append(np.zeros(1, np.int32))
        return self

    def _open(self, array: str, dtype: type[np.generic], *row_shape: int) -> ArrayFile:
        file = ArrayFile(self._folder / f"all__{array}.npy", np.dtype(dtype), *row_shape)
        self._files.callback(file.close)
        return file

    def add(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, sizes_P: np.ndarray, identifiers_P: np.ndarray) -> None:
        """Append the examples of P puzzles. The first puzzle has the first sizes_P[0] rows."""
        assert inputs_NS.dtype == labels_NS.dtype == np.uint8 and inputs_NS.shape == labels_NS.shape
        assert len(sizes_P) == len(identifiers_P) and sizes_P.sum() == len(inputs_NS)
        self._inputs.append(inputs_NS)
        self._labels.append(labels_NS)
        self._identifiers.append(identifiers_P)
        self._puzzle_indices.append(self._num_rows + np.cumsum(sizes_P, dtype=np.int64))
        self._num_rows += len(inputs_NS)
        self._num_puzzles += len(sizes_P)

    def end_groups(self, sizes_G: np.ndarray) -> None:
        """Put the puzzles that are not in a group yet into groups of these sizes, in order."""
        self._group_indices.append(self._num_grouped + np.cumsum(sizes_G, dtype=np.int64))
        self._num_grouped += int(sizes_G.sum())
        self._num_groups += len(sizes_G)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        arrays = (self._inputs, self._labels, self._identifiers, self._puzzle_indices, self._group_indices)
        with self._files:
            if error is not None:
                return
            assert self._num_grouped == self._num_puzzles
            for array in arrays:
                array.finish()
        metadata = DatasetMetadata(
            pad_id=0,
            ignore_label_id=0,
            blank_identifier_id=0,
            vocab_size=self._vocab_size,
            seq_len=self._seq_len,
            num_puzzle_identifiers=self._num_identifiers,
            total_groups=self._num_groups,
            mean_puzzle_examples=self._num_rows / self._num_puzzles,
            sets=["all"],
        )
        (self._folder / "dataset.json").write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")


def require_index(num_rows: int, lower: str) -> None:
    """Raise UserError if a dataset can't index so many examples. `lower` is the option to lower."""
    if num_rows > MAX_ROWS:
        raise UserError(f"{num_rows:,} examples are more than a dataset can index, {MAX_ROWS:,}; lower {lower}")


def write_boards(
    folder: Path,
    chunks: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    groups: int,
    group_size: int,
    seq_len: int,
    vocab_size: int,
) -> None:
    """Write a split of puzzles without identifiers, each of which has one example.

    Args:
        folder: the folder of the split, which must not exist yet.
        chunks: inputs and labels (N, S) of the puzzles, group after group.
        groups, group_size: the number of groups, and of the puzzles in each.
    """
    require_index(groups * group_size, "--num-aug")
    with (
        SplitWriter(folder, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=1) as writer,
        progress(folder.name, groups * group_size, "boards") as bar,
    ):
        for inputs_NS, labels_NS in chunks:
            ones_N = np.ones(len(inputs_NS), np.int32)
            writer.add(inputs_NS, labels_NS, ones_N, identifiers_P=0 * ones_N)
            bar.update(len(inputs_NS))
        writer.end_groups(np.full(groups, group_size))


def build_dataset(program: str, settings: Any, write: Callable[[Path], tuple[Iterable[str], Sequence[str]]]) -> str:
    """Build a dataset of puzzles in the place of `settings.output_dir`, and return a summary.

    Args:
        program: the name of the builder, for the record.
        write: writes both splits into a folder, and returns the names of the puzzle identifiers
            and lines for the summary.

    Raises:
        UserError: The input is bad, or the folder can't be written. No new dataset is left then.
    """
    started = time.perf_counter()
    with new_dataset(settings.output_dir) as folder:
        names, lines = write(folder)
        fingerprints = finish(folder, names, record_of(program, settings))
    return summary(settings.output_dir, started, lines, fingerprints)


def finish(folder: Path, identifiers: Iterable[str], builder: dict[str, object]) -> dict[SplitName, str]:
    """Check both splits, and write identifiers.json and fingerprint.json.

    Args:
        identifiers: the names of the puzzle identifiers, from number 0. They are read one by one,
            because there can be a million.
        builder: the program's name and its settings, for fingerprint.json.

    Returns:
        The fingerprints of both splits.

    Raises:
        UserError: A split does not agree with its metadata.
    """
    # This is the code with which training reads the dataset.
    fingerprints = {split: check_contents(open_split(folder, split)) for split in SPLITS}
    with (folder / "identifiers.json").open("w", encoding="utf-8") as stream:
        stream.write("[")
        for number, name in enumerate(identifiers):
            stream.write((", " if number else "") + json.dumps(name))
        stream.write("]\n")
    write_fingerprints(folder, fingerprints, builder)
    return fingerprints


def write_fingerprints(folder: Path, fingerprints: dict[SplitName, str], builder: dict[str, object]) -> None:
    """Write fingerprint.json.

    Args:
        builder: the program's name and its settings.
    """
    record = json.dumps({**fingerprints, "builder": builder}, indent=2, default=str)
    (folder / "fingerprint.json").write_text(record + "\n", encoding="utf-8")


def record_of(program: str, settings: Any) -> dict[str, object]:
    """Return the record of a build for fingerprint.json: the program and its settings.

    Args:
        settings: a dataclass. Its output_dir is left out.
    """
    record = {"program": program, **dataclasses.asdict(settings)}
    del record["output_dir"]
    return record


def summary(output_dir: Path, started: float, lines: Sequence[str], fingerprints: dict[SplitName, str]) -> str:
    """Return the text that a builder prints at the end.

    Args:
        output_dir: the finished dataset.
        started: time.perf_counter() at the beginning of the build.
        lines: lines that describe the contents of the dataset.
        fingerprints: the fingerprints from `finish`.
    """
    return "\n".join(
        [
            f"built {output_dir} in {time.perf_counter() - started:.1f} s ({size_mb(output_dir):,.1f} MB)",
            *(f"  {line}" for line in lines),
            *(f"  sha256 {fingerprints[split]} ({split})" for split in SPLITS),
        ]
    )


def size_mb(folder: Path) -> float:
    """Return the size of all files in a folder, in millions of bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
