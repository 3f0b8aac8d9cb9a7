"""Find, read and check CSV files of puzzles, such as the published ones and Kaggle's."""
# N = rows, S = cells of a puzzle

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np

from dataset.builder import SPLITS, Boards, progress, what_was_left_out
from dataset.schema import SplitName
from utils.errors import UserError
from utils.files import plain
from utils.terminal import tell
from utils.text import one_line

Column = Literal["question", "answer", "rating"]
# The names that the header may give to a column. Kaggle's files of Sudokus have puzzle,solution or
# quizzes,solutions.
COLUMNS: dict[Column, tuple[str, ...]] = {
    "question": ("question", "puzzle", "quizzes"),
    "answer": ("answer", "solution", "solutions"),
    "rating": ("rating",),
}
CHUNK_ROWS = 4096
MOST_CHARACTERS = 1 << 20
FIX_ROW = "correct or remove the row"
# Keeps the random numbers that draw a subsample independent of those of the builders.
_SUBSAMPLE = 0
# The token of characters that have none.
_NO_TOKEN = 255


class Row(NamedTuple):
    """One puzzle."""

    line: int  # the last of its lines in the file, counted from 1
    question: str
    answer: str
    rating: int | None  # None: the file has no such column


def load_boards(settings: Any, unit: str, to_boards: Callable[[Path, list[Row]], Boards]) -> dict[SplitName, Boards]:
    """Read the puzzles of both splits, before augmentation.

    Args:
        settings: source_dir or source_repo, subsample_size and seed.
        unit: the word for the puzzles.
        to_boards: converts and checks rows of a file.

    Raises:
        UserError: A file is missing or holds something else, or the boards differ in size.
    """
    files = source_files(settings.source_dir, settings.source_repo)
    boards = {split: read_boards(file, to_boards) for split, file in files.items()}
    num_cells, num_test_cells = (of_split.questions_NS.shape[1] for of_split in boards.values())
    if num_cells != num_test_cells:
        raise UserError(
            f"{files['test']}: {unit} have {num_test_cells} cells, but those of {files['train']} have {num_cells}; "
            f"give {unit} of one size"
        )
    if (size := settings.subsample_size) is not None:
        num = len(boards["train"].questions_NS)
        if size > num:
            raise UserError(f"{files['train']}: --subsample-size is {size}, but there are {num} {unit}; lower it")
        chosen = np.random.default_rng([settings.seed, _SUBSAMPLE]).choice(num, size, replace=False)
        boards["train"] = Boards(*(array_NS[chosen] for array_NS in boards["train"]))
    return boards


def read_boards(file: Path, to_boards: Callable[[Path, list[Row]], Boards]) -> Boards:
    """Return all puzzles of a file, as `load_boards`."""
    with progress(f"reading {file.name}", None, "rows") as bar:
        parts = []
        for rows in read_rows(file):
            parts.append(to_boards(file, rows))
            bar.update(len(rows))
    if len({part.questions_NS.shape[1] for part in parts}) > 1:
        raise UserError(f"{file}: holds puzzles of several sizes; give puzzles of one size")
    boards = Boards(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    if not len(boards.questions_NS):
        raise UserError(f"{file}: no puzzle is left; lower --min-difficulty")
    return boards


def source_files(source_dir: Path | None, source_repo: str | None) -> dict[SplitName, Path]:
    """Return the files of both splits, from a folder or else from the Hugging Face Hub.

    Raises:
        UserError: A file is missing or can't be downloaded.
    """
    if source_dir is not None:
        files = {split: find_csv(source_dir, split) for split in SPLITS}
        others = [file for file in _csvs_in(source_dir) if file not in files.values()]
        if left_out := what_was_left_out(source_dir, {"other CSV files": others}):
            tell(f"note: {source_dir}{left_out}")
        return files
    assert source_repo is not None
    return download(source_repo)


def find_csv(folder: Path, split: SplitName) -> Path:
    """Return <split>.csv or <split>.csv.gz of a folder.

    Raises:
        UserError: The folder does not hold exactly one of them.
    """
    if folder.is_file():
        raise UserError(f"--source-dir {folder} is a file; give its folder, --source-dir {folder.parent}")
    found = [file for file in (folder / f"{split}.csv", folder / f"{split}.csv.gz") if file.is_file()]
    if len(found) == 2:
        raise UserError(f"{folder}: holds both {split}.csv and {split}.csv.gz; remove one of them")
    if not found:
        raise UserError(
            f"{folder}: holds neither {split}.csv nor {split}.csv.gz"
            f"{what_was_left_out(folder, {'other CSV files': _csvs_in(folder)})}; correct --source-dir, or call the "
            f"file with the puzzles for {split}ing {split}.csv"
        )
    return found[0]


def _csvs_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.name.lower().endswith((".csv", ".csv.gz")))


