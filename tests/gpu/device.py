"""The device of the tests in this folder.

GPU_TESTS_ON=cpu rehearses them where there is no GPU:

    GPU_TESTS_ON=cpu python -m pytest tests/gpu/test_options.py
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")

on_the_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here"),
]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let an operator that makes the host wait for the GPU raise RuntimeError inside."""
    if DEVICE != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
