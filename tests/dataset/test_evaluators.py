"""Evaluators by their names, and the data that they refuse."""
# B = boards, S = cells of a board

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from dataset.evaluators import EvaluatorName, build_evaluators, fitting_evaluators, training_evaluators
from dataset.tasks import TASKS
from tests.dataset.shapes import split_of


def test_names_and_metrics() -> None:
    assert get_args(EvaluatorName) == tuple(task.kind for task in TASKS)
    evaluators = build_evaluators(["sudoku", "sudoku"], split_of(81, 11))
    tokens_BS = torch.ones(3, 81, dtype=torch.int64)
    assert evaluators.metrics == ("valid_boards", "clues_kept") == tuple(evaluators.judge(tokens_BS, tokens_BS, "all"))
    nothing = build_evaluators([], split_of(900, 12))
    assert nothing.metrics == () and nothing.judge(tokens_BS, tokens_BS, "all") == {}
    for size in ((36, 6), (64, 11)):
        with pytest.raises(ValueError, match="the evaluator sudoku can't judge"):
            build_evaluators(["sudoku"], split_of(*size))


def test_a_run_that_names_no_evaluators_has_those_that_need_no_votes(tmp_path: Path) -> None:
    arc = replace(split_of(900, 12), path=tmp_path / "test")
    assert fitting_evaluators(arc) == [], "ARC needs the file test_puzzles.json"
    (tmp_path / "test_puzzles.json").write_text("{}")
    assert fitting_evaluators(arc) == ["arc"]
    for split, checks in ((split_of(81, 11), ("valid_boards", "clues_kept")), (arc, ()), (split_of(24, 6), ())):
        chosen = training_evaluators(None, split)
        assert chosen.metrics == checks and chosen.votes is None
        assert training_evaluators([], split).metrics == ()
