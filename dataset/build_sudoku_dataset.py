"""Build a Sudoku dataset from a download, from local CSV files, or from puzzles generated here."""
# N = puzzles, B = boards (puzzles and their augmentations), S = cells of a board

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset import boards
from dataset.augment import BOXES, Box, draw_symmetries
from dataset.boards import Boards, Row, wrong_row
from dataset.builder import OUTPUT_DIR, Builder, Typed, Written, option, progress, require_index, seed_option
from dataset.sudoku import (
    DIGITS,
    LARGEST_SEARCHED_SIDE,
    count_guesses,
    count_solutions,
    dig,
    generate,
    symmetry_keys,
    with_clues,
)
from dataset.tasks.base import joined
from dataset.tasks.sudoku import SudokuTask
from utils.arguments import given
from utils.errors import UserError

DEFAULT_REPO = "sapientinc/sudoku-extreme"
AUGMENT_CHUNK_BOARDS = 4096
DIG = "new puzzles from the same solutions"  # the title of these options
_MOST_MISSES = 200  # tries in a row that dig nothing new

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

  # ten more puzzles from the solution of each training puzzle
  python dataset/build_sudoku_dataset.py --output-dir data/sudoku-extreme-1k-dig-10 \\
      --subsample-size 1000 --dig 10

The CSV files have the columns question and answer, and perhaps rating. Kaggle's names, puzzle and
solution or quizzes and solutions, are read too. A board is a text of 16, 36, 64, 81, 144
or 256 digits, row by row, with . or 0 for a blank. Digits above 9 are the letters A to G, in upper
or lower case. The boxes of sides 6, 8 and 12 have 2 rows and 3 columns, 2 and 4, and 3 and 4.

