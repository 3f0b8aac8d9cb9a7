"""Reading documents: what each format gives, and what each fault is called."""

import gzip
import json
import os
from pathlib import Path

import pytest

from dataset import tables
from dataset.text.sources import PASSAGE_BYTES, files_of, read_documents, require_separator
from utils.errors import UserError


def _written(file: Path, contents: bytes | str) -> Path:
    contents = contents.encode() if isinstance(contents, str) else contents
    file.write_bytes(gzip.compress(contents) if file.suffix == ".gz" else contents)
    return file


def test_lines_and_tables(tmp_path: Path) -> None:
    long = "x" * 200_000  # above the limit that Python sets for a field
    values = {"text": "Ä\n"}, {"instruction": "2 + 2", "response": "4", "task": "sums", "id": 7}
    lines = "\n".join(map(json.dumps, values))
    table = f'instruction,response\r\n"a\nb","say ""hi"""\r\n\r\nc,{long}\r\n'
    for name, text, expected, places in (
        ("a.JSONL.gz", f"\ufeff{lines}\n\n", [(None, "Ä\n".encode(), "text"), (b"2 + 2", b"4", "sums")], "12"),
        ("a.csv", table, [(b"a\nb", b'say "hi"', "instruction"), (b"c", long.encode(), "instruction")], "25"),
        (
            "a.tsv.gz",
            'text\ttask\nfirst, row\ta\n"a\tb"\tb\n',
            [(None, b"first, row", "a"), (None, b"a\tb", "b")],
            "23",
        ),
    ):
        found = list(read_documents(_written(tmp_path / name, text)))
        assert [each[1:] for each in found] == expected
        assert [each.place for each in found] == [f"{tmp_path / name}:{line}" for line in places]


@pytest.mark.parametrize("separator, between", [(b"<|endoftext|>", b"\r\n<|endoftext|>\n"), (b"\n\n\n", b"\n\n\n")])
@pytest.mark.parametrize("length", [3, 16_300, PASSAGE_BYTES - 1, PASSAGE_BYTES])
def test_a_separator_divides_plain_text_wherever_it_stands(
    tmp_path: Path, separator: bytes, between: bytes, length: int
) -> None:
    documents = [(b"%d " % n + b"word " * length)[: length + n % 7] for n in range(3, 200)]
    documents = [each[:PASSAGE_BYTES].strip() for each in documents]
    file = tmp_path / "stories.txt"
    file.write_bytes(between.join(documents) + between)
    assert [each.text for each in read_documents(file, separator)] == documents
    require_separator([_written(file, b"x" * (PASSAGE_BYTES - 2) + separator)], separator)


def test_every_file_of_a_folder_is_read_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents: dict[str, bytes] = {
        "b.txt": b"text",
        "deep/er/a.JSONL": b'{"text": "a"}',
        "deep/b.json": b"[]",
        "deep/c.parquet": b"PAR1",
        "empty.txt": b"\n",
        "picture.png": b"PNG\0",
        "wide.txt": "text".encode("utf-16"),
        ".git/HEAD": b"ref",
    }
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path, tmp_path / "deep" / "loop")
    os.symlink(tmp_path / "nowhere", tmp_path / "lost")
    assert files_of([tmp_path]) == [tmp_path / "b.txt", tmp_path / "deep/er/a.JSONL"]
    (note,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}: 2 files read (from b.txt on)" in note
    for left_out in (
        "1 hidden (.git/HEAD)",
        "2 of a kind that can't be read (deep/b.json)",
        "1 empty (empty.txt)",
        "2 no file (lost)",
        "1 binary (picture.png)",
        "1 in UTF-16 (wide.txt)",
    ):
        assert left_out in note
    with pytest.raises(UserError, match=r"b.txt is named twice, itself or by its folder"):
        os.symlink(tmp_path / "b.txt", tmp_path.with_suffix(".txt"))
        files_of([tmp_path, tmp_path.with_suffix(".txt")])
    with pytest.raises(UserError, match=r"\.git holds no file of text.*1 empty \(HEAD\)"):
        (tmp_path / ".git/HEAD").write_bytes(b"")
        files_of([tmp_path / ".git"])


@pytest.mark.parametrize("name", ["a", "a.md.gz"])
def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path, name: str) -> None:
    text = b"".join(b"word %d\n" % number + b"\n" * (number % 50 == 0) for number in range(9000))
    found = [each.text for each in read_documents(_written(tmp_path / name, b"\xef\xbb\xbf" + text))]
    assert b"".join(found) == text and len(found) > 5
    assert all(len(each) <= PASSAGE_BYTES for each in found) and all(each.endswith(b"\n\n") for each in found[:-1])


@pytest.mark.parametrize("text", ["ä€𝄞" * 9000, "x" * 40_000, "two words " * 5000])
def test_a_text_without_lines_is_cut_between_characters(tmp_path: Path, text: str) -> None:
    found = [each.text for each in read_documents(_written(tmp_path / "a.txt", text))]
    assert len(found) > 2 and "".join(each.decode() for each in found) == text


@pytest.mark.parametrize(
    "name, contents, message",
    [
        ("a.txt", b" \n\n", "a.txt: is empty; give plain text"),
        ("a.txt", b"x" * 70_000 + b"\0", r"a.txt: is binary \(byte 70,000 is 0\); give"),
        ("a.parquet", b"PAR1", "a.parquet: is of a kind that can't be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl:2: is no JSON \(.*\); write one object on each line"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: is no object with text, or instruction and response"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: text is no text in UTF-8; correct or remove the line"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: text is no text"),
        ("a.csv", b"instruction,response\na,b\nc\n", "a.csv:3: 1 fields instead of 2"),
        ("a.csv", b"question,answer\na,b\n", "a.csv:1: has question, answer, not text, or .*; rename"),
        ("a.tsv", b"text,task\nfirst row,a\n", "a.tsv:1: has text,task, not text, or .*tabs are between"),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: has two columns named text; rename or remove one"),
        ("a.csv", b"text\ra\rJos\xe9\r", "a.csv:3: text is no text in UTF-8; correct or remove the line"),
        ("a.csv", b'text\na\n"b" c\n', r"a.csv:3: cannot be read \(.*\); correct or remove the row"),
        ("a.csv", b'text\na\n"b\n' + b"c\n" * 9, r"a.csv:3: cannot be read \(.*\); correct or remove the row"),
        ("a.csv", b"text,task\na,b\x1b\n", "a.csv:2: task has control characters"),
        ("a.txt.gz", None, "there is no file .*a.txt.gz"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, contents: bytes | None, message: str) -> None:
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=message):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize(
    "name, line", [("a.txt.gz", "text\n"), ("a.jsonl.gz", '{"text": "b"}\n'), ("a.csv.gz", "text\n")]
)
def test_a_truncated_download_a_pipe_or_an_endless_line_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str
) -> None:
    file = _written(tmp_path / name, line * 9000)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match=rf"{name}: cannot be read \(.*\); get the file again"):
        list(read_documents(file))
    if ".txt" not in name:
        monkeypatch.setattr(tables, "MOST_BYTES", 1000)
        _written(file, line + "é" * 5000)
        with pytest.raises(UserError, match=rf"{name}:2: the line has 1,000 bytes or more"):
            list(read_documents(file))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=rf"{name}: cannot be read \(.* is no regular file\)"):
        list(read_documents(file))
