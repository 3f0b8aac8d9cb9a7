"""Open and check datasets in the published format, with memory maps. No file can run code.

A split, <data path>/{train,test}, is dataset.json and, for each of its sets, <set>__<array>.npy. A
set consists of groups (a puzzle and its augmentations), a group of puzzles, and a puzzle of
examples. Index arrays say where each of them begins.
"""
# N = examples, S = sequence length, P = puzzles, G = groups

import difflib
import hashlib
import json
import mmap
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dataset.canvas import Corner, common_side, shape_of, side_of
from records.checkpoint.format import is_run
from utils.config import Float, Int
from utils.errors import UserError
from utils.files import file_errors, plain
from utils.json_files import read_json
from utils.text import for_shell, one_line

SplitName = Literal["train", "test"]

# The errors that numpy raises for a damaged header. It parses headers as Python literals, and deep
# nesting alone can exhaust the parser.
_DAMAGED_ARRAY = (
    *(OSError, ValueError, TypeError, OverflowError, EOFError, SyntaxError, tokenize.TokenError),
    *(MemoryError, RecursionError),
)

REBUILD = "rebuild the dataset"
# How many bytes of an array are read at a time, so that memory does not grow with the dataset.
CHUNK_BYTES = 4 << 20
# The arrays of a set, with their numbers of axes.
_ARRAYS = {"inputs": 2, "labels": 2, "puzzle_identifiers": 1, "puzzle_indices": 1, "group_indices": 1}


class DatasetError(UserError):
    """A dataset has faults, a line for each. The message is the first line."""

    def __init__(self, *faults: str) -> None:
        super().__init__(faults[0])
        self.faults = faults


@contextmanager
def collecting(faults: list[str]) -> Iterator[None]:
    """Note a UserError inside, with all its faults, and go on behind the block."""
    try:
        yield
    except DatasetError as error:
        faults += error.faults
    except UserError as error:
        faults.append(one_line(error))


class DatasetDescription(BaseModel):
    """What a file that describes a split says."""

    # Other trainers add keys of their own (TRM: total_puzzles).
    model_config = ConfigDict(extra="ignore", frozen=True)

    # The value of the key `kind`. Without that key the kind asked for is assumed.
    kind_of_data: ClassVar[str]


Described = TypeVar("Described", bound=DatasetDescription)


