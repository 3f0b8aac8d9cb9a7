"""What the builders of boards share: puzzles of CSV files or generators, and images of boards."""
# N = boards, S = cells of a board

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dataset.builder import ONE_OF_THESE, SPLITS, SplitWriter, Typed, option, options_of, progress, require_index
from dataset.schema import SplitName
from dataset.tables import read_table
from dataset.tasks.base import TextTask, some
from utils import hub
from utils.arguments import given
from utils.errors import UserError
from utils.files import opened
from utils.terminal import tell

SOURCES = f"where the puzzles come from {ONE_OF_THESE})"
FILES, GENERATE = "with --source-repo or --source-dir", "with --generate"
SOURCE_DIR = option("DIR", "folder with train and test, as .csv or .csv.gz", group=SOURCES)
SUBSAMPLE_SIZE = option("N", "draw N of the training puzzles (default: all)", group=FILES, at_least=1)
GENERATE_TEST = option("M", "make M test puzzles (default: a tenth of N, at least 1)", group=GENERATE, at_least=1)

# Independent streams of random numbers, so that an option that uses one stream does not change the
# others.
_SUBSAMPLE, _AUGMENT, _GENERATE, DIG_STREAM = range(4)
_CHUNK_BOARDS = 1024


class Boards(NamedTuple):
    """Puzzles and their solutions, (N, S) uint8 each."""

    questions_NS: np.ndarray
    answers_NS: np.ndarray

    def take(self, rows: np.ndarray | slice) -> "Boards":
        return Boards(self.questions_NS[rows], self.answers_NS[rows])

    def chunks(self) -> Iterator["Boards"]:
        for start in range(0, len(self.questions_NS), _CHUNK_BOARDS):
            yield self.take(slice(start, start + _CHUNK_BOARDS))


def repo_option(default: str) -> Any:
    return option("REPO", f"data set on the Hugging Face Hub (default: {default})", group=SOURCES)


