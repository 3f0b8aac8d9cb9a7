"""What a training step costs at the paper's size: operators, and bytes that they read and write.

    python -m tests.step_costs    count again, and renew tests/step_costs.json

The counts are of eager steps on the fake accelerator, so they take seconds and no arithmetic. That
device has no fused kernels: attention and the norm count as their parts. A GPU launches fewer
kernels, and each line that a change adds is still counted.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tests.fake_accelerator import fake_accelerator, register
from tests.fake_training import SIZES, FakeTraining
from tests.in_process import pretrain_config
from training.data import Sizes

RECORD = Path(__file__).with_suffix(".json")
TOLERANCE = 0.01  # of the operators and of the bytes of a step
_SHOWN = 5

RECIPES: dict[str, tuple[str, ...]] = {
    "hrm": ("data_path=x", "arch.forward_dtype=bfloat16"),
    "sudoku_extreme_fast": ("experiment=sudoku_extreme_fast", "arch.forward_dtype=bfloat16"),
}

Costs = dict[str, dict[str, Any]]
"""For each function of this repository: "operators" by name, and "megabytes"."""


def costs_of_a_step(device: torch.device, typed: tuple[str, ...], sizes: Sizes = SIZES) -> Costs:
    """Return what one step of a command line costs, by the function that asks for it."""
    with fake_accelerator(device, as_cuda=True) as seen:
        training = FakeTraining(pretrain_config(*typed), device, sizes)
        seen.forget()
        # Anomaly detection notes for each operator of the backward pass who called its forward.
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            training.step()
    return {
        name: {
            "operators": dict(sorted(seen.operators[name].items())),
            "megabytes": round(seen.num_bytes[name] / 1e6, 1),
        }
        for name in sorted(seen.operators)
    }


def _total(cost: dict[str, Any], what: str) -> float:
    return float(sum(cost["operators"].values()) if what == "operators" else cost["megabytes"])


def difference(recorded: Costs, now: Costs) -> str:
    """Return what changed by more than the tolerance, and which functions changed most."""
    parts = []
    for what in ("operators", "megabytes"):
        before, after = ({name: _total(cost, what) for name, cost in costs.items()} for costs in (recorded, now))
        change, total = sum(after.values()) - sum(before.values()), sum(before.values())
        if abs(change) <= TOLERANCE * total:
            continue
        parts.append(f"{change:+,.0f} {what}, {total + change:,.0f} instead of {total:,.0f}:")
        changes = {name: after.get(name, 0) - before.get(name, 0) for name in before.keys() | after.keys()}
        largest = sorted(filter(changes.get, changes), key=lambda name: -abs(changes[name]))[:_SHOWN]
        parts += [f"  {changes[name]:+,.0f} in {name}" for name in largest]
    return "\n".join(parts)


def torch_version() -> str:
    """Return the version whose operators the counts are of, such as "2.13"."""
    return ".".join(torch.__version__.split(".")[:2])


def read_record() -> dict[str, Any]:
    return dict(json.loads(RECORD.read_text()))


def main() -> None:
    device = register()
    recipes = {}
    for recipe, typed in RECIPES.items():
        recipes[recipe] = costs = costs_of_a_step(device, typed)
        for what in ("operators", "megabytes"):
            print(f"{recipe}: {sum(_total(cost, what) for cost in costs.values()):,.0f} {what}")
    RECORD.write_text(_as_json({"torch": torch_version(), "recipes": recipes}))


def _as_json(record: dict[str, Any]) -> str:
    """Return the record with a line for each function, so that a renewal is easy to review."""
    recipes = ",\n".join(
        f" {json.dumps(recipe)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(cost)}" for name, cost in costs.items())
        + "\n }"
        for recipe, costs in record["recipes"].items()
    )
    return f'{{"torch": {json.dumps(record["torch"])}, "recipes": {{\n{recipes}\n}}}}\n'


if __name__ == "__main__":
    main()
