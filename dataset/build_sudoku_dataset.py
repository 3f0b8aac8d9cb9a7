"""Build a Sudoku dataset from a download, from local CSV files, or from puzzles generated here.

The training puzzles are augmented by random symmetries. The puzzles and the settings, with the
seed, decide every byte of the dataset. The dataset appears under its name only when it is whole.
"""
# N = puzzles, B = boards (puzzles and their augmentations), S = cells of a board

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset import puzzle_csv
from dataset.augment import BOXES, Box, draw_symmetries
from dataset.builder import (
    MAX_ROWS,
    SPLITS,
    SplitWriter,
    add_sources,
    check_sources,
    collect,
    finish,
    new_dataset,
    progress,
    record_of,
    subsample,
    summary,
)
from dataset.puzzle_csv import FIX_ROW, NO_TOKEN, Row
from dataset.schema import SplitName
from dataset.sudoku import DIGITS, count_solutions, digits_in_words, generate, valid_solutions
from dataset.tasks.base import joined
from utils.arguments import Parser, check_at_least, typed_path
from utils.errors import UserError
from utils.shell import run_command

DEFAULT_REPO = "sapientinc/sudoku-extreme"
AUGMENT_CHUNK_BOARDS = 4096
# Independent streams of random numbers, so that an option that uses one stream does not change the
# others.
_SUBSAMPLE, _AUGMENT, _GENERATE = 0, 1, 2

EXAMPLES = """
examples:
  # Sudoku-Extreme: 1,000 training puzzles with 1,000 augmentations each (downloads the CSV files)
  python dataset/build_sudoku_dataset.py --output-dir data/sudoku-extreme-1k-aug-1000 \\
      --subsample-size 1000 --num-aug 1000

  # puzzles from local files: train.csv and test.csv, or .csv.gz
  python dataset/build_sudoku_dataset.py --output-dir data/sudoku \\
      --source-dir my-puzzles --num-aug 100

  # new small puzzles, 1,000 for training and 500 for testing; no puzzle is a symmetry of another
  python dataset/build_sudoku_dataset.py --output-dir data/sudoku-4x4 \\
      --generate 1000 --generate-test 500 --box 2x2

  # puzzles of side 16, which need no guesses (19 s of one core)
  python dataset/build_sudoku_dataset.py --output-dir data/sudoku-16x16 \\
      --generate 200 --generate-test 100 --box 4x4

The CSV files have the columns question and answer, and perhaps rating. Kaggle's names, puzzle and
solution or quizzes and solutions, are read too. A board is a text of 16, 36, 64, 81, 144
or 256 digits, row by row, with . or 0 for a blank. Digits above 9 are the letters A to G, in upper
or lower case. The boxes of sides 6, 8 and 12 have 2 rows and 3 columns, 2 and 4, and 3 and 4.

Every generated puzzle has one solution. Up to side 9, a search makes sure of it, and puzzles range
from minimal to easy ones. For sides 12 and 16 the search could take minutes, so a clue is removed
only if naked and hidden singles (a cell with one candidate; a digit with one place in a row, column
or box) still derive the whole board. Such puzzles need no guesses; at least 0.4 of the cells are clues.

An old dataset in the output folder is replaced once the new dataset is whole.
"""


