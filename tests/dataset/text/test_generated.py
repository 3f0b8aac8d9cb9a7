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


def test_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch)
    sums, more_sums = generate(["sums"], 2, seed=7)
    assert sums.instruction is not None and more_sums.instruction is not None
    first = int(sums.instruction.split()[0])
    assert sums[1:] == (b"%d + 1" % first, b"%d" % (first + 1), "sums")
    assert more_sums[1:] == (b"%d + 1" % (first + 1), b"%d" % (first + 2), "sums")


def test_neighbouring_seeds_share_no_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """reasoning-gym alone makes problem n from seed + n."""
    _fake(monkeypatch)
    seen = [{each.instruction for each in generate(["sums"], 100, seed)} for seed in range(4)]
    assert len(set().union(*seen)) == 4 * 100


def test_a_task_that_names_no_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch)
    with pytest.raises(UserError, match="--generate open: its problems name no answer, because several are right"):
        list(generate(["sums", "open"], 2, seed=7))


@pytest.mark.parametrize("task", ["sumz", "composite"])
def test_an_unknown_task_is_named(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    _fake(monkeypatch)
    with pytest.raises(UserError, match=rf"--generate {task}: reasoning-gym has no such task; give others, such as "):
        list(generate(["sums", task], 2, seed=7))
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"--generate needs the package reasoning-gym, .*-r requirements-text.txt"):
        list(generate(["sums"], 2, seed=7))


def test_the_package() -> None:
    pytest.importorskip("reasoning_gym", reason="needs pip install -r requirements-text.txt")
    tasks = ["basic_arithmetic", "number_sorting", "mini_sudoku"]
    found = list(generate(tasks, 20, seed=1))
    assert [each.task for each in found] == [task for task in tasks for _ in range(20)]
    assert all(each.instruction and each.text for each in found)
    assert found == list(generate(tasks, 20, seed=1)) != list(generate(tasks, 20, seed=2))
