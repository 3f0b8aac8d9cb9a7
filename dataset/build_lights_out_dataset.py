"""Build a Lights Out dataset: boards that have a solution, and the fewest presses as labels.

No test board is a symmetry of a training board. The settings, with the seed, decide every byte of
the dataset. The dataset appears under its name only when it is whole.
"""
# N = boards, S = cells of a board, T = 8 transforms, A = images (transformed copies) of a board

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset.builder import add_generate_test, build_dataset, builder_parser, generated, write_boards
from dataset.tasks.lights_out import DARK, LEAVE, LIT, MAX_SIDE, MIN_SIDE, PRESS, VOCAB_SIZE, solve, toggled
from dataset.transforms import NUM_TRANSFORMS, transform_sources
from utils.arguments import check_at_least
from utils.errors import UserError
from utils.shell import run_command

PROGRAM = "build_lights_out_dataset"
CHUNK_BOARDS = 1024
# The generator gives up after this many symmetries of earlier boards in a row, because it has
# probably found all boards.
MAX_DUPLICATES = 3000
# Independent streams of random numbers, so that an option that uses one stream does not change the
# other.
_AUGMENT, _GENERATE = 1, 2

EXAMPLES = """
examples:
  # 5x5, the size of the toy: 1,000 training boards and 500 test boards
  python dataset/build_lights_out_dataset.py --output-dir data/lights-out-5x5 \\
      --generate 1000 --generate-test 500

  # easier boards, which need at most four presses
  python dataset/build_lights_out_dataset.py --output-dir data/lights-out-easy \\
      --generate 1000 --max-presses 4

A press toggles a lamp and its neighbours above, below, left and right. The goal is to turn every
lamp off. The label is the solution with the fewest presses. If several solutions have equally few,
the label is the solution that presses the first cell in which they differ. An old dataset in the
output folder is replaced once the new dataset is whole.
"""


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    output_dir: Path
    side: int
    max_presses: int | None
    generate: int
    generate_test: int | None
    num_aug: int
    seed: int


# --------------------------------------------------------------------------------------------------
# Command line


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Parse the command line.

    Raises:
        UserError: An option is unknown, malformed or out of range.
    """
    parser = builder_parser(
        PROGRAM,
        "Build a Lights Out dataset. Inputs are lamps, labels are presses that turn all lamps off.",
        EXAMPLES,
        "data/lights-out-5x5",
    )
    add = parser.add_argument
    add("--side", type=int, metavar="L", default=5, help=f"side, {MIN_SIDE} to {MAX_SIDE} (default: %(default)s)")
    add("--max-presses", type=int, metavar="K", help="press 1 to K cells to make a board (default: any number)")
    add("--generate", type=int, metavar="N", default=1000, help="make N training boards (default: %(default)s)")
    add_generate_test(parser, "boards")
    add("--num-aug", type=int, metavar="N", default=0, help="other images of each training board, 0 to 7 (default: 0)")
    settings = Settings(**vars(parser.parse_args(argv)))
    check_at_least(settings, num_aug=0, seed=0, generate=1, generate_test=1, max_presses=1)
    if not MIN_SIDE <= settings.side <= MAX_SIDE:
        raise UserError(f"--side is {settings.side}; it must be {MIN_SIDE} to {MAX_SIDE}")
    if settings.num_aug >= NUM_TRANSFORMS:
        raise UserError(f"--num-aug is {settings.num_aug}; it must be at most {NUM_TRANSFORMS - 1}")
    if settings.max_presses is not None and settings.max_presses > settings.side**2:
        raise UserError(f"--max-presses is {settings.max_presses}, but a board has {settings.side**2} cells; lower it")
    return dataclasses.replace(settings, generate_test=settings.generate_test or max(1, settings.generate // 10))


# --------------------------------------------------------------------------------------------------
# Boards


def generate(
    num: int, side: int, max_presses: int | None, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `num` boards that have a solution, each with its label, (S,) bool each.

    No board is all dark, and no board is a symmetry of another.

    Args:
        num: the number of boards.
        side: the side of the boards.
        max_presses: a board is made by pressing 1 to `max_presses` cells; None: boards are drawn
            uniformly from all that have a solution.
        rng: the random numbers.

    Raises:
        UserError: There seem to be fewer than `num` boards.
    """
    num_cells = side * side
    sources_TS = transform_sources(side)
    seen: set[bytes] = set()
    num_duplicates = 0
    while True:
        # All boards with a solution have equally many solutions. So uniformly drawn presses give
        # uniformly drawn boards.
        presses_NS = rng.random((CHUNK_BOARDS, num_cells)) < 0.5
        if max_presses is not None:
            order_NS = rng.random((CHUNK_BOARDS, num_cells)).argsort(1).argsort(1)
            presses_NS = order_NS < rng.integers(1, max_presses + 1, (CHUNK_BOARDS, 1))
        boards_NS = toggled(presses_NS)
        for board_S, label_S in zip(boards_NS, solve(boards_NS)[0], strict=True):
            key = min(map(bytes, board_S[sources_TS]))
            if key in seen or not board_S.any():
                num_duplicates += 1
                if num_duplicates == MAX_DUPLICATES:
                    raise UserError(
                        f"found only {len(seen):,} boards of {side}x{side} that are no symmetries of one another, but "
                        f"{num:,} are needed; ask for fewer, or for a larger --side or --max-presses"
                    )
                continue
            num_duplicates = 0
            seen.add(key)
            yield board_S, label_S
            if len(seen) == num:
                return


