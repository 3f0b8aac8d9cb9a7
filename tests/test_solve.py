"""solve.py on the command line and from Python: answers, exit statuses and mistakes."""
# N = puzzles, T = steps, S = cells

import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import solve as program
from dataset import arc
from dataset.augment import BOXES
from dataset.builder import SPLITS, SplitWriter
from dataset.puzzle_input import PuzzleTable
from dataset.tta import Variations, winner
from models.act import initial_carry, segment
from models.inference import Trace, trace
from models.trajectories import Trajectories
from solve import Solver
from tests import runs
from tests.dataset.shapes import solved_sudoku
from tests.in_process import SINGLE, load_run, train_here
from training import more_compute
from training.trained import Trained
from utils.batch import Batch
from utils.errors import UserError

QUESTION, SOLUTION = "1..4....4....3.1", "1234341241232341"
OTHER = ".2..3..1..1...4."
GRID = [[1, 2], [3, 4]]
TASK: dict[str, list[dict[str, Any]]] = {
    "train": [{"input": GRID, "output": GRID}],
    "test": [{"input": GRID, "output": [[5, 5]]}, {"input": [[7]], "output": [[5, 6]]}],
}


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 4x4 Sudoku that has learnt little. Its Q head halts sometimes."""
    folder = tmp_path_factory.mktemp("solve") / "run"
    train_here(runs.settings(data, folder, max_steps=4, lr=1e-2, lr_warmup_steps=0, eval_every_n_steps=None))
    return folder


def _board_run(folder: Path, seq_len: int, vocab_size: int, names: list[str]) -> Path:
    """Return an untrained run on a dataset of one board. Its puzzle table has these names."""
    row_1S = np.full((1, seq_len), 2, dtype=np.uint8)
    data = folder / "data"
    data.mkdir(parents=True)
    for split in SPLITS:
        sizes = {"seq_len": seq_len, "vocab_size": vocab_size, "num_puzzle_identifiers": len(names)}
        with SplitWriter(data / split, **sizes) as writer:
            writer.add(row_1S, row_1S, np.ones(1, int), np.zeros(1, int))
            writer.end_groups(np.ones(1, int))
    (data / "identifiers.json").write_text(json.dumps(names))
    train_here(runs.settings(data, folder / "run", max_steps=1, global_batch_size=1, eval_every_n_steps=None))
    return folder / "run"


@pytest.fixture(scope="module")
def arc_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["<blank>", "another", "known", "known|||t3|||0192837465"]
    return _board_run(tmp_path_factory.mktemp("arc") / "a", arc.SEQ_LEN, arc.VOCAB_SIZE, names)


def _answering(*answers_NS: list[np.ndarray]) -> Callable[..., Trace]:
    """Return a `trace` of a model that gives these answers, and would stop after the second."""

    def trace(model: object, batch: Batch, num_steps: int | None) -> Trace:
        predictions_TNS = torch.from_numpy(np.stack([np.stack(answers) for answers in answers_NS]))
        num_steps, num = predictions_TNS.shape[:2]
        assert len(batch["inputs"]) == num
        q_halt_TN = torch.linspace(0.1, 0.9, num_steps).logit()[:, None].expand(-1, num)
        settled_N = torch.full((num,), num_steps > 1)
        return Trace(predictions_TNS, q_halt_TN, torch.full((num,), min(2, num_steps)), settled_N)

    return trace


def solved_by_search(model: object, batch: Batch, num_steps: int | None) -> Trace:
    """Copy 4x4 Sudokus at the first step of a `trace`, and solve them at the second."""
    inputs_NS = batch["inputs"].numpy().astype(np.uint8)
    solutions = [solved_sudoku(inputs_S - 1, BOXES["2x2"]) for inputs_S in inputs_NS]
    answers = [np.ones(16, np.uint8) if solution_S is None else solution_S + 1 for solution_S in solutions]
    return _answering(list(inputs_NS), answers, answers)(model, batch, num_steps)


def _tokens(text: str) -> np.ndarray:
    return np.array([".1234".index(symbol) + 1 for symbol in text], dtype=np.uint8)


def _batch(text: str) -> Batch:
    inputs_1S = torch.from_numpy(_tokens(text).astype(np.int32))[None]
    return {"inputs": inputs_1S, "labels": inputs_1S, "puzzle_identifiers": torch.zeros(1, dtype=torch.int32)}


Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def run_main(*typed: str, stdin: object = "") -> tuple[int, str]:
        stream = io.TextIOWrapper(io.BytesIO(stdin.encode())) if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["solve.py", "device=cpu", *typed])
        monkeypatch.setattr(sys, "stdin", stream)
        capsys.readouterr()
        try:
            program.main(SINGLE)
            status = 0
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            status = ended.code
        return status, capsys.readouterr().out

    return run_main


@torch.no_grad()
def test_answers_equal_those_of_segments_run_by_hand(run: Path) -> None:
    _, model, _ = load_run(run, SINGLE)
    puzzles = [QUESTION, OTHER, "." * 16]
    solutions = Solver.from_checkpoint(run, device="cpu").solve(puzzles)
    longer = Solver.from_checkpoint(run, ["num_steps=5"], device="cpu").solve(puzzles)
    for text, solution, with_five in zip(puzzles, solutions, longer, strict=True):
        batch = _batch(text)
        carry, before = initial_carry(model, batch), text
        settled = 3
        assert [step.number for step in solution.steps] == [1, 2, 3] and len(with_five.steps) == 5
        assert [step.answer for step in with_five.steps[:3]] == [step.answer for step in solution.steps]
        for step in solution.steps:
            carry, outputs = segment(model, carry, batch)
            answer = "".join("?.1234"[token] for token in outputs.logits_BSV[0].argmax(-1).tolist())
            assert step.answer == answer
            assert step.changed == [cell for cell in range(16) if answer[cell] != before[cell]]
            assert step.confidence == pytest.approx(float(outputs.q_halt_B.sigmoid()), rel=1e-5)
            wants_to_halt = bool(outputs.q_halt_B > outputs.q_continue_B)
            if wants_to_halt and step.number > 1 and not step.changed:
                settled = min(settled, step.number)
            before = answer
        assert (solution.answer, solution.settled_at) == (before, settled)
        assert solution.solved == solution.valid == (sorted(before[:4]) == list("1234") and solution.solved)


# The digits are renamed in a circle.
NAMES = [str.maketrans("1234", "12341234"[n : n + 4]) for n in range(4)]
PUZZLES = [puzzle.translate(names) for names in NAMES for puzzle in (QUESTION, OTHER)]


def _passes(run: Path) -> list[list[Trace]]:
    """Return three noisy trajectories of each of PUZZLES, each run alone."""
    _, model, _ = load_run(run, SINGLE)

    def alone(row: int, k: int) -> Trace:
        number = np.array([row * 3 + k])
        return trace(model, _batch(PUZZLES[row]), 5, trajectories=Trajectories(3, 0.9, seed=4), numbers_N=number)

    return [[alone(row, k) for k in range(3)] for row in range(len(PUZZLES))]


@pytest.mark.parametrize("batch_size", [1, 7, 100])
@pytest.mark.parametrize("method", ["trajectories=3", "restarts=2"])
def test_the_surest_pass_answers_if_none_settles(run: Path, batch_size: int, method: str) -> None:
    typed = [method, "num_steps=5", "noise=0.9", "seed=4", f"batch_size={batch_size}"]
    solver = Solver.from_checkpoint(run, typed, device="cpu")
    winners = set()
    for passes, solution in zip(_passes(run), solver.solve(PUZZLES), strict=True):
        assert not any(bool(seen.settled_N) for seen in passes)
        expected = max(passes, key=lambda seen: float(seen.confidence_TN[-1, 0]))
        winners |= {k for k, seen in enumerate(passes) if seen is expected}
        assert [step.tokens_S.tolist() for step in solution.steps] == expected.predictions_TNS[:, 0].tolist()
        assert solution.steps[-1].confidence == pytest.approx(float(expected.confidence_TN[-1, 0]), abs=1e-4)
    assert len(winners) > 1, "one pass always wins, so that the test proves little"


def test_symmetries_vote_on_the_answer(run: Path) -> None:
    _, model, _ = load_run(run, SINGLE)
    variations = Variations.of_boards(16, 6, "here", 4)
    solver = Solver.from_checkpoint(run, ["tta=4", "num_steps=5", "batch_size=5"], device="cpu")
    for row, (puzzle, solution) in enumerate(zip(PUZZLES, solver.solve(PUZZLES), strict=True)):
        votes = []
        for k in range(4):
            number, batch = np.array([row * 4 + k]), _batch(puzzle)
            seen = trace(model, batch | {"inputs": variations.vary(number, batch["inputs"])}, 5)
            votes.append((variations.undo(number, seen.predictions_TNS[-1])[0].numpy(), float(seen.confidence_TN[-1])))
        assert solution.steps[-1].tokens_S.tolist() == winner(votes).tolist()


def test_every_step_is_shown(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, right = _tokens("2" + SOLUTION[1:]), _tokens(SOLUTION)
    almost = _tokens("1243" + SOLUTION[4:])  # a clue is altered
    answers = ([almost], [right], [right], [right], [wrong], [right])
    monkeypatch.setattr(more_compute, "trace", _answering(*answers))
    status, text = call(f"checkpoint={run}", f"puzzle={QUESTION}")
    assert status == 0
    headings = [line.split(", ")[0] for line in text.splitlines() if line.startswith("step")]
    first = ["step 1: 12 cells changed", "step 2: 2 cells changed", "steps 3 to 4: nothing changed"]
    assert headings == [*first, "step 5: 1 cell changed", "step 6: 1 cell changed"]
    assert text.endswith("\nthe model would stop after step 2 of 6\n\n")
    assert text.count("┌") == 5  # the puzzle, and the steps that changed a cell
    assert "│ 1  .  │ .  4  │" in text and "│ 1  2' │ 4! 3! │" in text and "│ 1  2' │ 3* 4* │" in text
    assert "\x1b" not in text  # the output is not a terminal
    _, colored = call(f"checkpoint={run}", f"puzzle={QUESTION}", "color=always")
    assert "\x1b[36;7m3 \x1b[0m" in colored
    monkeypatch.setattr(more_compute, "trace", _answering([almost], [wrong]))
    status, text = call(f"checkpoint={run}", f"puzzle={QUESTION}")
    assert status == 1 and "not solved: 1 clue altered" in text


def test_json_is_one_object_per_puzzle(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(more_compute, "trace", solved_by_search)
    status, text = call("--json", f"checkpoint={run}", f"puzzle={QUESTION}")
    (line,) = text.splitlines()
    found = json.loads(line)
    steps = found.pop("steps")
    named = {"name": "puzzle", "task": "sudoku 2x2", "question": QUESTION, "answer": SOLUTION, "expected": None}
    judged = {"valid": True, "solved": True, "settled_at": 2, "confidence": pytest.approx(0.9), "notes": []}
    assert status == 0 and found.pop("reason") and found == named | judged
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["answer"] for step in steps] == [QUESTION, SOLUTION, SOLUTION]
    blanks = [cell for cell in range(16) if QUESTION[cell] == "."]
    assert [step["changed"] for step in steps] == [[], blanks, []]


# Hydra would read the first one as a number.
@pytest.mark.parametrize("typed", ["0000000000000341", "1,2", "{1: 2}", "  #  # ", "${x}", "\\.'\""])
def test_a_puzzle_is_taken_exactly_as_typed(typed: str) -> None:
    for key in ("puzzle", "csv", "task", "prompt", "+puzzle", "--puzzle"):
        read = program.read_command_line(["--json", "checkpoint=x", f"{key}={typed}", "device=cpu"])
        assert not isinstance(read, str) and read[1]
        assert getattr(read[0], key.lstrip("+-")) == typed
        assert (read[0].checkpoint, read[0].device) == ("x", "cpu")


def test_the_puzzles_of_a_csv_are_solved(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(more_compute, "trace", solved_by_search)
    file = tmp_path / "puzzles.csv"
    unsolvable = "12....3" + "." * 9  # the first row can't have a 3
    assert solved_sudoku(_tokens(unsolvable) - 1, BOXES["2x2"]) is None
    file.write_text(f"question\n{QUESTION}\n\n{unsolvable}\n{OTHER}\n{QUESTION}\n{OTHER}\n")
    status, text = call(f"checkpoint={run}", f"csv={file}", "batch_size=2")
    *lines, last = text.splitlines()
    assert (status, last) == (1, "4 of 5 solved")
    assert [line.split()[0] for line in lines] == [f"puzzles.csv:{line}" for line in (2, 4, 5, 6, 7)]
    assert SOLUTION in lines[0] and " solved " in lines[0] and "not solved" in lines[1]
    assert "would stop at step 2 of 3, confidence 0.90" in lines[0] and "confidence 0.90  " in lines[1]

    compressed = tmp_path / "published.csv.gz"
    with gzip.open(compressed, "wt") as stream:
        stream.write(f"source,question,answer,rating\nx,{QUESTION},{SOLUTION},3\nx,{OTHER},,\n")
    status, text = call(f"checkpoint={run}", f"csv={compressed}", "--json")
    first, second = (json.loads(line) for line in text.splitlines())
    assert (status, first["expected"], second["expected"]) == (0, SOLUTION, None)
    # Few puzzles are shown step by step.
    for shown, has_steps in (([f"csv={compressed}"], True), ([f"csv={compressed}", "show=lines"], False)):
        assert ("┌" in call(f"checkpoint={run}", *shown)[1]) == has_steps
    assert "┌" in call(f"checkpoint={run}", f"csv={file}", "show=steps")[1]
    monkeypatch.setattr(more_compute, "trace", _answering([_tokens("1.24....4....3.1")] * 2))
    assert "│ 1  .! │ 2! 4  │" in call(f"checkpoint={run}", f"csv={compressed}")[1], "the file has another solution"


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


def test_a_task_without_a_class_takes_and_prints_token_numbers(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = _board_run(tmp_path / "other", 4, 300, ["<blank>"])
    answer_S = np.array([1, 299, 0, 7])
    monkeypatch.setattr(more_compute, "trace", _answering([answer_S]))
    for puzzle, stdin in (("1 2 3 299", ""), ("1,2\n3,299", ""), ("-", "1 2\n3 299\n")):
        status, text = call(f"checkpoint={run}", f"puzzle={puzzle}", "--json", stdin=stdin)
        found = json.loads(text)
        assert (status, found["question"], found["answer"]) == (0, "1 2 3 299", "1 299 0 7")
        assert (found["task"], found["solved"]) == ("4 tokens of 300 kinds", None)
    file = tmp_path / "rows.csv"
    file.write_text('question,answer\n1 2 3 4,1 299 0 7\n1 2 3 4,"1,299,0,8"\n')
    monkeypatch.setattr(more_compute, "trace", _answering([answer_S, answer_S]))
    status, text = call(f"checkpoint={run}", f"csv={file}", "--json")
    assert [json.loads(line)["solved"] for line in text.splitlines()] == [True, False] and status == 1
    for puzzle, expected in (("1 2 3", "has 3 characters"), ("1 2 3 300", "'300' in cell 4"), ("a b c d", "'a'")):
        with pytest.raises(UserError, match=expected):
            call(f"checkpoint={run}", f"puzzle={puzzle}")


def _arc_answers(monkeypatch: pytest.MonkeyPatch, *grids: list[list[int]]) -> None:
    answers = [arc.to_tokens(np.array(grid, dtype=np.uint8)) for grid in grids]
    monkeypatch.setattr(more_compute, "trace", _answering(answers))


def test_an_arc_task(arc_run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    file.write_text(json.dumps(TASK))
    _arc_answers(monkeypatch, [[5, 5]], [[5, 6]])
    status, text = call(f"checkpoint={arc_run}", f"task={file}")
    assert status == 0
    assert "known test 1 (arc)\n1 2\n3 4\n" in text and "known test 2 (arc)\n7\n" in text and "note" not in text
    _arc_answers(monkeypatch, [[5, 5]], [[5, 5]])
    status, text = call(f"checkpoint={arc_run}", f"task={file}", "--json")
    first, second = (json.loads(line) for line in text.splitlines())
    assert (status, first["solved"], second["solved"], second["valid"]) == (1, True, False, True)
    assert (second["question"], second["answer"], second["expected"]) == ([[7]], [[5, 5]], [[5, 6]])
    hidden = json.dumps({"known": {"train": TASK["train"], "test": [{"input": GRID}]}})
    _arc_answers(monkeypatch, [[9]])
    status, text = call(f"checkpoint={arc_run}", "puzzle=-", stdin=hidden)
    assert status == 0 and "answered: not checked" in text
    monkeypatch.setattr(more_compute, "trace", _answering([np.zeros(arc.SEQ_LEN, dtype=np.uint8)]))
    status, text = call(f"checkpoint={arc_run}", f"puzzle={hidden}")
    assert status == 1 and "not solved: the answer is no grid" in text


def test_a_known_task_has_its_row_of_the_puzzle_table(
    arc_run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The data of the training may be gone, or may be in another folder."""
    asked = []
    answer = _answering([arc.to_tokens(np.ones((1, 1), np.uint8))] * 2)

    def trace(model: object, batch: Batch, num_steps: int | None) -> Trace:
        asked.append(batch["puzzle_identifiers"].tolist())
        return answer(model, batch, num_steps)

    monkeypatch.setattr(more_compute, "trace", trace)
    file = tmp_path / "two.json"
    task = {"train": TASK["train"], "test": [{"input": GRID}]}
    file.write_text(json.dumps({"known": task, "unknown": task}))
    typed = [f"checkpoint={arc_run}", f"task={file}"]
    _, text = call(*typed)
    (note,) = [line for line in text.splitlines() if line.startswith("note: ")]
    assert asked == [[2, 0]] and note.startswith("note: unknown is not among the puzzles of ")

    data, moved = arc_run.parent / "data", tmp_path / "moved"
    data.rename(moved)
    try:
        _, text = call(*typed, "--json")
        assert asked[1:] == [[0, 0]] and json.loads(text.splitlines()[0])["notes"]
        call(*typed, f"data_path={moved}")
        assert asked[2:] == [[2, 0]]
    finally:
        moved.rename(data)


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


