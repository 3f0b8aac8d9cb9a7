"""Read ARC tasks from JSON, convert grids to tokens, and augment ARC tasks.

The tokens are the published ones: 0 is padding, 1 the end of a grid, and c + 2 is colour c. A
sequence is a canvas of 30 x 30 cells, or of a smaller square for ARC tasks with small grids.
"""
# N = examples, S = cells of the canvas, hw = rows and columns of a grid, C = the ten colours

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset.transforms import NUM_TRANSFORMS, transformed
from utils.errors import UserError
from utils.files import opened
from utils.json_files import parse_json

SIDE = 30  # of the published canvas, and of the largest grid
MIN_SIDE = 5  # of a canvas
SEQ_LEN = SIDE * SIDE
NUM_COLOURS = 10
PADDING, END, FIRST_COLOUR = 0, 1, 2
VOCAB_SIZE = FIRST_COLOUR + NUM_COLOURS
# The number in dataset/transforms.py of each published transform, and the transform that undoes it.
_TRANSFORM_OF = (0, 6, 3, 5, 1, 2, 4, 7)
INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)
IDENTITY_C = np.arange(NUM_COLOURS, dtype=np.uint8)

SEPARATOR = "|||"  # between the parts of an identifier's name, as in TRM
_AUGMENTATION = re.compile(r"t([0-7])\|\|\|(\d{10})")
_ENDING = re.compile(r"\.json(\.gz)?$", re.IGNORECASE)
_FIX, _FORM = "correct the file", "{train: [...], test: [...]}"
# Far more than any published file. The limit is needed because a gzipped file can expand to a
# thousand times its size.
_MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class Pair:
    """Two grids of colours 0 to 9, (h, w) uint8. The output of a hidden test pair is None."""

    input: np.ndarray
    output: np.ndarray | None

    @property
    def grids(self) -> list[np.ndarray]:
        """The input, and the output if it is known."""
        return [self.input] if self.output is None else [self.input, self.output]

    @property
    def key(self) -> bytes:
        """Bytes that are equal exactly for pairs with the same contents."""
        return b"".join(map(grid_key, self.grids))


@dataclass(frozen=True)
class Task:
    """An ARC task: demonstrations with outputs, and test pairs, with outputs or without."""

    name: str
    train: list[Pair]
    test: list[Pair]

    @property
    def side(self) -> int:
        """The largest number of rows or columns of a grid."""
        return max(max(grid.shape) for pair in self.train + self.test for grid in pair.grids)

    @property
    def content(self) -> tuple[list[bytes], list[bytes]]:
        """Equal for ARC tasks with the same pairs in any order, in which revisions differ."""
        return sorted(pair.key for pair in self.train), sorted(pair.key for pair in self.test)

    def as_json(self) -> dict[str, list[dict[str, list[list[int]]]]]:
        return {
            part: [
                dict(zip(("input", "output"), (grid.tolist() for grid in pair.grids), strict=False)) for pair in pairs
            ]
            for part, pairs in (("train", self.train), ("test", self.test))
        }


def read_tasks(file: Path, solutions_file: Path | None = None) -> list[Task]:
    """Read the ARC tasks of a .json or .json.gz file.

    The file holds one ARC task, which gets the name of the file, or many as {name: task}. The file
    of solutions has {name: [output of each test pair]}, which replace the outputs in `file`.
    """
    tasks = parse_tasks(_read_json(file), str(file), _ENDING.sub("", file.name))
    if solutions_file is None:
        return tasks
    solutions = _read_json(solutions_file)
    solved = []
    for task in tasks:
        where = f"{solutions_file}: task {task.name}"
        outputs = solutions.get(task.name) if isinstance(solutions, dict) else None
        if not isinstance(outputs, list) or len(outputs) != len(task.test):
            raise UserError(f"{where}: is no list of {len(task.test)} outputs, one for each test pair; {_FIX}")
        grids = [_grid(output, f"{where}: output {i}") for i, output in enumerate(outputs, 1)]
        test = [Pair(pair.input, grid) for pair, grid in zip(task.test, grids, strict=True)]
        solved.append(Task(task.name, task.train, test))
    return solved


def parse_tasks(value: Any, where: str, name: str) -> list[Task]:
    """Return the ARC tasks in parsed JSON, as `read_tasks`."""
    if not isinstance(value, dict) or not value:
        raise UserError(f"{where}: holds no ARC task ({_FORM}); {_FIX}")
    # One of many ARC tasks may be called "train" or "test". Its value is then not a list of pairs.
    if isinstance(value.get("train"), list) or isinstance(value.get("test"), list):
        return [_task(value, name, where)]
    return [_task(task, name, f"{where}: task {name}") for name, task in value.items()]


def _read_json(file: Path) -> Any:
    with opened(file) as stream:
        text = stream.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise UserError(f"{file}: holds more than {_MOST_BYTES >> 20} MiB of JSON, no ARC tasks; give a smaller file")
    return parse_json(text, file, _FIX)


