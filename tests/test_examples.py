"""The models of examples/ load, solve boards, and are what their recipes and cards say."""

from pathlib import Path

import pytest

from sharing.card import RECIPE
from sharing.exported import open_model
from solve import Solver
from tests.in_process import pretrain_config
from tests.runs import REPOSITORY

EXAMPLES = sorted(path for path in (REPOSITORY / "examples").iterdir() if path.is_dir())
BOARDS = {
    "4x4": ("1..4....4....3.1", "1234341241232341"),
    "6x6": ("2.3..1....6...1...5......3.5.2......", "263451415263341625526134634512152346"),
    "9x9": (
        "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79",
        "534678912672195348198342567859761423426853791713924856961537284287419635345286179",
    ),
}


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_recipe_trains_this_model(folder: Path) -> None:
    described = open_model(str(folder)).described
    assert described is not None
    config = pretrain_config(f"experiment={folder / RECIPE}")
    assert config.arch == described.arch
    assert config.max_steps == described.step


@pytest.mark.parametrize("size", BOARDS)
def test_one_model_solves_boards_of_several_sizes(size: str) -> None:
    question, answer = BOARDS[size]
    solver = Solver.from_checkpoint(REPOSITORY / "examples/sudoku", device="cpu")
    (solution,) = solver.solve([question])
    assert solution.solved, solution.reason
    assert solution.answer == answer