FILES = {
    "answer.csv": f"question,answer\n{QUESTION},{SOLUTION[::-1]}\n",
    "short.sdk": "#A me\n[Puzzle]\n1..4\n...\n4...\n.3.1\n",
    "damaged.txt.gz": "no gzip",
    "ragged.json": json.dumps({"train": TASK["train"], "test": [{"input": [[1, 2], [3]]}]}),
    "task.json": json.dumps(TASK),
}
MISTAKES = [
    ("run", "puzzle=" + QUESTION[1:], "puzzle has 15 characters, this model's puzzles have 16 (sudoku 2x2)"),
    ("run", "puzzle=nowhere.txt", "there is no file nowhere.txt"),
    ("run", "puzzle={files}/short.sdk", "short.sdk:4 has 3 characters"),
    ("run", "puzzle={files}/damaged.txt.gz", "damaged.txt.gz: cannot be read"),
    ("run", "csv={files}/answer.csv", "answer.csv:2: the answer is no solution of its question"),
    ("run", "task={files}/task.json", "task.json is JSON, as ARC tasks are, but {run} was trained on sudoku 2x2"),
    ("arc_run", "csv={files}/answer.csv", "answer.csv is no ARC task as JSON, but {run} was trained on arc"),
    ("arc_run", "task={files}/ragged.json", "ragged.json: test pair 1, input"),
]


