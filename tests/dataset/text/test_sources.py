"""Reading documents: what each format gives, and what each fault is called."""

import gzip
import json
import os
from pathlib import Path

import pytest

from dataset.text import sources
from dataset.text.sources import PASSAGE_BYTES, read_documents
from utils.errors import UserError


def _written(file: Path, contents: bytes | str) -> Path:
    contents = contents.encode() if isinstance(contents, str) else contents
    file.write_bytes(gzip.compress(contents) if file.suffix == ".gz" else contents)
    return file


def _lines(*values: object) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL.gz"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    text = _lines({"text": "Ä\n"}, {"instruction": "2 + 2", "response": "4", "task": "sums", "id": 7})
    found = list(read_documents(_written(tmp_path / name, "\ufeff" + text + "\n")))
    assert [each[1:] for each in found] == [(None, "Ä\n".encode(), "text"), (b"2 + 2", b"4", "sums")]
    assert found[1].place.endswith(f"{name}:2")


def test_csv(tmp_path: Path) -> None:
    long = "x" * 200_000  # above the limit that Python sets for a field
    file = _written(tmp_path / "a.csv", f'instruction,response\r\n"a\nb","say ""hi"""\r\n\r\nc,{long}\r\n')
    found = list(read_documents(file))
    assert [each[1:] for each in found] == [
        (b"a\nb", b'say "hi"', "instruction"),
        (b"c", long.encode(), "instruction"),
    ]
    assert [each.place.rsplit(":")[-1] for each in found] == ["2", "5"]


@pytest.mark.parametrize("name", ["a.txt", "a", "a.md.gz"])
def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path, name: str) -> None:
    text = b"".join(b"word %d\n" % number + b"\n" * (number % 50 == 0) for number in range(9000))
    found = [each.text for each in read_documents(_written(tmp_path / name, text))]
    assert b"".join(found) == text and len(found) > 5
    assert all(len(each) <= PASSAGE_BYTES for each in found) and all(each.endswith(b"\n\n") for each in found[:-1])


def test_a_text_with_the_line_ends_and_the_mark_of_windows_is_cut_at_blank_lines(tmp_path: Path) -> None:
    text = b"".join(b"word %d\r\n" % number + b"\r\n" * (number % 50 == 0) for number in range(9000))
    found = [each.text for each in read_documents(_written(tmp_path / "a.txt", b"\xef\xbb\xbf" + text))]
    assert b"".join(found) == text and len(found) > 5
    assert all(each.endswith(b"\r\n\r\n") for each in found[:-1])


def test_a_problem_without_a_task_has_that_of_its_kind(tmp_path: Path) -> None:
    rows = "instruction,response,task\na,b,\nc,d,sums\n"
    assert [each.task for each in read_documents(_written(tmp_path / "a.csv", rows))] == ["instruction", "sums"]


@pytest.mark.parametrize("text", ["ä€𝄞" * 9000, "x" * 40_000, "two words " * 5000])
def test_a_text_without_lines_is_cut_between_characters(tmp_path: Path, text: str) -> None:
    found = [each.text for each in read_documents(_written(tmp_path / "a.txt", text))]
    assert len(found) > 2 and "".join(each.decode() for each in found) == text


def test_bytes_that_are_no_utf8_are_read_as_they_are(tmp_path: Path) -> None:
    (found,) = read_documents(_written(tmp_path / "latin1.txt", "für".encode("latin-1")))
    assert found.text == b"f\xfcr"


@pytest.mark.parametrize(
    "name, contents, message",
    [
        ("a.txt", b"", "a.txt: holds no text; give a file with text"),
        ("a.txt", b" \n\n", "a.txt: holds no text; give a file with text"),
        ("a.jsonl", b"\n", "a.jsonl: holds no text; give a file with text"),
        ("a.csv", b"text\n", "a.csv: holds no text; give a file with text"),
        ("a.txt", b"x" * 70_000 + b"\0", r"a.txt: is binary \(byte 70,000 is 0\); give text, .jsonl or .csv"),
        ("a.parquet", b"PAR1", "a.parquet: can't be read; convert it to .jsonl, .csv or plain text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl:2: is no JSON \(.*\); correct or remove"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1: is no JSON .*utf-8.*; correct or remove"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: is no object with text, or instruction and response"),
        (
            "a.jsonl",
            b'{"prompt": "a"}\n',
            "a.jsonl:1: has prompt; it needs either text, or .*; rename the keys",
        ),
        ("a.jsonl", b'{"instruction": "a"}\n', "a.jsonl:1: has instruction; it needs either text, or"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: text is a number, no text; correct or remove the line"),
        ("a.jsonl", b'{"text": "a", "task": null}\n', "a.jsonl:1: task is null, no text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: text has half a character"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: is no JSON"),
        ("a.csv", b"instruction,response\na,b\nc\n", "a.csv:3: the row has not as many fields as the header"),
        ("a.csv", b"instruction,response\na,b,c\n", "a.csv:2: the row has not as many fields as the header"),
        ("a.csv", b"question,answer\na,b\n", "a.csv:1: has question, answer; it needs either .*; name the columns so"),
        ("a.csv", b"instruction;response\na;b\n", "a.csv:1: has instruction;response; .*, and separate them by commas"),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: has two columns named text; rename or remove one"),
        ("a.csv", b'text\na\n"b\n' + b"c\n" * 9, r"a.csv:3: cannot be read \(.*\); correct or remove the row"),
        ("a.csv", b"text,task\na,b\x1b\n", "a.csv:2: the name of the task has control characters"),
        ("a.csv", "text\na\n".encode("utf-16"), "a.csv: is UTF-16; convert it to UTF-8"),
        ("a.txt", "text".encode("utf-16"), "a.txt: is UTF-16; convert it to UTF-8"),
        ("a.jsonl", b"[\n{}\n]\n", r"a.jsonl:1: is no JSON \(.*\); write one object on each line"),
        ("", b"", " is a folder; give its files"),
        ("a.csv", b"text\n\xff\n", "a.csv:2: cannot be read .*; correct or remove the row"),
        ("a.txt.gz", None, "a.txt.gz is missing; correct --source"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, contents: bytes | None, message: str) -> None:
    if contents is not None and name:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=message):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.csv.gz"])
def test_a_truncated_download_is_refused(tmp_path: Path, name: str) -> None:
    rows = {"a.txt.gz": "some text\n", "a.jsonl.gz": _lines({"text": "a"}), "a.csv.gz": "text\n"}[name]
    file = _written(tmp_path / name, rows + (_lines({"text": "b"}) if "jsonl" in name else "b\n") * 9000)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match=rf"{name}: cannot be read on \(.*\); get the file again"):
        list(read_documents(file))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a.txt: cannot be read on \(.* is no regular file\)"):
        list(read_documents(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    "name, contents", [("a.jsonl.gz", _lines({"text": "a"}, {"text": "b" * 5000})), ("a.csv", "text\n" + "é" * 5000)]
)
def test_a_line_that_never_ends_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, contents: str
) -> None:
    monkeypatch.setattr(sources, "MOST_BYTES", 1000)
    file = _written(tmp_path / name, contents)
    with pytest.raises(UserError, match=rf"{name}:2: the line has 1,000 bytes or more; split the document"):
        list(read_documents(file))
