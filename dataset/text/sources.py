"""Read documents from plain text, JSONL, CSV and TSV, as a stream. GBs need little memory."""

import codecs
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from dataset.tables import read_lines, read_table
from dataset.tasks.base import count, joined
from utils.errors import UserError
from utils.files import files_below, opened
from utils.json_files import parse_json
from utils.terminal import tell

# A plain text has no marks between documents. It is cut into documents of so many bytes at most, at
# a blank line if there is one.
PASSAGE_BYTES = 1 << 14
_TAB = "\t"
_LINES, _TABLES = (".jsonl", ".ndjson"), (".csv", ".tsv")
_REFUSED = (".json", ".parquet", ".arrow", ".zip", ".zst", ".xz", ".bz2", ".pdf")
KEYS = "text, or instruction and response"


class Document(NamedTuple):
    """A text, or a problem with its answer."""

    place: str  # its file and line, for messages
    instruction: bytes | None  # None: a text
    text: bytes  # the text or the response
    task: str

    @property
    def num_bytes(self) -> int:
        """What the document takes in memory, roughly."""
        return len(self.text) + len(self.instruction or b"") + 256


def files_of(sources: Sequence[Path]) -> list[Path]:
    """Return the files of sources, and for a folder all files of text in it, in order."""
    files = [file for source in sources for file in (_files_in(source) if source.is_dir() else [source])]
    if twice := [file for file, num in Counter(map(os.path.realpath, files)).items() if num > 1]:
        raise UserError(f"{twice[0]} is named twice, itself or by its folder; name it once")
    return files


def _files_in(folder: Path) -> list[Path]:
    read: list[Path] = []
    left_out: dict[str, list[Path]] = {}
    for file in files_below(folder):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        why = "hidden" if is_hidden else _why_no_text(file) if file.is_file() else "no file"
        (left_out.setdefault(why, []) if why else read).append(file)
    reasons = [f"{len(files):,} {why} ({files[0].relative_to(folder)})" for why, files in left_out.items()]
    others = f"; left out: {joined(reasons)}" if reasons else ""
    if not read:
        raise UserError(f"{folder} holds no file of text{others}; give files of text")
    tell(f"note: {folder}: {count(len(read), 'file')} read (from {read[0].relative_to(folder)} on){others}")
    return read


def _why_no_text(file: Path) -> str:
    """Return why a file can't be read; an empty text if it can."""
    if _name(file).endswith(_REFUSED):
        return "of a kind that can't be read"
    with opened(file) as stream:
        beginning = stream.read(PASSAGE_BYTES)
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "in UTF-16"
    if b"\0" in beginning:
        return "binary"
    return "" if len(beginning) == PASSAGE_BYTES or beginning.strip() else "empty"


def require_separator(files: Sequence[Path], separator: bytes) -> None:
    """Raise UserError if no file of plain text has the separator. Reads up to the first one."""
    for file in files:
        if not _name(file).endswith((*_LINES, *_TABLES, *_REFUSED)):
            end = b""
            with opened(file) as stream:
                for block in iter(partial(stream.read, PASSAGE_BYTES), b""):
                    end = end[-len(separator) :] + block
                    if separator in end:
                        return
    raise UserError(
        f"no plain text in --source has the separator {os.fsdecode(separator)!r}; write it as the texts do, such as "
        "--separator '<|endoftext|>' or --separator $'\\n\\n'"
    )


def read_documents(file: Path, separator: bytes | None = None) -> Iterator[Document]:
    """Yield the documents of a file: .jsonl, .csv, .tsv, or else plain text; each perhaps with .gz.

    A separator divides plain text into documents. Line ends around it are dropped.
    """
    name = _name(file)
    if why := _why_no_text(file):
        raise UserError(f"{file}: is {why}; give plain text in UTF-8, .jsonl, .csv or .tsv, perhaps with .gz")
    is_empty = True
    with opened(file) as stream:
        if name.endswith(_LINES):
            documents = _jsonl(file, stream)
        elif name.endswith(_TABLES):
            documents = _csv(file, stream, _TAB if name.endswith(".tsv") else ",")
        else:
            documents = _plain(file, stream, separator)
        for document in documents:
            is_empty = False
            yield document
    if is_empty:
        raise UserError(f"{file}: holds no text; give a file with text, or leave it out")


