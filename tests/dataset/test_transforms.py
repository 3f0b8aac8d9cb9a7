"""The eight transforms of a square equal slow transforms of one grid at a time."""
# N = grids, L = side, S = cells, T = transforms

import numpy as np
import torch

from dataset.transforms import transform_sources, transformed
from tests.dataset.mazes import turned


def test_the_eight_transforms_equal_the_slow_ones() -> None:
    grids_NLL = np.arange(2 * 16).reshape(2, 4, 4)
    for transform in range(8):
        expected = [turned(grid_LL, transform) for grid_LL in grids_NLL]
        np.testing.assert_array_equal(transformed(grids_NLL, transform), expected)
    assert len({transformed(grids_NLL, transform).tobytes() for transform in range(8)}) == 8


def test_a_source_is_the_cell_that_moves_to_a_place() -> None:
    for side in (3, 11, 12, 30):
        sources_TS = transform_sources(side)
        grid_LL = np.random.default_rng(side).integers(0, 99, (side, side))
        for transform, sources_S in enumerate(sources_TS):
            np.testing.assert_array_equal(grid_LL.ravel()[sources_S], turned(grid_LL, transform).ravel())
        # PyTorch raises an error here if it cannot read the type of the table.
        torch.arange(side * side).gather(0, torch.from_numpy(sources_TS).long()[3])
