"""A model of one size of mazes solves mazes of other sizes, and refuses other puzzles."""

from pathlib import Path

import pytest

from dataset.build_maze_dataset import main as build
from solve import Solver
from tests.in_process import train_here
from tests.models.helpers import small_model
from tests.runs import settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mazes")
    arguments = ["--output-dir", str(folder / "6x6"), "--size", "6", "--generate", "12", "--generate-test", "6"]
    assert build(arguments) == 0
    # debug=tiny chooses the options of every architecture, a puzzle embedding among them.
    changes = {"arch": "trm_conv", "arch.puzzle_emb_ndim": 0, "max_steps": 3}
    train_here(settings(folder / "6x6", folder / "run", **changes))
    return folder / "run"


def test_it_solves_mazes_of_the_size_that_they_have(run: Path) -> None:
    solver = Solver.from_checkpoint(run, device="cpu")
    for side in (6, 8):
        maze = "S" + " " * (side * side - 2) + "G"
        (solution,) = solver.solve([maze])
        assert (solution.board.name, len(solution.answer)) == (f"maze {side}x{side}", side * side)


def test_a_sequence_that_is_no_square_is_refused() -> None:
    with pytest.raises(ValueError, match="conv_2d is true, but a sequence of 10 tokens is no square board"):
        small_model("trm_conv", seq_len=10)