class DatasetMetadata(DatasetDescription):
    """The contents of dataset.json of a split of puzzles."""

    kind_of_data: ClassVar[str] = "puzzles"

    pad_id: Annotated[Int, Field(ge=0)]
    # Labels of this value are neither learnt nor counted; null: all labels count.
    ignore_label_id: Annotated[Int, Field(ge=-(2**31), lt=2**31)] | None
    blank_identifier_id: Annotated[Int, Field(ge=0)]
    vocab_size: Annotated[Int, Field(ge=1, le=2**20)]
    seq_len: Annotated[Int, Field(ge=1, le=2**20)]
    num_puzzle_identifiers: Annotated[Int, Field(ge=1, le=2**31)]
    total_groups: Annotated[Int, Field(ge=1)]
    mean_puzzle_examples: Float
    # Names of sets are parts of file names, so they must not lead to another folder.
    sets: Annotated[list[Annotated[str, Field(pattern=r"^[\w.-]+$")]], Field(min_length=1)]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of tokens and of kinds of tokens of an example, which tell its task."""
        return self.seq_len, self.vocab_size


@dataclass(frozen=True)
class MappedFile:
    """The size, identity and time of a file when it was mapped.

    A memory map doesn't tell when the file is deleted, replaced or changed. If the file became
    shorter, a read behind its end kills the process (SIGBUS).
    """

    path: Path
    num_bytes: int
    inode: int
    mtime_ns: int

    @staticmethod
    def of(path: Path) -> "MappedFile":
        now = path.stat()
        return MappedFile(path, now.st_size, now.st_ino, now.st_mtime_ns)

    def require_unchanged(self) -> None:
        """Raise UserError if the file is not as it was. Takes some microseconds."""
        try:
            now = MappedFile.of(self.path)
        except OSError as error:
            what = f"can't be found any more ({error.strerror})"
        else:
            if now == self:
                return
            what = f"was written to or replaced ({now.num_bytes} bytes, not {self.num_bytes})"
        raise UserError(f"{self.path} {what}: it was changed while the run reads it; restore it, then resume")


@contextmanager
def unchanged(files: Sequence[MappedFile]) -> Iterator[None]:
    """Raise UserError unless mapped files are unchanged before and after they are read inside."""
    for file in files:
        file.require_unchanged()
    try:
        yield
    finally:
        for file in files:
            file.require_unchanged()


@dataclass(frozen=True)
class PuzzleSet:
    """The arrays of one set. Puzzle p has the examples puzzle_indices[p]:puzzle_indices[p + 1]."""

    name: str
    inputs: np.ndarray  # (N, S), memory-mapped, of any integer type
    labels: np.ndarray  # (N, S), memory-mapped, of any integer type
    puzzle_identifiers: np.ndarray  # (P,) int64
    puzzle_indices: np.ndarray  # (P + 1,) int64
    group_indices: np.ndarray  # (G + 1,) int64: where the puzzles of each group begin
    files: tuple[MappedFile, ...] = ()  # those of inputs and labels; none if these are in memory
    # Where the boards of inputs and labels lie on the canvas of a merged split; None: they fill it.
    corner: Corner | None = None


@dataclass(frozen=True)
class Split:
    """One split of a dataset, or several that are used as one (`merge_splits`)."""

    # The folder, <data path>/{train,test}; of a merged split the folders of all parts, joined.
    path: Path
    metadata: DatasetMetadata
    sets: dict[str, PuzzleSet]
    parts: tuple["Split", ...] = ()  # the merged splits; none if this is a single split

    def shape_of(self, set_name: str) -> tuple[int, int]:
        """Return the number of tokens and of kinds of tokens of a set's boards by themselves."""
        corner = self.sets[set_name].corner
        return corner.shape if corner is not None else self.metadata.shape

    def file(self, set_name: str, array: str) -> Path:
        assert not self.parts, "the files are those of the parts"
        return self.path / f"{set_name}__{array}.npy"

    def num_examples(self, most: int | None) -> dict[str, int]:
        """Return how many examples of each set an evaluation of at most `most` of them has."""
        sizes = {name: len(puzzle_set.inputs) for name, puzzle_set in self.sets.items()}
        return {name: size if most is None else min(size, most) for name, size in sizes.items()}


def locate(splits: Sequence[Split], example: int) -> tuple[Split, str, int]:
    """Return the split, the set and the row of an example, by its number through all sets."""
    sets = [(split, set_name) for split in splits for set_name in split.sets]
    ends = np.cumsum([len(split.sets[set_name].inputs) for split, set_name in sets])
    number = int(np.searchsorted(ends, example, side="right"))
    return *sets[number], example - int(ends[number - 1] if number else 0)


# ---- opening a split -----------------------------------------------------------------------------


@file_errors()
def open_split(data_path: str | Path, split: SplitName) -> Split:
    """Open a split, and check its files, types, shapes and indices without reading the examples."""
    folder = Path(data_path) / split
    metadata = read_metadata(folder)
    sets: dict[str, PuzzleSet] = {}
    faults: list[str] = []
    for name in metadata.sets:
        with collecting(faults):
            sets[name] = _open_set(folder, name, metadata.seq_len)
    if faults:
        raise DatasetError(*faults)
    file = folder / "dataset.json"
    num_groups = sum(len(puzzle_set.group_indices) - 1 for puzzle_set in sets.values())
    if len(sets) < len(metadata.sets):
        raise UserError(f"{file}: sets names a set twice: {metadata.sets}; name each once")
    if num_groups != metadata.total_groups:
        raise UserError(f"{file}: total_groups is {metadata.total_groups}, but the sets hold {num_groups}; {REBUILD}")
    return Split(folder, metadata, sets)


def read_metadata(folder: Path) -> DatasetMetadata:
    """Read and check dataset.json in the folder of a split."""
    file = folder / "dataset.json"
    try:
        metadata = read_described(file, DatasetMetadata)
    except FileNotFoundError:
        raise UserError(f"no dataset at {folder.parent}: {_why_none(folder)}") from None
    # The published trainers fill their last batch with these two values, so they must be in range.
    for key, limit_key in (("pad_id", "vocab_size"), ("blank_identifier_id", "num_puzzle_identifiers")):
        value, limit = getattr(metadata, key), getattr(metadata, limit_key)
        if value >= limit:
            raise UserError(f"{file}: {key} is {value}, but {limit_key} is {limit}; correct it or rebuild the dataset")
    return metadata