def complete_sources(typed: Typed, settings: type[Any], default_repo: str) -> None:
    """Check the options about sources, and fill in those that were not given."""
    if typed.generate is not None:
        for name in given(typed, *options_of(settings, FILES)):
            raise UserError(f"{name} is for puzzles from files, not for --generate; leave it out")
        typed.generate_test = typed.generate_test or max(1, typed.generate // 10)
        return
    for name in given(typed, *options_of(settings, GENERATE)):
        raise UserError(f"{name} needs --generate; add --generate N or leave {name} out")
    if typed.source_dir is None:
        typed.source_repo = typed.source_repo or default_repo


Pairs = Iterator[tuple[np.ndarray, np.ndarray]]


def generate_boards(
    settings: Any, generate: Callable[[int, np.random.Generator], Pairs], *, shuffled: bool
) -> dict[SplitName, Boards]:
    """Return the puzzles of both splits from a generator.

    Args:
        generate: yields so many puzzles with their solutions.
        shuffled: whether puzzles are put in random order before they are divided. If nearly all
            puzzles of a kind are used, rare puzzles come late, and would all be test puzzles.
    """
    num = settings.generate + settings.generate_test
    rng = np.random.default_rng([settings.seed, _GENERATE])
    pairs = []
    with progress("generating", num, "puzzles") as bar:
        for pair in generate(num, rng):
            pairs.append(pair)
            bar.update()
    boards = Boards(*(np.stack(column) for column in zip(*pairs, strict=True)))
    order_N = rng.permutation(num) if shuffled else np.arange(num)
    parts = np.split(order_N, [settings.generate])
    return {split: boards.take(rows) for split, rows in zip(SPLITS, parts, strict=True)}


def write_boards(
    folder: Path,
    boards: dict[SplitName, Boards],
    images: Callable[[Boards, int, np.random.Generator], Iterator[Boards]],
    num_aug: int,
    seed: int,
    vocab_size: int,
    tokens: str,
) -> tuple[list[str], list[str]]:
    """Write both splits, and return the names of the identifiers and lines of the summary.

    Args:
        images: yields the images of boards as tokens: each board, followed by so many symmetries.
        tokens: says what the tokens are.
    """
    lines = []
    for split, of_split in boards.items():
        num_boards, seq_len = of_split.questions_NS.shape
        group_size = 1 + (num_aug if split == "train" else 0)
        require_index(num_boards * group_size)
        with (
            SplitWriter(folder / split, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=1) as writer,
            progress(split, num_boards * group_size, "boards") as bar,
        ):
            for inputs_NS, labels_NS in images(of_split, group_size - 1, np.random.default_rng([seed, _AUGMENT])):
                ones_N = np.ones(len(inputs_NS), np.int32)
                writer.add(inputs_NS, labels_NS, ones_N, identifiers_P=0 * ones_N)
                bar.update(len(inputs_NS))
            writer.end_groups(np.full(num_boards, group_size))
        sizes = f" = {num_boards:,} puzzles x (1 + {num_aug:,} augmentations)" if split == "train" else ""
        lines.append(f"{split:<6} {writer.num_examples:,} boards{sizes}")
    return ["<blank>"], [*lines, f"tokens {tokens}: vocab_size {vocab_size}, seq_len {seq_len}"]


# ---- puzzles of CSV files ------------------------------------------------------------------------

Column = Literal["question", "answer", "rating"]
# The names that the header may give to a column. Kaggle's files of Sudokus have puzzle,solution or
# quizzes,solutions.
COLUMNS: dict[Column, tuple[str, ...]] = {
    "question": ("question", "puzzle", "quizzes"),
    "answer": ("answer", "solution", "solutions"),
    "rating": ("rating",),
}
CHUNK_ROWS = 4096
MOST_CHARACTERS = 1 << 20  # of a line
# The token of characters that have none.
_NO_TOKEN = 255


class Row(NamedTuple):
    """One puzzle."""

    line: int  # the first of its lines in the file, counted from 1
    question: str
    answer: str
    rating: int | None  # None: the file has no such column


def wrong_row(file: Path, row: Row, what: str) -> UserError:
    return UserError(f"{file}:{row.line}: {what}; correct or remove the row")


def load_boards(settings: Any, to_boards: Callable[[Path, list[Row]], Boards]) -> dict[SplitName, Boards]:
    """Return the puzzles of both splits. `to_boards` converts and checks rows."""
    files = source_files(settings.source_dir, settings.source_repo)
    boards = {split: read_boards(file, to_boards) for split, file in files.items()}
    num_cells, num_test_cells = (of_split.questions_NS.shape[1] for of_split in boards.values())
    if num_cells != num_test_cells:
        raise UserError(
            f"{files['test']}: puzzles have {num_test_cells} cells, but those of {files['train']} have {num_cells}; "
            "give puzzles of one size"
        )
    if (size := settings.subsample_size) is not None:
        num = len(boards["train"].questions_NS)
        if size > num:
            raise UserError(f"{files['train']}: --subsample-size is {size}, but there are {num} puzzles; lower it")
        rng = np.random.default_rng([settings.seed, _SUBSAMPLE])
        boards["train"] = boards["train"].take(rng.choice(num, size, replace=False))
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
    """Return the files of both splits, from a folder or else from the Hugging Face Hub."""
    if source_dir is None:
        assert source_repo is not None
        return download(source_repo)
    csvs = sorted(file for file in source_dir.glob("*") if file.name.lower().endswith((".csv", ".csv.gz")))
    files: dict[SplitName, Path] = {}
    for split in SPLITS:
        found = [file for file in csvs if file.name in (f"{split}.csv", f"{split}.csv.gz") and file.is_file()]
        if len(found) != 1:
            held = ", ".join(file.name for file in csvs[:5]) or "no CSV files"
            raise UserError(f"{source_dir}: holds {held}; give a folder with one {split}.csv or {split}.csv.gz")
        files[split] = found[0]
    if others := [file.name for file in csvs if file not in files.values()]:
        tell(f"note: {source_dir}: other CSV files are left out: {some(others)}")
    return files


def download(repo: str) -> dict[SplitName, Path]:
    """Return both files of a data set on the Hugging Face Hub, from the local cache if possible."""
    remedy = "check the name and the connection, or give files with --source-dir"
    files: dict[SplitName, Path] = {}
    for split in SPLITS:
        tell(f"fetching {split}.csv of {repo} from the Hugging Face Hub")
        failed = f"cannot download {split}.csv of {repo}"
        files[split] = hub.download(repo, f"{split}.csv", failed, remedy, repo_type="dataset")
    return files


def read_fields(file: Path, needed: Sequence[Column]) -> Iterator[tuple[int, dict[Column, str]]]:
    """Yield each row of a .csv or .csv.gz file: its line, and the fields that `COLUMNS` lists.

    Blanks are kept, because they are cells of some puzzles. Empty lines and other columns are
    ignored. A file without the columns that are needed is refused.
    """
    with opened(file) as stream:
        rows = read_table(file, stream, most=MOST_CHARACTERS, strict=False)
        _, header = next(rows)
        index_of: dict[Column, int] = {}
        for column, names in COLUMNS.items():
            found = [index for index, name in enumerate(header) if name.strip().lower() in names]
            if len(found) > 1 or (column in needed and not found):
                raise UserError(
                    f"{file}:1: the header is {','.join(header)[:80]!r}, with {len(found)} columns for the {column}; "
                    f"give it one called {' or '.join(names)}"
                )
            if found:
                index_of[column] = found[0]
        line = 1
        for line, fields in rows:
            yield line, {column: fields[index] for column, index in index_of.items()}
    if line == 1:
        raise UserError(f"{file}:2: no puzzles after the header; give a file with rows")


def read_rows(file: Path) -> Iterator[list[Row]]:
    """Yield the rows of a file of puzzles with answers, in lists of up to CHUNK_ROWS rows."""
    rows: list[Row] = []
    for line, fields in read_fields(file, ("question", "answer")):
        row = Row(line, fields["question"], fields["answer"], None)
        if (rating := fields.get("rating")) is not None:
            try:
                row = row._replace(rating=int(rating))
            except ValueError:
                raise wrong_row(file, row, f"the rating is {rating[:40]!r}, no integer") from None
        rows.append(row)
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
    only: str,
    num_cells: int,
) -> np.ndarray:
    """Convert a column of text to tokens, (N, S) uint8.

    Args:
        tokens: the token of each character that is allowed.
        only: the allowed characters, for the message: "1 to 9".
    """
    texts: list[str] = [getattr(row, column) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if len(text) != num_cells:
            raise wrong_row(file, row, f"the {column} has {len(text)} characters, not {num_cells}")
    token_of = np.full(256, _NO_TOKEN, np.uint8)
    for character, token in tokens.items():
        token_of[ord(character)] = token
    codes = np.frombuffer("".join(texts).encode("latin-1", errors="replace"), dtype=np.uint8)
    tokens_NS = token_of[codes].reshape(len(rows), num_cells)
    for n, cell in np.argwhere(tokens_NS == _NO_TOKEN)[:1]:
        what = f"the {column} has {texts[n][cell]!r} in cell {cell + 1}, where only {only} can be"
        raise wrong_row(file, rows[n], what)
    return tokens_NS


def to_boards(file: Path, rows: list[Row], task: TextTask, question_tokens: dict[str, int], only: str) -> Boards:
    """Convert rows to tokens, and check each answer by the rules of the task.

    `question_tokens` and `only` are as for `to_tokens`.
    """
    num_cells = task.rows * task.columns
    questions_NS = to_tokens(file, rows, "question", question_tokens, only, num_cells)
    answers_NS = to_tokens(file, rows, "answer", *task.symbols_of_solutions(), num_cells)
    for (array, what), wrong_N in task.faults(questions_NS, answers_NS, np.ones(answers_NS.shape, bool)).items():
        for n in np.flatnonzero(wrong_N)[:1]:
            name = "question" if array == "inputs" else "answer"
            raise wrong_row(file, rows[n], f"the {name} {what.replace('its input', 'its question')}")
    return Boards(questions_NS, answers_NS)
