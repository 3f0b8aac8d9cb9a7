"""Read documents from plain text, JSONL and CSV, as a stream: a file of GBs needs little memory."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from utils.errors import UserError
from utils.files import plain
from utils.text import one_line

# A plain text has no marks between documents. It is cut into documents of so many bytes at most, at
# a blank line if there is one.
PASSAGE_BYTES = 1 << 14
# The longest line of a JSONL file and the longest field of a CSV file.
MOST_BYTES = 1 << 26
KEYS = "text, or instruction and response"


class Document(NamedTuple):
    """A text, or a problem with its answer."""

    place: str  # its file and line, for messages
    instruction: bytes | None  # None: a text
    text: bytes  # the text or the response
    task: str

    @property
    def num_bytes(self) -> int:
        return len(self.text) + len(self.instruction or b"")


def read_documents(file: Path) -> Iterator[Document]:
    """Yield the documents of a file: .jsonl, .csv, or else plain text; each perhaps with .gz.

    Raises:
        UserError: The file is missing, empty, binary or malformed. The message names the line.
    """
    name = file.name.lower().removesuffix(".gz")
    if name.endswith((".json", ".parquet", ".arrow", ".zip", ".zst", ".xz", ".bz2")):
        raise UserError(f"{file}: can't be read; convert it to .jsonl, .csv or plain text, perhaps with .gz")
    reader = _jsonl if name.endswith((".jsonl", ".ndjson")) else _csv if name.endswith(".csv") else _plain
    is_empty = True
    with _opened(file) as stream:
        for document in reader(file, stream):
            is_empty = False
            yield document
    if is_empty:
        raise UserError(f"{file}: holds no text; give a file with text, or leave it out")


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file. Turn the errors of reading it, and only these, into a UserError."""
    try:
        with gzip.open(plain(file)) if file.name.lower().endswith(".gz") else plain(file).open("rb") as stream:
            yield stream  # type: ignore[misc]
    except FileNotFoundError:
        raise UserError(f"{file} is missing; correct --source or --test-source") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read on ({one_line(error)}); get the file again") from None


def _plain(file: Path, stream: BinaryIO) -> Iterator[Document]:
    rest, offset = b"", 0
    for block in iter(partial(stream.read, PASSAGE_BYTES), b""):
        if (zero := block.find(b"\0")) >= 0:
            raise UserError(f"{file}: is binary (byte {offset + zero:,} is 0); give text, .jsonl or .csv")
        offset += len(block)
        rest += block
        while len(rest) > PASSAGE_BYTES:
            cut = _cut(rest[:PASSAGE_BYTES])
            if rest[:cut].strip():
                yield Document(f"{file}, before byte {offset:,}", None, rest[:cut], "text")
            rest = rest[cut:]
    if rest.strip():
        yield Document(f"{file}, before byte {offset:,}", None, rest, "text")


def _cut(passage: bytes) -> int:
    """Return where to cut a text, in its second half: behind a blank line, a line or a word.

    A text without them is cut between characters of UTF-8.
    """
    for end in (b"\n\n", b"\n", b" "):
        if (at := passage.rfind(end, len(passage) // 2)) > 0:
            return at + len(end)
    at = len(passage) - 1
    while at > len(passage) - 4 and passage[at] & 0xC0 == 0x80:  # inside of a character
        at -= 1
    return at if passage[at] >= 0xC0 else len(passage)


def _jsonl(file: Path, stream: BinaryIO) -> Iterator[Document]:
    lines = iter(partial(stream.readline, MOST_BYTES), b"")
    for number, line in enumerate(lines, 1):
        place = f"{file}:{number}"
        if len(line) == MOST_BYTES:
            raise UserError(f"{place}: the line has {MOST_BYTES:,} bytes or more; split the document")
        if not line.strip():
            continue
        try:
            values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: is no line of JSON ({one_line(error)}); correct or remove the line") from None
        if not isinstance(values, dict):
            raise UserError(f"{place}: is no object with {KEYS}; correct or remove the line")
        yield _document(place, values)


def _csv(file: Path, stream: BinaryIO) -> Iterator[Document]:
    number = 1

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in enumerate(iter(partial(stream.readline, MOST_BYTES), b""), 1):
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")

    limit = csv.field_size_limit(MOST_BYTES)
    try:
        for row in csv.DictReader(lines()):
            if None in row or None in row.values():
                raise UserError(f"{file}:{number}: the row has not as many fields as the header; correct the row")
            yield _document(f"{file}:{number}", row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file}:{number}: cannot be read ({one_line(error)}); correct or remove the row") from None
    finally:
        csv.field_size_limit(limit)


def _document(place: str, values: dict[str, object]) -> Document:
    """Return the document of a line of JSON or a row.

    Raises:
        UserError: The values are not those of a text or of a problem.
    """
    if "text" in values and not {"instruction", "response"} & values.keys():
        used, default_task = ["text"], "text"
    elif {"instruction", "response"} <= values.keys() and "text" not in values:
        used, default_task = ["instruction", "response"], "instruction"
    else:
        raise UserError(f"{place}: has {', '.join(values) or 'nothing'}; it needs {KEYS}")
    task = values.get("task", default_task)
    encoded = []
    for key, value in [*((key, values[key]) for key in used), ("task", task)]:
        if not isinstance(value, str):
            raise UserError(f"{place}: {key} is {type(value).__name__}, no text; correct or remove the line")
        try:
            encoded.append(value.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: {key} has half a character ({one_line(error)}); correct the line") from None
    return Document(place, encoded[0] if len(used) == 2 else None, encoded[-2], str(task))
