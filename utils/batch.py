"""What the loader makes and the models read."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # programs that only look at datasets start much faster without PyTorch
    import torch

Batch = dict[str, "torch.Tensor"]
"""Int32 tensors by name, with a row for each example."""

IGNORE_LABEL = -100
"""A label of this value does not count, in every batch."""