# --------------------------------------------------------------------------------------------------
# The dataset


def _with_images(
    boards_NS: np.ndarray, num_aug: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and labels: each board, followed by `num_aug` other images of it.

    Args:
        boards_NS: whether each lamp is lit, bool.
        rng: the random numbers that choose the images.
    """
    num, num_cells = boards_NS.shape
    sources_TS = transform_sources(int(num_cells**0.5))
    for start in range(0, num, CHUNK_BOARDS):
        chunk_NS = boards_NS[start : start + CHUNK_BOARDS]
        others = rng.permuted(np.tile(np.arange(1, NUM_TRANSFORMS), (len(chunk_NS), 1)), axis=1)[:, :num_aug]
        transforms_NA = np.concatenate([np.zeros((len(chunk_NS), 1), int), others], axis=1)
        images_NAS = np.take_along_axis(chunk_NS[:, None, :], sources_TS[transforms_NA].astype(np.intp), axis=2)
        images_NS = images_NAS.reshape(-1, num_cells)
        # Images are solved again. If a board has several solutions, the image of its label need not
        # be the label of its image.
        inputs_NS = np.where(images_NS, np.uint8(LIT), np.uint8(DARK))
        yield inputs_NS, np.where(solve(images_NS)[0], np.uint8(PRESS), np.uint8(LEAVE))


def build(settings: Settings) -> str:
    """Build the dataset and return a summary of it.

    Raises:
        UserError: There are too few boards, or the folder can't be written. No new dataset is left
            then.
    """

    def write(folder: Path) -> tuple[list[str], list[str]]:
        assert settings.generate_test is not None
        rng = np.random.default_rng([settings.seed, _GENERATE])
        pairs = generate(settings.generate + settings.generate_test, settings.side, settings.max_presses, rng)
        # If nearly all boards are used, boards with symmetries come late. Without shuffling they
        # would all be test boards.
        boards = generated("boards", settings, pairs, shuffle=rng)
        shape = {"seq_len": settings.side**2, "vocab_size": VOCAB_SIZE}
        for split, (boards_NS, _) in boards.items():
            num_aug = settings.num_aug if split == "train" else 0
            chunks = _with_images(boards_NS, num_aug, np.random.default_rng([settings.seed, _AUGMENT]))
            write_boards(folder / split, chunks, groups=len(boards_NS), group_size=1 + num_aug, **shape)
        num_train = settings.generate * (1 + settings.num_aug)
        num_presses_N = np.concatenate([presses_NS for _, presses_NS in boards.values()]).sum(1)
        return ["<blank>"], [
            f"train  {num_train:,} boards = {settings.generate:,} x (1 + {settings.num_aug} images)",
            f"test   {settings.generate_test:,} boards",
            f"labels {num_presses_N.min()} to {num_presses_N.max()} presses, {num_presses_N.mean():.1f} on average",
            f"tokens padding 0, dark 1, lit 2, leave 3, press 4: vocab_size {VOCAB_SIZE}, seq_len {settings.side**2}",
        ]

    return build_dataset(PROGRAM, settings, write)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    less_memory = "fewer puzzles need less memory: lower --generate"
    return run_command(lambda arguments: build(parse_settings(arguments)), argv, less_memory=less_memory)


if __name__ == "__main__":
    sys.exit(main())
