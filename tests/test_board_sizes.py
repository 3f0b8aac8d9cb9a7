"""A mixer on Sudokus of several sides: metrics of each set, resume, ranks, answers and pages."""

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import view
from dataset.augment import BOXES
from dataset.tasks.sudoku import SudokuTask
from models.se_mixer import SEMixerConfig
from solve import Solver
from tests.in_process import mistake
from tests.runs import Evaluate, rows, settings, train
from tests.test_ranks import assert_same_numbers
from training.trained import Trained
from utils.ranks.world import World
from viewer.run_page import page_of_run

SMALL, LARGE = "s2x2.all", "s2x3.all"
COUNTED = ("exact_accuracy", "steps", "valid_boards", "clues_kept")


def _arguments(boards: dict[str, Path], run: Path, **changes: object) -> list[str]:
    recipe: dict[str, object] = {
        "arch": "se_mixer",
        "data_paths": f"[{boards['2x2']},{boards['2x3']}]",
        "data_path": None,
        "augment": "online",
        "evaluators": "[sudoku]",
        "log_interval": 1,
        "eval_batch_size": 3,
        "max_steps": 8,
        "lr": 0.003,
    }
    typed = settings(boards["2x2"], run, **recipe | changes)
    return [each for each in typed if each != "data_path=null" and "H_layers" not in each]


@pytest.fixture(scope="module")
def one_rank(boards: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("any_size")
    train(_arguments(boards, folder / "run"), folder / "log").ok()
    return folder / "run"


def test_every_set_has_its_own_metrics_and_can_be_scored_alone(
    boards: dict[str, Path], one_rank: Path, tmp_path: Path, evaluate_here: Evaluate
) -> None:
    (last,) = [row for row in rows(one_rank) if row["step"] == 8]
    for name in (SMALL, LARGE):
        assert {f"eval/{name}/{metric}" for metric in COUNTED} <= last.keys()
        assert last[f"eval/{name}/num_examples"] == 8
    losses = [row["train/lm_loss"] for row in rows(one_rank)]
    assert losses[-1] < losses[0]

    evaluate_here(f"checkpoint={one_rank}", f"data_path={boards['2x2']}", f"out={tmp_path / 'out'}")
    alone = json.loads((tmp_path / "out" / "results.json").read_text())["metrics"]
    expected = {name: value for name, value in last.items() if name.startswith(f"eval/{SMALL}/")}
    assert {name: alone[name] for name in expected} == pytest.approx(expected, abs=1e-5)


@pytest.mark.invariance
def test_two_ranks_give_the_same_curve(boards: dict[str, Path], one_rank: Path, tmp_path: Path, log: Path) -> None:
    train(_arguments(boards, tmp_path / "run"), log, ranks=2).ok()
    assert_same_numbers(rows(one_rank), rows(tmp_path / "run"))


def test_other_architectures_and_label_smoothing_are_refused(boards: dict[str, Path], tmp_path: Path) -> None:
    said = mistake(_arguments(boards, tmp_path / "run", arch="trm", **{"arch.puzzle_emb_ndim": 0}))
    assert re.search(r"s2x2/train has seq_len 16, but .*s2x3/train has 36; .*arch=se_mixer", said)
    said = mistake(_arguments(boards, tmp_path / "run", **{"arch.loss.label_smoothing": 0.1}))
    assert "label_smoothing is 0.1, which would ask small boards for symbols that they lack; set it to 0" in said


def test_saved_answers_votes_and_pages_are_of_the_boards_themselves(
    one_rank: Path, tmp_path: Path, evaluate_here: Evaluate
) -> None:
    out = tmp_path / "answers"
    saved = "[inputs,labels,predictions,predictions_at_step,q_halt_at_step,logits]"
    evaluate_here(f"checkpoint={one_rank}", f"save_outputs={saved}", f"out={out}", "tta=3")
    scored = json.loads((out / "results.json").read_text())["metrics"]
    for name, box in ((SMALL, BOXES["2x2"]), (LARGE, BOXES["2x3"])):
        assert {f"eval/{name}/tta/{metric}" for metric in COUNTED if metric != "steps"} <= scored.keys()
        (file,) = out.glob(f"{name}_*.safetensors")
        tensors = load_file(file)
        for key in ("inputs", "labels", "predictions"):
            assert tensors[key].shape == (8, box.num_cells)
            assert 0 <= tensors[key].min() <= tensors[key].max() < box.side + 2
        assert tensors["predictions_at_step"].shape[2] == tensors["logits"].shape[1] == box.num_cells
        assert SudokuTask(box).verdict(tensors["inputs"][0], tensors["labels"][0]).solved
    page = page_of_run(out, view.parse_settings([str(out), "-o", str(tmp_path / "page.html")]))
    assert {name: board["rows"] for name, board in page["boards"].items()} == {SMALL: 4, LARGE: 6}
    assert page["boards"][LARGE]["box"] == [2, 3] and page["board"] == page["boards"][SMALL]
    assert page["facts"]["task"] == "Sudoku 2x2, Sudoku 2x3"
    assert view.view([str(out), "-o", str(tmp_path / "page.html"), "--png"])


# ---- solve.py ----------------------------------------------------------------------------------

FOUR, SIX = "1..4....4....3.1", "1" + "." * 35


def test_smaller_boards_are_solved_on_the_canvas(one_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with weights that belong to the size of the canvas (arch.cells=mlp)."""
    monkeypatch.setattr(SEMixerConfig, "is_free_of_sizes", property(lambda self: False))
    solver = Solver.from_checkpoint(one_rank, device="cpu")
    solutions = solver.solve([FOUR, SIX, FOUR])
    assert [solution.board.name for solution in solutions] == ["sudoku 2x2", "sudoku 2x3", "sudoku 2x2"]
    assert [len(solution.answer) for solution in solutions] == [16, 36, 16]
    assert solutions[0].answer == solutions[2].answer == solver.solve([FOUR])[0].answer
    with pytest.raises(ValueError, match=r"has 81 characters, .* have 16 or 36; give one"):
        solver.solve(["." * 81])


def test_each_size_is_opened_once(one_rank: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[int] = []
    load = Trained.load_puzzle_model

    def load_noted(trained: Trained, world: World) -> object:
        opened.append(trained.of_puzzles()[1].seq_len)
        return load(trained, world)

    monkeypatch.setattr(Trained, "load_puzzle_model", load_noted)
    solver = Solver.from_checkpoint(one_rank, ["batch_size=3"], device="cpu")
    large = "G" + "." * 255
    file = tmp_path / "puzzles.csv"
    file.write_text("question\n" + "\n".join([large, FOUR, SIX, large.lower(), FOUR]) + "\n")
    solutions = list(solver.solutions(solver.reader.of_csv(file)))
    assert [len(solution.puzzle.question_S) for solution in solutions] == [256, 16, 36, 256, 16]
    assert opened == [36, 256, 16]
    assert solutions[0].board.plain(solutions[0].puzzle.question_S) == large
    with pytest.raises(ValueError, match=r"has 17 characters, .* 81, 144 or 256; give one"):
        solver.solve(["." * 17])
