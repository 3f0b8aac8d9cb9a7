"""Read recorded trajectories of published code, and compare them with what is computed."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-4


@dataclass
class Report:
    """The errors of one folder.

    Compared values are removed from `recorded`, so that only values remain that were never
    compared.

    Attributes:
        recorded: tensors, numbers, and what else is recorded, by name.
        quantities: the kinds of values, in the order in which they are printed.
    """

    recorded: dict[str, Any]
    quantities: Sequence[str]
    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def compare(self, quantity: str, name: str, ours: torch.Tensor | float, *, exact: bool = False) -> None:
        if name not in self.recorded:
            self._fail(quantity, f"{name} should have been recorded, but is missing")
            return
        theirs = self.recorded.pop(name)
        error = _exact_error(ours, theirs) if exact else _relative_error(ours, theirs)
        self.errors[quantity] = max(self.errors.get(quantity, 0.0), error)
        if error > TOLERANCE:
            self.failures.append(f"{name} differs by {error:.3g}")

    def compare_equal(self, quantity: str, name: str, ours: object) -> None:
        """Compare a value that is no tensor and must be the same, such as a list of names."""
        if name not in self.recorded:
            self._fail(quantity, f"{name} should have been recorded, but is missing")
        elif (theirs := self.recorded.pop(name)) != ours:
            self._fail(quantity, f"{name} is {ours}, and {theirs} was recorded")
        else:
            self.errors.setdefault(quantity, 0.0)

    def close(self) -> None:
        """Report recorded values that were never compared as failures."""
        for name in sorted(self.recorded):
            self._fail("unknown", f"{name} was recorded, but nothing here is compared with it")

    @property
    def max_error(self) -> float:
        return max(self.errors.values())

    def print(self, folder: Path) -> None:
        print(folder)
        for quantity in (*self.quantities, "unknown"):
            if quantity in self.errors:
                print(f"  {quantity:<16} {self.errors[quantity]:.2e}")
        for failure in self.failures:
            print(f"  FAILED: {failure}")

    def _fail(self, quantity: str, message: str) -> None:
        self.errors[quantity] = math.inf
        self.failures.append(message)


def _relative_error(ours: torch.Tensor | float, theirs: torch.Tensor | float) -> float:
    """Return the relative error as the README of the recordings defines it.

    It is infinite if the shapes differ or a value is not finite.
    """
    ours_tensor, theirs_tensor = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    if ours_tensor.shape != theirs_tensor.shape:
        return math.inf
    if ours_tensor.numel() == 0:
        return 0.0
    difference = (ours_tensor - theirs_tensor).abs().max().item()
    scale = theirs_tensor.abs().max().item()
    if isinstance(theirs, float):
        scale = max(1.0, scale)
    if difference == 0:
        return 0.0
    error = difference / scale if scale else math.inf
    return error if math.isfinite(error) else math.inf


def _exact_error(ours: torch.Tensor | float, theirs: torch.Tensor | float) -> float:
    return 0.0 if torch.equal(torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()) else math.inf


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file of tensors. Raise ValueError if it is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path.name} can't be read: {error}") from error


def read_json(path: Path) -> Any:
    """Read a description. Raise ValueError if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} can't be read: {error}") from error


def take(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Move a tensor out of the others. Raise ValueError if it is missing or has another shape."""
    tensor = tensors.pop(name, None)
    if tensor is None or tuple(tensor.shape) != shape:
        raise ValueError(f"trajectory.safetensors: {name} is missing or has another shape than {shape}")
    return tensor


def of_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return what changes the description in a folder, for tests."""

    def changed(folder: Path) -> None:
        path = folder / "trajectory.json"
        description = json.loads(path.read_text())
        change(description)
        path.write_text(json.dumps(description))

    return changed


def of_tensors(file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Return what changes a file of tensors in a folder, for tests."""

    def changed(folder: Path) -> None:
        path = folder / f"{file}.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path)

    return changed


def of_tensor(file: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Return what changes one tensor of a file in a folder, for tests."""
    return of_tensors(file, lambda tensors: tensors.update({name: change(tensors[name])}))


def number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"trajectory.json: {name} is {value!r}, no number")
    return float(value)


def expect_keys(table: Any, required: set[str], optional: set[str], name: str) -> None:
    """Raise ValueError if a table lacks a key, or has a key that the replay would ignore."""
    if not isinstance(table, dict):
        raise ValueError(f"{name} is no table")
    if missing := required - table.keys():
        raise ValueError(f"{name} lacks {', '.join(sorted(missing))}")
    if unknown := table.keys() - required - optional:
        raise ValueError(f"{name} has {', '.join(sorted(unknown))}, which this replay can't honour")
