"""Augmentation on the fly: every visit of an example draws one of the symmetries of its task.

What is drawn is a pure function of (seed, step, slot of the global batch), so any number of ranks and a resumed run see
the same batches. The random numbers are drawn on the host, for the whole global batch, and a rank keeps its slots; the
tokens are moved about where they are trained on.
"""
# B = slots of this rank, S = tokens of a puzzle, L = side of a grid, N = examples of a split, T = 8 transforms,
# U = random numbers for one visit, V = vocabulary

import math
from abc import ABC, abstractmethod

import numpy as np
import torch

from dataset import arc, maze
from dataset.augment import Box, box_of, draws_per_symmetry, symmetries_from
from dataset.schema import PuzzleSet, Split, unchanged
from dataset.tasks import KNOWN_SHAPES
from utils.batch import Batch
from utils.errors import UserError

# Tells this random stream from others made of (seed, step).
_STREAM = 0xA6

# Examples whose transforms are checked at a time, so that memory does not grow with the dataset.
_CHECKED_AT_ONCE = 1024


class Symmetries(ABC):
    """The symmetries of one task: what random numbers mean, on the host, and what is done with it, on the device."""

    description: str
    num_draws: int  # U

    @abstractmethod
    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        """What `apply` needs, as small arrays, from numbers in [0, 1) and the examples' numbers."""

    @abstractmethod
    def apply(self, batch: Batch, chosen: Batch) -> Batch:
        """The batch with inputs and labels transformed alike. Labels below 0 are ignored ones, and stay ignored."""


class OnlineAugmentation:
    """The symmetries of a split's task, drawn anew for these slots of every global batch."""

    def __init__(self, symmetries: Symmetries, *, seed: int, global_batch_size: int, slots: slice) -> None:
        self._symmetries = symmetries
        self._seed, self._global_batch_size, self._slots = seed, global_batch_size, slots

    @classmethod
    def build(
        cls, split: Split, *, seed: int, global_batch_size: int, slots: slice, device: torch.device
    ) -> "OnlineAugmentation":
        """Raises UserError for a task whose symmetries nobody knows. Mazes are checked one by one, here and once."""
        symmetries = _symmetries_of(split, device)
        return cls(symmetries, seed=seed, global_batch_size=global_batch_size, slots=slots)

    @property
    def description(self) -> str:
        """A phrase for the head of a run: "symmetries of Sudoku 3x3"."""
        return self._symmetries.description

    def draw(self, step: int, examples_B: np.ndarray) -> Batch:
        """What is drawn for this rank's slots at a step, on the host. `examples_B`: the sampler's numbers for them."""
        rng = np.random.default_rng([_STREAM, self._seed, step])
        uniform_BU = rng.random((self._global_batch_size, self._symmetries.num_draws))[self._slots]
        chosen = self._symmetries.choose(uniform_BU, examples_B)
        return {name: torch.from_numpy(array) for name, array in chosen.items()}

    def apply(self, batch: Batch, drawn: Batch) -> Batch:
        """The augmented batch, from a batch and what was drawn for it, both on the device."""
        return self._symmetries.apply(batch, drawn)


def _symmetries_of(split: Split, device: torch.device) -> Symmetries:
    """The closed table of tasks, told by their shapes."""
    seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
    box = box_of(seq_len, vocab_size)
    if box is not None:
        return SudokuSymmetries(box)
    if (seq_len, vocab_size) == (arc.SEQ_LEN, arc.VOCAB_SIZE):
        return ArcSymmetries()
    if maze.is_maze(seq_len, vocab_size):
        return MazeSymmetries(list(split.sets.values()), device)
    raise UserError(
        f"{split.path} has {seq_len} tokens of {vocab_size} kinds, a task whose symmetries are not known "
        f"({KNOWN_SHAPES}); set augment=none"
    )


# ---- Sudoku ----------------------------------------------------------------------------------------------


