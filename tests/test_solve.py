"""solve.py on the command line and from Python: answers, exit statuses and mistakes."""
# N = puzzles, T = steps, S = cells

import functools
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import solve as program
from dataset import arc, maze
from dataset.augment import BOXES
from dataset.builder import SPLITS, SplitWriter
from dataset.puzzle_input import PuzzleReader, PuzzleTable
from dataset.tasks.sudoku import SudokuTask
from dataset.tta import Variations, winner
from models.act import initial_carry, segment
from models.inference import Trace, trace
from models.trajectories import Trajectories
from sharing import export
from solve import Solver
from tests import runs
from tests.dataset.mazes import to_tokens as maze_tokens
from tests.dataset.shapes import solved_sudoku
from tests.in_process import load_run, train_here
from training import more_compute
from training.trained import Trained
from utils.batch import Batch
from utils.errors import UserError
from utils.ranks.world import World

SINGLE = World.single()
STEPS = 3
QUESTION, SOLUTION = "1..4....4....3.1", "1234341241232341"
OTHER = ".2..3..1..1...4."
MAZE_SIDE = 5
MAZE, PATH = "S   G" + " ### " * 3 + "     ", "SoooG" + " ### " * 3 + "     "
GRID = [[1, 2], [3, 4]]
TASK: dict[str, list[dict[str, Any]]] = {
    "train": [{"input": GRID, "output": GRID}],
    "test": [{"input": GRID, "output": [[5, 5]]}, {"input": [[7]], "output": [[5, 6]]}],
}
HIDDEN = {"train": TASK["train"], "test": [{"input": GRID}]}


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 4x4 Sudoku that has learnt little. Its Q head halts sometimes."""
    folder = tmp_path_factory.mktemp("solve") / "run"
    train_here(runs.settings(data, folder, max_steps=4, lr=1e-2, lr_warmup_steps=0, eval_every_n_steps=None))
    return folder


def _board_run(folder: Path, seq_len: int, vocab_size: int, names: list[str]) -> Path:
    """Return an untrained run on a dataset of one board.

    The puzzle table has a row for each name.
    """
    row_1S = np.full((1, seq_len), 2, dtype=np.uint8)
    data = folder / "data"
    data.mkdir(parents=True)
    for split in SPLITS:
        with SplitWriter(
            data / split, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=len(names)
        ) as writer:
            writer.add(row_1S, row_1S, np.ones(1, int), np.zeros(1, int))
            writer.end_groups(np.ones(1, int))
    (data / "identifiers.json").write_text(json.dumps(names))
    train_here(runs.settings(data, folder / "run", max_steps=1, global_batch_size=1, eval_every_n_steps=None))
    return folder / "run"


@pytest.fixture(scope="module")
def maze_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _board_run(tmp_path_factory.mktemp("maze") / "m", MAZE_SIDE**2, maze.VOCAB_SIZE, ["<blank>"])


@pytest.fixture(scope="module")
def arc_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["<blank>", "another", "known", "known|||t3|||0192837465"]
    return _board_run(tmp_path_factory.mktemp("arc") / "a", arc.SEQ_LEN, arc.VOCAB_SIZE, names)


def _answering(*answers_NS: list[np.ndarray]) -> Callable[..., Trace]:
    """Return a `trace` of a model that gives these answers step by step.

    The model would stop after its second step.
    """

    def trace(model: object, batch: Batch, num_steps: int | None) -> Trace:
        predictions_TNS = torch.from_numpy(np.stack([np.stack(answers) for answers in answers_NS]))
        num_steps, num = predictions_TNS.shape[:2]
        assert len(batch["inputs"]) == num
        q_halt_TN = torch.linspace(0.1, 0.9, num_steps).logit()[:, None].expand(-1, num)
        settled_N = torch.full((num,), num_steps > 1)
        return Trace(predictions_TNS, q_halt_TN, torch.full((num,), min(2, num_steps)), settled_N)

    return trace


def solved_by_search(model: object, batch: Batch, num_steps: int | None) -> Trace:
    """Return a `trace` that solves 4x4 Sudokus at its second step.

    At the first step it copies the input.
    """
    inputs_NS = batch["inputs"].numpy().astype(np.uint8)
    solutions = [solved_sudoku(inputs_S - 1, BOXES["2x2"]) for inputs_S in inputs_NS]
    answers = [np.ones(16, np.uint8) if solution_S is None else solution_S + 1 for solution_S in solutions]
    return _answering(list(inputs_NS), answers, answers)(model, batch, num_steps)


def _tokens(text: str) -> np.ndarray:
    return np.array([".1234".index(symbol) + 1 for symbol in text], dtype=np.uint8)


class Stdin:
    def __init__(self, text: str) -> None:
        self.buffer = io.BytesIO(text.encode())


Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs main() and returns the exit status and the printed text."""

    def run_main(*typed: str, stdin: str = "") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["solve.py", "device=cpu", *typed])
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        capsys.readouterr()
        try:
            program.main(SINGLE)
            status = 0
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            status = ended.code
        return status, capsys.readouterr().out

    return run_main