def _task(value: Any, name: str, where: str) -> Task:
    if not isinstance(value, dict):
        raise UserError(f"{where}: is no ARC task ({_FORM}); {_FIX}")
    pairs: dict[str, list[Pair]] = {"train": [], "test": []}
    for part, of_part in pairs.items():
        found = value.get(part)
        if not isinstance(found, list) or not found:
            raise UserError(f"{where}: {part} is missing or no list of pairs; {_FIX}")
        for i, pair in enumerate(found, 1):
            grids = pair if isinstance(pair, dict) else {}
            place = f"{where}: {part} pair {i}"
            output = grids.get("output")
            is_hidden = part == "test" and output is None
            of_part.append(
                Pair(
                    _grid(grids.get("input"), f"{place}, input"),
                    None if is_hidden else _grid(output, f"{place}, output"),
                )
            )
    if len({pair.output is None for pair in pairs["test"]}) > 1:
        raise UserError(f"{where}: a test pair has no output, but others have; give all of them or none")
    return Task(name, pairs["train"], pairs["test"])


def _grid(value: Any, where: str) -> np.ndarray:
    sizes = [len(row) if isinstance(row, list) else 0 for row in value] if isinstance(value, list) else []
    is_grid = 0 < len(sizes) <= SIDE and 0 < min(sizes) == max(sizes) <= SIDE
    # True is an int to isinstance.
    if not is_grid or not all(type(cell) is int and 0 <= cell < NUM_COLOURS for row in value for cell in row):
        raise UserError(f"{where}: is no grid of 1x1 to {SIDE}x{SIDE} colours from 0 to 9; {_FIX}")
    return np.array(value, dtype=np.uint8)


def side_of(seq_len: int) -> int | None:
    """Return the side of a canvas with so many cells; None if no canvas of ARC has as many.

    No canvas has a side of 10, because a Sudoku of that side has 12 kinds of tokens, too.
    """
    side = math.isqrt(seq_len)
    is_of_sudoku = side + 2 == VOCAB_SIZE
    return side if side * side == seq_len and MIN_SIDE <= side <= SIDE and not is_of_sudoku else None


def framed(grid_hw: np.ndarray) -> np.ndarray:
    """Return the tokens of a grid with end markers below and to the right, (h + 1, w + 1) uint8."""
    height, width = grid_hw.shape
    tokens = np.full((height + 1, width + 1), END, dtype=np.uint8)
    tokens[:height, :width] = grid_hw + np.uint8(FIRST_COLOUR)
    tokens[height, width] = PADDING
    return tokens


def to_tokens(grid_hw: np.ndarray, top: int = 0, left: int = 0, *, side: int = SIDE) -> np.ndarray:
    """Return the canvas with a grid whose first cell is at (top, left), (S,) uint8."""
    height, width = grid_hw.shape
    if min(top, left) < 0 or max(top + height, left + width) > side:
        raise UserError(
            f"a grid of {height}x{width} at ({top}, {left}) goes over the edge of {side}x{side}; give a smaller one"
        )
    canvas = np.full((side + 1, side + 1), PADDING, dtype=np.uint8)
    canvas[top : top + height + 1, left : left + width + 1] = framed(grid_hw)
    return canvas[:side, :side].reshape(-1)


def crop(tokens_NS: np.ndarray) -> list[np.ndarray]:
    """Return the grid in each canvas, (h, w) uint8.

    The grid is the largest rectangle of colours that begins at the first cell of the canvas. Of two
    equally large rectangles it is the one with fewer rows, as published. If the first cell is not a
    colour, the grid is 0 x 0.
    """
    side = math.isqrt(tokens_NS.shape[1])
    canvas_NRC = tokens_NS.reshape(-1, side, side)
    is_colour_NRC = (canvas_NRC >= FIRST_COLOUR) & (canvas_NRC < VOCAB_SIZE)
    # How far colours reach from the left in each row, and how far in all rows down to it.
    run_NR = np.logical_and.accumulate(is_colour_NRC, axis=2).sum(2)
    width_NR = np.minimum.accumulate(run_NR, axis=1)
    area_NR = width_NR * np.arange(1, side + 1)
    last_N = area_NR.argmax(1)
    grids = []
    for canvas_RC, last, widths_R, areas_R in zip(canvas_NRC, last_N, width_NR, area_NR, strict=True):
        height = last + 1 if areas_R[last] else 0
        grids.append((canvas_RC[:height, : widths_R[last]] - FIRST_COLOUR).astype(np.uint8))
    return grids


def grid_key(grid_hw: np.ndarray) -> bytes:
    """Return the shape and the colours of a grid as bytes, to serve as a key."""
    return bytes(grid_hw.shape) + np.ascontiguousarray(grid_hw, dtype=np.uint8).tobytes()


def grid_of(key: bytes) -> np.ndarray:
    return np.frombuffer(key, dtype=np.uint8, offset=2).reshape(key[0], key[1])


