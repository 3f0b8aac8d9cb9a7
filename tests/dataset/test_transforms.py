"""The eight transforms of a square equal slow transforms of one grid at a time."""
# L = side, S = cells, T = transforms

import numpy as np
import torch

from dataset.transforms import transform_sources, transformed
from tests.dataset.mazes import turned


def test_the_eight_transforms_equal_the_slow_ones() -> None:
    for side in (3, 11, 12, 30):
        sources_TS = transform_sources(side)
        grid_LL = np.random.default_rng(side).integers(0, 99, (side, side))
        for transform, sources_S in enumerate(sources_TS):
            expected_LL = turned(grid_LL, transform)
            np.testing.assert_array_equal(grid_LL.ravel()[sources_S], expected_LL.ravel())
            np.testing.assert_array_equal(transformed(grid_LL[None], transform)[0], expected_LL)
        # PyTorch raises an error here if it cannot read the type of the table.
        torch.arange(side * side).gather(0, torch.from_numpy(sources_TS).long()[3])
