"""Build a Lights Out dataset: boards that have a solution, and the fewest presses as labels."""
# N = boards, S = cells of a board, T = 8 transforms, A = images (transformed copies) of a board

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset import boards
from dataset.boards import Boards
from dataset.builder import OUTPUT_DIR, Builder, Typed, Written, option, seed_option
from dataset.tasks.lights_out import DARK, LEAVE, LIT, MAX_SIDE, MIN_SIDE, PRESS, VOCAB_SIZE, solve, toggled
from dataset.transforms import NUM_TRANSFORMS, transform_sources
from utils.errors import UserError

_DRAWN_AT_ONCE = 1024
# The generator gives up after this many symmetries of earlier boards in a row, because it has
# probably found all boards.
MAX_DUPLICATES = 3000

EXAMPLES = """
examples:
  # 5x5, the size of the toy: 1,000 training boards and 500 test boards
  python dataset/build_lights_out_dataset.py --output-dir data/lights-out-5x5 \\
      --generate 1000 --generate-test 500

  # easier boards, which need at most four presses
  python dataset/build_lights_out_dataset.py --output-dir data/lights-out-easy \\
      --generate 1000 --max-presses 4

The label is the solution with the fewest presses (docs/datasets.md).
"""


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    output_dir: Path = OUTPUT_DIR
    side: int = option("L", f"side, {MIN_SIDE} to {MAX_SIDE} (default: %(default)s)", default=5)
    max_presses: int | None = option("K", "press 1 to K cells to make a board (default: any number)", at_least=1)
    generate: int = option("N", "make N training boards (default: %(default)s)", default=1000, at_least=1)
    generate_test: int = boards.GENERATE_TEST
    num_aug: int = option("N", "other images of each training board, 0 to 7 (default: 0)", default=0, at_least=0)
    seed: int = seed_option()


def complete(typed: Typed) -> None:
    if not MIN_SIDE <= typed.side <= MAX_SIDE:
        raise UserError(f"--side is {typed.side}; it must be {MIN_SIDE} to {MAX_SIDE}")
    if typed.num_aug >= NUM_TRANSFORMS:
        raise UserError(f"--num-aug is {typed.num_aug}; it must be at most {NUM_TRANSFORMS - 1}")
    if typed.max_presses is not None and typed.max_presses > typed.side**2:
        raise UserError(f"--max-presses is {typed.max_presses}, but a board has {typed.side**2} cells; lower it")
    typed.generate_test = typed.generate_test or max(1, typed.generate // 10)


def generate(num: int, side: int, max_presses: int | None, rng: np.random.Generator) -> boards.Pairs:
    """Yield `num` boards that have a solution, each with its label, (S,) bool each.

    No board is all dark, and no board is a symmetry of another. A board is made by pressing 1 to
    `max_presses` cells, or drawn uniformly from all that have a solution.
    """
    sources_TS = transform_sources(side)
    seen: set[bytes] = set()
    num_duplicates = 0
    while True:
        # All boards with a solution have equally many solutions. So uniformly drawn presses give
        # uniformly drawn boards.
        presses_NS = rng.random((_DRAWN_AT_ONCE, side * side)) < 0.5
        if max_presses is not None:
            order_NS = rng.random(presses_NS.shape).argsort(1).argsort(1)
            presses_NS = order_NS < rng.integers(1, max_presses + 1, (_DRAWN_AT_ONCE, 1))
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


def images(lit: Boards, num_aug: int, rng: np.random.Generator) -> Iterator[Boards]:
    """Yield the tokens of each board, followed by those of `num_aug` other images of it."""
    num_cells = lit.questions_NS.shape[1]
    sources_TS = transform_sources(int(num_cells**0.5))
    for chunk_NS, _ in lit.chunks():
        others = rng.permuted(np.tile(np.arange(1, NUM_TRANSFORMS), (len(chunk_NS), 1)), axis=1)[:, :num_aug]
        transforms_NA = np.concatenate([np.zeros((len(chunk_NS), 1), int), others], axis=1)
        images_NAS = np.take_along_axis(chunk_NS[:, None, :], sources_TS[transforms_NA].astype(np.intp), axis=2)
        images_NS = images_NAS.reshape(-1, num_cells)
        # Images are solved again. If a board has several solutions, the image of its label need not
        # be the label of its image.
        labels_NS = np.where(solve(images_NS)[0], np.uint8(PRESS), np.uint8(LEAVE))
        yield Boards(np.where(images_NS, np.uint8(LIT), np.uint8(DARK)), labels_NS)


def write(folder: Path, settings: Settings) -> Written:
    """Write both splits. Raise UserError if there are too few boards."""
    side, most = settings.side, settings.max_presses
    lit = boards.generate_boards(settings, lambda num, rng: generate(num, side, most, rng), shuffled=True)
    tokens = "padding 0, dark 1, lit 2, leave 3, press 4"
    names, lines = boards.write_boards(folder, lit, images, settings.num_aug, settings.seed, VOCAB_SIZE, tokens)
    presses_N = np.concatenate([of_split.answers_NS for of_split in lit.values()]).sum(1)
    return names, [*lines, f"labels {presses_N.min()} to {presses_N.max()} presses, {presses_N.mean():.1f} on average"]


BUILDER = Builder("build_lights_out_dataset", __doc__, EXAMPLES, "data/lights-out-5x5", Settings, complete, write)
main = BUILDER.main

if __name__ == "__main__":
    sys.exit(main())
