"""The number of ranks is not part of the result: one curve and one evaluation for 1, 2 and 4, also across a resume."""

import re
from pathlib import Path

import pytest

from tests.runs import Row, rows, settings, train

# Counts over examples: a different order of sums can't change them.
COUNTED = ("exact_accuracy", "q_halt_accuracy", "steps", "halt_step", "valid_boards", "clues_kept")
# 20 examples in batches of 3: with 4 ranks each batch leaves some rank without an example.
UNEVEN = {"log_interval": 1, "eval_batch_size": 3}


# Everything on that the gradients of the ranks or their slots go through; tests/test_parallel.py has the published HRM.
RECIPE: dict[str, object] = {
    "arch": "trm_mlp",
    "optim": "muon",
    "augment": "online",
    "ema": "true",
    "ema_rate": 0.5,
    "grad_clip": 1.0,
    "arch.num_registers": 2,
    "evaluators": "[sudoku]",
}


def _arguments(data: Path, run: Path, **changes: object) -> list[str]:
    return settings(data, run, **UNEVEN | RECIPE | changes)


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """What a run on one rank logged."""
    folder = tmp_path_factory.mktemp("one_rank")
    train(_arguments(data, folder / "run"), folder / "log").ok()
    return rows(folder / "run")


def _assert_same_numbers(there: list[Row], here: list[Row]) -> None:
    assert [row["step"] for row in there] == [row["step"] for row in here]
    for row, expected in zip(here, there, strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            parts = name.split("/")
            is_count = parts[0] == "eval" and (parts[-1] in COUNTED or "exact_accuracy_at_step" in parts)
            # Train metrics over sequences are ratios of counts as well; losses and norms are sums of float32.
            tolerance = 0.0 if is_count else 1e-5
            assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), f"{name} at step {row['step']}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_same_curve_and_evaluation(data: Path, one_rank: list[Row], tmp_path: Path, log: Path, ranks: int) -> None:
    train(_arguments(data, tmp_path / "run"), log, ranks=ranks).ok()
    _assert_same_numbers(one_rank, rows(tmp_path / "run"))
    evaluated = [row["eval/all/exact_accuracy"] for row in one_rank if "eval/all/exact_accuracy" in row]
    assert any(0 < value < 1 for value in evaluated), "the comparison of counts is empty if they are all 0 or all 1"
    assert any(row["train/grad_norm"] > 1.0 for row in one_rank), "nothing was clipped"


def test_resume_with_another_number_of_ranks(data: Path, one_rank: list[Row], tmp_path: Path, log: Path) -> None:
    """2 -> 1 -> 4, cut between two logs so that open sums are handed over as well."""
    run = tmp_path / "run"
    for ranks, last in ((2, 4), (1, 8), (4, 12)):
        train(_arguments(data, run, resume="auto", max_steps=last, log_interval=3), log, ranks=ranks).ok()
    logged = {row["step"]: row for row in rows(run)}
    alone = {row["step"]: row for row in one_rank}
    # Step 1, then means over 2 to 3, 4 to 6, ...
    for first, last in ((1, 1), (2, 3), (4, 6), (7, 9), (10, 12)):
        mean = sum(alone[step]["train/lm_loss"] for step in range(first, last + 1)) / (last - first + 1)
        assert logged[last]["train/lm_loss"] == pytest.approx(mean, abs=1e-5), f"steps {first} to {last}"
    for step in (5, 10, 12):
        for name in (name for name in COUNTED if f"eval/all/{name}" in alone[step]):
            assert logged[step][f"eval/all/{name}"] == alone[step][f"eval/all/{name}"], f"{name} at step {step}"


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 20), (2, 7), (4, 3)])
def test_evaluate_gives_what_training_gave(quiet: Path, log: Path, tmp_path: Path, ranks: int, batch_size: int) -> None:
    arguments = [f"checkpoint={quiet}", f"batch_size={batch_size}", "device=cpu"]
    output = train(arguments, log, ranks=ranks, program="evaluate").ok()
    printed = dict(re.findall(r"^  (eval/\S+) +(\S+)", output, re.MULTILINE))
    expected = {name: value for name, value in rows(quiet)[-1].items() if name.startswith("eval/")}
    assert {name: float(printed[name]) for name in expected} == pytest.approx(expected, abs=1e-4)
    assert output.rstrip().endswith(f"exact_accuracy={expected['eval/all/exact_accuracy']:.4f}")
