"""Time attention with each backend of PyTorch, and with the kernels for packed rows of text.

python -m benchmarks.gpu.attention [--json FILE] [--device cuda] SLOTSxPOSITIONS...
                                   [--packed TOKENSxLONGEST ...]
e.g. python -m benchmarks.gpu.attention 768x82 72x900 --packed 32768x1024 32768x4096

The heads are those of the published models: 8 of 64 numbers, in bfloat16 (float32 on a CPU). They
lie in memory as in a model with rotary positions: values are a view of the projection that also
gives queries and keys, and these are rotated, which makes tensors of their own. The rotation is not
timed.

A packed row is full of sequences of 2 to LONGEST tokens, any length as likely as any other, and
half of each is a prefix. It is timed with each kernel of arch.attention_kernel.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import parser_of, write
from benchmarks.matrix_peak import fastest_ms
from models.attention import apply_rotary, rotary_tables
from models.text.packing import Packing
from models.text.stack_config import Kernel, Mask, Sequences

NUM_HEADS, HEAD_DIM = 8, 64
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
CHOSEN = "PyTorch's choice"
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def measure(num_slots: int, num_positions: int, device: torch.device) -> dict[str, Any]:
    """Return the times of a shape, and which backend PyTorch chooses for it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = make_heads(num_slots, num_positions, dtype, device)
    times: dict[str, dict[str, float] | None] = {}
    refused = {}
    for name in (*BACKENDS, CHOSEN):
        try:
            with sdpa_kernel([BACKENDS[name]]) if name in BACKENDS else nullcontext():
                times[name] = times_of(F.scaled_dot_product_attention, heads, device)
        except RuntimeError as error:  # a device refuses a backend, or its memory runs out
            times[name], refused[name] = None, " ".join(str(error).split())[:200]
    with torch.no_grad():
        forward = _backend(heads)
    choices = {"forward": forward, "forward and backward": _backend(heads)}
    return {"slots": num_slots, "positions": num_positions, "ms": times, "refused": refused, "choices": choices}


def make_heads(num_slots: int, num_positions: int, dtype: torch.dtype, device: torch.device) -> Heads:
    """Return queries, keys and values, with the strides that models.attention gives them."""
    qkv = torch.randn((num_slots, num_positions, 3, NUM_HEADS, HEAD_DIM), dtype=dtype, device=device)
    qk, v = qkv.permute(2, 0, 3, 1, 4).split([2, 1])
    cos, sin = rotary_tables(num_positions, HEAD_DIM, 10000.0)
    q, k = apply_rotary(qk, (cos.to(device), sin.to(device))).unbind()
    return q.requires_grad_(), k.requires_grad_(), v.squeeze(0).requires_grad_()


def times_of(attend: Callable[..., torch.Tensor], heads: Heads, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of a forward pass without gradient, and with the backward pass."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(*heads)

    def both() -> object:
        return torch.autograd.grad(attend(*heads), heads, gradient)

    gradient = torch.randn_like(forward())
    return {"forward": fastest_ms(forward, device), "forward and backward": fastest_ms(both, device)}


def _backend(heads: Heads) -> str:
    """Return the name of the backend that PyTorch chooses."""
    chosen = SDPBackend(torch._fused_sdp_choice(*heads))
    return next((name for name, backend in BACKENDS.items() if backend == chosen), str(chosen))


def measure_packed(num_tokens: int, longest: int, device: torch.device) -> list[dict[str, Any]]:
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
    parser = parser_of(__doc__, overrides=False)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--packed", nargs="+", default=[], metavar="TOKENSxLONGEST")
    parser.add_argument("shapes", nargs="+", metavar="SLOTSxPOSITIONS")
    args = parser.parse_intermixed_args()
    found = list[dict[str, Any]]()
    for shape in args.shapes:
        num_slots, num_positions = map(int, shape.split("x"))
        found.append(measure(num_slots, num_positions, args.device))
        write(args.json, found)
    for shape in args.packed:
        num_tokens, longest = map(int, shape.split("x"))
        found += measure_packed(num_tokens, longest, args.device)
        write(args.json, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