class SudokuSymmetries(Symmetries):
    """Digits, bands, rows in bands, stacks, columns in stacks, transposition: as the builder draws them."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self.description = f"symmetries of Sudoku {box}"
        self.num_draws = draws_per_symmetry(box)

    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        symmetries = symmetries_from(uniform_BU, self._box)
        padding_B1 = np.zeros((len(uniform_BU), 1), np.uint8)
        # Tokens are digit + 1; bytes, because they travel.
        return {
            "cells": symmetries.cells_NS.astype(np.uint8),
            "names": np.concatenate([padding_B1, symmetries.digits_ND + np.uint8(1)], axis=1),
        }

    def apply(self, batch: Batch, chosen: Batch) -> Batch:
        cells_BS = chosen["cells"].long()
        moved = {name: rename(batch[name].gather(1, cells_BS), chosen["names"]) for name in ("inputs", "labels")}
        return {**batch, **moved}


def rename(tokens_BS: torch.Tensor, names_BV: torch.Tensor) -> torch.Tensor:
    """Each token by its row's table; ignored labels, below 0, have no other name."""
    renamed_BS = names_BV.to(tokens_BS.dtype).gather(1, tokens_BS.clamp(min=0).long())
    return torch.where(tokens_BS < 0, tokens_BS, renamed_BS)


# ---- the eight transforms of a grid ----------------------------------------------------------------------


