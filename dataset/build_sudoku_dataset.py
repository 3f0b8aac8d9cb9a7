"""Builds a Sudoku dataset in the published format: downloaded, from local CSV files, or generated here.

The training puzzles are augmented by random symmetries. The result is a pure function of the settings, seed included,
and appears under its name only when it is whole.
"""
# N = puzzles, B = boards (puzzles and their augmentations), S = cells of a board

import argparse
import contextlib
import csv
import dataclasses
import errno
import fcntl
import gzip
import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

if not __package__:  # run as a script, with dataset/ itself on the path instead of the folder above it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from tqdm import tqdm

from dataset.augment import BOXES, Box, draw_symmetries
from dataset.schema import DatasetMetadata, SplitName, check_contents, open_split
from dataset.sudoku import generate, valid_solutions

DEFAULT_REPO = "sapientinc/sudoku-extreme"
SPLITS: tuple[SplitName, ...] = ("train", "test")
CSV_HEADER = ["source", "question", "answer", "rating"]
CSV_CHUNK_ROWS = 20_000
AUGMENT_CHUNK_BOARDS = 4096
_FIX_ROW = "correct or remove the row"
# The index arrays are int32, as published.
MAX_BOARDS = 2**31 - 1
# Independent streams of random numbers, so that an option that consumes one of them leaves the others alone.
_SUBSAMPLE, _AUGMENT, _GENERATE = 0, 1, 2

EXAMPLES = """
examples:
  # Sudoku-Extreme, 1,000 training puzzles with 1,000 augmentations each (downloads train.csv and test.csv)
  python dataset/build_sudoku_dataset.py --output-dir data/sudoku-extreme-1k-aug-1000 \\
      --subsample-size 1000 --num-aug 1000

  # the same from files that are already here: train.csv and test.csv, or .csv.gz
  python dataset/build_sudoku_dataset.py --output-dir data/sudoku --source-dir my-puzzles --num-aug 100

  # small puzzles of one's own: 1,000 to train on, 500 to test on, none of them a symmetry of another
  python dataset/build_sudoku_dataset.py --output-dir data/sudoku-4x4 --generate 1000 --generate-test 500 --box 2x2

The CSV files have the header source,question,answer,rating. A board is a text of 16, 36 (boxes of 2 rows and 3 columns)
or 81 digits, row by row, with . or 0 for a blank. A dataset that is already in the output folder is replaced once the
new one is whole.
"""


class Boards(NamedTuple):
    """Puzzles as digits, 0 for a blank: (N, S) uint8 each."""

    questions_NS: np.ndarray
    solutions_NS: np.ndarray


