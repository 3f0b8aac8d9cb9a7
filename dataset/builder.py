"""The base of all builders: options, the format on disk, and the program around them.

A dataset is written as a stream. It is read back and checked, and only then appears under its name.
"""
# N = examples, S = tokens of an example, P = puzzles, G = groups

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, get_args, get_origin, get_type_hints

import numpy as np
from tqdm import tqdm

from dataset.schema import DatasetDescription, DatasetMetadata, SplitName, check_contents, open_split
from dataset.text.schema import check_text_contents, open_text_split
from records.lock import take_lock
from utils.arguments import Parser, check_at_least, check_exclusive, typed_path
from utils.errors import UserError
from utils.files import remove_replaced
from utils.shell import run_command
from utils.terminal import tell
from utils.text import one_line

SPLITS: tuple[SplitName, ...] = ("train", "test")
# The index arrays are int32, as published.
MAX_ROWS = 2**31 - 1
# Everything in the folder of a dataset.
_PARTS = {*SPLITS, "identifiers.json", "fingerprint.json", "test_puzzles.json", "tokenizer.json"}

# --------------------------------------------------------------------------------------------------
# The program

_REPLACES = "An old dataset in the output folder is replaced once the new dataset is whole.\n"
# In a group of options with this in its title the options exclude one another.
ONE_OF_THESE = "(one of these"
Typed = argparse.Namespace
Written = tuple[Iterable[str] | None, Sequence[str]]
"""The names of the puzzle identifiers, None for text; and lines of the summary."""


def option(
    metavar: str | None, text: str, *, default: object = None, group: str = "", at_least: int | None = None, **more: Any
) -> Any:
    """Return a field of a builder's settings, which is an option of its command line.

    `text` is its help, `group` the title above it, and `more` goes to `add_argument`.
    """
    more |= {"help": text, "default": default} | ({"metavar": metavar} if metavar else {})
    return dataclasses.field(metadata={"group": group, "at_least": at_least, "argument": more})


def seed_option(default: int = 0) -> Any:
    return option("N", "seed of all random choices (default: %(default)s)", default=default, at_least=0)


OUTPUT_DIR = option("DIR", "default: %(default)s")


def options_of(settings: type[Any], group: str) -> list[str]:
    return [field.name for field in dataclasses.fields(settings) if field.metadata["group"] == group]


@dataclass(frozen=True)
class Builder:
    """A program that builds datasets.

    The first line of `about` describes it. The fields of `settings` are options (`option`).
    `complete` checks what was typed, and fills in defaults that depend on other options. `write`
    writes both splits into a folder. `less_memory` says what needs less memory.
    """

    program: str
    about: str
    examples: str
    output_dir: str
    settings: type[Any]
    complete: Callable[[Typed], None]
    write: Callable[[Path, Any], Written]
    less_memory: str = "fewer puzzles need less memory: lower --generate, --subsample-size or --num-aug"

    def main(self, argv: list[str] | None = None) -> int:
        """Run the program. Return 0, 2 after a user's mistake, or 130 after Ctrl-C."""
        return run_command(self._build, argv, less_memory=self.less_memory)

    def parse(self, argv: list[str] | None) -> Any:
        """Return the settings. Raise UserError if an option is malformed or in conflict."""
        parser = Parser(f"{self.program}.py", self.about.splitlines()[0], self.examples + _REPLACES)
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        types_of, fields = get_type_hints(self.settings), dataclasses.fields(self.settings)
        for field in fields:
            group, kind, argument = field.metadata["group"], types_of[field.name], dict(field.metadata["argument"])
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            if isinstance(kind, types.UnionType):
                (kind,) = set(get_args(kind)) - {type(None)}
            if get_origin(kind) is list:
                (kind,) = get_args(kind)
                argument["nargs"] = "+"
            argument |= {"action": "store_true"} if kind is bool else {"type": typed_path if kind is Path else kind}
            groups[group].add_argument(f"--{field.name.replace('_', '-')}", **argument)
        parser.set_defaults(output_dir=self.output_dir)
        typed = parser.parse_args(argv)
        least = {field.name: field.metadata["at_least"] for field in fields}
        check_at_least(typed, **{name: limit for name, limit in least.items() if limit is not None})
        for group in groups:
            if ONE_OF_THESE in group:
                check_exclusive(typed, *options_of(self.settings, group))
        self.complete(typed)
        return self.settings(**vars(typed))

    def _build(self, argv: list[str] | None) -> str:
        settings = self.parse(argv)
        started = time.perf_counter()
        record = {"program": self.program, **dataclasses.asdict(settings)}
        output_dir = record.pop("output_dir")
        with new_dataset(output_dir) as folder:
            names, lines = self.write(folder, settings)
            fingerprints = finish(folder, names, record)
        first = f"built {output_dir} in {time.perf_counter() - started:.1f} s ({size_mb(output_dir):,.1f} MB)"
        return "\n  ".join([first, *lines, *(f"sha256 {fingerprints[split]} ({split})" for split in SPLITS)])


