"""A helper for tests of variations."""
# N = boards, K = variations, S = tokens

import numpy as np
import torch

from dataset.tta import Variations


def spread(variations: Variations, rows: list[int], boards_NS: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Return the numbers and the inputs of all variations of the boards.

    The labels and identifiers of the variations must be those of their boards.
    """
    batch = {"inputs": boards_NS, "labels": boards_NS + 100, "puzzle_identifiers": torch.arange(len(rows))}
    ((numbers, varied),) = variations.spread(iter([(np.array(rows), batch)]))
    count = variations.count
    assert varied["labels"].tolist() == (boards_NS + 100).repeat_interleave(count, 0).tolist()
    assert varied["puzzle_identifiers"].tolist() == [n for n in range(len(rows)) for _ in range(count)]
    assert numbers.tolist() == [row * count + k for row in rows for k in range(count)]
    return numbers, varied["inputs"]