def transform(grid_hw: np.ndarray, number: int) -> np.ndarray:
    """Apply a symmetry of the square to a grid, and return a grid of (h, w) or (w, h).

    The published numbers are: 0 to 3 quarter turns counterclockwise, 4 mirrored left to right, 5
    mirrored top to bottom, 6 mirrored at the main diagonal, 7 mirrored at the other diagonal.
    """
    return transformed(grid_hw[None], _TRANSFORM_OF[number])[0]


def undo(grid_hw: np.ndarray, number: int, permutation_C: np.ndarray) -> np.ndarray:
    """Return the grid for which `permutation_C[transform(grid, number)]` is `grid_hw`."""
    return np.argsort(permutation_C).astype(np.uint8)[transform(grid_hw, INVERSE[number])]


class Augmentations(NamedTuple):
    """Versions of one ARC task. A version is a transform, then a permutation of the colours."""

    transforms_A: np.ndarray  # (A,) uint8
    permutations_AC: np.ndarray  # (A, C) uint8; colour c becomes entry c


def draw_augmentations(pairs: Sequence[Pair], num_aug: int, rng: np.random.Generator) -> Augmentations:
    """Return an ARC task and up to `num_aug` versions of it.

    The versions differ in content from the original and from one another. Black stays black. A
    version that is already there is drawn again, with at most 5 * num_aug draws in total, as
    published. An ARC task with few colours or much symmetry gets fewer versions.
    """
    transforms_A = np.zeros(1, dtype=np.uint8)
    permutations_AC = IDENTITY_C[None]
    seen = set(_version_keys(pairs, Augmentations(transforms_A, permutations_AC)))
    num_draws = 5 * num_aug
    while (num_missing := 1 + num_aug - len(transforms_A)) and num_draws:
        num = min(num_missing, num_draws)
        num_draws -= num
        drawn_A = rng.integers(NUM_TRANSFORMS, size=num, dtype=np.uint8)
        drawn_AC = np.tile(IDENTITY_C, (num, 1))
        drawn_AC[:, 1:] = rng.permuted(drawn_AC[:, 1:], axis=1)
        is_new_A = np.zeros(num, dtype=bool)
        for a, key in enumerate(_version_keys(pairs, Augmentations(drawn_A, drawn_AC))):
            is_new_A[a] = key not in seen
            seen.add(key)
        transforms_A = np.concatenate([transforms_A, drawn_A[is_new_A]])
        permutations_AC = np.concatenate([permutations_AC, drawn_AC[is_new_A]])
    return Augmentations(transforms_A, permutations_AC)


def all_transforms(pairs: Sequence[Pair]) -> Augmentations:
    """Return an ARC task and its turned and mirrored versions whose content differs."""
    transforms_A = np.arange(NUM_TRANSFORMS, dtype=np.uint8)
    versions = Augmentations(transforms_A, np.tile(IDENTITY_C, (NUM_TRANSFORMS, 1)))
    keys = _version_keys(pairs, versions)
    is_new_A = np.array([key not in keys[:a] for a, key in enumerate(keys)])
    return Augmentations(transforms_A[is_new_A], versions.permutations_AC[is_new_A])


def _version_keys(pairs: Sequence[Pair], augmentations: Augmentations) -> list[bytes]:
    """Return for each version a digest of its pairs, which does not depend on their order."""
    keys = [b""] * len(augmentations.transforms_A)
    for number in np.unique(augmentations.transforms_A):
        grids = [[transform(grid, number) for grid in pair.grids] for pair in pairs]
        shapes = [b"".join(bytes(grid.shape) for grid in of_pair) for of_pair in grids]
        cells = np.concatenate([grid.reshape(-1) for of_pair in grids for grid in of_pair])
        ends = np.cumsum([sum(grid.size for grid in of_pair) for of_pair in grids]).tolist()
        (which,) = np.nonzero(augmentations.transforms_A == number)
        for a in which.tolist():
            content = augmentations.permutations_AC[a][cells].tobytes()
            of_pairs = [shape + content[start:end] for shape, start, end in zip(shapes, [0, *ends], ends, strict=False)]
            keys[a] = hashlib.blake2b(b"".join(sorted(of_pairs)), digest_size=16).digest()
    return keys


def augmented_name(task: str, number: int, permutation_C: np.ndarray) -> str:
    """Return an identifier's name: <task>, or <task>|||t<transform>|||<new colours of 0 to 9>."""
    if number == 0 and np.array_equal(permutation_C, IDENTITY_C):
        return task
    return f"{task}{SEPARATOR}t{number}{SEPARATOR}{''.join(map(str, permutation_C.tolist()))}"


def parse_name(name: str) -> tuple[str, int, np.ndarray]:
    """Return the ARC task, the transform and the permutation_C in an identifier's name."""
    task, separator, rest = name.partition(SEPARATOR)
    if not separator:
        return name, 0, IDENTITY_C
    match = _AUGMENTATION.fullmatch(rest)
    if match is None or len(set(match[2])) < NUM_COLOURS or not task:
        raise UserError(
            f"the identifier {name!r} is not called <task>|||t<0 to 7>|||<ten different digits>; rebuild the dataset"
        )
    return task, int(match[1]), np.frombuffer(match[2].encode(), dtype=np.uint8) - ord("0")