class _Lines:
    """Prints each state of a progress bar on a line of its own."""

    def write(self, text: str) -> None:
        if line := text.strip():
            tell(line)


def progress(what: str, total: int | None, unit: str) -> "tqdm[NoReturn]":
    """Return a progress bar. Files and pipes get a plain line every ten seconds instead."""
    options: dict[str, Any] = {}
    if not sys.stderr.isatty():
        line = "{desc}: {n_fmt} of {total_fmt}{unit} after {elapsed}"
        options = {"file": _Lines(), "bar_format": line, "delay": 10, "mininterval": 10}
    many = total is None or total >= 10_000
    return tqdm(desc=what, total=total, unit=f" {unit}", unit_scale=many, **options)


# --------------------------------------------------------------------------------------------------
# The folder


@contextlib.contextmanager
def new_dataset(output_dir: Path) -> Iterator[Path]:
    """Provide a folder beside `output_dir` in which a dataset is built.

    The folder takes the place of `output_dir` if the block ends without an error, and is removed
    otherwise. It is locked while the build runs.

    Raises:
        UserError: `output_dir` holds something else than a dataset, another process builds the same
            dataset, or an OSError occurred.
    """
    target = output_dir.resolve()
    building, replaced = (target.with_name(f".{target.name}.{state}") for state in ("building", "replaced"))
    try:
        _check_replaceable(target, output_dir)
        building.mkdir(parents=True, exist_ok=True)
        lock = os.open(building, os.O_RDONLY)
        try:
            if take_lock(lock, fcntl.LOCK_EX) is False:
                raise UserError(f"{output_dir} is being built by another process; wait for it or stop it")
            _settle_replaced(replaced, target)
            for stale in building.iterdir():
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
            try:
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
    except OSError as error:
        reason = f"cannot build {output_dir} ({one_line(error)})"
        raise UserError(f"{reason}; check space and permissions there, or choose another --output-dir") from None


def _settle_replaced(replaced: Path, target: Path) -> None:
    """Remove the old dataset; if no new dataset has taken its place, put it back instead."""
    if replaced.exists():
        if target.exists():
            remove_replaced(replaced)
        else:
            replaced.rename(target)


def _check_replaceable(target: Path, shown: Path) -> None:
    """Refuse a target that is no dataset, because a typo must not delete other files."""
    if not target.exists():
        return
    parts = _PARTS if any((target / split / "dataset.json").is_file() for split in SPLITS) else set()
    others = sorted({entry.name for entry in target.iterdir()} - parts) if target.is_dir() else [""]
    if others:
        raise UserError(f"{shown / others[0]} is no part of a dataset; choose another --output-dir")


def size_mb(folder: Path) -> float:
    """Return the size of all files in a folder, in millions of bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


# --------------------------------------------------------------------------------------------------
# The contents


class ArrayFile:
    """A .npy file to which rows are appended. Their number is written into the header last."""

    def __init__(self, file: Path, dtype: np.dtype[Any], *row_shape: int) -> None:
        self._dtype, self._row_shape = dtype, row_shape
        # No memory map: on a full disk a map kills the process without an error.
        self.stream = file.open("wb")
        self._num_rows = 0
        self.write_header()

    def append(self, rows: np.ndarray) -> None:
        assert rows.shape[1:] == self._row_shape
        self.stream.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self._num_rows += len(rows)

    def write_header(self) -> None:
        # The header keeps its length, because numpy pads headers for any length of the first axis.
        self.stream.seek(0)
        shape = (self._num_rows, *self._row_shape)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.stream, header)


class FolderWriter(ABC):
    """Writes a split into a new folder, as a stream. Only counts stay in memory.

    dataset.json is written last, if the block ends without an error. Without it the folder is not a
    split.
    """

    def __init__(self, folder: Path, **arrays: tuple[Any, ...]) -> None:
        """Take the type and the shape of a row of each array, by the name of its file."""
        self._folder, self._described = folder, arrays

    def __enter__(self) -> Self:
        self._folder.mkdir()
        self._arrays = {
            name: ArrayFile(self._folder / f"{name}.npy", np.dtype(dtype), *row_shape)
            for name, (dtype, *row_shape) in self._described.items()
        }
        return self

    @abstractmethod
    def _finish(self) -> DatasetDescription:
        """Write what is left, and return the contents of dataset.json."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as files:
            for array in self._arrays.values():
                files.enter_context(array.stream)
            if error is not None:
                return
            metadata = self._finish()
            for array in self._arrays.values():
                array.write_header()
        (self._folder / "dataset.json").write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")


