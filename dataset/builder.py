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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from dataset.schema import DatasetMetadata, SplitName, check_contents, open_split
from dataset.tasks.base import joined
from utils.arguments import Parser, check_exclusive, given, typed_path
from utils.errors import UserError
from utils.files import remove_replaced
from utils.terminal import tell
from utils.text import one_line

SPLITS: tuple[SplitName, ...] = ("train", "test")
# The index arrays are int32, as published.
MAX_ROWS = 2**31 - 1

# --------------------------------------------------------------------------------------------------
# Command line


def add_sources(parser: Parser, unit: str, default_repo: str, generate_help: str) -> "argparse._ArgumentGroup":
    """Add the options that say where puzzles come from.

    Args:
        unit: the word for the puzzles, such as "mazes".

    Returns:
        The group for options that apply to puzzles from files.
    """
    add = parser.add_argument_group(f"where the {unit} come from (one of these)").add_argument
    add("--source-repo", metavar="REPO", help=f"data set on the Hugging Face Hub (default: {default_repo})")
    add("--source-dir", type=typed_path, metavar="DIR", help="folder with train and test, as .csv or .csv.gz")
    add("--generate", type=int, metavar="N", help=generate_help)
    of_files = parser.add_argument_group("with --source-repo or --source-dir")
    of_files.add_argument(
        "--subsample-size", type=int, metavar="N", help=f"draw N of the training {unit} (default: all)"
    )
    return of_files


def check_sources(settings: object, unit: str, *, of_files: Sequence[str], of_generate: Sequence[str]) -> None:
    """Raise UserError if two sources were given, or an option that does not apply to the source."""
    check_exclusive(settings, "source_repo", "source_dir", "generate")
    if given(settings, "generate"):
        for option in given(settings, *of_files):
            raise UserError(f"{option} is for {unit} from files, not for --generate; leave it out")
    else:
        for option in given(settings, *of_generate):
            raise UserError(f"{option} needs --generate; add --generate N or leave {option} out")


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
    unit_scale = total is None or total >= 10_000
    if sys.stderr.isatty():
        return tqdm(desc=what, total=total, unit=f" {unit}", unit_scale=unit_scale)
    return tqdm(
        desc=what,
        total=total,
        unit=f" {unit}",
        unit_scale=unit_scale,
        delay=_LINE_EVERY_S,
        mininterval=_LINE_EVERY_S,
        bar_format="{desc}: {n_fmt}" + (" of {total_fmt}" if total is not None else "") + "{unit} after {elapsed}",
        file=_Lines(),
    )


# --------------------------------------------------------------------------------------------------
# Puzzles and their solutions


def collect(what: str, unit: str, num: int, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Return the puzzles and the solutions that a generator yields, (num, S) each.

    A progress bar shows how many are done.

    Args:
        what, unit: the words of the progress bar, such as "generating" and "mazes".
        num: the number of puzzles that the generator yields.
        pairs: the generator.
    """
    collected = []
    with progress(what, num, unit) as bar:
        for pair in pairs:
            collected.append(pair)
            bar.update()
    return tuple(np.stack(column) for column in zip(*collected, strict=True))


def subsample(size: int, num: int, rng: np.random.Generator, file: Path, what: str) -> np.ndarray:
    """Draw `size` of the numbers 0 to num - 1, none of them twice.

    Args:
        file, what: the file of the puzzles and the word for them, for the message.

    Raises:
        UserError: There are fewer than `size` numbers.
    """
    if size > num:
        raise UserError(f"{file}: --subsample-size is {size}, but there are {num} {what}; lower it")
    return rng.choice(num, size, replace=False)


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
    if not target.is_dir():
        raise UserError(f"{shown} is a file; choose another --output-dir")
    ours = {*SPLITS, "identifiers.json", "fingerprint.json", "test_puzzles.json", "tokenizer.json"}
    others = sorted(entry.name for entry in target.iterdir() if entry.name not in ours)
    if others:
        raise UserError(f"{shown} holds {others[0]}, which is no part of a dataset; choose another --output-dir")
    is_dataset = any((target / split / "dataset.json").is_file() for split in SPLITS)
    if any(target.iterdir()) and not is_dataset:
        raise UserError(f"{shown} is neither empty nor a dataset; choose another --output-dir")


def what_was_left_out(folder: Path, left_out: Mapping[str, Sequence[Path]]) -> str:
    """Return a phrase with the number and the first of the files that were not read, by reason."""
    return joined([f"{len(files):,} {why} ({files[0].relative_to(folder)})" for why, files in left_out.items()])


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

    def __init__(
        self, folder: Path, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int, set_name: str = "all"
    ) -> None:
        self._folder, self._set_name = folder, set_name
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
        file = ArrayFile(self._folder / f"{self._set_name}__{array}.npy", np.dtype(dtype), *row_shape)
        self._files.callback(file.close)
        return file

    def add(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, sizes_P: np.ndarray, identifiers_P: np.ndarray) -> None:
        """Append the examples of P puzzles.

        The first sizes_P[0] rows are the examples of the first puzzle, and so on.

        Raises:
            UserError: There are more rows than a dataset can index.
        """
        assert inputs_NS.dtype == labels_NS.dtype == np.uint8 and inputs_NS.shape == labels_NS.shape
        assert len(sizes_P) == len(identifiers_P) and sizes_P.sum() == len(inputs_NS)
        if self._num_rows + len(inputs_NS) > MAX_ROWS:
            raise UserError(f"{self._folder.name}: a dataset indexes {MAX_ROWS:,} examples at most; augment less")
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
            sets=[self._set_name],
        )
        (self._folder / "dataset.json").write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")


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
