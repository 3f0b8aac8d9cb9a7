"""Time attention with each backend of PyTorch, and with the one that PyTorch chooses.

python -m benchmarks.gpu.attention --json FILE [--device cuda] SLOTSxPOSITIONS...
e.g. python -m benchmarks.gpu.attention --json found.json 768x82 72x900

The heads are those of the published models: 8 of 64 numbers, in bfloat16 (float32 on a CPU). They
lie in memory as in a model with rotary positions: values are a view of the projection that also
gives queries and keys, and these are rotated, which makes tensors of their own. The rotation is not
timed.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.matrix_peak import fastest_ms
from models.attention import apply_rotary, rotary_tables

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
    q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
    cos, sin = rotary_tables(num_positions, HEAD_DIM, 10000.0)
    rotary = cos.to(device), sin.to(device)
    return apply_rotary(q, rotary).requires_grad_(), apply_rotary(k, rotary).requires_grad_(), v.requires_grad_()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("shapes", nargs="+", metavar="SLOTSxPOSITIONS")
    args = parser.parse_intermixed_args()
    found = []
    for shape in args.shapes:
        num_slots, num_positions = map(int, shape.split("x"))
        found.append(measure(num_slots, num_positions, torch.device(args.device)))
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found[-1]), flush=True)


if __name__ == "__main__":
    main()
