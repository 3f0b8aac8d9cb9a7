"""Count how often the host waits for the card between two logs of a training run, and where.

python -m benchmarks.gpu.waits --json FILE [--steps 10] OVERRIDE...

PyTorch warns of each operator that waits. Loading, augmenting, training and summing up should never
wait. On a CPU there is nothing to wait for, and nothing is counted.
"""

import json
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.arguments import read_arguments
from benchmarks.on_request import REPOSITORY
from benchmarks.our_steps import OurTrainer

_SAID = "called a synchronizing"
_WARM_STEPS = 4


def count_waits(train: Callable[[int], object], num_steps: int, device: torch.device) -> dict[str, Any]:
    """Train warm, and return how many waits of which places there were.

    Args:
        train: trains a number of steps without waiting in the end.
    """
    train(_WARM_STEPS)
    places: Counter[str] = Counter()
    with _warned(device), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: places.update([_place()] if _SAID in str(message) else [])
        train(num_steps)
    return {"steps": num_steps, "is_counted": device.type == "cuda", "places": dict(places.most_common())}


@contextmanager
def _warned(device: torch.device) -> Iterator[None]:
    """Let PyTorch warn of each wait inside."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _place() -> str:
    """Return the innermost line of this project that is running, but none of this file."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(REPOSITORY) and path != Path(__file__) and ".venv" not in path.parts:
            return f"{path.relative_to(REPOSITORY)}:{frame.lineno} ({frame.name})"
    return "outside of this project"


def main() -> None:
    args = read_arguments(__doc__, num_steps=10)
    trainer = OurTrainer(args.overrides)
    found = count_waits(trainer.train, args.steps, trainer.world.device)
    args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
