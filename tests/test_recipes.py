"""The parts of a recipe besides the architecture: early stopping, and several datasets."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import runs
from tests.in_process import begin, mistake, train_here, with_identifiers
from tests.runs import rows, settings, train


def _printed(lines: list[str]) -> dict[str, str]:
    found = (line.split() for line in lines if line.startswith("  eval/"))
    return {name: value for name, value, *_ in found}


def _evaluated(run: Path) -> list[float]:
    return [row["step"] for row in rows(run) if "eval/all/exact_accuracy" in row]


# ---- when it evaluates, and when it has seen enough --------------------------------------------


def test_patience_ends_a_run(data: Path, tmp_path: Path, log: Path) -> None:
    """Nothing is learned, so the first evaluation stays the best. Two more end the run."""
    run = tmp_path / "run"
    typed = settings(
        data,
        run,
        early_stop_patience=2,
        eval_every_n_steps=2,
        lr=0,
        puzzle_emb_lr=0,
        checkpoint_every_n_steps=None,
        checkpoint_every_eval="false",
    )
    output = train(typed, log).ok()
    assert "ended at step 6: no better eval/all/exact_accuracy than" in output and "in 2 evaluations" in output
    assert _evaluated(run) == [2, 4, 6]
    assert (runs.latest(run), (run / "best").read_text()) == (6, "step_00000002\n")
    assert not (run / "stopped").exists()
    before = runs.contents(run)
    assert "is finished: it has done 6 of 12 steps" in train([*typed, "resume=auto"], log).ok()
    assert runs.contents(run) == before
    # With more patience the run goes on.
    train_here([f"resume={run}", "early_stop_patience=3"])
    assert _evaluated(run) == [2, 4, 6, 8]


# ---- several datasets, and where they lie ------------------------------------------------------


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two datasets with the same boards, under three and under four identifiers."""
    folder = tmp_path_factory.mktemp("two")
    return with_identifiers(data, folder / "first", 3), with_identifiers(data, folder / "second", 4)


def test_a_run_can_train_on_two_datasets_and_evaluate_both(
    data: Path, two: tuple[Path, Path], tmp_path: Path, evaluate_here: runs.Evaluate
) -> None:
    run = tmp_path / "run"
    paths = f"[{two[0]},{two[1]}]"
    begun = begin(settings(data, run, data_paths=paths, log_interval=1))
    table = begun.state.model.puzzle_embedding
    assert table is not None and len(table.weight) == 3 + 4
    begun.fit()
    assert table.weight.abs().sum(1).gt(0).all(), "the puzzles of one dataset were not trained on"
    last = rows(run)[-1]
    for metric in ("lm_loss", "exact_accuracy", "exact_accuracy_at_step/3"):
        assert {f"eval/first.all/{metric}", f"eval/second.all/{metric}"} <= last.keys()
    assert not any(name.startswith("eval/all/") for name in last)
    # The boards are the same, but their identifiers have other rows.
    assert last["eval/first.all/lm_loss"] != last["eval/second.all/lm_loss"]
    # evaluate.py scores both datasets, or one dataset with its own rows.
    for typed, sets in (([], ["first.all", "second.all"]), ([f"data_path={two[1]}"], ["second.all"])):
        printed = _printed(evaluate_here(f"checkpoint={run}", *typed))
        assert {name.split("/")[1] for name in printed} == set(sets)
        for name in printed.keys() & last.keys():
            assert float(printed[name]) == pytest.approx(last[name], abs=1e-4)
        others = {name.split("/", 2)[2] for name in printed.keys() - last.keys()}
        assert others == {"calibration_error"}, "training reports everything else"

    # The scores of one dataset equal those with both, because a puzzle keeps its row.
    one, best = tmp_path / "one", "eval/second.all/exact_accuracy"
    train_here(settings(data, one, data_paths=paths, data_paths_test=f"[{two[1]}]", best_metric=best, log_interval=1))
    last, expected = rows(one)[-1], last
    names = {name for name in last if name.startswith("eval/")}
    assert names and all(name.startswith("eval/second.all/") for name in names)
    assert all(last[name] == expected[name] for name in names)


# ---- mistakes ----------------------------------------------------------------------------------


def test_a_recipe_that_does_not_fit_is_refused(data: Path, tmp_path: Path, log: Path) -> None:
    """Before the run has a folder, on one rank and on two."""
    run, short = tmp_path / "run", Path(shutil.copytree(data, tmp_path / "short"))
    # Without their last four cells, boards of 12 tokens are neither a square nor a Sudoku.
    for file in (*short.glob("*/all__inputs.npy"), *short.glob("*/all__labels.npy")):
        np.save(file, np.load(file)[:, :12])
    for description in short.glob("*/dataset.json"):
        description.write_text(json.dumps(json.loads(description.read_text()) | {"seq_len": 12}))
    assert "has 12 tokens" in mistake(settings(short, run, evaluators="[sudoku]", best_metric=None))
    message = train(settings(short, run, augment="online"), log, ranks=2).error()
    assert "a task whose symmetries are not known" in message
    assert "augment_clues=0.3 is part of augment=online" in mistake(settings(data, run, augment_clues=0.3))
    assert not run.exists()
