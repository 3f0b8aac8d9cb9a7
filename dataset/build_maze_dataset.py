"""Build a maze dataset from a download, from local CSV files, or from mazes generated here.

The mazes and the settings, with the seed, decide every byte of the dataset. The dataset appears
under its name only when it is whole.
"""
# N = mazes, L = side, S = cells of a maze (L * L), T = transforms

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset import maze, puzzle_csv
from dataset.builder import (
    SPLITS,
    Boards,
    add_sources,
    build_dataset,
    builder_parser,
    check_sources,
    generated,
    write_boards,
)
from dataset.puzzle_csv import FIX_ROW, Row
from dataset.schema import SplitName
from dataset.tasks import task_of_shape
from dataset.tasks.maze import MazeTask
from dataset.transforms import NUM_TRANSFORMS, transformed
from utils.errors import UserError
from utils.shell import run_command

PROGRAM = "build_maze_dataset"
DEFAULT_REPO = "sapientinc/maze-30x30-hard-1k"
DEFAULT_SIZE = 30
# The number of mazes that are written at a time.
CHUNK_MAZES = 1024
# A stream of random numbers, as in the Sudoku builder.
_GENERATE = 2

EXAMPLES = """
examples:
  # Maze-Hard: 1,000 training mazes and 1,000 test mazes of 30x30 (downloads train.csv and test.csv)
  python dataset/build_maze_dataset.py

  # the same from local files: train.csv and test.csv, or .csv.gz
  python dataset/build_maze_dataset.py --output-dir data/maze --source-dir my-mazes

  # new mazes, 1,000 for training and 500 for testing; no maze is a transform of another
  python dataset/build_maze_dataset.py --output-dir data/maze-12x12 --size 12 \\
      --generate 1000 --generate-test 500

--aug is off by default because a turned label is still a shortest path, but mostly not the path that
the labels' search finds in the turned maze. With augment=online training turns the mazes whose label
stays right.

The CSV files have the columns question and answer. A maze is a text of L x L characters,
row by row: # is a wall, a blank is free (also at the ends of a row), S the start, G the goal, and o
in the answer the path. There is no wall around the maze unless the text has one. An old dataset in
the output folder is replaced once the new dataset is whole.
"""


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    `generate_test` and `size` are None unless mazes are generated.
    """

    output_dir: Path
    source_repo: str | None
    source_dir: Path | None
    generate: int | None
    generate_test: int | None
    size: int | None
    subsample_size: int | None
    aug: bool
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
        "Build a maze dataset. Inputs are mazes, labels the same mazes with a shortest path.",
        EXAMPLES,
        "data/maze-30x30-hard-1k",
    )
    parser.add_argument(
        "--aug",
        type=_parse_bool,
        nargs="?",
        const=True,
        default=False,
        metavar="true|false",
        help="add the 7 turned and mirrored images of each training maze (default: false, see below)",
    )
    _, of_generate = add_sources(parser, "mazes", DEFAULT_REPO, "make N hard training mazes")
    of_generate.add_argument(
        "--size",
        type=int,
        metavar="L",
        help=f"side of the mazes, {maze.MIN_SIDE} to {maze.MAX_SIDE} (default: {DEFAULT_SIZE}); G is at least "
        f"{maze.least_distance(DEFAULT_SIZE)} x (L / {DEFAULT_SIZE})^1.13 steps from S",
    )
    settings = Settings(**vars(parser.parse_args(argv)))
    settings = check_sources(settings, "mazes", DEFAULT_REPO, of_generate=["size"])
    if settings.generate is not None and settings.size is None:
        return dataclasses.replace(settings, size=DEFAULT_SIZE)
    if settings.size is not None and not maze.MIN_SIDE <= settings.size <= maze.MAX_SIDE:
        raise UserError(f"--size is {settings.size}; it must be {maze.MIN_SIDE} to {maze.MAX_SIDE}")
    return settings


def _parse_bool(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


# --------------------------------------------------------------------------------------------------
# Mazes


def load_mazes(settings: Settings) -> dict[SplitName, Boards]:
    """Return the mazes of both splits, before augmentation.

    Raises:
        UserError: A file is missing or holds something else than mazes.
    """
    if settings.generate is None:
        return puzzle_csv.load_boards(settings, "mazes", to_mazes)
    assert settings.generate_test is not None and settings.size is not None
    rng = np.random.default_rng([settings.seed, _GENERATE])
    return generated("mazes", settings, maze.generate(settings.generate + settings.generate_test, settings.size, rng))


def to_mazes(file: Path, rows: list[Row]) -> Boards:
    """Convert rows to tokens, and check that each answer is a shortest path through its maze.

    The path need not be the one that the search of this project finds, because other people's files
    may choose another shortest path.
    """
    num_cells = len(rows[0].question)
    if num_cells < 4 or not isinstance(task_of_shape(num_cells, maze.VOCAB_SIZE), MazeTask):
        raise UserError(
            f"{file}:{rows[0].line}: the question has {num_cells} characters; a maze is a square, of 4, 9, 25, ... "
            f"(16 would be taken for a Sudoku); {FIX_ROW}"
        )
    tokens = {symbol: token for token, symbol in enumerate(maze.SYMBOLS) if token}
    of_questions = {symbol: tokens[symbol] for symbol in "# SG"}
    questions_NS = puzzle_csv.to_tokens(file, rows, "question", of_questions, num_cells, "'#', blank, S and G")
    answers_NS = puzzle_csv.to_tokens(file, rows, "answer", tokens, num_cells, "'#', blank, S, G and o")
    for token in (maze.START, maze.GOAL):
        count_N = (questions_NS == token).sum(axis=1)
        for n in np.flatnonzero(count_N != 1)[:1]:
            raise UserError(
                f"{file}:{rows[n].line}: the question has {count_N[n]} {maze.SYMBOLS[token]}, not one; {FIX_ROW}"
            )
    is_drawn_NS = (questions_NS == maze.BLANK) & (answers_NS == maze.PATH)
    for n, cell in np.argwhere((questions_NS != answers_NS) & ~is_drawn_NS)[:1]:
        raise UserError(
            f"{file}:{rows[n].line}: the answer has {rows[n].answer[cell]!r} in cell {cell + 1}, "
            f"but the question has {rows[n].question[cell]!r}; {FIX_ROW}"
        )
    judged = maze.judge_paths(questions_NS, answers_NS)
    for n in np.flatnonzero(~judged["path_optimal"])[:1]:
        wrong = "no shortest path" if judged["path_valid"][n] else "not one path"
        raise UserError(f"{file}:{rows[n].line}: the answer is {wrong} from S to G; {FIX_ROW}")
    return Boards(questions_NS, answers_NS)


# --------------------------------------------------------------------------------------------------
# The dataset


def _images(mazes_NS: np.ndarray, num_images: int) -> np.ndarray:
    """Return the first `num_images` transforms of each maze, maze after maze, (N * T, S)."""
    side = maze.side_of(mazes_NS.shape[1])
    assert side is not None
    mazes_NLL = mazes_NS.reshape(-1, side, side)
    images_NTLL = np.stack([transformed(mazes_NLL, transform) for transform in range(num_images)], axis=1)
    return images_NTLL.reshape(-1, side * side)


def _chunks(mazes: Boards, num_images: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, len(mazes.questions_NS), CHUNK_MAZES):
        inputs, labels = (_images(array_NS[start : start + CHUNK_MAZES], num_images) for array_NS in mazes)
        yield inputs, labels


def build(settings: Settings) -> str:
    """Build the dataset and return a summary of it.

    Raises:
        UserError: The input is bad, or the folder can't be written. No new dataset is left then.
    """

    def write(folder: Path) -> tuple[list[str], list[str]]:
        mazes = load_mazes(settings)
        num_train, num_test = (len(mazes[split].questions_NS) for split in SPLITS)
        num_cells = mazes["train"].questions_NS.shape[1]
        side = maze.side_of(num_cells)
        shape = {"seq_len": num_cells, "vocab_size": maze.VOCAB_SIZE}
        for split, of_split in mazes.items():
            # The first image is the maze itself.
            num_images = NUM_TRANSFORMS if settings.aug and split == "train" else 1
            chunks = _chunks(of_split, num_images)
            write_boards(folder / split, chunks, groups=len(of_split.questions_NS), group_size=num_images, **shape)
        images = f"{num_train * NUM_TRANSFORMS:,} images of {num_train:,} mazes" if settings.aug else ""
        return ["<blank>"], [
            f"train  {images or f'{num_train:,} mazes'} of {side}x{side}",
            f"test   {num_test:,} mazes",
            f"tokens padding 0, wall 1, blank 2, S 3, G 4, path 5: vocab_size {maze.VOCAB_SIZE}, seq_len {num_cells}",
        ]

    return build_dataset(PROGRAM, settings, write)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    less_memory = "fewer puzzles need less memory: lower --generate or --subsample-size"
    return run_command(lambda arguments: build(parse_settings(arguments)), argv, less_memory=less_memory)


if __name__ == "__main__":
    sys.exit(main())