def _name(file: Path) -> str:
    return file.name.lower().removesuffix(".gz")


def _plain(file: Path, stream: IO[bytes], separator: bytes | None) -> Iterator[Document]:
    mark = re.compile(rb"(?:\r?\n)?" + re.escape(separator) + rb"(?:\r?\n)?") if separator else None
    # A separator that begins in a passage ends within so many bytes.
    longest = PASSAGE_BYTES + (len(separator) + 4 if separator else 0)
    rest, offset = b"", 0
    for block in iter(partial(stream.read, PASSAGE_BYTES), b""):
        if not offset:
            block = block.removeprefix(codecs.BOM_UTF8)
        if (zero := block.find(b"\0")) >= 0:
            raise UserError(f"{file}: is binary (byte {offset + zero:,} is 0); give plain text, .jsonl or .csv")
        offset += len(block)
        rest += block
        start = 0
        while len(rest) - start > longest:
            found = mark.search(rest, start, start + longest) if mark else None
            if found and found.start() <= start + PASSAGE_BYTES:
                text, start = rest[start : found.start()], found.end()
            else:
                text = rest[start : start + _cut(rest[start : start + PASSAGE_BYTES])]
                start += len(text)
            if text.strip():
                yield Document(f"{file}, before byte {offset:,}", None, text, "text")
        rest = rest[start:]
    for text in mark.split(rest) if mark else [rest]:
        if text.strip():
            yield Document(f"{file}, before byte {offset:,}", None, text, "text")


def _cut(passage: bytes) -> int:
    """Return where to cut a text, in its second half: behind a blank line, a line or a word."""
    for end in (b"\n\n", b"\r\n\r\n", b"\n", b" "):
        if (at := passage.rfind(end, len(passage) // 2)) > 0:
            return at + len(end)
    at = len(passage) - 1
    while at > len(passage) - 4 and passage[at] & 0xC0 == 0x80:  # inside of a character
        at -= 1
    return at if passage[at] >= 0xC0 else len(passage)


def _jsonl(file: Path, stream: IO[bytes]) -> Iterator[Document]:
    for number, line in read_lines(file, stream):
        place = f"{file}:{number}"
        if line.strip():
            values = parse_json(line, place, "write one object on each line")
            if not isinstance(values, dict):
                raise UserError(f"{place}: is no object with {KEYS}; correct or remove the line")
            yield _document(place, values)


def _csv(file: Path, stream: IO[bytes], delimiter: str) -> Iterator[Document]:
    rows = read_table(file, stream, delimiter)
    _, header = next(rows)
    if twice := [name for name, num in Counter(header).items() if num > 1]:
        raise UserError(f"{file}:1: has two columns named {twice[0]}; rename or remove one")
    if header:
        _used_keys(f"{file}:1", header)
    for line, row in rows:
        yield _document(f"{file}:{line}", dict(zip(header, row, strict=True)))


def _used_keys(place: str, keys: Sequence[str]) -> list[str]:
    """Return the keys of a text or of a problem. Raise UserError if it is neither."""
    if "text" in keys and not {"instruction", "response"} & set(keys):
        return ["text"]
    if {"instruction", "response"} <= set(keys) and "text" not in keys:
        return ["instruction", "response"]
    named = ", ".join(keys)[:80] or "nothing"
    raise UserError(
        f"{place}: has {named}, not {KEYS}; rename the keys or columns (tabs are between those of .tsv, commas else)"
    )


def _document(place: str, values: Mapping[str, object]) -> Document:
    """Return the document of a line of JSON or a row. Raise UserError if it is none."""
    used = _used_keys(place, list(values))
    encoded = []
    for key in (*used, "task"):
        value = values.get(key, "")
        try:
            encoded.append(str.encode(value))  # type: ignore[arg-type]
        except (TypeError, UnicodeEncodeError):  # no text, half a character, or bytes that are no UTF-8
            raise UserError(f"{place}: {key} is no text in UTF-8; correct or remove the line") from None
    task = encoded[-1].decode() or used[0]
    if not task.isprintable():
        raise UserError(f"{place}: task has control characters; correct the line")
    return Document(place, encoded[0] if len(used) == 2 else None, encoded[-2], task)
