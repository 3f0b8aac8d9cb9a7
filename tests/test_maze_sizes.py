"""A model of one size of mazes answers mazes of other sizes, and refuses other puzzles."""

import json
from pathlib import Path

import pytest

from dataset.build_maze_dataset import main as build
from solve import Solver
from tests.in_process import train_here
from tests.models.helpers import small_model
from tests.runs import Evaluate, settings


def _mazes(folder: Path, side: int) -> Path:
    arguments = ["--output-dir", str(folder), "--size", str(side), "--generate", "12", "--generate-test", "6"]
    assert build(arguments) == 0
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that trained on mazes of 6x6."""
    folder = tmp_path_factory.mktemp("mazes")
    # debug=tiny chooses the options of every architecture, a puzzle embedding among them.
    changes = {"arch": "trm_conv", "arch.puzzle_emb_ndim": 0, "max_steps": 3}
    train_here(settings(_mazes(folder / "6x6", 6), folder / "run", **changes))
    return folder / "run"


def test_it_is_evaluated_on_larger_mazes(run: Path, tmp_path: Path, evaluate_here: Evaluate) -> None:
    larger = _mazes(tmp_path / "9x9", 9)
    evaluate_here(f"checkpoint={run}", f"data_path={larger}", f"out={tmp_path / 'out'}")
    metrics = json.loads((tmp_path / "out/results.json").read_text())["metrics"]
    assert 0 < metrics["eval/all/accuracy"] < 1


def test_it_solves_mazes_of_the_size_that_they_have(run: Path) -> None:
    solver = Solver.from_checkpoint(run, device="cpu")
    for side in (6, 8):
        maze = "S" + " " * (side * side - 2) + "G"
        (solution,) = solver.solve([maze])
        assert (solution.board.name, len(solution.answer)) == (f"maze {side}x{side}", side * side)


def test_a_sequence_that_is_no_square_is_refused() -> None:
    with pytest.raises(ValueError, match="conv_2d is true, but a sequence of 10 tokens is no square board"):
        small_model("trm_conv", seq_len=10)