def download(repo: str) -> dict[SplitName, Path]:
    """Return both files of a data set on the Hugging Face Hub, from the local cache if possible.

    Raises:
        UserError: huggingface_hub is not installed, or the download fails.
    """
    try:
        import huggingface_hub
        from huggingface_hub.utils import logging
    except ImportError:
        raise UserError(
            "downloading needs huggingface_hub, which is missing; pip install it, or give files with --source-dir"
        ) from None
    logging.set_verbosity_error()  # otherwise each retry prints two lines of warnings
    files: dict[SplitName, Path] = {}
    for split in SPLITS:
        tell(f"fetching {split}.csv of {repo} from the Hugging Face Hub")
        try:
            files[split] = Path(huggingface_hub.hf_hub_download(repo, f"{split}.csv", repo_type="dataset"))
        except (OSError, ValueError) as error:  # no network, no such data set, or a malformed name
            raise UserError(
                f"cannot download {split}.csv of {repo} ({one_line(error)}); check the name and the connection, "
                "or give files with --source-dir"
            ) from None
    return files


def lines_of(stream: TextIO) -> Iterator[str]:
    """Yield the lines of a CSV file, and overlong lines in pieces.

    A gzipped file of a MB can hold a line of a GB. The CSV reader refuses a field as long as one
    piece, so such a line never fills the memory.
    """
    return iter(partial(stream.readline, MOST_CHARACTERS), "")


def read_fields(file: Path, needed: Sequence[Column]) -> Iterator[tuple[int, dict[Column, str]]]:
    """Yield each row of a .csv or .csv.gz file: its line, and the fields that `COLUMNS` lists.

    Blanks are kept, because they are cells of some puzzles. Empty lines and other columns are
    ignored.

    Args:
        needed: columns without which the file is refused.

    Raises:
        UserError: The file can't be read, its header is wrong, it has no rows, or a row has another
            number of fields. The message names the file and the line.
    """
    opener = gzip.open if file.suffix.lower() == ".gz" else open
    line, num_rows = 1, 0
    try:
        # Undecodable bytes become characters that no puzzle has. The codec "utf-8-sig" drops the
        # byte order mark that spreadsheets write.
        with opener(plain(file), "rt", encoding="utf-8-sig", errors="replace", newline="") as stream:
            reader = csv.reader(lines_of(stream))
            header = next(reader, [])
            index_of = _columns(file, header, needed)
            for fields in reader:
                line = reader.line_num
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise UserError(f"{file}:{line}: {len(fields)} fields instead of {len(header)}; {FIX_ROW}")
                num_rows += 1
                yield line, {column: fields[index] for column, index in index_of.items()}
    except FileNotFoundError:
        raise UserError(f"there is no file {file}; correct the name") from None
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise UserError(f"{file}:{line}: cannot be read on ({one_line(error)}); get the file again") from None
    if not num_rows:
        raise UserError(f"{file}:2: no puzzles after the header; give a file with rows")


def _columns(file: Path, header: Sequence[str], needed: Sequence[Column]) -> dict[Column, int]:
    """Return the places of the columns. Raise UserError if one is missing or there twice."""
    index_of: dict[Column, int] = {}
    for column, names in COLUMNS.items():
        found = [index for index, name in enumerate(header) if name.strip().lower() in names]
        if len(found) > 1:
            both = " and ".join(header[index] for index in found[:2])
            raise UserError(f"{file}:1: {both} both name the {column}; rename or remove one of these columns")
        if found:
            index_of[column] = found[0]
        elif column in needed:
            typed = ",".join(header)[:80]
            raise UserError(
                f"{file}:1: the header is {typed!r}, without {column}; give a header with {' and '.join(needed)}, "
                f"such as {' or '.join(names)}"
            )
    return index_of


def read_rows(file: Path) -> Iterator[list[Row]]:
    """Yield the rows of a file of puzzles with answers, in lists of up to CHUNK_ROWS rows.

    So a file of millions of rows needs little memory.

    Raises:
        UserError: As `read_fields`, or a rating is no integer.
    """
    rows: list[Row] = []
    for line, fields in read_fields(file, ("question", "answer")):
        rating = fields.get("rating")
        try:
            rows.append(Row(line, fields["question"], fields["answer"], None if rating is None else int(rating)))
        except ValueError:
            raise UserError(f"{file}:{line}: the rating is {str(rating)[:40]!r}, no integer; {FIX_ROW}") from None
        if len(rows) == CHUNK_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def to_tokens(
    file: Path,
    rows: list[Row],
    column: Literal["question", "answer"],
    tokens: dict[str, int],
    num_cells: int,
    only: str,
) -> np.ndarray:
    """Convert a column of text to tokens, (N, S) uint8.

    Args:
        tokens: the token of each character that is allowed.
        num_cells: the length that each text must have.
        only: the allowed characters, for the message: "1 to 9".

    Raises:
        UserError: A text is malformed; the message names the file and the line.
    """
    texts: list[str] = [getattr(row, column) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if len(text) != num_cells:
            raise UserError(f"{file}:{row.line}: the {column} has {len(text)} characters, not {num_cells}; {FIX_ROW}")
    token_of = np.full(256, _NO_TOKEN, np.uint8)
    for character, token in tokens.items():
        token_of[ord(character)] = token
    codes = np.frombuffer("".join(texts).encode("latin-1", errors="replace"), dtype=np.uint8)
    tokens_NS = token_of[codes].reshape(len(rows), num_cells)
    for n, cell in np.argwhere(tokens_NS == _NO_TOKEN)[:1]:
        raise UserError(
            f"{file}:{rows[n].line}: the {column} has {texts[n][cell]!r} in cell {cell + 1}, "
            f"where only {only} can be; {FIX_ROW}"
        )
    return tokens_NS
