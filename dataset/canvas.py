"""Place boards of several sides in the upper left corner of one canvas, and crop them again."""
# N = boards, L = side of a board, S = cells of a board, C = cells of the canvas,
# V = vocabulary of the canvas

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PADDING = 0
"""The token of a cell outside of the board."""


@dataclass(frozen=True)
class Corner:
    """The place of a set's boards on a canvas, which the largest boards fill."""

    side: int
    canvas_side: int

    @property
    def shape(self) -> tuple[int, int]:
        """The number of tokens and of kinds of tokens of a board by itself."""
        return shape_of(self.side)

    def place(self, boards_NS: torch.Tensor, outside: int) -> torch.Tensor:
        """Return boards on the canvas, (N, C), with `outside` in every other cell."""
        side, small = self.canvas_side, self.side
        canvas_NLL = boards_NS.new_full((len(boards_NS), side, side), outside)
        canvas_NLL[:, :small, :small] = boards_NS.unflatten(-1, (small, small))
        return canvas_NLL.flatten(-2)

    def crop(self, canvas_C: torch.Tensor) -> torch.Tensor:
        """Return the boards on canvases: (..., C) -> (..., S)."""
        side, small = self.canvas_side, self.side
        return canvas_C.unflatten(-1, (side, side))[..., :small, :small].flatten(-2)

    def crop_answers(self, canvas_C: torch.Tensor) -> torch.Tensor:
        """Return the answers on canvases, (..., S), with padding for tokens that no board has."""
        return self.without_other_tokens(self.crop(canvas_C))

    def without_other_tokens(self, boards_S: torch.Tensor) -> torch.Tensor:
        """Return boards with padding for tokens that no board has, such as a 9 on a 4x4 board."""
        return boards_S.where(boards_S < self.shape[1], PADDING)

    def widen(self, chosen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return symmetries of boards as symmetries of canvases: "cells" (N, C), "names" (N, V)."""
        num = len(chosen["cells"])
        num_cells, vocab_size = shape_of(self.canvas_side)
        row, column = np.divmod(np.arange(self.side**2), self.side)
        cells_S = row * self.canvas_side + column  # the number on the canvas of each cell of the board
        cells_NC = np.tile(np.arange(num_cells).astype(np.uint8), (num, 1))
        cells_NC[:, cells_S] = cells_S[chosen["cells"]]
        names_NV = np.tile(np.arange(vocab_size).astype(np.uint8), (num, 1))
        if "names" in chosen:
            names_NV[:, : chosen["names"].shape[1]] = chosen["names"]
        return {"cells": cells_NC, "names": names_NV}


def shape_of(side: int) -> tuple[int, int]:
    """Return the number of tokens and of kinds of tokens of a board."""
    return side * side, side + 2


def side_of(shape: tuple[int, int]) -> int | None:
    """Return the side of the boards of this shape; None if such boards share no canvas."""
    side = math.isqrt(shape[0])
    return side if shape == shape_of(side) else None


def common_side(shapes: Iterable[tuple[int, int]]) -> int | None:
    """Return the side of the canvas of boards of several shapes, which is the largest side.

    It is None if there is one shape, or a shape whose boards share no canvas.
    """
    sides = {side_of(shape) for shape in shapes}
    known = [side for side in sides if side is not None]
    return max(known) if len(known) == len(sides) > 1 else None
