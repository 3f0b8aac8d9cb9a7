"""Open and check datasets of text, with memory maps. No file can run code.

A split, <data path>/{train,test}, is dataset.json, tokens.npy and samples.npy. A sample is an
instruction of P tokens and the response of R tokens that follows it. The model reads the P + R - 1
tokens without the last one, and predicts R of them, or all but the first. Plain text has P = 1.

Folders in HRM-Text's own format are opened as they are: tokens.npy, metadata.json, and the samples
of epoch k in epoch_<k>/{inst_start,inst_len,resp_start,resp_len}.npy.
"""
# N = samples, T = tokens, P = tokens of an instruction, R = tokens of a response

import hashlib
import json
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dataset.schema import (
    CHUNK_BYTES,
    REBUILD,
    DatasetDescription,
    MappedFile,
    SplitName,
    compare_with_builder,
    let_go,
    open_array,
    read_described,
    scan,
)
from utils.config import Int
from utils.errors import UserError
from utils.files import file_errors, plain
from utils.json_files import read_json

# The value of `tokenizer` in dataset.json if each byte is a token, and if nobody knows it.
BYTES, UNKNOWN = "bytes", "unknown"
SET_NAME = "all"
"""Samples of text have no sets, so the names of metrics and files have this one."""


Form = Literal["instruction", "text"]
"""A sample with an instruction asks for the response; a text is continued."""

# Of a split with more samples, so many are looked at, evenly spread.
_MOST_LOOKED_AT = 10_000


class SpecialTokens(BaseModel):
    """The tokens that no text contains.

    A document is `start`, its text, `end`. In a problem `end_of_instruction` divides the text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: Annotated[Int, Field(ge=0)]
    end_of_instruction: Annotated[Int, Field(ge=0)]
    end: Annotated[Int, Field(ge=0)]


class TextMetadata(DatasetDescription):
    """The contents of dataset.json of a split of text."""

    kind_of_data: ClassVar[str] = "text"

    kind: Literal["text"]
    # The tokens are 0 to vocab_size - 1, with the special tokens. A model may round the number up.
    vocab_size: Annotated[Int, Field(ge=1, le=2**24)]
    # The most tokens that the model reads of a sample, P + R - 1.
    max_len: Annotated[Int, Field(ge=1, le=2**31)]
    num_samples: Annotated[Int, Field(ge=1)]
    num_tokens: Annotated[Int, Field(ge=2)]
    # "bytes", the sha256 of tokenizer.json, or "unknown" (HRM-Text folders without tokenizer.json).
    tokenizer: Annotated[str, Field(pattern=rf"^({BYTES}|{UNKNOWN}|[0-9a-f]{{64}})$")]
    # None: nobody knows them.
    special_tokens: SpecialTokens | None
    # The name of each task number of samples.npy.
    tasks: Annotated[list[str], Field(min_length=1)]


class _HrmTextMetadata(DatasetDescription):
    """The contents of metadata.json of HRM-Text, as far as they matter here."""

    kind_of_data: ClassVar[str] = "text"

    tokenizer_info: dict[str, Any]
    # The longest sample with its last token, which the model doesn't read.
    max_seq_len: Annotated[Int, Field(ge=2, le=2**31)]


@dataclass(frozen=True)
class Samples:
    """Where samples lie in tokens.npy, (N,) integers each."""

    instruction_start: np.ndarray
    instruction_len: np.ndarray
    response_len: np.ndarray
    response_start: np.ndarray | None  # None: each response follows its instruction
    task: np.ndarray | None  # None: all samples have task 0
    files: tuple[Path, ...]  # the files of these arrays, for messages

    def __len__(self) -> int:
        return len(self.instruction_len)

    def lengths(self) -> np.ndarray:
        """Return how many tokens the model reads of each sample, P + R - 1, int64 (N,)."""
        return self.instruction_len.astype(np.int64) + self.response_len.astype(np.int64) - 1

    def take(self, indices: np.ndarray | slice) -> np.ndarray:
        """Return the places of some samples, int64 (K, 5).

        A row is the start and length of the instruction, those of the response, and the task.
        """
        starts, lens = (each[indices].astype(np.int64) for each in (self.instruction_start, self.instruction_len))
        responses = starts + lens if self.response_start is None else self.response_start[indices]
        tasks = np.zeros_like(starts) if self.task is None else self.task[indices]
        return np.stack([starts, lens, responses, self.response_len[indices], tasks], axis=1).astype(np.int64)


@dataclass(frozen=True)
class TextSplit:
    """One split of a dataset of text."""

    path: Path
    metadata: TextMetadata
    tokens: np.ndarray  # (T,) integers, memory-mapped
    epochs: tuple[Samples, ...]  # epoch k uses entry k modulo their number
    files: tuple[MappedFile, ...]  # as they were when they were mapped

    @property
    def is_published_form(self) -> bool:
        """Whether the folder has HRM-Text's own format, with samples in the order of training."""
        return self.epochs[0].response_start is not None

    @property
    def form(self) -> Form:
        """Whether most samples have an instruction, or are text."""
        samples = self.samples(0)
        rows = np.linspace(0, len(samples) - 1, min(len(samples), _MOST_LOOKED_AT), dtype=np.int64)
        num_instructions = int(np.count_nonzero(samples.instruction_len[rows] > 1))
        return "instruction" if 2 * num_instructions >= len(rows) else "text"

    def num_examples(self, most: int | None) -> dict[str, int]:
        """Return how many samples an evaluation of at most `most` of them has, under SET_NAME."""
        size = len(self.epochs[0])
        return {SET_NAME: size if most is None else min(size, most)}

    def __str__(self) -> str:
        lengths_N = self.epochs[0].lengths()
        epochs = f" in each of {len(self.epochs)} epochs" if len(self.epochs) > 1 else ""
        return (
            f"{len(lengths_N):,} samples{epochs} of {int(lengths_N.min()):,} to {int(lengths_N.max()):,} tokens (mean "
            f"{lengths_N.mean():,.0f}), {len(self.tokens):,} tokens of {self.metadata.vocab_size:,} kinds"
        )

    def samples(self, epoch: int) -> Samples:
        return self.epochs[epoch % len(self.epochs)]


