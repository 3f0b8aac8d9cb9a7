"""Splits for tests: empty splits with given sizes, and splits in memory with known examples."""
# N = examples, S = tokens of an example, B = slots, L = side of a grid

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataset import sudoku
from dataset.arc import SIDE
from dataset.augment import BOXES, Box
from dataset.loader import TrainLoader
from dataset.maze import VOCAB_SIZE as MAZE_VOCAB
from dataset.online import OnlineAugmentation
from dataset.sampler import Sampler
from dataset.schema import DatasetMetadata, PuzzleSet, Split, merge_splits
from dataset.sudoku import random_solution
from tests.dataset.mazes import random_maze
from utils.ranks.world import World


def split_of(seq_len: int, vocab_size: int) -> Split:
    """Return a split with these sizes and an empty set."""
    metadata = DatasetMetadata(
        pad_id=0,
        ignore_label_id=0,
        blank_identifier_id=0,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_puzzle_identifiers=1,
        total_groups=1,
        mean_puzzle_examples=1.0,
        sets=["all"],
    )
    nothing_NS, starts = np.zeros((0, seq_len), np.uint8), np.zeros(1, np.int64)
    empty = PuzzleSet("all", nothing_NS, nothing_NS, starts[:0], starts, starts)
    return Split(Path("data/test"), metadata, {"all": empty})


def split_with(inputs_NS: np.ndarray, labels_NS: np.ndarray, vocab_size: int) -> Split:
    """Return a split in memory. Each puzzle has one example."""
    num, seq_len = inputs_NS.shape
    puzzle_set = PuzzleSet("all", inputs_NS, labels_NS, np.zeros(num, np.int64), np.arange(num + 1), np.arange(num + 1))
    metadata = split_of(seq_len, vocab_size).metadata.model_copy(update={"total_groups": num})
    return Split(Path("data/train"), metadata, {"all": puzzle_set})


def tensors(inputs_BS: np.ndarray, labels_BS: np.ndarray, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
    arrays = {"inputs": inputs_BS.astype(np.int32), "labels": labels_BS.astype(np.int32), **arrays}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def sudoku_split(box: Box, num: int) -> Split:
    rng = np.random.default_rng(0)
    solutions_NS = np.concatenate([random_solution(box, rng)[None] for _ in range(num)])
    puzzles_NS = np.where(rng.random(solutions_NS.shape) < 0.6, 0, solutions_NS)
    return split_with((puzzles_NS + 1).astype(np.uint8), (solutions_NS + 1).astype(np.uint8), box.side + 2)


def mixed_split() -> Split:
    """Return 5 Sudokus of 4x4, 4 of 6x6 and 3 of 9x9 on one canvas."""
    parts = [
        replace(sudoku_split(BOXES[box], num), path=Path(f"data/{name}/train"))
        for name, box, num in (("four", "2x2", 5), ("six", "2x3", 4), ("nine", "3x3", 3))
    ]
    return merge_splits(parts, [0, 1, 2], canvas_side=9)


def solved_sudoku(puzzle_S: np.ndarray, box: Box) -> np.ndarray | None:
    """Return a solution (S,) of the puzzle by the slow search; None if there is none."""
    search = sudoku._search(sudoku._candidates(puzzle_S, box), 0, sudoku._board(box))
    solution = next(search, None)
    return None if solution is None else sudoku._to_array(solution, box)


def is_valid_sudoku(board_S: np.ndarray, box: Box) -> bool:
    """Return whether the board obeys the rules, written out slowly."""
    board = board_S.reshape(box.side, box.side).tolist()
    everything = set(range(1, box.side + 1))
    rows_and_columns = [*map(set, board), *map(set, zip(*board, strict=True))]
    in_boxes = [
        {board[top + i][left + j] for i in range(box.rows) for j in range(box.columns)}
        for top in range(0, box.side, box.rows)
        for left in range(0, box.side, box.columns)
    ]
    return all(unit == everything for unit in rows_and_columns + in_boxes)


def maze_split() -> Split:
    rng = np.random.default_rng(0)
    mazes = [random_maze(rng, 6) for _ in range(12)]
    return split_with(np.stack([m for m, _ in mazes]), np.stack([label for _, label in mazes]), MAZE_VOCAB)


# ---- ARC ---------------------------------------------------------------------------------------


def on_canvas(grid: np.ndarray, top: int, left: int) -> np.ndarray:
    """Return the canvas with a grid of colours, in the published format: (900,) tokens."""
    canvas_LL = np.zeros((SIDE, SIDE), np.uint8)
    for row in range(len(grid)):
        for column in range(len(grid[0])):
            canvas_LL[top + row, left + column] = grid[row, column] + 2
    if top + len(grid) < SIDE:
        for column in range(len(grid[0])):
            canvas_LL[top + len(grid), left + column] = 1
    if left + len(grid[0]) < SIDE:
        for row in range(len(grid)):
            canvas_LL[top + row, left + len(grid[0])] = 1
    return canvas_LL.ravel()


def arc_grids(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return two grids, and the row and column of the canvas where both grids begin.

    The sizes of the grids are random. A grid is often as wide or as high as the canvas.
    """
    sizes = rng.choice([1, 2, 3, 7, 18, 29, 30], size=(2, 2))
    top, left = (int(rng.integers(0, SIDE - sizes[:, axis].max() + 1)) for axis in (0, 1))
    one, other = (rng.integers(0, 10, size) for size in sizes)
    return one, other, top, left


# ---- batches -----------------------------------------------------------------------------------


def augmented_batches(
    split: Split, world: World, steps: range, size: int = 8, most_clues: float = 0.0, **options: Any
) -> list[Any]:
    sampler = Sampler(list(split.sets.values()), seed=0, epochs=20, global_batch_size=size)
    slots = world.slice_of(size)
    augmentation = OnlineAugmentation(split, seed=0, global_batch_size=size, slots=slots, most_clues=most_clues)
    return list(TrainLoader(split, sampler, world, augmentation=augmentation, **options).batches(steps))