@dataclass(frozen=True)
class Settings:
    """What the command line said. `generate_test` and `box` are None unless puzzles are generated."""

    output_dir: Path
    source_repo: str | None
    source_dir: Path | None
    generate: int | None
    generate_test: int | None
    box: str | None
    subsample_size: int | None
    min_difficulty: int | None
    num_aug: int
    seed: int


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse would print its usage as well; the project's rule is one line."""
        raise ValueError(f"{message}; --help shows the options")


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Raises ValueError for unknown, malformed or conflicting options."""
    parser = _Parser(
        "build_sudoku_dataset.py",
        description="Build a Sudoku dataset: inputs are puzzles, labels their solutions, one token per cell.",
        epilog=EXAMPLES,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=100),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--output-dir", type=Path, metavar="DIR", default=Path("data/sudoku-extreme-full"), help="default: %(default)s")
    add("--num-aug", type=int, metavar="N", default=0, help="augmented boards for each training puzzle (default: 0)")
    add("--seed", type=int, metavar="N", default=0, help="of everything that is random (default: 0)")

    add = parser.add_argument_group("where the puzzles come from (one of these)").add_argument
    add("--source-repo", metavar="REPO", help=f"data set on the Hugging Face Hub (default: {DEFAULT_REPO})")
    add("--source-dir", type=Path, metavar="DIR", help="folder with train and test, as .csv or .csv.gz")
    add("--generate", type=int, metavar="N", help="make N training puzzles with unique solutions")

    add = parser.add_argument_group("with --source-repo or --source-dir").add_argument
    add("--subsample-size", type=int, metavar="N", help="draw N of the training puzzles (default: all)")
    add("--min-difficulty", type=int, metavar="R", help="only puzzles rated R or more, in train and test")

    add = parser.add_argument_group("with --generate").add_argument
    add("--generate-test", type=int, metavar="M", help="make M test puzzles (default: a tenth of N, at least 1)")
    add("--box", choices=list(BOXES), help="rows x columns of a box; sides 4, 6 and 9 (default: 3x3)")

    return _complete(Settings(**vars(parser.parse_args(argv))))


def _complete(settings: Settings) -> Settings:
    """Checks the options against one another and fills in the defaults that depend on others."""

    def given(*names: str) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name) is not None]

    for name, least in (("num_aug", 0), ("seed", 0), ("generate", 1), ("generate_test", 1), ("subsample_size", 1)):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    sources = given("source_repo", "source_dir", "generate")
    if len(sources) > 1:
        raise ValueError(f"{' and '.join(sources)} exclude each other; give one of them")
    if settings.generate is None:
        for option in given("generate_test", "box"):
            raise ValueError(f"{option} needs --generate; add --generate N or leave {option} out")
        source_repo = settings.source_repo or (DEFAULT_REPO if settings.source_dir is None else None)
        return dataclasses.replace(settings, source_repo=source_repo)
    for option in given("subsample_size", "min_difficulty"):
        raise ValueError(f"{option} is for puzzles from files, not for --generate; leave it out")
    generate_test = settings.generate_test or max(1, settings.generate // 10)
    return dataclasses.replace(settings, generate_test=generate_test, box=settings.box or str(BOXES["3x3"]))


# ---------------------------------------------------------------------------------------------------------------------
# Where the puzzles come from: each gives the boards of both splits


def load_boards(settings: Settings) -> tuple[Box, dict[SplitName, Boards]]:
    """The puzzles of both splits, before augmentation. Raises ValueError for files that are no Sudoku."""
    if settings.generate is not None:
        return _generate(settings)
    if settings.source_dir is not None:
        files = {split: _find_csv(settings.source_dir, split) for split in SPLITS}
    else:
        assert settings.source_repo is not None
        files = _download(settings.source_repo)
    boards = {}
    for split, file in files.items():
        box, boards[split] = read_csv(file, settings.min_difficulty)
        if boards[split].questions_NS.shape[1] != boards["train"].questions_NS.shape[1]:
            raise ValueError(f"{file}: boards have side {box.side}, those of {files['train']} not; give both the same")

    size = settings.subsample_size
    if size is not None:
        num = len(boards["train"].questions_NS)
        if size > num:
            left = "" if settings.min_difficulty is None else f" rated {settings.min_difficulty} or more"
            raise ValueError(
                f"{files['train']}: --subsample-size is {size}, but there are {num} puzzles{left}; lower it"
            )
        chosen = np.random.default_rng([settings.seed, _SUBSAMPLE]).choice(num, size, replace=False)
        boards["train"] = Boards(*(array_NS[chosen] for array_NS in boards["train"]))
    return box, boards


def _generate(settings: Settings) -> tuple[Box, dict[SplitName, Boards]]:
    assert settings.generate is not None and settings.generate_test is not None and settings.box is not None
    box = BOXES[settings.box]
    num = settings.generate + settings.generate_test
    rng = np.random.default_rng([settings.seed, _GENERATE])
    with _progress("generating", num, "puzzles") as bar:
        pairs = []
        for pair in generate(num, box, rng):
            pairs.append(pair)
            bar.update()
    # Where nearly all classes are used up, rare ones come late: without shuffling they would all be test puzzles.
    order = rng.permutation(num)
    questions_NS, solutions_NS = (np.stack(column)[order] for column in zip(*pairs, strict=True))
    cut = settings.generate
    return box, {
        "train": Boards(questions_NS[:cut], solutions_NS[:cut]),
        "test": Boards(questions_NS[cut:], solutions_NS[cut:]),
    }


def _find_csv(folder: Path, split: SplitName) -> Path:
    candidates = [folder / f"{split}.csv", folder / f"{split}.csv.gz"]
    found = [file for file in candidates if file.is_file()]
    if not found:
        raise ValueError(f"{folder}: holds neither {split}.csv nor {split}.csv.gz; correct --source-dir")
    if len(found) == 2:
        raise ValueError(f"{folder}: holds both {split}.csv and {split}.csv.gz; remove one of them")
    return found[0]


def _download(repo: str) -> dict[SplitName, Path]:
    try:
        import huggingface_hub
        from huggingface_hub.utils import logging
    except ImportError:
        raise ValueError(
            "downloading needs huggingface_hub, which is missing; pip install it, or give files with --source-dir"
        ) from None
    logging.set_verbosity_error()  # otherwise each retry is two lines of warning
    files: dict[SplitName, Path] = {}
    for split in SPLITS:
        print(f"fetching {split}.csv of {repo} from the Hugging Face Hub", file=sys.stderr)
        try:
            files[split] = Path(huggingface_hub.hf_hub_download(repo, f"{split}.csv", repo_type="dataset"))
        except (OSError, ValueError) as error:  # no network, no such data set, not a name of one
            raise ValueError(
                f"cannot download {split}.csv of {repo} ({_one_line(error)}); check the name and the connection, "
                "or give files with --source-dir"
            ) from None
    return files


def read_csv(file: Path, min_difficulty: int | None = None) -> tuple[Box, Boards]:
    """The boards of a .csv or .csv.gz file whose rating is at least `min_difficulty`, and the box their side implies.

    Every row is checked, those that are left out too. Raises ValueError with file and line.
    """
    box: Box | None = None
    parts: list[Boards] = []
    highest = 0
    with _progress(f"reading {file.name}", None, "rows") as bar:
        for rows in _csv_chunks(file):
            box = box or _box_of(file, rows[0])
            boards = _to_boards(file, rows, box)
            ratings_N = np.array([row.rating for row in rows])
            highest = max(highest, int(ratings_N.max()))
            if min_difficulty is not None:
                boards = Boards(*(array_NS[ratings_N >= min_difficulty] for array_NS in boards))
            parts.append(boards)
            bar.update(len(rows))
    if box is None:
        raise ValueError(f"{file}:2: no puzzles after the header; give a file with rows")
    boards = Boards(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    if len(boards.questions_NS) == 0:
        raise ValueError(
            f"{file}: no puzzle is rated {min_difficulty} or more, the highest is {highest}; lower --min-difficulty"
        )
    return box, boards


class _Row(NamedTuple):
    line: int
    question: str
    answer: str
    rating: int


def _csv_chunks(file: Path) -> Iterator[list[_Row]]:
    """Lists of up to CSV_CHUNK_ROWS rows, so that a file of millions needs no memory for its text."""
    opener = gzip.open if file.suffix == ".gz" else open
    rows: list[_Row] = []
    line = 1
    try:
        # Undecodable bytes become characters that no board has; spreadsheets put a byte order mark in front.
        with opener(file, "rt", encoding="utf-8-sig", errors="replace", newline="") as stream:
            reader = csv.reader(stream)
            header = next(reader, None)
            if header is None:
                raise ValueError(f"{file}:1: the file is empty; it needs the header {','.join(CSV_HEADER)} and rows")
            if header != CSV_HEADER:
                found = ",".join(header)[:80]
                raise ValueError(f"{file}:1: the header is {found!r}; it must be {','.join(CSV_HEADER)}")
            for fields in reader:
                line = reader.line_num
                if not fields:
                    continue
                if len(fields) != len(CSV_HEADER):
                    raise ValueError(f"{file}:{line}: {len(fields)} fields instead of 4; {_FIX_ROW}")
                _, question, answer, rating = fields
                try:
                    rows.append(_Row(line, question, answer, int(rating)))
                except ValueError:
                    raise ValueError(f"{file}:{line}: the rating is {rating[:40]!r}, no integer; {_FIX_ROW}") from None
                if len(rows) == CSV_CHUNK_ROWS:
                    yield rows
                    rows = []
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise ValueError(f"{file}:{line}: cannot be read on ({_one_line(error)}); get the file again") from None
    if rows:
        yield rows


def _box_of(file: Path, row: _Row) -> Box:
    for box in BOXES.values():
        if len(row.question) == box.num_cells:
            return box
    raise ValueError(
        f"{file}:{row.line}: the question has {len(row.question)} characters; boards have 16, 36 or 81; {_FIX_ROW}"
    )


def _to_boards(file: Path, rows: list[_Row], box: Box) -> Boards:
    """Turns text into digits and makes sure that each answer is a solution of its question."""
    questions_NS = _to_digits(file, rows, "question", box, blanks=".0")
    solutions_NS = _to_digits(file, rows, "answer", box, blanks="")
    for n in np.flatnonzero(~valid_solutions(solutions_NS, box))[:1]:
        raise ValueError(
            f"{file}:{rows[n].line}: the answer is no valid Sudoku with boxes of {box} (rows x columns); {_FIX_ROW}"
        )
    for n, cell in np.argwhere((questions_NS != 0) & (questions_NS != solutions_NS))[:1]:
        raise ValueError(
            f"{file}:{rows[n].line}: the answer has {solutions_NS[n, cell]} in cell {cell + 1}, "
            f"the question {questions_NS[n, cell]}; {_FIX_ROW}"
        )
    return Boards(questions_NS, solutions_NS)


def _to_digits(file: Path, rows: list[_Row], column: str, box: Box, blanks: str) -> np.ndarray:
    """(N, S) uint8 from the text of a column, in which the characters of `blanks` mean 0."""
    texts: list[str] = [getattr(row, column) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if len(text) != box.num_cells:
            raise ValueError(
                f"{file}:{row.line}: the {column} has {len(text)} characters, not {box.num_cells}; {_FIX_ROW}"
            )
    invalid = 255
    digit_of = np.full(256, invalid, dtype=np.uint8)
    digit_of[[ord(blank) for blank in blanks]] = 0
    digit_of[ord("1") : ord("1") + box.side] = np.arange(1, box.side + 1)
    codes = np.frombuffer("".join(texts).encode("latin-1", errors="replace"), dtype=np.uint8)
    boards_NS = digit_of[codes].reshape(len(rows), box.num_cells)
    for n, cell in np.argwhere(boards_NS == invalid)[:1]:
        allowed = f"1 to {box.side}" + (", and . or 0 for a blank," if blanks else "")
        raise ValueError(
            f"{file}:{rows[n].line}: the {column} has {texts[n][cell]!r} in cell {cell + 1}, "
            f"where only {allowed} can be; {_FIX_ROW}"
        )
    return boards_NS


# ---------------------------------------------------------------------------------------------------------------------
# The dataset


def write_split(folder: Path, boards: Boards, box: Box, num_aug: int, rng: np.random.Generator) -> None:
    """Writes one split: for each puzzle a group of 1 + num_aug puzzles with one example each, the original first."""
    num_groups = len(boards.questions_NS)
    group_size = 1 + num_aug
    num_boards = num_groups * group_size
    if num_boards > MAX_BOARDS:
        raise ValueError(f"{num_boards:,} boards are more than a dataset can index, {MAX_BOARDS:,}; lower --num-aug")
    folder.mkdir()
    # Appended to plain files, not through memory maps: on a full disk a map kills the process without an error.
    with (
        _array_file(folder / "all__inputs.npy", (num_boards, box.num_cells)) as inputs_file,
        _array_file(folder / "all__labels.npy", (num_boards, box.num_cells)) as labels_file,
        _progress(folder.name, num_boards, "boards") as bar,
    ):
        for start in range(0, num_boards, AUGMENT_CHUNK_BOARDS):
            group_B, copy_B = np.divmod(np.arange(start, min(start + AUGMENT_CHUNK_BOARDS, num_boards)), group_size)
            questions_BS, solutions_BS = (array_NS[group_B] for array_NS in boards)
            if num_aug:
                # Drawn for the originals as well: then board b depends on (seed, b) alone, however chunks are cut.
                symmetries = draw_symmetries(rng, len(group_B), box)
                is_original_B1 = copy_B[:, None] == 0
                questions_BS = np.where(is_original_B1, questions_BS, symmetries.apply(questions_BS))
                solutions_BS = np.where(is_original_B1, solutions_BS, symmetries.apply(solutions_BS))
            inputs_file.write((questions_BS + np.uint8(1)).data)
            labels_file.write((solutions_BS + np.uint8(1)).data)
            bar.update(len(group_B))
    np.save(folder / "all__puzzle_identifiers.npy", np.zeros(num_boards, dtype=np.int32))
    np.save(folder / "all__puzzle_indices.npy", np.arange(num_boards + 1, dtype=np.int32))
    np.save(folder / "all__group_indices.npy", np.arange(0, num_boards + 1, group_size, dtype=np.int32))
    metadata = DatasetMetadata(
        pad_id=0,
        ignore_label_id=0,
        blank_identifier_id=0,
        vocab_size=box.side + 2,
        seq_len=box.num_cells,
        num_puzzle_identifiers=1,
        total_groups=num_groups,
        mean_puzzle_examples=1,
        sets=["all"],
    )
    (folder / "dataset.json").write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _array_file(file: Path, shape: tuple[int, int]) -> Iterator[BinaryIO]:
    """A .npy file of uint8 whose rows are appended."""
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        yield stream


def build(settings: Settings) -> str:
    """Builds the dataset and returns a summary of it. Raises ValueError for bad input; leaves nothing then."""
    started = time.perf_counter()
    with _new_folder(settings.output_dir) as folder:
        box, boards = load_boards(settings)
        fingerprints = {}
        for split in SPLITS:
            num_aug = settings.num_aug if split == "train" else 0
            rng = np.random.default_rng([settings.seed, _AUGMENT])
            write_split(folder / split, boards[split], box, num_aug, rng)
            # Read back through the code that training reads it with.
            fingerprints[split] = check_contents(open_split(folder, split))
        (folder / "identifiers.json").write_text(json.dumps(["<blank>"]) + "\n", encoding="utf-8")
        builder = {"program": "build_sudoku_dataset", **dataclasses.asdict(settings)}
        del builder["output_dir"]
        record = json.dumps({**fingerprints, "builder": builder}, indent=2, default=str)
        (folder / "fingerprint.json").write_text(record + "\n", encoding="utf-8")
        size_mb = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    num_train, num_test = (len(boards[split].questions_NS) for split in SPLITS)
    num_boards = num_train * (1 + settings.num_aug)
    return "\n".join(
        [
            f"built {settings.output_dir} in {time.perf_counter() - started:.1f} s ({size_mb:,.1f} MB)",
            f"  train  {num_boards:,} boards = {num_train:,} puzzles x (1 + {settings.num_aug:,} augmentations)",
            f"  test   {num_test:,} boards",
            f"  tokens padding 0, blank 1, digits from 2: vocab_size {box.side + 2}, seq_len {box.num_cells}",
            *(f"  sha256 {fingerprints[split]} ({split})" for split in SPLITS),
        ]
    )


@contextlib.contextmanager
def _new_folder(output_dir: Path) -> Iterator[Path]:
    """A folder to build in, beside `output_dir`, that takes its place when the block ends well and else is removed.

    It is locked, so that what an earlier build left when it was killed can be told from a build that is running.
    """
    target = output_dir.resolve()
    _check_replaceable(target, output_dir)
    building = target.with_name(f".{target.name}.building")
    replaced = target.with_name(f".{target.name}.replaced")
    building.mkdir(parents=True, exist_ok=True)
    lock = os.open(building, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{output_dir} is being built by another process; wait for it or stop it") from None
        except OSError as error:
            # Cluster file systems mounted without locks; then it is up to the user not to build twice at once.
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        try:
            _settle_replaced(replaced, target)
            for stale in building.iterdir():
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
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


def _settle_replaced(replaced: Path, target: Path) -> None:
    """Puts an old dataset back if a build stopped before the new one had taken its place, else removes it."""
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)


def _check_replaceable(target: Path, shown: Path) -> None:
    """Only a dataset may be replaced: a mistyped folder must not cost anyone's files."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{shown} is a file; choose another --output-dir")
    ours = {*SPLITS, "identifiers.json", "fingerprint.json"}
    others = sorted(entry.name for entry in target.iterdir() if entry.name not in ours)
    if others:
        raise ValueError(f"{shown} holds {others[0]}, which is no part of a dataset; choose another --output-dir")
    is_dataset = any((target / split / "dataset.json").is_file() for split in SPLITS)
    if any(target.iterdir()) and not is_dataset:
        raise ValueError(f"{shown} is neither empty nor a dataset; choose another --output-dir")


# ---------------------------------------------------------------------------------------------------------------------
# What the user sees


class _Lines:
    """Turns tqdm's rewriting of one line into whole lines, for a file or a pipe."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def _progress(what: str, total: int | None, unit: str) -> "tqdm[NoReturn]":
    interactive = sys.stderr.isatty()
    return tqdm(
        desc=what,
        total=total,
        unit=f" {unit}",
        unit_scale=total is None or total >= 10_000,
        mininterval=0.1 if interactive else 10.0,
        file=None if interactive else _Lines(),
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 after a mistake of the user, 130 after Ctrl-C."""
    try:
        settings = parse_settings(argv)
        try:
            summary = build(settings)
        except OSError as error:
            reason = f"cannot build {settings.output_dir} ({_one_line(error)})"
            raise ValueError(f"{reason}; see to space and permissions there, or choose another --output-dir") from None
    except ValueError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was built", file=sys.stderr)
        return 130
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