docs/datasets.md says how puzzles are generated.
"""


@dataclass(frozen=True)
class Settings:
    """The options of the command line. `box` is None if the files say it."""

    output_dir: Path = OUTPUT_DIR
    source_repo: str | None = boards.repo_option(DEFAULT_REPO)
    source_dir: Path | None = boards.SOURCE_DIR
    generate: int | None = option(
        "N", "make N training puzzles with unique solutions", group=boards.SOURCES, at_least=1
    )
    generate_test: int | None = boards.GENERATE_TEST
    box: str | None = option(None, "rows x columns of a box (default: 3x3, or that of the files)", choices=list(BOXES))
    subsample_size: int | None = boards.SUBSAMPLE_SIZE
    min_difficulty: int | None = option("R", "take only puzzles rated R or more, in both splits", group=boards.FILES)
    check_unique: bool | None = option(
        None, "count the questions with several solutions: at 1,000 or more a second up to side 9", group=boards.FILES
    )
    dig: int | None = option(
        "N", "dig N further puzzles out of the solution of each training puzzle", group=DIG, at_least=1
    )
    dig_clues: int | None = option("M", "put clues back until there are M (default: none)", group=DIG, at_least=1)
    dig_guesses: int | None = option("K", "keep those that make a solver guess K times or more", group=DIG, at_least=1)
    dig_near: int | None = option(
        "K", "dig out of the puzzle with K more clues, which leaves it about as hard", group=DIG, at_least=1
    )
    num_aug: int = option("N", "random symmetries of each training puzzle (default: 0)", default=0, at_least=0)
    seed: int = seed_option()


def complete(typed: Typed) -> None:
    boards.complete_sources(typed, Settings, DEFAULT_REPO)
    if typed.generate is not None:
        typed.box = typed.box or "3x3"
    for name in given(typed, "dig_clues", "dig_guesses", "dig_near") if typed.dig is None else ():
        raise UserError(f"{name} needs --dig; add --dig N or leave {name} out")


def to_boards(
    file: Path, rows: list[Row], box_of_files: str | None = None, min_difficulty: int | None = None
) -> Boards:
    """Convert rows to digits, and check that each answer is a solution of its question.

    `box_of_files` are the boxes that the user expects. Puzzles below `min_difficulty` are left out.
    """
    num_cells = len(rows[0].question)
    box = _box_with(num_cells)
    if box is None:
        sizes = joined([str(each.num_cells) for each in BOXES.values()], "or")
        raise wrong_row(file, rows[0], f"the question has {num_cells} characters; boards have {sizes}")
    if box_of_files not in (None, str(box)):
        raise UserError(f"{file}: boxes have {box} cells, not --box {box_of_files}; correct it or leave it out")
    task, blanks = SudokuTask(box), {".": 1, "0": 1}
    digits, allowed = task.symbols_of_solutions()
    with_blanks = f"{allowed}, and . or 0 for a blank,"
    tokens = boards.to_boards(file, rows, task, digits | blanks, with_blanks)
    found = Boards(*(tokens_NS - np.uint8(1) for tokens_NS in tokens))
    if min_difficulty is None:
        return found
    if rows[0].rating is None:
        raise UserError(f"{file}:1: has no column rating; add it, or leave --min-difficulty out")
    return found.take(np.array([row.rating for row in rows]) >= min_difficulty)


def _box_with(num_cells: int) -> Box | None:
    return next((box for box in BOXES.values() if box.num_cells == num_cells), None)


def augmented(box: Box, puzzles: Boards, num_aug: int, rng: np.random.Generator) -> Iterator[Boards]:
    """Yield the tokens of each puzzle, followed by those of `num_aug` symmetries of it."""
    group_size = 1 + num_aug
    num_boards = len(puzzles.questions_NS) * group_size
    for start in range(0, num_boards, AUGMENT_CHUNK_BOARDS):
        group_B, copy_B = np.divmod(np.arange(start, min(start + AUGMENT_CHUNK_BOARDS, num_boards)), group_size)
        chunk = puzzles.take(group_B)
        if num_aug:
            # Symmetries are drawn for the originals too, so that board b depends only on the seed
            # and on b, and not on the size of a chunk.
            symmetries = draw_symmetries(rng, len(group_B), box)
            is_original_B1 = copy_B[:, None] == 0
            chunk = Boards(*(np.where(is_original_B1, each_BS, symmetries.apply(each_BS)) for each_BS in chunk))
        yield Boards(*(each_BS + np.uint8(1) for each_BS in chunk))


def with_dug(train: Boards, test: Boards, num_dug: int, settings: Settings, box: Box) -> Boards:
    """Return the training puzzles, each followed by further ones, no symmetry of a test puzzle."""
    if box.side > LARGEST_SEARCHED_SIDE or (settings.dig_clues or 0) >= box.num_cells:
        raise UserError(f"--dig needs boards up to side {LARGEST_SEARCHED_SIDE} with a blank; leave it out")
    rng = np.random.default_rng([settings.seed, boards.DIG_STREAM])
    require_index(len(train.questions_NS) * (1 + num_dug) * (1 + settings.num_aug))
    tested, parts = symmetry_keys(*test, box)[0], list[np.ndarray]()
    with progress("digging", len(train.questions_NS) * num_dug, "puzzles") as bar:
        for part in train.chunks():
            of_solution, misses = [[question_S] for question_S in part.questions_NS], 0
            seen = {question_S.tobytes() for question_S in part.questions_NS}
            while len(rows := np.flatnonzero([len(puzzles) <= num_dug for puzzles in of_solution])):
                answers_NS, start_NS = part.answers_NS[rows], None
                if settings.dig_near is not None:
                    given_NS = part.questions_NS[rows]
                    num_clues = (given_NS > 0).sum(axis=1, keepdims=True) + settings.dig_near
                    start_NS = with_clues(given_NS, answers_NS, num_clues, rng)
                dug = Boards(dig(answers_NS, box, rng, settings.dig_clues, start_NS), answers_NS)
                is_wanted_M = ~np.isin(symmetry_keys(*dug, box)[0], tested)
                if settings.dig_guesses is not None:
                    is_wanted_M &= count_guesses(dug.questions_NS, box) >= settings.dig_guesses
                misses += 1
                for row, puzzle_S in zip(rows[is_wanted_M], dug.questions_NS[is_wanted_M], strict=True):
                    if puzzle_S.tobytes() not in seen:
                        of_solution[row].append(puzzle_S)
                        seen.add(puzzle_S.tobytes())
                        misses = 0
                        bar.update()
                if misses == _MOST_MISSES:
                    raise UserError("no further puzzle was found; change --dig or its options")
            parts.append(np.stack([puzzle_S for puzzles in of_solution for puzzle_S in puzzles]))
    return Boards(np.concatenate(parts), np.repeat(train.answers_NS, 1 + num_dug, axis=0))


def _count_ambiguous(split: str, puzzles: Boards, box: Box) -> str:
    """Return a line on the questions that have several solutions."""
    found = []
    with progress(f"looking for second solutions in {split}", len(puzzles.questions_NS), "questions") as bar:
        for questions_NS, _ in puzzles.chunks():
            found += list(questions_NS[count_solutions(questions_NS, box) > 1])
            bar.update(len(questions_NS))
    first = f", the first is {''.join(f'.{DIGITS}'[digit] for digit in found[0])}" if found else ""
    return f"check  {len(found):,} of {len(puzzles.questions_NS):,} {split} questions have several solutions{first}"


def write(folder: Path, settings: Settings) -> Written:
    """Write both splits. Raise UserError if the input is bad."""
    if settings.generate is None:
        check = partial(to_boards, box_of_files=settings.box, min_difficulty=settings.min_difficulty)
        puzzles = boards.load_boards(settings, check)
    else:
        assert settings.box is not None
        made_for = BOXES[settings.box]
        puzzles = boards.generate_boards(settings, lambda num, rng: generate(num, made_for, rng), shuffled=True)
    box = _box_with(puzzles["train"].questions_NS.shape[1])
    assert box is not None
    if settings.dig is not None:
        puzzles["train"] = with_dug(puzzles["train"], puzzles["test"], settings.dig, settings, box)
    checked = puzzles.items() if settings.check_unique else ()
    unique = [_count_ambiguous(split, of_split, box) for split, of_split in checked]
    images, tokens = partial(augmented, box), "padding 0, blank 1, digits from 2"
    names, lines = boards.write_boards(folder, puzzles, images, settings.num_aug, settings.seed, box.side + 2, tokens)
    return names, [*lines, *unique]


BUILDER = Builder("build_sudoku_dataset", __doc__, EXAMPLES, "data/sudoku-extreme-full", Settings, complete, write)
main = BUILDER.main

if __name__ == "__main__":
    sys.exit(main())
