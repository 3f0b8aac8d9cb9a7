"""Measure how fast a recipe's matrices are multiplied, beside the best that the device does.

python -m benchmarks.gpu.peak --json FILE OVERRIDE...
"""

import json
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.arguments import read_arguments
from benchmarks.matrix_peak import copy_gb_per_s, peak_tflops, square_tflops
from benchmarks.our_steps import OurTrainer


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the TFLOP/s of a large product, and the GB/s of a large copy."""
    size, num_bytes = (8192, 2**31) if device.type == "cuda" else (512, 2**26)
    return {"tflops": square_tflops(device, dtype, size), "gb_per_s": copy_gb_per_s(device, num_bytes), "size": size}


def measure(trainer: OurTrainer) -> dict[str, Any]:
    products = trainer.products()
    return {
        "dtype": str(trainer.dtype).removeprefix("torch."),
        "best": ceilings(trainer.world.device, trainer.dtype),
        "peak_tflops": peak_tflops(products),
        "products": [asdict(product) for product in products],
    }


def main() -> None:
    args = read_arguments(__doc__)
    args.json.write_text(json.dumps(measure(OurTrainer(args.overrides)), indent=1) + "\n")


if __name__ == "__main__":
    main()