# ---- the API -----------------------------------------------------------------------------------


@torch.no_grad()
def test_answers_equal_those_of_segments_run_by_hand(run: Path) -> None:
    _, model, _ = load_run(run, SINGLE)
    puzzles = [QUESTION, OTHER, "." * 16]
    solutions = Solver.from_checkpoint(run, device="cpu").solve(puzzles)
    assert len(solutions) == 3
    for text, solution in zip(puzzles, solutions, strict=True):
        inputs_1S = torch.from_numpy(_tokens(text).astype(np.int32))[None]
        batch = {"inputs": inputs_1S, "labels": inputs_1S, "puzzle_identifiers": torch.zeros(1, dtype=torch.int32)}
        carry, before = initial_carry(model, batch), text
        settled = STEPS
        assert [step.number for step in solution.steps] == list(range(1, STEPS + 1))
        for step in solution.steps:
            carry, outputs = segment(model, carry, batch, training=False)
            answer = "".join("?.1234"[token] for token in outputs.logits_BSV[0].argmax(-1).tolist())
            assert step.answer == answer
            assert step.changed == [cell for cell in range(16) if answer[cell] != before[cell]]
            assert step.confidence == pytest.approx(float(outputs.q_halt_B.sigmoid()), rel=1e-5)
            wants_to_halt = bool(outputs.q_halt_B > outputs.q_continue_B)
            if wants_to_halt and step.number > 1 and not step.changed:
                settled = min(settled, step.number)
            before = answer
        assert solution.answer == before
        assert solution.settled_at == settled
        assert solution.solved == solution.valid == (sorted(before[:4]) == list("1234") and solution.solved)
        assert len(solution.reason) > 10


def test_more_steps_than_in_training(run: Path) -> None:
    together = Solver.from_checkpoint(run, device="cpu").solve([QUESTION])
    (longer,) = Solver.from_checkpoint(run, ["num_steps=5"], device="cpu").solve([QUESTION])
    assert [step.answer for step in longer.steps[:STEPS]] == [step.answer for step in together[0].steps]
    assert len(longer.steps) == 5
    assert Solver.from_checkpoint(run, device="cpu").solve([]) == []


def _rotated(text: str, digits: int) -> str:
    """Return a puzzle with its digits renamed in a circle."""
    return "".join(symbol if symbol == "." else str((int(symbol) + digits - 1) % 4 + 1) for symbol in text)


PUZZLES = [_rotated(puzzle, digits) for digits in range(4) for puzzle in (QUESTION, OTHER)]
NOISY = ["num_steps=5", "noise=0.9", "seed=4"]


def _passes(run: Path, count: int) -> list[list[Trace]]:
    """Return each trajectory of each of PUZZLES, run alone."""
    _, model, _ = load_run(run, SINGLE)
    trajectories = Trajectories(count, 0.9, seed=4)
    passes = []
    for row, puzzle in enumerate(PUZZLES):
        tokens_1S = torch.from_numpy(_tokens(puzzle).astype(np.int32))[None]
        batch = {"inputs": tokens_1S, "labels": tokens_1S, "puzzle_identifiers": torch.zeros(1, dtype=torch.int32)}
        numbers = (np.array([row * count + k]) for k in range(count))
        passes.append([trace(model, batch, 5, trajectories=trajectories, numbers_N=number) for number in numbers])
    return passes