def test_texts_and_files_that_are_no_puzzles_are_refused(
    run: Path, arc_run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Failing:
        @property
        def buffer(self) -> io.BytesIO:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(Trained, "load_model", lambda *_: pytest.fail("the weights were read first"))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    of_streams = [
        ("run", "puzzle=-", "standard input is empty", None),
        ("run", "puzzle=-", "read (Input/output error)", Failing()),
    ]
    for run_name, typed, expected, stdin in [*((*each, "") for each in MISTAKES), *of_streams]:
        folder = {"run": run, "arc_run": arc_run}[run_name]
        with pytest.raises(ValueError) as caught:
            call(f"checkpoint={folder}", typed.replace("{files}", str(tmp_path)), stdin=stdin)
        assert expected.replace("{run}", str(folder)) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_wrong_models_and_keys_are_refused(run: Path, arc_run: Path, call: Call, tmp_path: Path) -> None:
    other = _board_run(tmp_path / "other", 10, 7, ["<blank>"])
    weights = next(run.glob("step_*/model.safetensors"))
    question = f"puzzle={QUESTION}"
    for checkpoint, typed, expected in (
        (other, ["tta=2", question], "10 tokens of 7 kinds"),
        (arc_run, ["tta=4", f"puzzle={json.dumps(TASK)}"], "whose answers can't be turned back"),
        (weights, [question], f"a part of a checkpoint; give the step folder above it, {weights.parent}"),
        (run, [question, "trajectories=4", "noise=0.3", "tta=2"], "trajectories=4 and tta=2 each choose one answer"),
        (run, [question, "seed=3"], "seed=3 is that of the noise, but there is no noise"),
        (run, [question, "arch=trm"], "which knows its own; leave it out"),
        (run, [question, f"data_path={other.parent / 'data'}"], "take data of the same task"),
        (run, [question, question], "puzzle is given twice; give it once, or many puzzles with csv="),
        (run, ["puzzle="], "puzzle is given, but empty; give puzzle=..."),
        (run, ["prompt=ab"], f"prompt= is for models of text, but {run} was trained on sudoku"),
        (run, [], "there is nothing to solve; give one of puzzle=..., csv=..., task=..."),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            call(f"checkpoint={checkpoint}", *typed)
    rows: Any = [[1, 2, 3]]
    with pytest.raises(UserError, match="puzzle 1 is of the type list; give a text, or an ARC task"):
        Solver.from_checkpoint(run, device="cpu").solve(rows)


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
