"""Build a maze dataset from a download, from local CSV files, or from mazes generated here."""
# N = mazes, L = side, S = cells of a maze (L * L), T = transforms

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset import boards, maze
from dataset.boards import Boards, Row, wrong_row
from dataset.builder import OUTPUT_DIR, Builder, Typed, Written, option, seed_option
from dataset.tasks import task_of_shape
from dataset.tasks.maze import MazeTask
from dataset.transforms import NUM_TRANSFORMS, transform_sources
from utils.errors import UserError

DEFAULT_REPO = "sapientinc/maze-30x30-hard-1k"
DEFAULT_SIZE = 30

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
in the answer the path. There is no wall around the maze unless the text has one.
"""


@dataclass(frozen=True)
class Settings:
    """The options of the command line. `size` is None unless mazes are generated."""

    output_dir: Path = OUTPUT_DIR
    source_repo: str | None = boards.repo_option(DEFAULT_REPO)
    source_dir: Path | None = boards.SOURCE_DIR
    generate: int | None = option("N", "make N hard training mazes", group=boards.SOURCES, at_least=1)
    generate_test: int | None = boards.GENERATE_TEST
    size: int | None = option(
        "L",
        f"side of the mazes, {maze.MIN_SIDE} to {maze.MAX_SIDE} (default: {DEFAULT_SIZE}); G is at least "
        f"{maze.least_distance(DEFAULT_SIZE)} x (L / {DEFAULT_SIZE})^1.13 steps from S",
        group=boards.GENERATE,
    )
    subsample_size: int | None = boards.SUBSAMPLE_SIZE
    aug: bool = option(None, "add the 7 turned and mirrored images of each training maze (see below)", default=False)
    seed: int = seed_option()


def complete(typed: Typed) -> None:
    boards.complete_sources(typed, Settings, DEFAULT_REPO)
    if typed.generate is not None:
        typed.size = DEFAULT_SIZE if typed.size is None else typed.size
        if not maze.MIN_SIDE <= typed.size <= maze.MAX_SIDE:
            raise UserError(f"--size is {typed.size}; it must be {maze.MIN_SIDE} to {maze.MAX_SIDE}")


def to_mazes(file: Path, rows: list[Row]) -> Boards:
    """Convert rows to tokens, and check that each answer is a shortest path through its maze."""
    num_cells = len(rows[0].question)
    task = task_of_shape(num_cells, maze.VOCAB_SIZE)
    if num_cells < 4 or not isinstance(task, MazeTask):
        squares = "a maze is a square, of 4, 9, 25, ... (16 would be taken for a Sudoku)"
        raise wrong_row(file, rows[0], f"the question has {num_cells} characters; {squares}")
    questions = {symbol: maze.SYMBOLS.index(symbol, 1) for symbol in "# SG"}
    return boards.to_boards(file, rows, task, questions, "'#', blank, S and G")


def images(mazes: Boards, num_aug: int, rng: np.random.Generator) -> Iterator[Boards]:
    """Yield each maze, followed by its first `num_aug` transforms."""
    num_cells = mazes.questions_NS.shape[1]
    sources_TS = transform_sources(math.isqrt(num_cells))[: 1 + num_aug]
    for chunk in mazes.chunks():
        yield Boards(*(each_NS[:, sources_TS].reshape(-1, num_cells) for each_NS in chunk))


def write(folder: Path, settings: Settings) -> Written:
    """Write both splits. Raise UserError if the input is bad."""
    if settings.generate is None:
        mazes = boards.load_boards(settings, to_mazes)
    else:
        size = settings.size
        assert size is not None
        mazes = boards.generate_boards(settings, lambda num, rng: maze.generate(num, size, rng), shuffled=False)
    num_aug, tokens = NUM_TRANSFORMS - 1 if settings.aug else 0, "padding 0, wall 1, blank 2, S 3, G 4, path 5"
    return boards.write_boards(folder, mazes, images, num_aug, settings.seed, maze.VOCAB_SIZE, tokens)


BUILDER = Builder("build_maze_dataset", __doc__, EXAMPLES, "data/maze-30x30-hard-1k", Settings, complete, write)
main = BUILDER.main

if __name__ == "__main__":
    sys.exit(main())
