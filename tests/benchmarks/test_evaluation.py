"""The benchmark of evaluation compares each kind with the first one, in the same round."""

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.evaluation import measure, shown
from benchmarks.published_evaluation import PublishedEvaluator
from benchmarks.published_steps import PUBLISHED_ARCHS

STEPS, BATCH = 3, 4


class Head(nn.Module):
    """Stands for the published model in its loss: an example is right if it begins with 1."""

    def __init__(self, model: dict[str, Any], loss: str) -> None:
        super().__init__()
        self.weight, self.model = nn.Parameter(torch.zeros(1)), model

    def initial_carry(self, batch: dict[str, torch.Tensor]) -> int:
        assert len(batch["inputs"]) == BATCH == self.model["batch_size"], "the published loader pads the last batch"
        return 0

    def forward(self, carry: int, batch: dict[str, torch.Tensor], return_keys: list[str]) -> tuple[Any, ...]:
        last, labelled = carry + 1 == self.model["halt_max_steps"], (batch["labels"] >= 0).any(1)
        count = labelled.sum() * last
        right = (labelled & (batch["inputs"][:, 0] == 1)).sum() * last
        metrics = {"count": count, "exact_accuracy": right, "steps": count * (carry + 1)}
        return carry + 1, None, metrics, None, torch.tensor(last)


@pytest.fixture
def evaluator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedEvaluator:
    """Return the evaluator of ten examples, of which four are right."""
    clone = ModuleType("clone")
    clone.Model, clone.ACTLossHead = dict, Head  # type: ignore[attr-defined]
    monkeypatch.setattr("benchmarks.published_evaluation.use_clone", lambda repository: None)
    monkeypatch.setattr("benchmarks.published_evaluation.import_module", lambda name: clone)
    monkeypatch.setitem(PUBLISHED_ARCHS, "hrm", ("models.hrm", "Model", {}))
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    config = {"batch_size": BATCH, "halt_max_steps": STEPS}
    about = {"arch": "hrm", "config": config, "compile": False, "device": "cpu"}
    (tmp_path / "model.json").write_text(json.dumps(about))
    np.save(tmp_path / "inputs.npy", np.array([[1, 5]] * 4 + [[2, 5]] * 6, np.int32))
    np.save(tmp_path / "labels.npy", np.ones((10, 2), np.int32))
    np.save(tmp_path / "puzzle_identifiers.npy", np.zeros(10, np.int32))
    return PublishedEvaluator(tmp_path, tmp_path)


def test_the_published_loop_counts_each_example_once(evaluator: PublishedEvaluator) -> None:
    for _ in range(2):
        found = evaluator.evaluate()
        assert found.pop("seconds") > 0
        assert found == {"num_examples": 10, "exact_accuracy": 0.4, "steps": STEPS}


def test_kinds_are_compared_round_by_round() -> None:
    asked: list[str] = []
    seconds = {"slow": iter([10.0, 20.0, 10.0]), "fast": iter([2.0, 2.0, 5.0])}

    def run(name: str) -> dict[str, float]:
        asked.append(name)
        return {"seconds": next(seconds[name]), "exact_accuracy": 0.5, "steps": 2.0, "num_examples": 100.0}

    rows = measure({name: partial(run, name) for name in seconds}, num_steps=4, num_runs=3)
    assert asked == ["slow", "fast"] * 3, "other work of the machine must disturb all kinds equally"
    assert rows[1]["times_the_first"] == [5.0, 10.0, 2.0]
    last = "| 4 | fast | 0.5000 | 2.00 | 50.0 (20.0 to 50.0) | 5.00 (2.00 to 10.00) |"
    assert shown(rows).splitlines()[-1] == last
