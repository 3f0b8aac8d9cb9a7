"""The type of the batches that the loader makes and the models read."""

import torch

Batch = dict[str, torch.Tensor]
"""Int32 tensors by name, with a row for each example."""