def _why_none(folder: Path) -> str:
    """Say what is in the place of a split without dataset.json, and what to do."""
    path = folder.parent
    if is_run(path):
        return f"it is a run; resume={path} goes on with it, and checkpoint={path} evaluates it"
    if (path / "dataset.json").is_file():
        return f"it is one split of a dataset; give the folder above it, {path.parent}"
    below = sorted(file.parents[1] for file in path.glob("*/train/dataset.json"))
    beside = [file.parents[1] for near in (path.parent, Path("data")) for file in near.glob("*/train/dataset.json")]
    alike = difflib.get_close_matches(path.name, [each.name for each in beside], n=1)
    near = below or [each for each in beside if each.name in alike]
    to = for_shell([str(path)])
    build = f"build one: python dataset/build_sudoku_dataset.py --output-dir {to}, or with the builder of another task"
    return f"{folder / 'dataset.json'} is missing; {f'give {near[0]}, or ' if near else ''}{build}"


def read_described(file: Path, kind: type[Described]) -> Described:
    """Read the JSON file that describes a split. FileNotFoundError: there is none."""
    values = read_json(file, REBUILD)
    if isinstance(values, dict) and values.get("kind", kind.kind_of_data) != kind.kind_of_data:
        raise UserError(
            f"{file}: holds {values['kind']!r}, not {kind.kind_of_data}; give a dataset of {kind.kind_of_data} instead"
        )
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        place, what = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise UserError(f"{file}: {place or 'the file'}: {what}; correct it or rebuild the dataset") from None


def read_names(data_path: Path) -> list[str]:
    """Return the names in identifiers.json. FileNotFoundError: there is no such file."""
    file = data_path / "identifiers.json"
    names = read_json(file, REBUILD)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file}: is no list of names; {REBUILD}")
    return names


def _open_set(folder: Path, name: str, seq_len: int) -> PuzzleSet:
    files = [folder / f"{name}__{array}.npy" for array in _ARRAYS]
    arrays: list[np.ndarray] = []
    faults: list[str] = []
    for file, num_axes in zip(files, _ARRAYS.values(), strict=True):
        with collecting(faults):
            arrays.append(open_array(file, num_axes))
    if faults:
        raise DatasetError(*faults)
    inputs, labels = arrays[:2]
    # As int64, because differences of unsigned integers wrap around.
    identifiers, puzzle_indices, group_indices = (array.astype(np.int64) for array in arrays[2:])
    num_rows, num_puzzles = len(inputs), len(puzzle_indices) - 1
    wrong = (
        inputs.shape[1] != seq_len and f"rows have {inputs.shape[1]} tokens, but seq_len is {seq_len}",
        labels.shape != inputs.shape and f"has shape {labels.shape}, but inputs {inputs.shape}",
        len(identifiers) != num_puzzles and f"{len(identifiers)} entries, but puzzle_indices has {num_puzzles} puzzles",
        not _rise(puzzle_indices, num_rows) and f"does not rise from 0 to {num_rows} rows",
        not _rise(group_indices, num_puzzles) and f"does not rise from 0 to {num_puzzles} puzzles",
    )
    faults = [f"{file}: {what}; {REBUILD}" for file, what in zip(files, wrong, strict=True) if what]
    if faults:
        raise DatasetError(*faults)
    mapped = tuple(map(MappedFile.of, files[:2]))
    return PuzzleSet(name, inputs, labels, identifiers, puzzle_indices, group_indices, mapped)


def _rise(indices: np.ndarray, end: int) -> bool:
    """Return whether indices begin at 0, rise, and end at `end`: nothing is empty or left out."""
    return bool(indices[0] == 0 and indices[-1] == end and (np.diff(indices) > 0).all())


def open_array(file: Path, num_axes: int) -> np.ndarray:
    """Map a .npy file of integers. Archives and pickles are refused."""
    try:
        array = np.lib.format.open_memmap(plain(file), mode="r")
    except FileNotFoundError:
        raise UserError(f"{file} is missing; {REBUILD}, or correct sets in dataset.json") from None
    except _DAMAGED_ARRAY as error:
        # Arrays of objects end here as well: reading them takes unpickling, which can run any code.
        raise UserError(
            f"{file}: cannot be mapped as a plain array ({one_line(error)[:200]}): damaged, or a pickle; {REBUILD}"
        ) from None
    if array.dtype.kind not in "iu" or array.ndim != num_axes or array.size == 0:
        raise UserError(
            f"{file}: holds {array.dtype} of shape {array.shape}, not integers with {num_axes} axes; {REBUILD}"
        )
    return array


