"""The changes that are named where memory ran out fit into the memory that there is."""

import re
from pathlib import Path

import pytest

from tests.in_process import SINGLE, begin
from tests.runs import settings
from training import less_memory
from training.data import Sizes
from training.footprint import Footprints
from training.less_memory import smaller_evaluation, smaller_step

NUM_SLOTS = 1024


def _room(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    """Let the calculation have so many bytes."""
    monkeypatch.setattr(less_memory, "_limit", lambda world: num_bytes)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 2.0])
def test_the_named_change_of_a_step_fits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    begun = begin(settings(data, tmp_path / "run", global_batch_size=NUM_SLOTS, epochs=100_000))
    start, of_data = begun.start, begun.data
    footprints = Footprints(start.config, of_data.sizes, 1)
    asked = footprints.of().peak
    _room(monkeypatch, share * asked)
    said = smaller_step(start, of_data, SINGLE)
    parts = re.search(r"grad_accumulation=(\d+)", said)
    checkpointing = re.search(r"arch.activation_checkpointing=(\w+)", said)
    assert parts or checkpointing, said
    num_parts, kept = int(parts[1]) if parts else 1, checkpointing[1] if checkpointing else "none"
    needed = footprints.of(None, kept, num_parts).peak  # type: ignore[arg-type]
    assert needed <= min(share, 0.5) * asked, said


def test_a_step_that_nothing_makes_fit_names_the_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begin(settings(data, tmp_path / "run"))
    _room(monkeypatch, 1000)
    said = smaller_step(begun.start, begun.data, SINGLE)
    assert f"arch.hidden_size={begun.start.config.arch.hidden_size // 2}" in said and "parallel=fsdp" in said


def test_the_named_batch_of_an_evaluation_is_the_largest_half_that_fits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begin(settings(data, tmp_path / "run"))
    arch, sizes = begun.start.config.puzzle_arch, Sizes.of(begun.data.puzzles("train"))
    held = less_memory._evaluation(arch, sizes, NUM_SLOTS, SINGLE)  # so much that it decides

    def named() -> int:
        said = smaller_evaluation(
            "batch_size", NUM_SLOTS, arch, sizes, num_examples=NUM_SLOTS, num_held=held, world=SINGLE
        )
        found = re.search(r"batch_size=(\d+): ([\d.]+) GB instead of ([\d.]+)", said)
        assert found is not None and float(found[2]) < float(found[3]), said
        return int(found[1])

    needed = {n: held + less_memory._evaluation(arch, sizes, n, SINGLE) for n in (512, 256, 128)}
    for num, num_bytes in needed.items():
        _room(monkeypatch, num_bytes)
        assert named() == num
    _room(monkeypatch, 2 * 10**9)  # it did not fit although the calculation says so
    assert named() == NUM_SLOTS // 2