class SplitWriter(FolderWriter):
    """Writes a split of puzzles with one set.

        sizes = {"seq_len": 81, "vocab_size": 11, "num_puzzle_identifiers": 1}
        with SplitWriter(folder / "train", **sizes) as writer:
            writer.add(inputs_NS, labels_NS, sizes_P, identifiers_P)
            writer.end_groups(sizes_G)

    Padding, ignored labels and the blank identifier are 0. There must be at least one group, and
    each puzzle must be in a group.
    """

    def __init__(self, folder: Path, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int) -> None:
        tokens, index = (np.uint8, seq_len), (np.int32,)
        indices = {f"all__{name}": index for name in ("puzzle_identifiers", "puzzle_indices", "group_indices")}
        super().__init__(folder, all__inputs=tokens, all__labels=tokens, **indices)
        self._seq_len, self._vocab_size = seq_len, vocab_size
        self.num_puzzle_identifiers = num_puzzle_identifiers
        self.num_examples = self.num_puzzles = self.num_groups = self._num_grouped = 0

    def __enter__(self) -> Self:
        super().__enter__()
        for name in ("puzzle", "group"):
            self._arrays[f"all__{name}_indices"].append(np.zeros(1))
        return self

    def add(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, sizes_P: np.ndarray, identifiers_P: np.ndarray) -> None:
        """Append the examples of P puzzles. The first puzzle has the first sizes_P[0] rows."""
        assert inputs_NS.dtype == labels_NS.dtype == np.uint8 and inputs_NS.shape == labels_NS.shape
        assert len(sizes_P) == len(identifiers_P) and sizes_P.sum() == len(inputs_NS)
        self._arrays["all__inputs"].append(inputs_NS)
        self._arrays["all__labels"].append(labels_NS)
        self._arrays["all__puzzle_identifiers"].append(identifiers_P)
        self._arrays["all__puzzle_indices"].append(self.num_examples + np.cumsum(sizes_P, dtype=np.int64))
        self.num_examples += len(inputs_NS)
        self.num_puzzles += len(sizes_P)

    def end_groups(self, sizes_G: np.ndarray) -> None:
        """Put the puzzles that are not in a group yet into groups of these sizes, in order."""
        self._arrays["all__group_indices"].append(self._num_grouped + np.cumsum(sizes_G, dtype=np.int64))
        self._num_grouped += int(sizes_G.sum())
        self.num_groups += len(sizes_G)

    def _finish(self) -> DatasetDescription:
        assert self._num_grouped == self.num_puzzles
        return DatasetMetadata(
            pad_id=0,
            ignore_label_id=0,
            blank_identifier_id=0,
            vocab_size=self._vocab_size,
            seq_len=self._seq_len,
            num_puzzle_identifiers=self.num_puzzle_identifiers,
            total_groups=self.num_groups,
            mean_puzzle_examples=self.num_examples / self.num_puzzles,
            sets=["all"],
        )


def require_index(num_rows: int) -> None:
    """Raise UserError if a dataset can't index so many examples."""
    if num_rows > MAX_ROWS:
        raise UserError(f"{num_rows:,} examples are more than a dataset can index, {MAX_ROWS:,}; lower --num-aug")


def finish(folder: Path, identifiers: Iterable[str] | None, builder: dict[str, Any]) -> dict[SplitName, str]:
    """Check both splits, write identifiers.json and fingerprint.json, and return the fingerprints.

    `identifiers` are the names of the puzzle identifiers, from number 0; None: the dataset is text.
    `builder` is the program's name and its settings, for fingerprint.json.
    """
    # This is the code with which training reads the dataset.
    if identifiers is None:
        fingerprints = {split: check_text_contents(open_text_split(folder, split)) for split in SPLITS}
    else:
        fingerprints = {split: check_contents(open_split(folder, split)) for split in SPLITS}
        with (folder / "identifiers.json").open("w", encoding="utf-8") as stream:
            stream.write("[")
            for number, name in enumerate(identifiers):
                stream.write((", " if number else "") + json.dumps(name))
            stream.write("]\n")
    record = json.dumps({**fingerprints, "builder": builder}, indent=2, default=str)
    (folder / "fingerprint.json").write_text(record + "\n", encoding="utf-8")
    return fingerprints
