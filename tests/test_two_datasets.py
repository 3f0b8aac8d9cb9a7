"""A run on two datasets, and the scores of each."""

from pathlib import Path

import pytest

from tests import runs
from tests.in_process import begin, train_here, with_identifiers
from tests.runs import rows, settings


def _printed(lines: list[str]) -> dict[str, str]:
    found = (line.split() for line in lines if line.startswith("  eval/"))
    return {name: value for name, value, *_ in found}


def test_a_run_can_train_on_two_datasets_and_evaluate_both(
    data: Path, tmp_path: Path, evaluate_here: runs.Evaluate
) -> None:
    # The datasets have the same boards, under three and under four identifiers.
    two = with_identifiers(data, tmp_path / "first", 3), with_identifiers(data, tmp_path / "second", 4)
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
