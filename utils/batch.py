"""The type of a batch, which the loader makes and the models read."""

import torch

Batch = dict[str, torch.Tensor]
"""Tensors by name, with an example in each row: inputs and labels (B, S), puzzle_identifiers (B,), all int32."""
