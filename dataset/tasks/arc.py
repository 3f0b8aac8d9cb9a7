"""Define ARC as a task: boards, verdicts, checks, symmetries. dataset/arc_votes.py counts votes."""
# N = examples, S = cells of the canvas, L = its side, hw = rows and columns of a grid

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dataset import arc
from dataset.schema import PuzzleSet, Split
from dataset.tasks.base import GREY, BoardTask, Cell, Fault, Symmetries, Verdict, count, rename
from dataset.transforms import NUM_TRANSFORMS

if TYPE_CHECKING:
    import torch

    from utils.batch import Batch

# All colours but black, which is never permuted.
_NUM_PERMUTED = arc.NUM_COLOURS - 1
_WITHOUT_ENDS = bytes(arc.PADDING if token == arc.END else token for token in range(256))

# The background and the text colour of each ARC colour. The numbers are the nearest of a terminal's
# 256 colours to the colours in which ARC is usually shown.
_ARC_COLORS = (
    *((16, 240), (26, 231), (160, 231), (34, 16), (220, 16)),
    *((246, 16), (163, 231), (208, 16), (117, 16), (88, 231)),
)
# The text of each token and its colour in a terminal.
_LOOKS = (
    *[("· ", GREY)] * arc.FIRST_COLOUR,
    *((f"{number} ", f"48;5;{ground};38;5;{text}") for number, (ground, text) in enumerate(_ARC_COLORS)),
)


