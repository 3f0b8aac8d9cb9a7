"""The eight transforms of a square grid, numbered 4 * transposed + 2 * upside down + mirrored."""
# N = grids, L = side, S = cells (L * L), T = 8 transforms

import numpy as np

NUM_TRANSFORMS = 8


def transformed(grids_NLL: np.ndarray, transform: int) -> np.ndarray:
    """Return a view of the grids, transposed, turned upside down and mirrored as the number says; 0 is none of it."""
    if transform & 4:
        grids_NLL = grids_NLL.swapaxes(1, 2)
    if transform & 2:
        grids_NLL = grids_NLL[:, ::-1]
    return grids_NLL[:, :, ::-1] if transform & 1 else grids_NLL


def transform_sources(side: int) -> np.ndarray:
    """Return for each cell of a transformed grid the cell of the original that it shows, (T, S)."""
    # In the smallest signed integers, because they travel, and PyTorch can't index by all unsigned ones.
    cells_1LL = np.arange(side * side, dtype=np.min_scalar_type(-side * side)).reshape(1, side, side)
    return np.stack([transformed(cells_1LL, transform).ravel() for transform in range(NUM_TRANSFORMS)])