class Boards(NamedTuple):
    """Puzzles and their solutions as digits, with 0 for a blank, (N, S) uint8 each."""

    questions_NS: np.ndarray
    solutions_NS: np.ndarray


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    `generate_test` is None unless puzzles are generated. `box` is None if the files say it.
    """

    output_dir: Path
    source_repo: str | None
    source_dir: Path | None
    generate: int | None
    generate_test: int | None
    box: str | None
    subsample_size: int | None
    min_difficulty: int | None
    check_unique: bool | None
    num_aug: int
    seed: int


# --------------------------------------------------------------------------------------------------
# Command line


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Parse the command line.

    Raises:
        UserError: An option is unknown, malformed or in conflict with another.
    """
    parser = Parser(
        "build_sudoku_dataset.py",
        description="Build a Sudoku dataset. Inputs are puzzles, labels are their solutions.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--output-dir",
        type=typed_path,
        metavar="DIR",
        default=Path("data/sudoku-extreme-full"),
        help="default: %(default)s",
    )
    add("--num-aug", type=int, metavar="N", default=0, help="random symmetries of each training puzzle (default: 0)")
    add("--seed", type=int, metavar="N", default=0, help="seed of all random choices (default: 0)")
    add("--box", choices=list(BOXES), help="rows x columns of a box (default: 3x3, or that of the files)")

    of_files = add_sources(parser, "puzzles", DEFAULT_REPO, "make N training puzzles with unique solutions")
    add = of_files.add_argument
    add("--min-difficulty", type=int, metavar="R", help="take only puzzles rated R or more, in both splits")
    add(
        "--check-unique",
        action="store_true",
        default=None,
        help="count the questions with several solutions: at 1,000 or more a second up to side 9",
    )

    add = parser.add_argument_group("with --generate").add_argument
    add("--generate-test", type=int, metavar="M", help="make M test puzzles (default: a tenth of N, at least 1)")

    return _complete(Settings(**vars(parser.parse_args(argv))))


