"""Evaluate a model with the published code on request, for benchmarks.evaluation --published.

python -m benchmarks.published_evaluation REPOSITORY FOLDER

FOLDER holds what benchmarks.evaluation writes: model.safetensors with the published names, and
model.json. The model and its loss are those of a clone of the published code, and the loop is that
of its `evaluate`. Two things differ. The tensors are made on the device at hand, because the
published loop runs only on CUDA. Batches come from memory instead of another process, which is no
slower.
"""
# N = examples, B = slots

import argparse
import json
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.on_request import Program, answer_requests, wait_for
from benchmarks.published_steps import PUBLISHED_ARCHS, use_clone

_IGNORED_LABEL = -100
_FIELDS = ("inputs", "labels", "puzzle_identifiers")


class PublishedEvaluator(Program):
    """Evaluates a published model on the examples of one set."""

    def __init__(self, repository: Path, folder: Path) -> None:
        about: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        self._config: dict[str, Any] = about["config"]
        self._device = torch.device(about["device"])
        weights = load_file(folder / "model.safetensors")
        use_clone(repository)
        module, class_name, _ = PUBLISHED_ARCHS[about["arch"]]
        with torch.device(self._device):
            model = getattr(import_module(module), class_name)(self._config)
            head = import_module("models.losses").ACTLossHead(model, "stablemax_cross_entropy")
        head.load_state_dict(weights)
        self._head = head.eval()
        self._called: Any = torch.compile(self._head, dynamic=False) if about["compile"] else self._head
        self._examples = {name: np.load(folder / f"{name}.npy") for name in _FIELDS}

    def describe(self) -> dict[str, Any]:
        return {"what": "the published loop", "torch": torch.__version__}

    def evaluate(self) -> dict[str, float]:
        """Evaluate all examples once, and return seconds and metrics."""
        began = time.perf_counter()
        sums = self._evaluate(self._batches())
        count = sums.pop("count")
        return {"seconds": time.perf_counter() - began, "num_examples": count} | {
            name: value / count for name, value in sums.items()
        }

    def warm_up(self) -> None:
        """Evaluate one batch, which compiles the model."""
        self._evaluate(iter([next(self._batches())]))

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the examples in batches; padding fills the last one, as in the published loader."""
        size, padding = self._config["batch_size"], {"labels": _IGNORED_LABEL}
        for first in range(0, len(self._examples["inputs"]), size):
            batch = {}
            for name, all_N in self._examples.items():
                part_B = all_N[first : first + size]
                widths = [(0, size - len(part_B)), *[(0, 0)] * (part_B.ndim - 1)]
                batch[name] = torch.from_numpy(np.pad(part_B, widths, constant_values=padding.get(name, 0)))
            yield batch

    @torch.inference_mode()
    def _evaluate(self, batches: Iterator[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Return the sums of the metrics over all batches."""
        sums: dict[str, torch.Tensor] = {}
        for batch in batches:
            batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
            with torch.device(self._device):
                carry = self._called.initial_carry(batch)
            while True:
                carry, _, metrics, _, all_finish = self._called(carry=carry, batch=batch, return_keys=[])
                if all_finish:
                    break
            sums = {name: sums.get(name, 0) + value for name, value in metrics.items()}
        wait_for(self._device)
        return {name: float(value) for name, value in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="a clone of the published code")
    parser.add_argument("folder", type=Path, help="what benchmarks.evaluation wrote")
    args = parser.parse_args()
    evaluator = PublishedEvaluator(args.repository.resolve(), args.folder)
    answer_requests(evaluator, evaluator.warm_up)


if __name__ == "__main__":
    main()
