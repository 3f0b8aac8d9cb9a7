"""What the builders of boards share: sources of puzzles, and splits that hold images of boards."""
# N = boards, S = cells of a board

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset.builder import ONE_OF_THESE, SPLITS, SplitWriter, Typed, option, options_of, progress, require_index
from dataset.schema import SplitName
from utils.arguments import given
from utils.errors import UserError

SOURCES = f"where the puzzles come from {ONE_OF_THESE})"
FILES, GENERATE = "with --source-repo or --source-dir", "with --generate"
SOURCE_DIR = option("DIR", "folder with train and test, as .csv or .csv.gz", group=SOURCES)
SUBSAMPLE_SIZE = option("N", "draw N of the training puzzles (default: all)", group=FILES, at_least=1)
GENERATE_TEST = option("M", "make M test puzzles (default: a tenth of N, at least 1)", group=GENERATE, at_least=1)

# Independent streams of random numbers, so that an option that uses one stream does not change the
# others. Number 0 draws subsamples of files.
_AUGMENT, _GENERATE = 1, 2
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
    *,
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