def _complete(settings: Settings) -> Settings:
    """Check the options against one another, and fill in defaults that depend on other options."""
    check_at_least(settings, num_aug=0, seed=0, generate=1, generate_test=1, subsample_size=1)
    of_files, of_generate = ("subsample_size", "min_difficulty", "check_unique"), ("generate_test",)
    check_sources(settings, "puzzles", of_files=of_files, of_generate=of_generate)
    if settings.generate is None:
        source_repo = settings.source_repo or (DEFAULT_REPO if settings.source_dir is None else None)
        return dataclasses.replace(settings, source_repo=source_repo)
    generate_test = settings.generate_test or max(1, settings.generate // 10)
    return dataclasses.replace(settings, generate_test=generate_test, box=settings.box or str(BOXES["3x3"]))


# --------------------------------------------------------------------------------------------------
# Where the puzzles come from. Each source gives the boards of both splits


def load_boards(settings: Settings) -> tuple[Box, dict[SplitName, Boards]]:
    """Return the shape of the boxes and the puzzles of both splits, before augmentation.

    Raises:
        UserError: A file is missing or holds something else than Sudokus.
    """
    if settings.generate is not None:
        return _generate(settings)
    files = puzzle_csv.source_files(settings.source_dir, settings.source_repo)
    boards = {}
    for split, file in files.items():
        box, boards[split] = read_csv(file, settings.min_difficulty)
        if boards[split].questions_NS.shape[1] != boards["train"].questions_NS.shape[1]:
            raise UserError(f"{file}: boards have side {box.side}, those of {files['train']} not; give one size")
        if settings.box not in (None, str(box)):
            raise UserError(f"{file}: boxes have {box} cells, not --box {settings.box}; correct it or leave it out")

    if settings.subsample_size is not None:
        rng = np.random.default_rng([settings.seed, _SUBSAMPLE])
        num = len(boards["train"].questions_NS)
        rated = "" if settings.min_difficulty is None else f" rated {settings.min_difficulty} or more"
        chosen = subsample(settings.subsample_size, num, rng, files["train"], f"puzzles{rated}")
        boards["train"] = Boards(*(array_NS[chosen] for array_NS in boards["train"]))
    return box, boards


def _generate(settings: Settings) -> tuple[Box, dict[SplitName, Boards]]:
    assert settings.generate is not None and settings.generate_test is not None and settings.box is not None
    box = BOXES[settings.box]
    num = settings.generate + settings.generate_test
    rng = np.random.default_rng([settings.seed, _GENERATE])
    questions_NS, solutions_NS = collect("generating", "puzzles", num, generate(num, box, rng))
    # If nearly all symmetry classes are used, rare classes come late. Without shuffling they would
    # all be test puzzles.
    order = rng.permutation(num)
    questions_NS, solutions_NS = questions_NS[order], solutions_NS[order]
    cut = settings.generate
    return box, {
        "train": Boards(questions_NS[:cut], solutions_NS[:cut]),
        "test": Boards(questions_NS[cut:], solutions_NS[cut:]),
    }


def read_csv(file: Path, min_difficulty: int | None = None) -> tuple[Box, Boards]:
    """Read the boards of a .csv or .csv.gz file, and check every row.

    Args:
        file: the file.
        min_difficulty: leave out boards with a lower rating; None: take all.

    Returns:
        The shape of the boxes, which follows from the number of cells, and the boards.

    Raises:
        UserError: A row is malformed, or no board is left. The message names the file and the line.
    """
    box: Box | None = None
    parts: list[Boards] = []
    highest = 0
    with progress(f"reading {file.name}", None, "rows") as bar:
        for rows in puzzle_csv.read_rows(file):
            box = box or _box_of(file, rows[0])
            boards = _to_boards(file, rows, box)
            if min_difficulty is not None:
                if rows[0].rating is None:
                    raise UserError(f"{file}:1: has no column rating; add it, or leave --min-difficulty out")
                ratings_N = np.array([row.rating for row in rows])
                highest = max(highest, int(ratings_N.max()))
                boards = Boards(*(array_NS[ratings_N >= min_difficulty] for array_NS in boards))
            parts.append(boards)
            bar.update(len(rows))
    assert box is not None
    boards = Boards(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    if len(boards.questions_NS) == 0:
        raise UserError(
            f"{file}: no puzzle is rated {min_difficulty} or more, the highest is {highest}; lower --min-difficulty"
        )
    return box, boards


def _box_of(file: Path, row: Row) -> Box:
    for box in BOXES.values():
        if len(row.question) == box.num_cells:
            return box
    sizes = joined([str(box.num_cells) for box in BOXES.values()], "or")
    raise UserError(
        f"{file}:{row.line}: the question has {len(row.question)} characters; boards have {sizes}; {FIX_ROW}"
    )


def _to_boards(file: Path, rows: list[Row], box: Box) -> Boards:
    """Convert rows to digits, and check that each answer is a solution of its question."""
    questions_NS = _to_digits(file, rows, "question", box, blanks=".0")
    solutions_NS = _to_digits(file, rows, "answer", box, blanks="")
    for n in np.flatnonzero(~valid_solutions(solutions_NS, box))[:1]:
        raise UserError(
            f"{file}:{rows[n].line}: the answer is no valid Sudoku with boxes of {box} (rows x columns); {FIX_ROW}"
        )
    for n, cell in np.argwhere((questions_NS != 0) & (questions_NS != solutions_NS))[:1]:
        given, answered = (DIGITS[boards_NS[n, cell] - 1] for boards_NS in (questions_NS, solutions_NS))
        raise UserError(
            f"{file}:{rows[n].line}: the answer has {answered} in cell {cell + 1}, "
            f"but the question has {given}; {FIX_ROW}"
        )
    return Boards(questions_NS, solutions_NS)


def _to_digits(file: Path, rows: list[Row], column: Literal["question", "answer"], box: Box, blanks: str) -> np.ndarray:
    """Convert the text of a column to digits, (N, S) uint8. The characters of `blanks` mean 0."""
    digit_of = np.full(256, NO_TOKEN, dtype=np.uint8)
    digit_of[[ord(blank) for blank in blanks]] = 0
    for digit, symbol in enumerate(DIGITS[: box.side], start=1):
        digit_of[[ord(symbol), ord(symbol.lower())]] = digit
    allowed = digits_in_words(box.side) + (", and . or 0 for a blank," if blanks else "")
    return puzzle_csv.to_tokens(file, rows, column, digit_of, box.num_cells, allowed)


# --------------------------------------------------------------------------------------------------
# The dataset


def write_split(folder: Path, boards: Boards, box: Box, num_aug: int, rng: np.random.Generator) -> None:
    """Write one split. Each puzzle becomes a group of 1 + num_aug puzzles, the original first.

    Each puzzle has one example.
    """
    num_groups = len(boards.questions_NS)
    group_size = 1 + num_aug
    num_boards = num_groups * group_size
    if num_boards > MAX_ROWS:
        raise UserError(f"{num_boards:,} boards are more than a dataset can index, {MAX_ROWS:,}; lower --num-aug")
    with (
        SplitWriter(folder, seq_len=box.num_cells, vocab_size=box.side + 2, num_puzzle_identifiers=1) as writer,
        progress(folder.name, num_boards, "boards") as bar,
    ):
        for start in range(0, num_boards, AUGMENT_CHUNK_BOARDS):
            group_B, copy_B = np.divmod(np.arange(start, min(start + AUGMENT_CHUNK_BOARDS, num_boards)), group_size)
            questions_BS, solutions_BS = (array_NS[group_B] for array_NS in boards)
            if num_aug:
                # Symmetries are drawn for the originals too, so that board b depends only on the
                # seed and on b, and not on the size of a chunk.
                symmetries = draw_symmetries(rng, len(group_B), box)
                is_original_B1 = copy_B[:, None] == 0
                questions_BS = np.where(is_original_B1, questions_BS, symmetries.apply(questions_BS))
                solutions_BS = np.where(is_original_B1, solutions_BS, symmetries.apply(solutions_BS))
            ones_B = np.ones(len(group_B), np.int32)
            writer.add(questions_BS + np.uint8(1), solutions_BS + np.uint8(1), ones_B, identifiers_P=0 * ones_B)
            bar.update(len(group_B))
        writer.end_groups(np.full(num_groups, group_size))


def _describe_solutions(boards: dict[SplitName, Boards], box: Box) -> list[str]:
    """Return a line for each split on the questions that have several solutions."""
    lines = []
    for split, (questions_NS, _) in boards.items():
        num, first = 0, ""
        with progress(f"looking for second solutions in {split}", len(questions_NS), "questions") as bar:
            for start in range(0, len(questions_NS), AUGMENT_CHUNK_BOARDS):
                chunk_NS = questions_NS[start : start + AUGMENT_CHUNK_BOARDS]
                several_NS = chunk_NS[count_solutions(chunk_NS, box) > 1]
                if len(several_NS) and not num:
                    first = f", the first is {''.join(f'.{DIGITS}'[digit] for digit in several_NS[0])}"
                num += len(several_NS)
                bar.update(len(chunk_NS))
        lines.append(f"check  {num:,} of {len(questions_NS):,} {split} questions have several solutions{first}")
    return lines


def build(settings: Settings) -> str:
    """Build the dataset and return a summary of it.

    Raises:
        UserError: The input is bad, or the folder can't be written. No new dataset is left then.
    """
    started = time.perf_counter()
    with new_dataset(settings.output_dir) as folder:
        box, boards = load_boards(settings)
        unique = _describe_solutions(boards, box) if settings.check_unique else []
        for split in SPLITS:
            num_aug = settings.num_aug if split == "train" else 0
            rng = np.random.default_rng([settings.seed, _AUGMENT])
            write_split(folder / split, boards[split], box, num_aug, rng)
        fingerprints = finish(folder, ["<blank>"], record_of("build_sudoku_dataset", settings))
    num_train, num_test = (len(boards[split].questions_NS) for split in SPLITS)
    num_boards = num_train * (1 + settings.num_aug)
    lines = [
        f"train  {num_boards:,} boards = {num_train:,} puzzles x (1 + {settings.num_aug:,} augmentations)",
        f"test   {num_test:,} boards",
        f"tokens padding 0, blank 1, digits from 2: vocab_size {box.side + 2}, seq_len {box.num_cells}",
        *unique,
    ]
    return summary(settings.output_dir, started, lines, fingerprints)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    less_memory = "fewer puzzles need less memory: lower --generate or --subsample-size"
    return run_command(lambda arguments: build(parse_settings(arguments)), argv, less_memory=less_memory)


if __name__ == "__main__":
    sys.exit(main())
