"""Generated problems. Those of reasoning-gym itself need requirements-text.txt."""

import sys
from types import ModuleType
from typing import Any

import pytest

from dataset.text.generated import generate
from utils.errors import UserError


def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package of the same form with the tasks sums and open."""

    def create_dataset(task: str, size: int, seed: int) -> list[dict[str, Any]]:
        numbers = range(seed, seed + size)
        return [{"question": f"{n} + 1", "answer": str(n + 1) if task == "sums" else None} for n in numbers]

    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    package.create_dataset = create_dataset  # type: ignore[attr-defined]
    factory.DATASETS = {"sums": None, "open": None, "composite": None}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def test_problems_of_neighbouring_seeds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """reasoning-gym alone makes problem n from seed + n."""
    _fake(monkeypatch)
    seen = set()
    for seed in range(4):
        for each in generate(["sums"], 100, seed):
            assert each.instruction is not None and each.task == "sums"
            assert each.text == str(int(each.instruction.split()[0]) + 1).encode()
            seen.add(each.instruction)
    assert len(seen) == 4 * 100
    unanswered = list(generate(["open"], 100, 0))
    assert {each.text for each in unanswered} == {b""}
    assert not {each.instruction for each in unanswered} & seen, "each task must draw for itself"


def test_what_cannot_be_generated_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch)
    for task, message in (
        ("sumz", "--generate sumz: reasoning-gym has no such task; give another, such as sums$"),
        ("composite", "--generate composite: reasoning-gym has no such task; give another$"),
    ):
        with pytest.raises(UserError, match=message):
            list(generate(["sums", task], 2, seed=7))
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"--generate needs the package reasoning-gym"):
        list(generate(["sums"], 2, seed=7))


def test_the_package() -> None:
    pytest.importorskip("reasoning_gym", reason="needs pip install -r requirements-text.txt")
    tasks = ["basic_arithmetic", "number_sorting", "mini_sudoku"]
    found = list(generate(tasks, 20, seed=1))
    assert [each.task for each in found] == [task for task in tasks for _ in range(20)]
    assert all(each.instruction and each.text for each in found)
    assert found == list(generate(tasks, 20, seed=1)) != list(generate(tasks, 20, seed=2))