def _transform_bits(transforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Transform t = 4 * transposed + 2 * upside down + mirrored; 0 leaves the grid as it is."""
    return transforms // 4 % 2 == 1, transforms // 2 % 2 == 1, transforms % 2 == 1


def _box_sources(
    transform_B: torch.Tensor,
    top_B: torch.Tensor,
    left_B: torch.Tensor,
    height_B: torch.Tensor,
    width_B: torch.Tensor,
    side: int,
) -> torch.Tensor:
    """Transforms a box of a canvas of `side` x `side` inside itself: for each cell of the transformed canvas the cell
    of the original that it shows, (B, side * side) int64.

    All that is given is (B,) int64, top to width of the transformed box. Transposed, a box lies where rows and columns
    have changed places, so that it fits. The values outside of the box mean nothing.
    """
    transposed_B, upside_down_B, mirrored_B = _transform_bits(transform_B)
    places = torch.arange(side, device=transform_B.device)
    down_BL = places - top_B[:, None]
    across_BL = places - left_B[:, None]
    down_BL = torch.where(upside_down_B[:, None], height_B[:, None] - 1 - down_BL, down_BL) + top_B[:, None]
    across_BL = torch.where(mirrored_B[:, None], width_B[:, None] - 1 - across_BL, across_BL) + left_B[:, None]
    swap_B1 = transposed_B[:, None]
    sources_BLL = torch.where(swap_B1, down_BL, down_BL * side)[:, :, None]
    sources_BLL = sources_BLL + torch.where(swap_B1, across_BL * side, across_BL)[:, None, :]
    return sources_BLL.flatten(1).clamp(0, side * side - 1)


def square_sources(side: int) -> torch.Tensor:
    """(T, side * side): the same for every transform of a grid that is the whole canvas."""
    transform_T = torch.arange(maze.NUM_TRANSFORMS)
    zero_T, side_T = torch.zeros_like(transform_T), torch.full_like(transform_T, side)
    return _box_sources(transform_T, zero_T, zero_T, side_T, side_T, side)


# ---- mazes -----------------------------------------------------------------------------------------------


class MazeSymmetries(Symmetries):
    """The transforms of the square after which the label is still the answer.

    A maze has millions of shortest paths, and its label is the one that breadth-first search from S finds: of the
    sequences of directions the first, where down comes before left, right and up. Turned, most are another one's label.
    """

    def __init__(self, sets: list[PuzzleSet], device: torch.device) -> None:
        with unchanged(sets):
            allowed_NT = np.concatenate(
                [
                    maze.allowed_transforms(puzzle_set.inputs[rows], puzzle_set.labels[rows])
                    for puzzle_set in sets
                    for rows in _chunks(len(puzzle_set.inputs))
                ]
            )
        self.num_allowed = int(allowed_NT.sum())
        self._count_N = allowed_NT.sum(axis=1)
        # The allowed ones of each example come first, in order.
        self._transforms_NT = np.argsort(~allowed_NT, axis=1, kind="stable").astype(np.uint8)
        side = math.isqrt(sets[0].inputs.shape[1])
        self._sources_TS = square_sources(side).to(device)
        possible = len(allowed_NT) * maze.NUM_TRANSFORMS
        self.description = f"symmetries of mazes {side}x{side} ({self.num_allowed:,} of {possible:,} keep the label)"
        self.num_draws = 1

    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        nth_B = (uniform_BU[:, 0] * self._count_N[examples_B]).astype(np.intp)
        return {"transforms": self._transforms_NT[examples_B, nth_B]}

    def apply(self, batch: Batch, chosen: Batch) -> Batch:
        cells_BS = self._sources_TS[chosen["transforms"].long()]
        return {**batch, **{name: batch[name].gather(1, cells_BS) for name in ("inputs", "labels")}}


def _chunks(num: int) -> list[slice]:
    return [slice(start, min(start + _CHECKED_AT_ONCE, num)) for start in range(0, num, _CHECKED_AT_ONCE)]


# ---- ARC -------------------------------------------------------------------------------------------------

# All but black, which stays what it is.
_NUM_PERMUTED = arc.NUM_COLOURS - 1


class ArcSymmetries(Symmetries):
    """A permutation of the colours but black, and one of the eight transforms of each grid inside its own box.

    Example by example: a puzzle's identifier does not say which were drawn, as it does where a builder gives every
    augmentation an identifier of its own.
    """

    description = "symmetries of ARC (which puzzle embeddings know nothing of)"
    num_draws = _NUM_PERMUTED + 1

    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        names_BV = np.tile(np.arange(arc.VOCAB_SIZE, dtype=np.uint8), (len(uniform_BU), 1))
        names_BV[:, arc.FIRST_COLOUR + 1 :] = uniform_BU[:, :_NUM_PERMUTED].argsort(axis=1) + arc.FIRST_COLOUR + 1
        transform_B = (uniform_BU[:, _NUM_PERMUTED] * maze.NUM_TRANSFORMS).astype(np.uint8)
        return {"names": names_BV, "transforms": transform_B}

    def apply(self, batch: Batch, chosen: Batch) -> Batch:
        transform_B, names_BV = chosen["transforms"].long(), chosen["names"]
        moved = {name: _transform_grid(batch[name], transform_B, names_BV) for name in ("inputs", "labels")}
        return {**batch, **moved}


def _transform_grid(tokens_BS: torch.Tensor, transform_B: torch.Tensor, names_BV: torch.Tensor) -> torch.Tensor:
    """The grid of every example, transformed and in its new colours, with its end marked as published: below it over
    its columns, right of it over its rows, where the canvas goes on.
    """
    is_grid_BLL = (tokens_BS >= arc.FIRST_COLOUR).view(-1, arc.SIDE, arc.SIDE)
    in_row_BL, in_column_BL = is_grid_BLL.any(2), is_grid_BLL.any(1)
    # Grids have no holes: sums are sizes. argmax gives the first of equals; without a grid all sizes are 0.
    top_B, height_B = in_row_BL.int().argmax(1), in_row_BL.sum(1)
    left_B, width_B = in_column_BL.int().argmax(1), in_column_BL.sum(1)
    transposed_B, _, _ = _transform_bits(transform_B)
    top_B, left_B = torch.where(transposed_B, left_B, top_B), torch.where(transposed_B, top_B, left_B)
    height_B, width_B = torch.where(transposed_B, width_B, height_B), torch.where(transposed_B, height_B, width_B)

    sources_BS = _box_sources(transform_B, top_B, left_B, height_B, width_B, arc.SIDE)
    grid_BS = rename(tokens_BS.gather(1, sources_BS), names_BV)

    places = torch.arange(arc.SIDE, device=tokens_BS.device)
    down_BL, across_BL = places - top_B[:, None], places - left_B[:, None]
    in_row_BL = (down_BL >= 0) & (down_BL < height_B[:, None])
    in_column_BL = (across_BL >= 0) & (across_BL < width_B[:, None])
    below_BL, right_BL = down_BL == height_B[:, None], across_BL == width_B[:, None]
    inside_BS = (in_row_BL[:, :, None] & in_column_BL[:, None, :]).flatten(1)
    end_BLL = (below_BL[:, :, None] & in_column_BL[:, None, :]) | (in_row_BL[:, :, None] & right_BL[:, None, :])
    # Around it lies padding, which labels may ignore: the least token there is, for colours and markers are above it.
    around_B1 = tokens_BS.amin(1, keepdim=True).clamp(max=arc.PADDING)
    return torch.where(inside_BS, grid_BS, torch.where(end_BLL.flatten(1), arc.END, around_B1))
