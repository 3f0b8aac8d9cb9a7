"""Build a Sudoku dataset from a download, from local CSV files, or from puzzles generated here.

The training puzzles are augmented by random symmetries. The puzzles and the settings, with the
seed, decide every byte of the dataset. The dataset appears under its name only when it is whole.
"""
# N = puzzles, B = boards (puzzles and their augmentations), S = cells of a board

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset import puzzle_csv
from dataset.augment import BOXES, Box, draw_symmetries
from dataset.builder import (
    SPLITS,
    Boards,
    add_sources,
    build_dataset,
    builder_parser,
    check_sources,
    generated,
    progress,
    write_boards,
)
from dataset.puzzle_csv import FIX_ROW, Row
from dataset.schema import SplitName
from dataset.sudoku import DIGITS, count_solutions, digits_in_words, generate, valid_solutions
from dataset.tasks.base import joined
from utils.arguments import check_at_least
from utils.errors import UserError
from utils.shell import run_command

PROGRAM = "build_sudoku_dataset"
DEFAULT_REPO = "sapientinc/sudoku-extreme"
AUGMENT_CHUNK_BOARDS = 4096
# Independent streams of random numbers, so that an option that uses one stream does not change the
# others.
_AUGMENT, _GENERATE = 1, 2

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
    parser = builder_parser(
        PROGRAM,
        "Build a Sudoku dataset. Inputs are puzzles, labels are their solutions.",
        EXAMPLES,
        "data/sudoku-extreme-full",
    )
    add = parser.add_argument
    add("--num-aug", type=int, metavar="N", default=0, help="random symmetries of each training puzzle (default: 0)")
    add("--box", choices=list(BOXES), help="rows x columns of a box (default: 3x3, or that of the files)")
    of_files, _ = add_sources(parser, "puzzles", DEFAULT_REPO, "make N training puzzles with unique solutions")
    add = of_files.add_argument
    add("--min-difficulty", type=int, metavar="R", help="take only puzzles rated R or more, in both splits")
    add(
        "--check-unique",
        action="store_true",
        default=None,
        help="count the questions with several solutions: at 1,000 or more a second up to side 9",
    )
    settings = Settings(**vars(parser.parse_args(argv)))
    check_at_least(settings, num_aug=0)
    settings = check_sources(settings, "puzzles", DEFAULT_REPO, of_files=("min_difficulty", "check_unique"))
    if settings.generate is not None and settings.box is None:
        return dataclasses.replace(settings, box="3x3")
    return settings


# --------------------------------------------------------------------------------------------------
# Puzzles


def load_boards(settings: Settings) -> dict[SplitName, Boards]:
    """Return the puzzles of both splits as digits, 0 for a blank, before augmentation.

    Raises:
        UserError: A file is missing or holds something else than Sudokus.
    """
    if settings.generate is None:
        box, least = settings.box, settings.min_difficulty
        return puzzle_csv.load_boards(settings, "puzzles", lambda file, rows: to_boards(file, rows, box, least))
    assert settings.box is not None
    rng = np.random.default_rng([settings.seed, _GENERATE])
    pairs = generate(settings.generate + (settings.generate_test or 0), BOXES[settings.box], rng)
    # If nearly all symmetry classes are used, rare classes come late. Without shuffling they would
    # all be test puzzles.
    return generated("puzzles", settings, pairs, shuffle=rng)


def _box_with(num_cells: int) -> Box | None:
    return next((box for box in BOXES.values() if box.num_cells == num_cells), None)


def to_boards(
    file: Path, rows: list[Row], box_of_files: str | None = None, min_difficulty: int | None = None
) -> Boards:
    """Convert rows to digits, and check that each answer is a solution of its question.

    Args:
        box_of_files: the boxes that the user expects.
        min_difficulty: leaves out puzzles that are rated lower.

    Raises:
        UserError: A row is malformed; the message names the file and the line.
    """
    where = f"{file}:{rows[0].line}"
    box = _box_with(len(rows[0].question))
    if box is None:
        sizes = joined([str(each.num_cells) for each in BOXES.values()], "or")
        raise UserError(f"{where}: the question has {len(rows[0].question)} characters; boards have {sizes}; {FIX_ROW}")
    if box_of_files not in (None, str(box)):
        raise UserError(f"{file}: boxes have {box} cells, not --box {box_of_files}; correct it or leave it out")
    digits = {written: digit for digit, each in enumerate(DIGITS[: box.side], 1) for written in (each, each.lower())}
    allowed = digits_in_words(box.side)
    with_blanks = f"{allowed}, and . or 0 for a blank,"
    questions_NS = puzzle_csv.to_tokens(file, rows, "question", digits | {".": 0, "0": 0}, box.num_cells, with_blanks)
    solutions_NS = puzzle_csv.to_tokens(file, rows, "answer", digits, box.num_cells, allowed)
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
    if min_difficulty is None:
        return Boards(questions_NS, solutions_NS)
    if rows[0].rating is None:
        raise UserError(f"{file}:1: has no column rating; add it, or leave --min-difficulty out")
    hard_N = np.array([row.rating for row in rows]) >= min_difficulty
    return Boards(questions_NS[hard_N], solutions_NS[hard_N])