def kind_of_data(data_path: str | Path) -> Literal["puzzles", "text"] | None:
    """Return what a folder holds; None if it is no dataset. Text may be in HRM-Text's format."""
    found: Literal["puzzles", "text"] | None = None
    for folder in (Path(data_path), *(Path(data_path) / split for split in ("train", "test"))):
        is_described = any((folder / name).is_file() for name in ("metadata.json", "samples.npy"))
        if is_described and (folder / "tokens.npy").is_file():
            return "text"
        file = folder / "dataset.json"
        if folder != Path(data_path) and file.is_file():
            found = "puzzles"
            with suppress(OSError, UserError):  # what opens the dataset says what is wrong
                described = read_json(file, REBUILD)
                if isinstance(described, dict) and described.get("kind") == TextMetadata.kind_of_data:
                    return "text"
    return found


def has_split(data_path: Path, split: SplitName) -> bool:
    """Return whether a dataset of text has a split. A folder of HRM-Text is a training split."""
    folder = data_path / split
    files = [folder / "dataset.json", folder / "metadata.json"]
    return any(file.is_file() for file in files + [data_path / "metadata.json"] * (split == "train"))


@file_errors()
def open_text_split(data_path: str | Path, split: SplitName) -> TextSplit:
    """Open a split, and check its files, types and shapes without reading tokens or samples.

    A folder in HRM-Text's format is the train split, unless it is called test.
    """
    data_path = Path(data_path)
    folder = data_path / split
    if (folder / "metadata.json").is_file():
        return _open_hrm_text(folder)
    if (data_path / "metadata.json").is_file():
        if split == "train":
            return _open_hrm_text(data_path)
        raise UserError(f"{data_path}: is HRM-Text's training data without a test split; put one in {folder}")
    file = folder / "dataset.json"
    try:
        metadata = read_described(file, TextMetadata)
    except FileNotFoundError:
        raise UserError(
            f"no dataset of text at {data_path}: {file} is missing; build it "
            f"(python dataset/build_text_dataset.py --output-dir {shlex.quote(str(data_path))} "
            "--source FILE...), or set data_path to one that exists"
        ) from None
    if metadata.special_tokens and max(metadata.special_tokens.model_dump().values()) >= metadata.vocab_size:
        raise UserError(f"{file}: special_tokens are above vocab_size, {metadata.vocab_size}; {REBUILD}")
    tokenizer = data_path / "tokenizer.json"
    if metadata.tokenizer not in (BYTES, UNKNOWN) and (found := _sha256(tokenizer)) != metadata.tokenizer:
        raise UserError(
            f"{tokenizer} is {found[:12] or 'missing'}, but the tokens were made by the tokenizer "
            f"{metadata.tokenizer[:12]} (sha256); put it there, or {REBUILD}"
        )
    tokens = open_array(folder / "tokens.npy", num_axes=1)
    table = open_array(folder / "samples.npy", num_axes=2)
    if table.shape[1] != 4:
        raise UserError(f"{folder / 'samples.npy'}: rows have {table.shape[1]} numbers, not 4; {REBUILD}")
    for name, array, key in (("tokens.npy", tokens, "num_tokens"), ("samples.npy", table, "num_samples")):
        if len(array) != getattr(metadata, key):
            raise UserError(
                f"{folder / name}: has {len(array):,} rows, but {key} in dataset.json is "
                f"{getattr(metadata, key):,}; {REBUILD}"
            )
    files = (folder / "tokens.npy", folder / "samples.npy")
    samples = Samples(table[:, 0], table[:, 1], table[:, 2], None, table[:, 3], files[1:])
    return TextSplit(folder, metadata, tokens, (samples,), tuple(map(MappedFile.of, files)))


def _sha256(tokenizer: Path) -> str:
    """Return the digest of a file; an empty text if there is none."""
    return hashlib.sha256(plain(tokenizer).read_bytes()).hexdigest() if tokenizer.is_file() else ""


