"""Time attention in a packed row of text with each kernel of arch.attention_kernel.

python -m benchmarks.gpu.packing --json FILE [--device cuda] TOKENSxLONGEST...
e.g. python -m benchmarks.gpu.packing --json found.json 32768x1024 32768x4096

A row is full of sequences of 2 to LONGEST tokens, any length as likely as any other, and half of
each is a prefix. It has 8 heads of 64 numbers, in bfloat16 (float32 on a CPU).
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.gpu.attention import HEAD_DIM, NUM_HEADS, times_of
from models.text.packing import Packing
from models.text.stack_config import Kernel, Mask, Sequences


def measure(num_tokens: int, longest: int, device: torch.device) -> list[dict[str, Any]]:
    """Return the times of both kernels with each mask."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sequences = draw_sequences(num_tokens, longest)
    shape_NAH = (num_tokens, NUM_HEADS, HEAD_DIM)
    q_NAH, k_NAH, v_NAH = (torch.randn(shape_NAH, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    found = []
    for mask in get_args(Mask):
        times: dict[str, dict[str, float] | None] = {}
        refused = {}
        for kernel in get_args(Kernel):
            packing = Packing(sequences, num_tokens, device, kernel=kernel)
            try:
                times[kernel] = times_of(partial(packing.attend, mask=mask), (q_NAH, k_NAH, v_NAH), device)
            except (ImportError, RuntimeError, TypeError) as error:  # the device or the version of PyTorch lacks it
                times[kernel], refused[kernel] = None, " ".join(str(error).split())[:200]
        shape = {"tokens": num_tokens, "longest": longest, "sequences": len(sequences), "mask": mask}
        found.append({**shape, "ms": times, "refused": refused})
    return found


def draw_sequences(num_tokens: int, longest: int) -> Sequences:
    """Return sequences that fill a row, the same at each call."""
    generator, left = np.random.default_rng(0), num_tokens
    lengths = list[int]()
    while left:
        lengths.append(min(left, int(generator.integers(2, longest + 1))))
        left -= lengths[-1]
    return [(max(1, length // 2), length - max(1, length // 2)) for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("shapes", nargs="+", metavar="TOKENSxLONGEST")
    args = parser.parse_intermixed_args()
    found = list[dict[str, Any]]()
    for shape in args.shapes:
        num_tokens, longest = map(int, shape.split("x"))
        found += measure(num_tokens, longest, torch.device(args.device))
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found[-1]), flush=True)


if __name__ == "__main__":
    main()