# ---- several datasets as one ---------------------------------------------------------------------


def open_datasets(
    paths: Sequence[str], split: SplitName, *, numbered_by: Sequence[str], any_size: bool = False
) -> Split:
    """Open one split of each dataset, and merge them if there are several (`merge_splits`).

    Args:
        numbered_by: the datasets trained on. Their order numbers the puzzles: each dataset's
            identifiers come after those of the datasets before it.
        any_size: whether boards of several sides share a canvas, that of the largest of `paths` and
            `numbered_by`.
    """
    offsets: dict[Path, int] = {}
    shapes: set[tuple[int, int]] = set()
    end = 0
    for path in numbered_by:
        offsets[Path(path).resolve()] = end  # data/a and data/a/ are the same dataset
        if len(numbered_by) > 1 or (any_size and list(paths) != list(numbered_by)):
            trained_on = open_split(path, "train").metadata
            end += trained_on.num_puzzle_identifiers
            shapes.add(trained_on.shape)
    splits = [open_split(path, split) for path in paths]
    for path, opened in zip(paths, splits, strict=True):
        if Path(path).resolve() not in offsets and opened.metadata.num_puzzle_identifiers > 1:
            raise UserError(
                f"{path} names its own puzzles, but isn't trained on; evaluate on some of {', '.join(numbered_by)}"
            )
    canvas_side = common_side(shapes | {opened.metadata.shape for opened in splits}) if any_size else None
    if len(numbered_by) == len(splits) == 1 and canvas_side is None:
        return splits[0]  # a single dataset keeps the plain names of its sets
    return merge_splits(splits, [offsets.get(Path(path).resolve(), 0) for path in paths], canvas_side)


def merge_splits(splits: Sequence[Split], identifier_offsets: Sequence[int], canvas_side: int | None = None) -> Split:
    """Merge splits of several datasets of one task. Their sets are called <folder>.<set>.

    Args:
        identifier_offsets: the number added to the puzzle identifiers of each split, so that each
            dataset has rows of its own in the puzzle table.
        canvas_side: the side of the largest boards, whose shape the merged split has. The arrays of
            smaller boards stay as they are: whoever reads them places the boards on the canvas
            (`Corner`). None: all splits have one shape.
    """
    first = splits[0]
    alike = ["pad_id", "ignore_label_id"] if canvas_side is not None else []
    for other in splits[1:]:
        for key in alike or ("seq_len", "vocab_size", "pad_id", "ignore_label_id"):
            value, expected = getattr(other.metadata, key), getattr(first.metadata, key)
            if value != expected:
                raise UserError(
                    f"{first.path} has {key} {expected}, but {other.path} has {value}; train on datasets of one task, "
                    "built alike (boards of several sizes need arch=se_mixer with arch.symbols=side)"
                )

    sets: dict[str, PuzzleSet] = {}
    for split, offset in zip(splits, identifier_offsets, strict=True):
        side, corner = side_of(split.metadata.shape), None
        if canvas_side is not None and side is not None and side < canvas_side:
            corner = Corner(side, canvas_side)
        for puzzle_set in split.sets.values():
            # Resolved to get the folder's real name from paths such as "data/sudoku/." and "..".
            name = f"{split.path.parent.resolve().name}.{puzzle_set.name}"
            if name in sets:
                raise UserError(
                    f"{split.path} and another dataset would both be the set {name}; give their folders different "
                    "names, and each once"
                )
            identifiers = puzzle_set.puzzle_identifiers + offset
            sets[name] = replace(puzzle_set, name=name, puzzle_identifiers=identifiers, corner=corner)

    num_examples = sum(len(puzzle_set.inputs) for puzzle_set in sets.values())
    num_puzzles = sum(len(puzzle_set.puzzle_identifiers) for puzzle_set in sets.values())
    numbered = zip(splits, identifier_offsets, strict=True)
    seq_len, vocab_size = first.metadata.shape if canvas_side is None else shape_of(canvas_side)
    metadata = first.metadata.model_copy(
        update={
            "seq_len": seq_len,
            "vocab_size": vocab_size,
            "num_puzzle_identifiers": max(offset + split.metadata.num_puzzle_identifiers for split, offset in numbered),
            "blank_identifier_id": first.metadata.blank_identifier_id + identifier_offsets[0],
            "total_groups": sum(split.metadata.total_groups for split in splits),
            "mean_puzzle_examples": num_examples / num_puzzles,
            "sets": list(sets),
        }
    )
    path = Path(" + ".join(str(split.path) for split in splits))
    return Split(path, metadata, sets, tuple(splits))


