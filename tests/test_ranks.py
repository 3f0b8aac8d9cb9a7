"""The number of ranks does not change losses and evaluation of a run."""

from pathlib import Path

import pytest

from tests.runs import Row, rows, settings, train

pytestmark = pytest.mark.invariance

# These metrics are counts over examples, which do not depend on the order of summation.
COUNTED = ("exact_accuracy", "q_halt_accuracy", "steps", "halt_step", "valid_boards", "clues_kept")
# 20 examples in batches of 3: with 4 ranks each batch leaves some rank without an example.
UNEVEN = {"log_interval": 1, "eval_batch_size": 3}


# The recipe has every option that affects gradients or slots of ranks. tests/test_parallel.py has
# the published HRM.
RECIPE: dict[str, object] = {
    "arch": "trm_mlp",
    "optim": "muon",
    "augment": "online",
    "ema": "true",
    "ema_rate": 0.5,
    "grad_clip": 1.0,
    "arch.num_registers": 2,
    "arch.num_states": 2,
    "arch.noise": "annealed",
    "arch.pseudo_target_steps": 4,
    "evaluators": "[sudoku]",
}


def _arguments(data: Path, run: Path, **changes: object) -> list[str]:
    return settings(data, run, **UNEVEN | RECIPE | changes)


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("one_rank")
    train(_arguments(data, folder / "run"), folder / "log").ok()
    return rows(folder / "run")


def assert_same_numbers(there: list[Row], here: list[Row]) -> None:
    assert [row["step"] for row in there] == [row["step"] for row in here]
    for row, expected in zip(here, there, strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            parts = name.split("/")
            is_count = parts[0] == "eval" and (parts[-1] in COUNTED or "exact_accuracy_at_step" in parts)
            # Losses and norms are sums of float32, which depend on the order of summation.
            tolerance = 0.0 if is_count else 1e-5
            assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), f"{name} at step {row['step']}"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_number_of_ranks_does_not_change_losses_and_evaluation(
    data: Path, one_rank: list[Row], tmp_path: Path, log: Path, ranks: int
) -> None:
    train(_arguments(data, tmp_path / "run"), log, ranks=ranks).ok()
    assert_same_numbers(one_rank, rows(tmp_path / "run"))
    evaluated = [row["eval/all/exact_accuracy"] for row in one_rank if "eval/all/exact_accuracy" in row]
    assert any(0 < value < 1 for value in evaluated), "the test proves little if all answers are wrong or all are right"
    assert any(row["train/grad_norm"] > 1.0 for row in one_rank), "nothing was clipped"
