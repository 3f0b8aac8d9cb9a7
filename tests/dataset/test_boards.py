"""CSV files of puzzles: how they are found and read, and errors that name the line."""

import gzip
from pathlib import Path

import pytest

from dataset import boards
from dataset.boards import Row, read_rows, source_files

HEADER = "source,question,answer,rating"


def _file(folder: Path, text: str, name: str = "train.csv") -> Path:
    file = folder / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


@pytest.mark.parametrize("name", ["train.csv", "train.csv.gz"])
@pytest.mark.parametrize("chunk", [1, 2])
def test_rows_keep_their_blanks_and_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(boards, "CHUNK_ROWS", chunk)
    text = f'\ufeff{HEADER}\r\nx, a ,b  ,1\r\n\r\n"two\r\nlines",c,d,-2\r\n,,,0\r\n'
    lists = list(read_rows(_file(tmp_path, text, name)))
    assert [row for rows in lists for row in rows] == [
        Row(2, " a ", "b  ", 1),
        Row(4, "c", "d", -2),
        Row(6, "", "", 0),
    ]
    assert [len(rows) for rows in lists] == {1: [1, 1, 1], 2: [2, 1]}[chunk]


def test_other_columns_may_hold_anything_and_lines_may_end_as_on_old_macs(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    text = f'{HEADER}\nJos\u00e9,a,b,1\n"abc" x,c,d,2\n'
    for end in ("\n", "\r\n", "\r"):
        file.write_bytes(text.replace("\n", end).encode("latin-1"))
        assert list(read_rows(file)) == [[Row(2, "a", "b", 1), Row(3, "c", "d", 2)]]


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    for text, expected in (
        (f"{HEADER}\n\n", r"train\.csv:2: no puzzles after the header"),
        ("question,x\n", "with 0 columns for the answer"),
        ("answer,solution,puzzle\n", "with 2 columns for the answer"),
        (f"{HEADER}\nx,a,b,1\nx,a,b,1,2\n", r"train\.csv:3: 5 fields instead of 4"),
        (f"{HEADER}\nx,a,b,{'9' * 60}a\n", rf"train\.csv:2: the rating is '{'9' * 40}', no integer"),
    ):
        with pytest.raises(ValueError, match=rf"^[^\n]*{expected}[^\n]*$"):
            list(read_rows(_file(tmp_path, text)))
    file = tmp_path / "train.csv.gz"
    file.write_bytes(gzip.compress(f"{HEADER}\n{'x,a,b,1' * 100}".encode())[:-9])
    with pytest.raises(ValueError, match=r"train\.csv\.gz: cannot be read \(Compressed file ended"):
        list(read_rows(file))
    with pytest.raises(ValueError, match="there is no file"):
        list(read_rows(tmp_path / "none.csv"))


def test_a_folder_has_one_file_for_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compressed = _file(tmp_path, HEADER, "test.csv.gz")
    _file(tmp_path, HEADER, "sudoku.csv")
    with pytest.raises(ValueError, match=r"holds sudoku\.csv, test\.csv\.gz; give a folder with one train\.csv or"):
        source_files(tmp_path, None)
    _file(tmp_path, HEADER, "train.csv")
    assert source_files(tmp_path, None) == {"train": tmp_path / "train.csv", "test": compressed}
    assert "other CSV files are left out: sudoku.csv" in capsys.readouterr().err
    _file(tmp_path, HEADER, "test.csv")
    with pytest.raises(ValueError, match=r"test\.csv, test\.csv\.gz, train\.csv; give a folder with one test"):
        source_files(tmp_path, None)