def _steps(seen: Trace) -> list[list[int]]:
    return seen.predictions_TNS[:, 0].tolist()


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_the_most_confident_trajectory_answers(run: Path, batch_size: int) -> None:
    solver = Solver.from_checkpoint(run, ["trajectories=3", *NOISY, f"batch_size={batch_size}"], device="cpu")
    winners = []
    for passes, solution in zip(_passes(run, 3), solver.solve(PUZZLES), strict=True):
        confidence = [float(seen.confidence_TN[-1, 0]) for seen in passes]
        winners.append(confidence.index(max(confidence)))
        assert [step.tokens_S.tolist() for step in solution.steps] == _steps(passes[winners[-1]])
        assert solution.steps[-1].confidence == pytest.approx(max(confidence), abs=1e-4)
    assert len(set(winners)) > 1, "one trajectory always wins, so that the test proves little"


@pytest.mark.parametrize("batch_size", [1, 100])
def test_a_restart_answers_where_no_earlier_pass_settled(run: Path, batch_size: int) -> None:
    solver = Solver.from_checkpoint(run, ["restarts=2", *NOISY, f"batch_size={batch_size}"], device="cpu")
    for passes, solution in zip(_passes(run, 3), solver.solve(PUZZLES), strict=True):
        settled = [seen for seen in passes if bool(seen.settled_N)]
        boldest = max(passes, key=lambda seen: float(seen.confidence_TN[-1, 0]))
        assert [step.tokens_S.tolist() for step in solution.steps] == _steps((settled or [boldest])[0])


def test_symmetries_vote_on_the_answer(run: Path) -> None:
    _, model, _ = load_run(run, SINGLE)
    variations = Variations.of_boards(16, 6, "here", 4)
    solver = Solver.from_checkpoint(run, ["tta=4", "num_steps=5", "batch_size=5"], device="cpu")
    for row, (puzzle, solution) in enumerate(zip(PUZZLES, solver.solve(PUZZLES), strict=True)):
        votes = []
        for k in range(4):
            number, board_1S = np.array([row * 4 + k]), torch.from_numpy(_tokens(puzzle).astype(np.int32))[None]
            inputs_1S = variations.vary(number, board_1S)
            blank = torch.zeros(1, dtype=torch.int32)
            seen = trace(model, {"inputs": inputs_1S, "labels": inputs_1S, "puzzle_identifiers": blank}, 5)
            votes.append((variations.undo(number, seen.predictions_TNS[-1])[0].numpy(), float(seen.confidence_TN[-1])))
        assert solution.steps[-1].tokens_S.tolist() == winner(votes).tolist()


def test_keys_that_choose_among_passes_are_checked(run: Path, arc_run: Path) -> None:
    for checkpoint, overrides, expected in (
        (run, ["trajectories=4"], "trajectories=4 without noise repeats the same pass"),
        (run, ["trajectories=4", "noise=0.3", "tta=2"], "trajectories=4 and tta=2 each choose one answer"),
        (run, ["seed=3"], "seed=3 is that of the noise, but there is no noise"),
        (arc_run, ["tta=4"], "whose answers can't be turned back"),
    ):
        with pytest.raises(UserError, match=expected):
            Solver.from_checkpoint(checkpoint, overrides, device="cpu")


def test_objects_print_in_a_short_line(run: Path) -> None:
    """A notebook shows `repr` of what a cell returns, where arrays would fill the screen."""
    solver = Solver.from_checkpoint(run, device="cpu")
    (solution,) = solver.solve([QUESTION])
    for shown in (solver, solution.puzzle, *solution.steps, solution):
        assert "array" not in repr(shown) and "tensor" not in repr(shown) and "\n" not in repr(shown)


