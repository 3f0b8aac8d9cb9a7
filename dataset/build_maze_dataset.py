"""Build a maze dataset from a download, from local CSV files, or from mazes generated here.

The mazes and the settings, with the seed, decide every byte of the dataset. The dataset appears
under its name only when it is whole.
"""
# N = mazes, L = side, S = cells of a maze (L * L), T = transforms

import argparse
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset import maze, puzzle_csv
from dataset.builder import (
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
from dataset.tasks import task_of_shape
from dataset.tasks.maze import MazeTask
from dataset.transforms import NUM_TRANSFORMS, transformed
from utils.arguments import Parser, check_at_least, typed_path
from utils.errors import UserError
from utils.shell import run_command

DEFAULT_REPO = "sapientinc/maze-30x30-hard-1k"
DEFAULT_SIZE = 30
# The number of mazes that are checked or written at a time, because checking a maze takes much more
# memory than the maze itself.
CHUNK_MAZES = 1024
# Independent streams of random numbers, as in the Sudoku builder.
_SUBSAMPLE, _GENERATE = 0, 2

EXAMPLES = """
examples:
  # Maze-Hard: 1,000 training mazes and 1,000 test mazes of 30x30 (downloads train.csv and test.csv)
  python dataset/build_maze_dataset.py

  # the same from local files: train.csv and test.csv, or .csv.gz
  python dataset/build_maze_dataset.py --output-dir data/maze --source-dir my-mazes

  # new mazes, 1,000 for training and 500 for testing; no maze is a transform of another
  python dataset/build_maze_dataset.py --output-dir data/maze-12x12 --size 12 \\
      --generate 1000 --generate-test 500

why --aug is off by default:
  A maze can have millions of shortest paths. The label is the path that a breadth-first search from
  S finds if it tries down, left, right and up in this order. A turned or mirrored label is still a
  shortest path, but mostly not the path that this search finds in the new maze. Only 1,938 of the
  8,000 images of the 1,000 published training mazes keep the label. A model that is trained on all
  images can't know which path is asked for, but is scored by the search's path. To train on the
  images that keep the label, leave --aug off and train with augment=online.

The CSV files have the columns question and answer. A maze is a text of L x L characters,
row by row: # is a wall, a blank is free (also at the ends of a row), S the start, G the goal, and o
in the answer the path. There is no wall around the maze unless the text has one. An old dataset in
the output folder is replaced once the new dataset is whole.
"""


class Mazes(NamedTuple):
    """Mazes and their labels as tokens, (N, S) uint8 each."""

    questions_NS: np.ndarray
    answers_NS: np.ndarray


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
    parser = Parser(
        "build_maze_dataset.py",
        description="Build a maze dataset. Inputs are mazes, labels the same mazes with a shortest path.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--output-dir",
        type=typed_path,
        metavar="DIR",
        default=Path("data/maze-30x30-hard-1k"),
        help="default: %(default)s",
    )
    add(
        "--aug",
        type=_parse_bool,
        nargs="?",
        const=True,
        default=False,
        metavar="true|false",
        help="add the 7 turned and mirrored images of each training maze (default: false, see below)",
    )
    add("--seed", type=int, metavar="N", default=0, help="seed of all random choices (default: 0)")

    add_sources(parser, "mazes", DEFAULT_REPO, "make N hard training mazes")

    add = parser.add_argument_group("with --generate").add_argument
    add("--generate-test", type=int, metavar="M", help="make M test mazes (default: a tenth of N, at least 1)")
    add(
        "--size",
        type=int,
        metavar="L",
        help=f"side of the mazes, {maze.MIN_SIDE} to {maze.MAX_SIDE} (default: {DEFAULT_SIZE}); G is at least "
        f"{maze.least_distance(DEFAULT_SIZE)} x (L / {DEFAULT_SIZE})^1.13 steps from S",
    )
    return _complete(Settings(**vars(parser.parse_args(argv))))


def _parse_bool(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def _complete(settings: Settings) -> Settings:
    """Check the options against one another, and fill in defaults that depend on other options."""
    check_at_least(settings, seed=0, generate=1, generate_test=1, subsample_size=1)
    check_sources(settings, "mazes", of_files=["subsample_size"], of_generate=["generate_test", "size"])
    if settings.generate is None:
        source_repo = settings.source_repo or (DEFAULT_REPO if settings.source_dir is None else None)
        return dataclasses.replace(settings, source_repo=source_repo)
    size = DEFAULT_SIZE if settings.size is None else settings.size
    if not maze.MIN_SIDE <= size <= maze.MAX_SIDE:
        raise UserError(f"--size is {size}; it must be {maze.MIN_SIDE} to {maze.MAX_SIDE}")
    generate_test = settings.generate_test or max(1, settings.generate // 10)
    return dataclasses.replace(settings, generate_test=generate_test, size=size)


# --------------------------------------------------------------------------------------------------
# Where the mazes come from. Each source gives the mazes of both splits


def load_mazes(settings: Settings) -> dict[SplitName, Mazes]:
    """Return the mazes of both splits, before augmentation.

    Raises:
        UserError: A file is missing or holds something else than mazes.
    """
    if settings.generate is not None:
        return _generate(settings)
    files = puzzle_csv.source_files(settings.source_dir, settings.source_repo)
    mazes = {split: read_csv(file) for split, file in files.items()}
    num_cells, num_test_cells = (mazes[split].questions_NS.shape[1] for split in SPLITS)
    if num_cells != num_test_cells:
        raise UserError(
            f"{files['test']}: mazes have {num_test_cells} cells, but those of {files['train']} have {num_cells}; "
            "give mazes of one size"
        )
    if settings.subsample_size is not None:
        rng = np.random.default_rng([settings.seed, _SUBSAMPLE])
        num = len(mazes["train"].questions_NS)
        chosen = subsample(settings.subsample_size, num, rng, files["train"], "mazes")
        mazes["train"] = Mazes(*(array_NS[chosen] for array_NS in mazes["train"]))
    return mazes


def _generate(settings: Settings) -> dict[SplitName, Mazes]:
    assert settings.generate is not None and settings.generate_test is not None and settings.size is not None
    cut = settings.generate
    num = cut + settings.generate_test
    rng = np.random.default_rng([settings.seed, _GENERATE])
    questions_NS, answers_NS = collect("generating", "mazes", num, maze.generate(num, settings.size, rng))
    return {"train": Mazes(questions_NS[:cut], answers_NS[:cut]), "test": Mazes(questions_NS[cut:], answers_NS[cut:])}


def read_csv(file: Path) -> Mazes:
    """Read the mazes of a .csv or .csv.gz file, and check every row.

    Raises:
        UserError: A row is malformed, or its maze has another size than the first maze. The message
            names the file and the line.
    """
    parts: list[Mazes] = []
    num_cells = 0
    with progress(f"reading {file.name}", None, "rows") as bar:
        for rows in puzzle_csv.read_rows(file):
            num_cells = num_cells or _num_cells_of(file, rows[0])
            for start in range(0, len(rows), CHUNK_MAZES):
                chunk = rows[start : start + CHUNK_MAZES]
                parts.append(_to_mazes(file, chunk, num_cells))
                bar.update(len(chunk))
    return Mazes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _num_cells_of(file: Path, row: Row) -> int:
    num_cells = len(row.question)
    if num_cells < 4 or not isinstance(task_of_shape(num_cells, maze.VOCAB_SIZE), MazeTask):
        raise UserError(
            f"{file}:{row.line}: the question has {num_cells} characters; a maze is a square, of 4, 9, 25, ... "
            f"(16 would be taken for a Sudoku); {FIX_ROW}"
        )
    return num_cells


def _to_mazes(file: Path, rows: list[Row], num_cells: int) -> Mazes:
    """Convert rows to tokens, and check that each answer is a shortest path through its maze.

    The path need not be the one that the search of this project finds, because other people's files
    may choose another shortest path.
    """
    questions_NS = puzzle_csv.to_tokens(file, rows, "question", _token_of("# SG"), num_cells, "'#', blank, S and G")
    answers_NS = puzzle_csv.to_tokens(file, rows, "answer", _token_of("# SGo"), num_cells, "'#', blank, S, G and o")
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
    return Mazes(questions_NS, answers_NS)


def _token_of(characters: str) -> np.ndarray:
    """Return a table from Latin-1 characters to tokens, (256,) uint8.

    Characters that are not in `characters` have NO_TOKEN.
    """
    token_of = np.full(256, NO_TOKEN, dtype=np.uint8)
    for character in characters:
        token_of[ord(character)] = maze.to_tokens(character)[0]
    return token_of


# --------------------------------------------------------------------------------------------------
# The dataset


def write_split(folder: Path, mazes: Mazes, aug: bool) -> None:
    """Write one split. Each maze becomes a group of one puzzle or, with `aug`, of its eight images.

    Each puzzle has one example. The first image is the maze itself.
    """
    num, num_cells = mazes.questions_NS.shape
    num_images = NUM_TRANSFORMS if aug else 1
    with (
        SplitWriter(folder, seq_len=num_cells, vocab_size=maze.VOCAB_SIZE, num_puzzle_identifiers=1) as writer,
        progress(folder.name, num * num_images, "mazes") as bar,
    ):
        for start in range(0, num, CHUNK_MAZES):
            inputs, labels = (_images(array_NS[start : start + CHUNK_MAZES], num_images) for array_NS in mazes)
            ones = np.ones(len(inputs), np.int32)
            writer.add(inputs, labels, ones, identifiers_P=0 * ones)
            bar.update(len(inputs))
        writer.end_groups(np.full(num, num_images))


def _images(mazes_NS: np.ndarray, num_images: int) -> np.ndarray:
    """Return the first `num_images` transforms of each maze, maze after maze, (N * T, S)."""
    side = maze.side_of(mazes_NS.shape[1])
    assert side is not None
    mazes_NLL = mazes_NS.reshape(-1, side, side)
    images_NTLL = np.stack([transformed(mazes_NLL, transform) for transform in range(num_images)], axis=1)
    return images_NTLL.reshape(-1, side * side)


def build(settings: Settings) -> str:
    """Build the dataset and return a summary of it.

    Raises:
        UserError: The input is bad, or the folder can't be written. No new dataset is left then.
    """
    started = time.perf_counter()
    with new_dataset(settings.output_dir) as folder:
        mazes = load_mazes(settings)
        write_split(folder / "train", mazes["train"], settings.aug)
        write_split(folder / "test", mazes["test"], aug=False)
        fingerprints = finish(folder, ["<blank>"], record_of("build_maze_dataset", settings))
    num_train, num_test = (len(mazes[split].questions_NS) for split in SPLITS)
    num_cells = mazes["train"].questions_NS.shape[1]
    side = maze.side_of(num_cells)
    images = f"{num_train * NUM_TRANSFORMS:,} images of {num_train:,} mazes" if settings.aug else ""
    lines = [
        f"train  {images or f'{num_train:,} mazes'} of {side}x{side}",
        f"test   {num_test:,} mazes",
        f"tokens padding 0, wall 1, blank 2, S 3, G 4, path 5: vocab_size {maze.VOCAB_SIZE}, seq_len {num_cells}",
    ]
    return summary(settings.output_dir, started, lines, fingerprints)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    less_memory = "fewer puzzles need less memory: lower --generate or --subsample-size"
    return run_command(lambda arguments: build(parse_settings(arguments)), argv, less_memory=less_memory)


if __name__ == "__main__":
    sys.exit(main())