# --------------------------------------------------------------------------------------------------
# The dataset


def augmented(
    boards: Boards, box: Box, num_aug: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and labels: each puzzle, followed by `num_aug` symmetries of it."""
    group_size = 1 + num_aug
    num_boards = len(boards.questions_NS) * group_size
    for start in range(0, num_boards, AUGMENT_CHUNK_BOARDS):
        group_B, copy_B = np.divmod(np.arange(start, min(start + AUGMENT_CHUNK_BOARDS, num_boards)), group_size)
        questions_BS, solutions_BS = (array_NS[group_B] for array_NS in boards)
        if num_aug:
            # Symmetries are drawn for the originals too, so that board b depends only on the seed
            # and on b, and not on the size of a chunk.
            symmetries = draw_symmetries(rng, len(group_B), box)
            is_original_B1 = copy_B[:, None] == 0
            questions_BS = np.where(is_original_B1, questions_BS, symmetries.apply(questions_BS))
            solutions_BS = np.where(is_original_B1, solutions_BS, symmetries.apply(solutions_BS))
        yield questions_BS + np.uint8(1), solutions_BS + np.uint8(1)


def _describe_solutions(split: str, questions_NS: np.ndarray, box: Box) -> str:
    """Return a line on the questions that have several solutions."""
    num, first = 0, ""
    with progress(f"looking for second solutions in {split}", len(questions_NS), "questions") as bar:
        for start in range(0, len(questions_NS), AUGMENT_CHUNK_BOARDS):
            chunk_NS = questions_NS[start : start + AUGMENT_CHUNK_BOARDS]
            several_NS = chunk_NS[count_solutions(chunk_NS, box) > 1]
            if len(several_NS) and not num:
                first = f", the first is {''.join(f'.{DIGITS}'[digit] for digit in several_NS[0])}"
            num += len(several_NS)
            bar.update(len(chunk_NS))
    return f"check  {num:,} of {len(questions_NS):,} {split} questions have several solutions{first}"


def build(settings: Settings) -> str:
    """Build the dataset and return a summary of it.

    Raises:
        UserError: The input is bad, or the folder can't be written. No new dataset is left then.
    """

    def write(folder: Path) -> tuple[list[str], list[str]]:
        boards = load_boards(settings)
        box = _box_with(boards["train"].questions_NS.shape[1])
        assert box is not None
        shape = {"seq_len": box.num_cells, "vocab_size": box.side + 2}
        checked = boards.items() if settings.check_unique else ()
        unique = [_describe_solutions(split, of_split.questions_NS, box) for split, of_split in checked]
        for split, of_split in boards.items():
            num_aug = settings.num_aug if split == "train" else 0
            rng = np.random.default_rng([settings.seed, _AUGMENT])
            chunks = augmented(of_split, box, num_aug, rng)
            write_boards(folder / split, chunks, groups=len(of_split.questions_NS), group_size=1 + num_aug, **shape)
        num_train, num_test = (len(boards[split].questions_NS) for split in SPLITS)
        num_boards = num_train * (1 + settings.num_aug)
        return ["<blank>"], [
            f"train  {num_boards:,} boards = {num_train:,} puzzles x (1 + {settings.num_aug:,} augmentations)",
            f"test   {num_test:,} boards",
            f"tokens padding 0, blank 1, digits from 2: vocab_size {box.side + 2}, seq_len {box.num_cells}",
            *unique,
        ]

    return build_dataset(PROGRAM, settings, write)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    less_memory = "fewer puzzles need less memory: lower --generate or --subsample-size"
    return run_command(lambda arguments: build(parse_settings(arguments)), argv, less_memory=less_memory)


if __name__ == "__main__":
    sys.exit(main())