# ---- contents ------------------------------------------------------------------------------------


def check_contents(split: Split) -> str:
    """Read everything once, check the range of every value, and return the fingerprint.

    That is the sha256 of metadata and arrays. The fingerprint of a merged split covers those of its
    parts, which are checked on their own, and the offsets of the identifiers.
    """
    metadata = split.metadata
    faults: list[str] = []
    digest = hashlib.sha256(json.dumps(metadata.model_dump(), sort_keys=True).encode())
    if split.parts:
        for part in split.parts:
            digest.update(check_contents(part).encode())
        for puzzle_set in split.sets.values():
            digest.update(puzzle_set.puzzle_identifiers.data)
        return digest.hexdigest()
    for name, puzzle_set in split.sets.items():
        for array, what, limit, ignored in (
            ("inputs", "token", metadata.vocab_size, None),
            ("labels", "label", metadata.vocab_size, metadata.ignore_label_id),
            ("puzzle_identifiers", "puzzle identifier", metadata.num_puzzle_identifiers, None),
        ):
            with collecting(faults):
                scan(digest, getattr(puzzle_set, array), split.file(name, array), what, limit, ignored)
        # The indices need no scan: they were checked when the split was opened.
        for indices in (puzzle_set.puzzle_indices, puzzle_set.group_indices):
            digest.update(f"{indices.shape}".encode())
            digest.update(indices.data)
    if faults:
        raise DatasetError(*faults)
    compare_with_builder(split.path, digest.hexdigest())
    return digest.hexdigest()


def scan(
    digest: "hashlib._Hash", array: np.ndarray, file: Path, what: str, limit: int, ignored: int | None = None
) -> None:
    """Add an array to the digest. Raise UserError if a value is not in [0, limit) or `ignored`."""
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    num_rows = max(1, CHUNK_BYTES // (array.nbytes // len(array)))
    fault, num_wrong = "", 0
    for start in range(0, len(array), num_rows):
        chunk = np.ascontiguousarray(array[start : start + num_rows])
        digest.update(chunk.data)
        if chunk.min() < 0 or chunk.max() >= limit:
            wrong = ((chunk < 0) | (chunk >= limit)) & (True if ignored is None else chunk != ignored)
            num_wrong += int(wrong.reshape(len(wrong), -1).any(axis=1).sum())
            if wrong.any() and not fault:
                first = np.unravel_index(int(wrong.argmax()), wrong.shape)
                fault = f"row {start + first[0]} has {what} {chunk[first]}, but 0 to {limit - 1} are possible"
        let_go(array)
    if fault:
        others = f" ({num_wrong:,} rows of {len(array):,} in all)" if num_wrong > 1 else ""
        raise UserError(f"{file}: {fault}{others}; {REBUILD} or correct dataset.json")


def let_go(array: np.ndarray) -> None:
    """Release the pages of a mapped array that were read, which count as this process's memory."""
    pages = getattr(array, "_mmap", None)
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


def read_record(data_path: Path) -> dict[str, Any]:
    """Return fingerprint.json; nothing if another program built the dataset."""
    file, fix = data_path / "fingerprint.json", "rebuild the dataset or delete the file"
    try:
        record = read_json(file, fix)
    except FileNotFoundError:
        return {}
    if not isinstance(record, dict):
        raise UserError(f"{file}: is no dict; {fix}")
    return record


def compare_with_builder(folder: Path, fingerprint: str) -> None:
    """Raise UserError if fingerprint.json holds another fingerprint of the split in this folder."""
    record = read_record(folder.parent)
    if record and record.get(folder.name) != fingerprint:
        raise UserError(
            f"{folder} changed after it was built (its fingerprint is {fingerprint[:12]}, not the one in "
            "fingerprint.json); rebuild the dataset, or delete that file if the change is meant"
        )
