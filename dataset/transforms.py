"""Transform square grids. Transform t is 4 * transposed + 2 * upside down + mirrored."""
# N = grids, L = side, S = cells (L * L), T = 8 transforms

import numpy as np

NUM_TRANSFORMS = 8


def transformed(grids_NLL: np.ndarray, transform: int) -> np.ndarray:
    """Return a view of the grids after a transform, (N, L, L). Transform 0 is the identity.

    A grid is first transposed, then turned upside down, then mirrored left to right.
    """
    if transform & 4:
        grids_NLL = grids_NLL.swapaxes(1, 2)
    if transform & 2:
        grids_NLL = grids_NLL[:, ::-1]
    return grids_NLL[:, :, ::-1] if transform & 1 else grids_NLL


def transform_sources(side: int) -> np.ndarray:
    """Return for each cell of a transformed grid the number of the original cell, (T, S)."""
    # The type is the smallest signed one that fits, because the numbers are copied to the device,
    # and PyTorch can't index by all unsigned types.
    cells_1LL = np.arange(side * side, dtype=np.min_scalar_type(-side * side)).reshape(1, side, side)
    return np.stack([transformed(cells_1LL, transform).ravel() for transform in range(NUM_TRANSFORMS)])