def require_same_tokens(first: TextSplit, other: TextSplit) -> None:
    """Raise UserError unless a token of one split means the same in the other split."""
    for key in ("tokenizer", "vocab_size", "special_tokens"):
        value, expected = getattr(other.metadata, key), getattr(first.metadata, key)
        if value != expected:
            raise UserError(
                f"{first.path} has {key} {str(expected)[:60]}, but {other.path} has {str(value)[:60]}; build both "
                "with one tokenizer"
            )


def _open_hrm_text(folder: Path) -> TextSplit:
    file = folder / "metadata.json"
    published = read_described(file, _HrmTextMetadata)
    vocab_size = published.tokenizer_info.get("vocab_size")
    if not isinstance(vocab_size, int) or not 0 < vocab_size <= 2**24:
        raise UserError(f"{file}: tokenizer_info.vocab_size is {vocab_size!r}, no number of tokens; {REBUILD}")
    tokens = open_array(folder / "tokens.npy", num_axes=1)
    epochs: list[Samples] = []
    while (epoch := folder / f"epoch_{len(epochs)}").is_dir():
        of_epoch = tuple(epoch / f"{name}.npy" for name in ("inst_start", "inst_len", "resp_len", "resp_start"))
        start, length, response_len, response_start = arrays = [open_array(each, num_axes=1) for each in of_epoch]
        for each, array in zip(of_epoch, arrays, strict=True):
            if len(array) != len(start):
                raise UserError(f"{each}: has {len(array):,} entries, but inst_start.npy {len(start):,}; {REBUILD}")
        epochs.append(Samples(start, length, response_len, response_start, None, of_epoch))
    if not epochs:
        raise UserError(f"{folder / 'epoch_0'} is missing; {REBUILD}")
    tokenizer = folder / "tokenizer.json"
    metadata = TextMetadata(
        kind="text",
        vocab_size=vocab_size,
        max_len=published.max_seq_len - 1,
        num_samples=len(epochs[0]),
        num_tokens=len(tokens),
        tokenizer=_sha256(tokenizer) or UNKNOWN,
        special_tokens=_published_special_tokens(tokenizer, published.tokenizer_info),
        tasks=["text"],
    )
    files = [folder / "tokens.npy", *(file for epoch in epochs for file in epoch.files)]
    return TextSplit(folder, metadata, tokens, tuple(epochs), tuple(map(MappedFile.of, files)))


def _published_special_tokens(tokenizer: Path, info: dict[str, Any]) -> SpecialTokens | None:
    """Return the tokens that metadata.json names, with their numbers from tokenizer.json."""
    names = [info.get(key) for key in ("boq", "eoq", "eoa")]
    if not tokenizer.is_file():
        return None
    described = read_json(tokenizer, "copy it again")
    try:
        numbers = {token["content"]: token["id"] for token in described["added_tokens"]}
        start, end_of_instruction, end = (numbers[name] for name in names)
        return SpecialTokens(start=start, end_of_instruction=end_of_instruction, end=end)
    except (ValueError, LookupError, TypeError):
        return None


def check_text_contents(split: TextSplit) -> str:
    """Read everything once, in chunks, check every token and sample, and return the fingerprint."""
    digest = hashlib.sha256(json.dumps(split.metadata.model_dump(), sort_keys=True).encode())
    scan(digest, split.tokens, split.path / "tokens.npy", "token", split.metadata.vocab_size)
    for samples in split.epochs:
        digest.update(f"{len(samples)}".encode())
        for start in range(0, len(samples), CHUNK_BYTES // 40):
            rows = samples.take(slice(start, start + CHUNK_BYTES // 40))
            digest.update(np.ascontiguousarray(rows).data)
            _check_samples(split, samples, start, rows)
        for array in (samples.instruction_start, samples.instruction_len, samples.response_len):
            let_go(array)
    fingerprint = digest.hexdigest()
    compare_with_builder(split.path, fingerprint)
    return fingerprint


def _check_samples(split: TextSplit, samples: Samples, first: int, rows_N5: np.ndarray) -> None:
    """Raise UserError if one of these samples is empty, too long, or outside of the tokens."""
    starts_N, lens_N, responses_N, response_lens_N, tasks_N = rows_N5.T
    num_tokens, max_len, num_tasks = len(split.tokens), split.metadata.max_len, len(split.metadata.tasks)
    wrong_N = (lens_N < 1) | (response_lens_N < 1) | (lens_N + response_lens_N - 1 > max_len)
    wrong_N |= (starts_N < 0) | (starts_N > num_tokens - lens_N)
    wrong_N |= (responses_N < 0) | (responses_N > num_tokens - response_lens_N)
    wrong_N |= (tasks_N < 0) | (tasks_N >= num_tasks)
    for at in np.flatnonzero(wrong_N)[:1]:
        start, length, response, response_len, task = rows_N5[at].tolist()
        raise UserError(
            f"{samples.files[0]}: sample {first + at:,} is empty, longer than max_len {max_len:,}, or outside of the "
            f"{num_tokens:,} tokens and {num_tasks:,} tasks (instruction {start:,} + {length:,}, response "
            f"{response:,} + {response_len:,}, task {task}); {REBUILD}"
        )