class ArcTask(BoardTask):
    """ARC grids on a square canvas. Only the grid that is cropped from an answer counts."""

    kind = "arc"
    plural = "ARC"
    shapes = f"ARC: {arc.SEQ_LEN} (or a smaller square) of {arc.VOCAB_SIZE}"
    checked = "ARC: grids that are no rectangle of colours with end markers; input and label in different places."
    lets_vote = True
    name = "arc"
    tokens = ("padding", "end of the grid", *(f"colour {number}" for number in range(arc.NUM_COLOURS)))
    _colors_are_marks = False

    def __init__(self, side: int = arc.SIDE) -> None:
        self.title = "ARC" if side == arc.SIDE else f"ARC {side}x{side}"
        self.side = self.rows = self.columns = side

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> ArcTask | None:
        side = arc.side_of(seq_len)
        return None if side is None or vocab_size != arc.VOCAB_SIZE else cls(side)

    def plain(self, tokens_S: np.ndarray) -> list[list[int]]:
        return arc.crop(tokens_S[None])[0].tolist()

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        (answer_hw,) = arc.crop(answer_S[None])
        if answer_hw.size == 0:
            return Verdict(False, False, "the answer is no grid")
        if solution_S is None:
            return Verdict(True, None, "not checked, since the task gives no output")
        (solution_hw,) = arc.crop(solution_S[None])
        if answer_hw.shape != solution_hw.shape:
            shapes = [f"{height}x{width}" for height, width in (answer_hw.shape, solution_hw.shape)]
            return Verdict(True, False, f"the grid is {shapes[0]}, the output {shapes[1]}")
        if num_wrong := int((answer_hw != solution_hw).sum()):
            return Verdict(True, False, f"{num_wrong} of {count(answer_hw.size, 'cell')} not as in the output")
        return Verdict(True, True, "the output that the task gives")

    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        # The grid of a training example may begin anywhere on the canvas. Then the rectangle that
        # holds all colours is shown.
        canvas_LL = tokens_S.reshape(self.side, self.side)
        height, width = arc.crop(tokens_S[None])[0].shape
        rows, columns = range(height), range(width)
        if not height:
            colored = np.nonzero(canvas_LL >= arc.FIRST_COLOUR)
            if len(colored[0]) == 0:
                return ["(no grid)"]
            rows, columns = (range(axis.min(), axis.max() + 1) for axis in colored)
        cells = [
            [cell(row * self.side + column, *_LOOKS[canvas_LL[row, column]]) for column in columns] for row in rows
        ]
        return ["".join(of_row).rstrip() for of_row in cells]

    def symmetries(self, sets: Sequence[PuzzleSet]) -> ArcSymmetries:
        return ArcSymmetries()

    def scores(self, split: Split) -> bool:
        # Votes need the file test_puzzles.json, which merged datasets and the datasets of other
        # builders lack.
        return (split.path.parent / "test_puzzles.json").is_file()

    def faults(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> dict[Fault, np.ndarray]:
        labelled_N = labelled_NS.any(axis=1)
        inputs_right_N, inputs_corner_N = _grids(inputs_NS)
        labels_right_N, labels_corner_N = _grids(labels_NS)
        elsewhere_N = labelled_N & inputs_right_N & labels_right_N & (inputs_corner_N != labels_corner_N)
        what = "is no rectangle of colours with end markers below and right of it"
        return {
            ("inputs", what): ~inputs_right_N,
            ("labels", what): labelled_N & ~labels_right_N,
            ("labels", "has its grid elsewhere on the canvas than its input"): elsewhere_N,
        }

    def identity(self, tokens: bytes) -> bytes:
        # The tokens from the first cell of a grid to its last do not depend on its place on the
        # canvas. End markers do, because the edge of the canvas cuts them off, so they are removed.
        return tokens.translate(_WITHOUT_ENDS).strip(bytes([arc.PADDING]))


def _grids(tokens_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which canvases hold one grid with correct end markers, and its first cell, (N,)."""
    side = math.isqrt(tokens_NS.shape[1])
    tokens_NLL = tokens_NS.reshape(-1, side, side)
    is_grid_NLL = tokens_NLL >= arc.FIRST_COLOUR
    rows_NL, columns_NL = (np.logical_or.reduce(is_grid_NLL, axis=axis) for axis in (2, 1))
    below_NL, right_NL = _line_after(rows_NL), _line_after(columns_NL)
    # Each run of lines with a grid ends at a line without, or at the edge of the canvas.
    right_N = (below_NL.sum(1) + rows_NL[:, -1] == 1) & (right_NL.sum(1) + columns_NL[:, -1] == 1)
    right_N &= (is_grid_NLL == (rows_NL[:, :, None] & columns_NL[:, None, :])).all(axis=(1, 2))
    ends_NLL = (below_NL[:, :, None] & columns_NL[:, None, :]) | (rows_NL[:, :, None] & right_NL[:, None, :])
    right_N &= ((tokens_NLL == arc.END) == ends_NLL).all(axis=(1, 2))
    return right_N, rows_NL.argmax(axis=1) * side + columns_NL.argmax(axis=1)


def _line_after(lines_NL: np.ndarray) -> np.ndarray:
    """Return which lines follow a marked line directly but are not marked, (N, L) bool."""
    after_NL = np.zeros_like(lines_NL)
    after_NL[:, 1:] = lines_NL[:, :-1] & ~lines_NL[:, 1:]
    return after_NL


# ---- symmetries ----


class ArcSymmetries(Symmetries):
    """Permutations of all colours but black, and the eight transforms of a grid inside its own box.

    The puzzle's identifier does not tell which symmetry was drawn. A builder, in contrast, gives
    every augmentation an identifier of its own.
    """

    description = "symmetries of ARC (unknown to the puzzle embeddings)"
    num_draws = _NUM_PERMUTED + 1

    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        names_BV = np.tile(np.arange(arc.VOCAB_SIZE, dtype=np.uint8), (len(uniform_BU), 1))
        names_BV[:, arc.FIRST_COLOUR + 1 :] = uniform_BU[:, :_NUM_PERMUTED].argsort(axis=1) + arc.FIRST_COLOUR + 1
        transform_B = (uniform_BU[:, _NUM_PERMUTED] * NUM_TRANSFORMS).astype(np.uint8)
        return {"names": names_BV, "transforms": transform_B}

    def apply(self, batch: Batch, chosen: Batch) -> Batch:
        transform_B, names_BV = chosen["transforms"].long(), chosen["names"]
        moved = {name: _transform_grid(batch[name], transform_B, names_BV) for name in ("inputs", "labels")}
        return {**batch, **moved}


def _transform_grid(tokens_BS: torch.Tensor, transform_B: torch.Tensor, names_BV: torch.Tensor) -> torch.Tensor:
    """Return canvases whose grids are transformed and have new colours, (B, S).

    End markers stand below the grid over its columns, and right of it over its rows, as published.
    Markers beyond the edge of the canvas are left out.
    """
    import torch  # only here, because most programs that import the tasks do not need it

    side = math.isqrt(tokens_BS.shape[1])
    is_grid_BLL = (tokens_BS >= arc.FIRST_COLOUR).view(-1, side, side)
    in_row_BL, in_column_BL = is_grid_BLL.any(2), is_grid_BLL.any(1)
    # Sums are sizes, because grids have no holes. argmax returns the first of equal values. Without
    # a grid all sizes are 0.
    top_B, height_B = in_row_BL.int().argmax(1), in_row_BL.sum(1)
    left_B, width_B = in_column_BL.int().argmax(1), in_column_BL.sum(1)
    transposed_B, upside_down_B, mirrored_B = ((transform_B & bit).bool() for bit in (4, 2, 1))
    # A transposed box has its row and column exchanged, so that it stays on the canvas.
    top_B, left_B = torch.where(transposed_B, left_B, top_B), torch.where(transposed_B, top_B, left_B)
    height_B, width_B = torch.where(transposed_B, width_B, height_B), torch.where(transposed_B, height_B, width_B)

    # The number of the original cell that each cell of the canvas shows inside of the box.
    places = torch.arange(side, device=tokens_BS.device)
    down_BL, across_BL = places - top_B[:, None], places - left_B[:, None]
    from_down_BL = torch.where(upside_down_B[:, None], height_B[:, None] - 1 - down_BL, down_BL) + top_B[:, None]
    from_across_BL = torch.where(mirrored_B[:, None], width_B[:, None] - 1 - across_BL, across_BL) + left_B[:, None]
    swap_B1 = transposed_B[:, None]
    sources_BLL = torch.where(swap_B1, from_down_BL, from_down_BL * side)[:, :, None]
    sources_BLL = sources_BLL + torch.where(swap_B1, from_across_BL * side, from_across_BL)[:, None, :]
    sources_BS = sources_BLL.flatten(1).clamp(0, side * side - 1)
    grid_BS = rename(tokens_BS.gather(1, sources_BS), names_BV)

    in_row_BL = (down_BL >= 0) & (down_BL < height_B[:, None])
    in_column_BL = (across_BL >= 0) & (across_BL < width_B[:, None])
    below_BL, right_BL = down_BL == height_B[:, None], across_BL == width_B[:, None]
    inside_BS = (in_row_BL[:, :, None] & in_column_BL[:, None, :]).flatten(1)
    end_BLL = (below_BL[:, :, None] & in_column_BL[:, None, :]) | (in_row_BL[:, :, None] & right_BL[:, None, :])
    # The rest of the canvas is padding, or in labels the negative number that the loader gives to
    # ignored labels. Both are the smallest token of the canvas.
    around_B1 = tokens_BS.amin(1, keepdim=True).clamp(max=arc.PADDING)
    return torch.where(inside_BS, grid_BS, torch.where(end_BLL.flatten(1), arc.END, around_B1))