def test_an_exported_file_solves_without_any_data(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    assert export.main([str(run), "-o", str(file)]) == 0
    solver, of_run = Solver.from_checkpoint(file, device="cpu"), Solver.from_checkpoint(run, device="cpu")
    (solution,), (expected,) = solver.solve([QUESTION]), of_run.solve([QUESTION])
    assert [step.confidence for step in solution.steps] == [step.confidence for step in expected.steps]
    assert solution.answer == expected.answer


def test_mistakes_in_python_are_value_errors(run: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint at nowhere"):
        Solver.from_checkpoint("nowhere")
    with pytest.raises(ValueError, match="puzzle 2 has 3 characters, this model's puzzles have 16"):
        Solver.from_checkpoint(run, device="cpu").solve([QUESTION, "123"])
    rows: Any = [[1, 2, 3]]
    with pytest.raises(UserError, match="puzzle 1 is of the type list; give a text with a character for each cell"):
        Solver.from_checkpoint(run, device="cpu").solve(rows)


# ---- one puzzle --------------------------------------------------------------------------------


def test_every_step_is_shown(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _tokens("2" + SOLUTION[1:])
    right = _tokens(SOLUTION)
    almost = _tokens("1243" + SOLUTION[4:])  # a clue is altered
    answers = ([almost], [right], [right], [right], [wrong], [right])
    monkeypatch.setattr(more_compute, "trace", _answering(*answers))
    status, text = call(f"checkpoint={run}", f"puzzle={QUESTION}")
    assert status == 0
    headings = [line.split(", ")[0] for line in text.splitlines() if line.startswith("step")]
    first = ["step 1: 12 cells changed", "step 2: 2 cells changed", "steps 3 to 4: nothing changed"]
    assert headings == [*first, "step 5: 1 cell changed", "step 6: 1 cell changed"]
    assert text.count("┌") == 5  # the puzzle, and the steps that changed a cell
    assert "│ 1  .  │ .  4  │" in text and "│ 1  2' │ 4! 3! │" in text and "│ 1  2' │ 3* 4* │" in text
    assert "│ 2× 2" in text and text.rstrip().endswith("the model would stop after step 2 of 6")
    assert "\x1b" not in text  # the output is not a terminal
    _, colored = call(f"checkpoint={run}", f"puzzle={QUESTION}", "color=always")
    assert "\x1b[36;7m3 \x1b[0m" in colored
    monkeypatch.setattr(more_compute, "trace", _answering([almost], [wrong]))
    status, text = call(f"checkpoint={run}", f"puzzle={QUESTION}")
    assert status == 1 and "not solved: 1 clue altered" in text


def test_json_is_one_object_per_puzzle(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(more_compute, "trace", solved_by_search)
    status, text = call("--json", f"checkpoint={run}", f"puzzle={QUESTION}")
    assert status == 0
    (line,) = text.splitlines()
    found = json.loads(line)
    steps = found.pop("steps")
    assert found == {
        "name": "puzzle",
        "task": "sudoku 2x2",
        "question": QUESTION,
        "answer": SOLUTION,
        "expected": None,
        "valid": True,
        "solved": True,
        "reason": "every row, column and box holds each digit once, and the clues are kept",
        "settled_at": 2,
        "confidence": pytest.approx(0.9),
        "notes": [],
    }
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["answer"] for step in steps] == [QUESTION, SOLUTION, SOLUTION]
    blanks = [cell for cell in range(16) if QUESTION[cell] == "."]
    assert [step["changed"] for step in steps] == [[], blanks, []]


@pytest.mark.parametrize(
    "typed",
    [
        "0000000000000341",  # Hydra would read a number
        "1,2",
        "{1: 2}",
        "  #  # ",
        "${x}",
        "\\.'\"",
    ],
)
def test_a_puzzle_is_taken_exactly_as_typed(typed: str) -> None:
    for key in ("puzzle", "csv", "task", "prompt", "+puzzle"):
        read = program.read_command_line(["--json", "checkpoint=x", f"{key}={typed}", "device=cpu"])
        assert not isinstance(read, str) and read[1]
        assert getattr(read[0], key.lstrip("+")) == typed
        assert (read[0].checkpoint, read[0].device) == ("x", "cpu")


def test_a_maze_can_be_typed_in_rows(maze_run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    astray = PATH[:-1] + "o"
    monkeypatch.setattr(more_compute, "trace", _answering(*([maze_tokens(text)] for text in (astray, PATH))))
    rows = "\n".join(MAZE[start : start + MAZE_SIDE] for start in range(0, len(MAZE), MAZE_SIDE))
    for typed, stdin in ((MAZE, ""), (rows, ""), ("-", rows + "\n"), ("-", MAZE)):
        status, text = call(f"checkpoint={maze_run}", f"puzzle={typed}", stdin=stdin)
        assert status == 0
        assert "│S o o o G │" in text and "step 2: 1 cell changed" in text and "│         *│" in text
        assert "solved: a path of 4 steps, and there is no shorter one" in text
    monkeypatch.setattr(more_compute, "trace", _answering([maze_tokens(astray)]))
    status, text = call(f"checkpoint={maze_run}", f"puzzle={MAZE}", "--json")
    found = json.loads(text)
    assert (status, found["solved"], found["question"], found["answer"]) == (1, False, MAZE, astray)


# ---- many puzzles ------------------------------------------------------------------------------


def test_the_puzzles_of_a_csv_are_solved(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(more_compute, "trace", solved_by_search)
    file = tmp_path / "puzzles.csv"
    unsolvable = "12....3" + "." * 9  # the first row can't have a 3
    assert solved_sudoku(_tokens(unsolvable) - 1, BOXES["2x2"]) is None
    file.write_text(f"question\n{QUESTION}\n\n{unsolvable}\n{OTHER}\n{QUESTION}\n{OTHER}\n")
    status, text = call(f"checkpoint={run}", f"csv={file}", "batch_size=2")
    assert status == 1
    *lines, last = text.splitlines()
    assert last == "4 of 5 solved"
    assert [line.split()[0] for line in lines] == [f"puzzles.csv:{line}" for line in (2, 4, 5, 6, 7)]
    assert SOLUTION in lines[0] and " solved " in lines[0] and "would stop at step 2 of 3, confidence 0.90" in lines[0]
    assert "not solved" in lines[1] and lines[1].endswith("16 cells left blank; 3 clues altered")

    compressed = tmp_path / "published.csv.gz"
    with gzip.open(compressed, "wt") as stream:
        stream.write(f"source,question,answer,rating\nx,{QUESTION},{SOLUTION},3\nx,{OTHER},,\n")
    status, text = call(f"checkpoint={run}", f"csv={compressed}", "--json")
    first, second = (json.loads(line) for line in text.splitlines())
    assert (status, first["expected"], second["expected"]) == (0, SOLUTION, None)
    status, text = call(f"checkpoint={run}", f"csv={compressed}")
    assert (
        status == 0 and text.count("│ 1  .  │ .  4  │") == 1 and "2 of 2 solved" in text
    )  # few puzzles are shown step by step
    assert "┌" not in call(f"checkpoint={run}", f"csv={compressed}", "show=lines")[1]
    assert "┌" in call(f"checkpoint={run}", f"csv={file}", "show=steps")[1]


IN_FILES = {
    "list.txt": f"# two of them\n{QUESTION}\n{OTHER.replace('.', '0')}\n",
    "one.sdk": "#AMe\n[Puzzle]\n1..4\n....\n4...\n.3.1\n[State]\n1234\n3412\n4123\n2341\n",
    "plain.sdk.gz": "1..4\n....\n4...\n.3.1\n",
    "frame.ss": "*-------*\n|1X|X4|\n|XX|XX|\n|--+--|\n|4X|XX|\n|X3|X1|\n*-------*\n",
    "spaces.SS": "1 . | . 4\n0 0 | 0 0\n----+----\n4 . | . .\n. 3 | . 1\n",
    "kaggle.csv": f"id,puzzle,solution,clues\n1,{QUESTION.replace('.', '0')},{SOLUTION},5\n",
    "quizzes.CSV": f"quizzes,solutions\n{QUESTION.replace('.', '0')},{SOLUTION}\n",
}


@pytest.mark.parametrize("name", IN_FILES)
def test_files_of_puzzles_as_other_programs_write_them(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(more_compute, "trace", solved_by_search)
    contents = IN_FILES[name].encode()
    (tmp_path / name).write_bytes(gzip.compress(contents) if name.endswith(".gz") else contents)
    status, text = call(f"checkpoint={run}", f"puzzle={tmp_path / name}", "--json")
    found = [json.loads(line) for line in text.splitlines()]
    assert (status, [each["question"] for each in found]) == (0, [QUESTION, OTHER][: 2 if name == "list.txt" else 1])
    assert {each["expected"] for each in found} == {SOLUTION if "csv" in name.lower() else None}
    assert all(each["name"].startswith(f"{name}:") for each in found)


def test_all_sizes_that_a_model_reads_are_named() -> None:
    table = PuzzleTable([], "", 0)
    reader = PuzzleReader(SudokuTask(BOXES["3x4"]), SudokuTask(BOXES["3x4"]).of_other_size, True, "", table)
    assert [len(puzzle.question_S) for puzzle in reader.of_lines(f"{'.' * 81}\n{QUESTION}", "stdin")] == [81, 16]
    for text in ("." * 80, "." * 9, "." * 300):
        with pytest.raises(UserError, match="have 16, 36, 64, 81, 144 or 256; give one"):
            reader.of_text(text, "puzzle")


# ---- token numbers -----------------------------------------------------------------------------


def test_a_task_without_a_class_takes_and_prints_token_numbers(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = _board_run(tmp_path / "other", 4, 300, ["<blank>"])
    answer_S = np.array([1, 299, 0, 7])
    monkeypatch.setattr(more_compute, "trace", _answering([answer_S]))
    for puzzle, stdin in (("1 2 3 299", ""), ("1,2\n3,299", ""), ("-", "1 2\n3 299\n"), ("-", "1 2 3 299")):
        status, text = call(f"checkpoint={run}", f"puzzle={puzzle}", "--json", stdin=stdin)
        found = json.loads(text)
        assert (status, found["question"], found["answer"]) == (0, "1 2 3 299", "1 299 0 7")
        assert (found["task"], found["solved"]) == ("4 tokens of 300 kinds", None)
    status, text = call(f"checkpoint={run}", "puzzle=1 2 3 299")
    assert "  1   2\n  3 299\n" in text and "  1 299\n  0   7\n" in text
    file = tmp_path / "rows.csv"
    file.write_text('question,answer\n1 2 3 4,1 299 0 7\n1 2 3 4,"1,299,0,8"\n')
    monkeypatch.setattr(more_compute, "trace", _answering([answer_S, answer_S]))
    status, text = call(f"checkpoint={run}", f"csv={file}", "--json")
    assert [json.loads(line)["solved"] for line in text.splitlines()] == [True, False] and status == 1
    for puzzle, expected in (("1 2 3", "has 3 characters"), ("1 2 3 300", "'300' in cell 4"), ("a b c d", "'a'")):
        with pytest.raises(UserError, match=expected):
            call(f"checkpoint={run}", f"puzzle={puzzle}")


# ---- ARC ---------------------------------------------------------------------------------------


def _arc_answers(monkeypatch: pytest.MonkeyPatch, *grids: list[list[int]]) -> None:
    answers = [arc.to_tokens(np.array(grid, dtype=np.uint8)) for grid in grids]
    monkeypatch.setattr(more_compute, "trace", _answering(answers))


def test_an_arc_task(arc_run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    file.write_text(json.dumps(TASK))
    _arc_answers(monkeypatch, [[5, 5]], [[5, 6]])
    status, text = call(f"checkpoint={arc_run}", f"task={file}")
    assert status == 0
    assert "known test 1 (arc)\n1 2\n3 4\n" in text and "known test 2 (arc)\n7\n" in text
    assert "5 6\n\nsolved: the output that the task gives" in text and "note" not in text
    _arc_answers(monkeypatch, [[5, 5]], [[5, 5]])
    status, text = call(f"checkpoint={arc_run}", f"task={file}", "--json")
    first, second = (json.loads(line) for line in text.splitlines())
    assert (status, first["solved"], second["solved"], second["valid"]) == (1, True, False, True)
    assert (second["question"], second["answer"], second["expected"]) == ([[7]], [[5, 5]], [[5, 6]])
    assert second["reason"] == "1 of 2 cells not as in the output"


def test_an_arc_task_on_a_small_canvas(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = _board_run(tmp_path / "a", 25, arc.VOCAB_SIZE, ["<blank>"])
    answers = [arc.to_tokens(np.array(grid, dtype=np.uint8), side=5) for grid in ([[5, 5]], [[5, 6]])]
    monkeypatch.setattr(more_compute, "trace", _answering(answers))
    status, text = call(f"checkpoint={run}", f"puzzle={json.dumps({'known': TASK})}")
    assert status == 0 and text.count("solved: the output that the task gives") == 2
    large = {**TASK, "test": [{"input": [[0] * 6]}]}
    with pytest.raises(UserError, match=r"large test 1 of .* has a grid of 1x6, but this model's canvas has 5x5 cells"):
        call(f"checkpoint={run}", f"puzzle={json.dumps({'large': large})}")


def test_an_arc_task_without_outputs(
    arc_run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _arc_answers(monkeypatch, [[9]])
    status, text = call(f"checkpoint={arc_run}", "puzzle=-", stdin=json.dumps({"known": HIDDEN}))
    assert status == 0
    assert "answered: not checked, since the task gives no output" in text
    monkeypatch.setattr(more_compute, "trace", _answering([np.zeros(arc.SEQ_LEN, dtype=np.uint8)]))
    status, text = call(f"checkpoint={arc_run}", f"puzzle={json.dumps(HIDDEN)}")
    assert status == 1
    assert "not solved: the answer is no grid" in text


def test_a_known_task_has_its_row_of_the_puzzle_table(
    arc_run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    answer = _answering([arc.to_tokens(np.ones((1, 1), np.uint8))] * 2)

    def trace(model: object, batch: Batch, num_steps: int | None) -> Trace:
        asked.append(batch["puzzle_identifiers"].tolist())
        return answer(model, batch, num_steps)

    monkeypatch.setattr(more_compute, "trace", trace)
    file = tmp_path / "two.json"
    file.write_text(json.dumps({"known": HIDDEN, "unknown": HIDDEN}))
    _, text = call(f"checkpoint={arc_run}", f"task={file}")
    assert asked == [[2, 0]]
    (note,) = [line for line in text.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: unknown is not among the puzzles of ") and "the model has not seen this task" in note

    # The data of the training may be gone, or may be in another folder.
    run = Path(shutil.copytree(arc_run, tmp_path / "run"))
    config = run / "step_00000001" / "state.json"
    assert str(arc_run.parent / "data") in config.read_text()
    moved = Path(shutil.copytree(arc_run.parent / "data", tmp_path / "moved"))
    names = arc_run.parent / "data" / "identifiers.json"
    kept = names.read_text()
    names.unlink()
    try:
        _, text = call(f"checkpoint={run}", f"task={file}", "--json")
        assert asked[1:] == [[0, 0]]
        assert "there is no identifiers.json in" in json.loads(text.splitlines()[0])["notes"][0]
        call(f"checkpoint={run}", f"task={file}", f"data_path={moved}")
        assert asked[2:] == [[2, 0]]
    finally:
        names.write_text(kept)


def test_rows_of_several_datasets_are_numbered_in_sequence(tmp_path: Path) -> None:
    for folder, names in (("a", ["<blank>", "x"]), ("b", ["<blank>", "y", "z"])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "identifiers.json").write_text(json.dumps(names))
    paths = [str(tmp_path / folder) for folder in "ab"]
    rows = PuzzleTable(paths, "", 5).rows
    assert [rows[name] for name in "xyz"] == [1, 3, 4]
    assert PuzzleTable([*paths, str(tmp_path / "c")], "", 5).rows == {}
    (tmp_path / "b" / "identifiers.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b/identifiers\.json: is no list of names"):
        _ = PuzzleTable(paths, "", 5).rows


# ---- mistakes ----------------------------------------------------------------------------------

FILES = {
    "short.csv": f"question\n{QUESTION}\n{QUESTION[1:]}\n",
    "answer.csv": f"question,answer\n{QUESTION},{SOLUTION[::-1]}\n",
    "short.sdk": "#A me\n[Puzzle]\n1..4\n...\n4...\n.3.1\n",
    "damaged.txt.gz": "no gzip",
    "ragged.json": json.dumps({"train": TASK["train"], "test": [{"input": [[1, 2], [3]]}]}),
    "task.json": json.dumps(TASK),
}
SUDOKU_MISTAKES = [
    ("puzzle=" + QUESTION[1:], "puzzle has 15 characters, this model's puzzles have 16 (sudoku 2x2)"),
    ("puzzle=44" + "." * 14, "puzzle has the digit 4 twice in row 1"),
    ("puzzle=" + json.dumps(TASK), "puzzle is JSON, as ARC tasks are, but {run} was trained on sudoku 2x2"),
    ("puzzle=-", "standard input is empty"),
    ("puzzle=nowhere.txt", "there is no file nowhere.txt"),
    ("puzzle={files}/short.sdk", "short.sdk:4 has 3 characters"),
    ("puzzle={files}/damaged.txt.gz", "damaged.txt.gz: cannot be read"),
    ("csv={files}/answer.csv", "answer.csv:2: the answer is no solution of its question"),
    ("task={files}/task.json", "task.json is an ARC task, but {run} was trained on sudoku 2x2"),
]
ARC_MISTAKES = [
    ("puzzle=" + QUESTION, "puzzle is no ARC task as JSON, but {run} was trained on arc"),
    ("csv={files}/short.csv", "short.csv is no ARC task as JSON, but {run} was trained on arc"),
    ("task={files}/ragged.json", "ragged.json: test pair 1, input"),
]


@pytest.mark.parametrize(
    ("run_name", "typed", "expected"),
    [
        *(("run", *case) for case in SUDOKU_MISTAKES),
        *(("arc_run", *case) for case in ARC_MISTAKES),
    ],
)
def test_texts_and_files_that_are_no_puzzles_are_refused(
    run_name: str,
    typed: str,
    expected: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "stdin", Stdin(""))
    folder = request.getfixturevalue(run_name)
    key, _, value = typed.replace("{files}", str(tmp_path)).partition("=")
    solver = _unloaded(folder)
    config = solver.config.model_copy(update={key: value})
    with pytest.raises(ValueError) as caught:
        program.puzzles_of(config, solver)
    assert expected.replace("{run}", str(folder)) in str(caught.value)
    assert "\n" not in str(caught.value)


@functools.cache
def _unloaded(run: Path) -> Solver:
    read = program.read_command_line([f"checkpoint={run}", "puzzle=x"])
    assert not isinstance(read, str)
    config = read[0].model_copy(update={"puzzle": None})
    return Solver(config, config.open_trained(SINGLE))


def test_a_wrong_puzzle_is_refused_before_the_weights_are_loaded(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Trained, "load_model", load)
    for dashes in ("", "--"):
        with pytest.raises(UserError, match="puzzle has 3 characters"):
            call(f"{dashes}checkpoint={run}", f"{dashes}puzzle=123")


def test_wrong_models_are_refused(run: Path, call: Call, tmp_path: Path) -> None:
    other = _board_run(tmp_path / "other", 10, 7, ["<blank>"])
    weights = next(run.glob("step_*/model.safetensors"))
    question = f"puzzle={QUESTION}"
    for typed, expected in (
        ([f"checkpoint={other}", "tta=2", question], "10 tokens of 7 kinds"),
        (
            [f"checkpoint={weights}", question],
            f"a part of a checkpoint; give the step folder above it, {weights.parent}",
        ),
        ([f"checkpoint={run}", question, "arch=trm"], "which knows its own; leave it out"),
        ([f"checkpoint={run}", question, f"data_path={other.parent / 'data'}"], "take data of the same task"),
        ([f"checkpoint={run}", question, question], "puzzle is given twice; give it once, or many puzzles with csv="),
        ([f"checkpoint={run}", "puzzle="], "puzzle is given, but empty; give puzzle=..."),
        ([f"checkpoint={run}", "prompt=ab"], f"prompt= is for models of text, but {run} was trained on sudoku"),
        ([f"checkpoint={run}"], "there is nothing to solve; give one of puzzle=..., csv=..., task=..."),
        ([f"checkpoint={run}", question, "task=x"], "puzzle= and task= exclude each other; give one of them"),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            call(*typed)


# ---- as the user meets it: real processes ------------------------------------------------------


def test_a_standard_input_that_is_closed_or_fails_is_a_mistake(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        @property
        def buffer(self) -> io.BytesIO:
            raise OSError(5, "Input/output error")

    solver = _unloaded(run)
    config = solver.config.model_copy(update={"puzzle": "-"})
    for stdin, message in ((None, "standard input is empty; pipe"), (Failing(), "read (Input/output error); pipe")):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(UserError) as caught:
            program.puzzles_of(config, solver)
        assert message in str(caught.value)


def test_standard_streams(run: Path, tmp_path: Path) -> None:
    """A pipe brings 1,000 puzzles that are not solved, and the reader leaves, as with `| head`."""
    file = tmp_path / "many.txt"
    file.write_text(f"{'.' * 16}\n" * 1000)
    command = [sys.executable, str(runs.REPOSITORY / "solve.py"), "device=cpu", f"checkpoint={run}", "puzzle=-"]
    with file.open() as stdin:
        process = subprocess.Popen(
            [*command, "--json"], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    assert process.stdout is not None and process.stderr is not None
    found = json.loads(process.stdout.readline())
    assert (found["name"], found["question"], found["solved"]) == ("stdin:1", "." * 16, False)
    process.stdout.close()
    assert process.wait(timeout=60) == 0, "1 would say that not all puzzles are solved"
    assert process.stderr.read() == ""
