"""view.py: the data of its pages, its pictures and its mistakes."""
# N = examples, T = reasoning steps, S = cells, P = puzzles, G = groups

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import matplotlib.image
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import view
from dataset import pictures
from dataset.text.tokenizer import ByteTokenizer
from tests.runs import contents
from tests.viewer.samples import (
    EVIL,
    GIVEN,
    NUM_WRONG_NT,
    OUTPUTS,
    SOLUTION_S,
    SUDOKU_BOARD,
    page_of,
    predictions,
    questions,
    shown,
    write_any_run,
    write_arc,
    write_metrics,
    write_run,
    write_runs,
    write_sudoku,
    write_text,
    write_text_run,
)
from utils.command_line import read_config
from utils.drawing import BLACK, RED
from utils.shell import run_command as run_program
from viewer.curve_pictures import COLOURS
from viewer.dataset_page import pieces_of
from viewer.outputs import SAVING
from viewer.run_page import data_folders

# ---- what the page holds -------------------------------------------------------------------------


def test_a_dataset_is_shown_in_one_file_that_treats_names_as_text(tmp_path: Path) -> None:
    data = write_sudoku(tmp_path / os.fsdecode(b"<b>@@DATA@@&caf\xe9"), ["<blank>", EVIL], group_size=3)
    page = page_of(data, tmp_path / "view.html")
    assert page["board"] == SUDOKU_BOARD and page["facts"].pop("size").endswith("kB")
    of_sets = {name: "6 examples in 2 groups" for name in ("train/all", "test/all")}
    assert page["facts"] == {"task": "Sudoku 2x2", **of_sets, "tokens": "16 of 6 kinds", "identifiers": "2"}
    assert page["sets"] == {"train/all": 6, "test/all": 6}
    rows = [(one["set"], one["row"], one["group"], one["puzzle"], one["name"]) for one in page["examples"]]
    of_set = [(n, n // 3, n % 3, ["<blank>", EVIL][n % 2]) for n in range(6)]
    assert rows == [("train/all", *row) for row in of_set] + [("test/all", *row) for row in of_set]
    for example in page["examples"]:
        assert example["input"] == questions()[0].tolist()
        assert example["label"] == SOLUTION_S.tolist()
    text = (tmp_path / "view.html").read_text(encoding="utf-8")
    assert "taken over" not in text and "<b>@@DATA" not in text
    assert "<title>&lt;b&gt;@@DATA@@&amp;caf?</title>" in text
    text = text.replace("http://www.w3.org/2000/svg", "")  # a namespace, which browsers do not fetch
    for outside in ("http://", "https://", "src=", "@import", "url("):
        assert outside not in text


def test_only_the_first_puzzle_of_a_group_shows_its_examples(tmp_path: Path) -> None:
    """Groups of one, two and one puzzle. A cell whose label is ignored has none."""
    data, label_S = write_sudoku(tmp_path / "data", group_size=2), [0, *SOLUTION_S[1:]]
    shutil.rmtree(data / "train")
    indices = {"puzzle_indices": [0, 2, 3, 5, 6], "group_indices": [0, 1, 3, 4], "puzzle_identifiers": [0] * 4}
    for name, values in (indices | {"labels": [label_S] * 6}).items():
        np.save(data / "test" / f"all__{name}.npy", np.array(values, np.int32))
    page = page_of(data, tmp_path / "view.html", "--set", "all")
    assert page["facts"]["test/all"] == "6 examples of 4 puzzles in 3 groups"
    found = [(one["row"], one["group"], one["puzzle"], one["group_size"]) for one in page["examples"]]
    assert found == [(0, 0, 0, 1), (1, 0, 0, 1), (2, 1, 0, 2), (3, 1, 1, 2), (5, 2, 0, 1)]
    assert page["examples"][0]["label"] == [-1, *label_S[1:]]


def test_tokens_of_a_tokenizer_are_pieces_of_whole_characters() -> None:
    class Halves(ByteTokenizer):
        name = "0" * 64  # the tokens are not bytes

        def __init__(self) -> None:
            self.special_tokens = ByteTokenizer().special_tokens

    pieces = pieces_of([256, *"aé".encode(), 0xC3, 258], Halves())
    assert pieces == [{"special": "start"}, ["a", 97], ["é", 0xC3, 0xA9], ["\ufffd", 0xC3], {"special": "end"}]
    assert pieces_of([7, 8], None) == [["7", 7], ["8", 8]]


def test_a_run_of_text_is_shown_with_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/viewer/page reads the answers."""
    run = write_text_run(tmp_path / "run")
    (run / "step_00000200").mkdir()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("evaluate.py saves no answers to text"))
    monkeypatch.setattr(view, "draw_png", draw := Mock())
    page = page_of(run, tmp_path / "view.html", "--png")
    assert [(text["set"], text["row"]) for text in page["texts"]] == [
        *[("step 200", 0), ("step 200", 7), ("step 100", 0), ("step 100", 7)]
    ]
    assert [one["metric"] for one in page["curves"]] == ["exact_accuracy", "loss", "perplexity", "bits_per_byte"]
    panels, to = draw.call_args.args
    assert to == run / "curve.png" and not (run / "puzzle.png").exists()
    last = [(panel.metric, panel.series[0].name, panel.series[0].values[-1]) for panel in panels]
    assert last == [("exact_accuracy", "train", 0.5), ("loss", "train", 0.01)]
    assert "): 2 examples, " in view.view([str(run), "-o", str(tmp_path / "view.html"), "--step", "100"])
    assert "has no answers of step 5, but of: 100, 200; choose one of them" in mistake(capsys, run, "--step", "5")
    (run / "samples" / "step_00000200.json").write_text('[{"row": 1}]')
    assert "step_00000200.json: isn't what an evaluation writes; remove it" in mistake(capsys, run)


def test_a_run_is_shown_with_answers_confidence_and_curves(tmp_path: Path) -> None:
    """tests/viewer/page reads its tables."""
    data = write_sudoku(tmp_path / "data", [f"puzzle {n}" for n in range(6)])
    page = page_of(write_run(tmp_path / "run", data), tmp_path / "view.html")
    assert page["board"]["kind"] == "sudoku" and page["sets"] == {"all": 6}
    assert [example["row"] for example in page["examples"]] == list(range(6)), "files of two ranks are joined"
    assert [example["name"] for example in page["examples"]] == [f"puzzle {n}" for n in range(6)]
    for example, predictions_TS in zip(page["examples"], predictions(), strict=True):
        assert [answer for answer in example["answers"]] == predictions_TS.tolist()
        assert example["confidence"] == pytest.approx([0.0474, 0.2689, 0.7311, 0.9526])
    series = {(one["metric"], line["name"]): line for one in page["curves"] for line in one["over"]["step"]}
    of_sets = [(metric, name) for metric in ("exact_accuracy", "lm_loss") for name in ("train", "eval all")]
    assert [*series] == [*of_sets, ("perf/step_ms", "train")]
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    of_set = series["exact_accuracy", "eval all"]
    assert (of_set["x"], of_set["values"], of_set["low"]) == ([100, 200, 300, 400, 500], values, None)
    facts = {"architecture": "trm", "hidden size": "64", "optimizer": "muon", "learning rate": "0.001", "batch": "32"}
    facts |= {"seed": "0", "task": "Sudoku 2x2", "data": "data", "outputs": "step_00000500"}
    assert page["facts"] == facts | {"all/exact_accuracy": "0.5000"} and page["project"] == tmp_path.name
    last = page["over_steps"][-1]
    assert last == {"set": "all", "step": 500, "counts": [1, 2, 3, 4], "values": [0.125, 0.25, 0.375, 0.5]}


def test_a_limited_number_of_examples_is_spread_over_all(tmp_path: Path) -> None:
    """The sequences have halted after two steps. The folder of one run shows that run."""
    run = write_run(tmp_path / "project" / "run", None)
    for file in (run / OUTPUTS).glob("*.safetensors"):
        save_file({**load_file(file), "steps": np.full(3, 2, np.int32)}, file)
    page = page_of(run.parent, tmp_path / "view.html", "--max-examples", "3", "--png")
    assert [example["row"] for example in page["examples"]] == [0, 2, 5]
    assert {(len(one["answers"]), len(one["confidence"])) for one in page["examples"]} == {(2, 2)}
    assert page["sets"] == {"all": 6} and page["title"] == "run" and (run / "curve.png").exists()
    data = write_sudoku(tmp_path / "data", group_size=3)
    page = page_of(data, tmp_path / "view.html", "--max-examples", "3", "--set", "test/all")
    assert [(example["set"], example["row"]) for example in page["examples"]] == [("test/all", n) for n in range(3)]


def test_the_newest_outputs_are_shown_unless_another_step_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    shutil.copytree(run / "eval_outputs" / "step_00000500", run / "eval_outputs" / "step_00000090")
    shutil.copytree(run / "eval_outputs" / "step_00000500", run / "eval_outputs" / "step_00000500_other")
    for step, shown_step in (([], "step_00000500"), (["--step", "90"], "step_00000090")):
        assert page_of(run, tmp_path / "view.html", *step)["facts"]["outputs"] == shown_step
    for folder in ("step_00000090", "step_00000500"):
        (run / folder).mkdir()
    (run / "best").write_text("step_00000090\n")
    (run / "latest").write_text("step_00000090\n")
    assert page_of(run, tmp_path / "view.html")["facts"]["outputs"] == "step_00000090", "evaluate.py takes that step"
    assert page_of(run / "best", tmp_path / "view.html")["facts"]["outputs"] == "step_00000090"
    other = page_of(run / "eval_outputs" / "step_00000500_other", tmp_path / "view.html")
    assert other["facts"]["outputs"] == "step_00000500_other" and len(other["examples"]) == 6


def test_a_run_without_predictions_names_the_command(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    write_metrics(run)
    page = page_of(run, tmp_path / "view.html")
    assert page["examples"] == [] and len(page["curves"]) == 3
    words = shlex.split(page["command"])
    assert words[:2] == ["python", "evaluate.py"] and words[3:] == [SAVING]
    assert read_config("evaluate", words[2:3])["checkpoint"] == str(run), "the command can't be pasted"
    outputs = run / "eval_outputs" / "step_00000500"
    outputs.mkdir(parents=True)
    save_file({"rows": np.arange(2), "q_halt": np.zeros(2, np.float32)}, outputs / "all_rank0_0000.safetensors")
    assert page_of(run, tmp_path / "view.html")["examples"] == []


# ---- several runs --------------------------------------------------------------------------------


def test_runs_of_a_folder_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "save_missing_answers", None)  # no run of a folder is asked
    runs = write_runs(tmp_path / "runs", write_sudoku(tmp_path / "data"))
    with (runs / "hrm" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 510, "time_s": 64, "eval/all/exact_accuracy": 0.25, "eval/all/lm_loss": 9}\n')
    page = page_of(runs, tmp_path / "view.html")
    assert page["facts"]["batch"] == "32" and "architecture" not in page["facts"] and page["opens"] == 3
    assert page["kind"] == "runs" and [run["name"] for run in page["runs"]] == ["hrm", "trm-0", "trm-1"]
    assert [run["values_going_on"] for run in page["runs"]] == [True, False, False]
    differences = dict(page["differences"])
    assert differences["arch.name"] == ["hrm", "trm", "trm"] and differences["lr"] == ["0.0002", "0.001", "0.001"]
    assert differences["seed"] == ["0", "0", "1"], "a reader must see which seed a run has"
    for metric, better, best, newest in (("exact_accuracy", "max", 0.5, 0.25), ("lm_loss", "min", 0.006, 9)):
        (found,) = [one for one in page["numbers"] if one["metric"] == f"eval/all/{metric}"]
        number = {"last": best, "step": 500, "best": best, "best_step": 500}
        numbers = [number | {"last": newest, "step": 510}, number, number]
        assert found == {"metric": f"eval/all/{metric}", "better": better, "runs": numbers}
    curve = page["curves"][0]
    assert curve["metric"] == "eval/all/exact_accuracy" and set(curve["over"]) == {"step", "seconds"}
    assert [(one["name"], one["low"] is not None) for one in curve["over"]["step"]] == [
        ("arch=hrm lr=0.0002", False),
        ("arch=trm lr=0.001 (2 seeds)", True),
    ]
    assert page["answering"] == [0, 1] and page["sets"] == {"all": 6}
    assert [sorted(puzzle["runs"]) for puzzle in page["examples"]] == [["0", "1"]] * 6
    last = {run: answers["answers"][-1] for run, answers in page["examples"][3]["runs"].items()}
    assert last["0"] == SOLUTION_S.tolist() != last["1"]
    labels = [run["label"] for run in page["runs"]]
    assert labels == ["arch=hrm lr=0.0002", "arch=trm lr=0.001, seed 0", "arch=trm lr=0.001, seed 1"]
    (runs / "hrm" / OUTPUTS / "all_rank0_0000.safetensors").unlink()
    puzzles = page_of(runs, tmp_path / "view.html", "--max-examples", "2")["examples"]
    assert [(each["row"], sorted(each["runs"])) for each in puzzles] == [(1, ["0", "1"]), (5, ["0", "1"])]
    shard = runs / "trm-0" / OUTPUTS / "all_rank1_0000.safetensors"
    arrays = load_file(shard)
    arrays["inputs"][2] = SOLUTION_S  # row 5 is another puzzle
    save_file(arrays, shard)
    puzzles = page_of(runs, tmp_path / "view.html", "--max-examples", "2")["examples"]
    assert [(each["row"], *each["runs"]) for each in puzzles] == [(1, "0", "1"), (5, "0"), (5, "1")]


def test_answers_to_another_task_are_not_missing_and_restrict_no_rows(tmp_path: Path) -> None:
    """Their rows 0 and 1 are of other puzzles than rows 0 and 1 of the Sudoku."""
    sudoku = write_run(tmp_path / "sudoku", tmp_path / "sudoku-4x4")
    _, arc = write_arc(tmp_path / "arc")
    silent = write_run(tmp_path / "silent", tmp_path / "sudoku-4x4")
    shutil.rmtree(silent / "eval_outputs")
    output = tmp_path / "view.html"
    view.view([str(sudoku), str(arc), str(silent), "-o", str(output)])
    page = shown(output)
    assert len(page["examples"]) == 6 and page["answering"] == [0] and page["unanswered"] == [2]
    assert page["notes"] == ["run has answers to puzzles of another task, which are not compared."]
    assert page["command"] == f"python view.py {sudoku} {arc} {silent} -o {output}"


def test_a_run_that_is_tested_on_other_data_shows_those() -> None:
    config = {"data_path": "a", "data_paths": ["b"], "data_paths_test": ["c"], "started_in": None}
    assert data_folders(config, None) == [Path("c")]
    assert data_folders(config, {"data": "d/test + e/test"}) == [Path("d"), Path("e")]


def test_runs_are_compared_by_the_names_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of different steps are told apart. A branch names the run that it went on from."""
    runs = write_runs(tmp_path / "runs", write_sudoku(tmp_path / "data"))
    hrm, trm, output = runs / "hrm", runs / "trm-0", tmp_path / "view.html"
    for run in (hrm, trm):
        (run / "step_00000500").mkdir()
        (run / "best").write_text("step_00000500\n")
    config = json.loads((hrm / "config.yaml").read_text())
    (hrm / "config.yaml").write_text(json.dumps(config | {"resume": "runs/parent/best"}))
    view.view([str(hrm), str(trm), "-o", str(output)])
    expected = shown(output)
    assert ["resume", ["runs/parent/best", "null"]] in expected["differences"]
    for named in ("best", "step_00000500"):
        view.view([str(hrm / named), str(trm / named), "-o", str(output)])
        assert shown(output) == expected
    assert capsys.readouterr().err == ""
    view.view([str(hrm / "best"), str(trm), "-o", str(output)])
    assert shown(output) == expected
    assert "the paths name different steps" in capsys.readouterr().err
    assert "name a step; give one of them" in mistake(capsys, hrm / "best", trm, "--step", "500")
    (hrm / OUTPUTS).rename(hrm / "eval_outputs" / "step_00000400")
    page = page_of(runs, output)
    assert [run["step"] for run in page["runs"]] == [400, 500, None]
    note = "The answers and the evaluations are of different training steps: hrm at 400, trm-0 at 500."
    assert page["notes"] == [note]


# ---- answers that are not saved yet --------------------------------------------------------------


def test_a_run_without_answers_gets_them_from_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results of an earlier evaluation stay, and answers of an older step aren't the newest."""
    run = write_run(tmp_path / "my run", None)
    saved, output = tmp_path / "answers", tmp_path / "view.html"
    shutil.copytree(run / OUTPUTS, run / f"{OUTPUTS}_other")
    (run / OUTPUTS).rename(saved)
    (saved / "arc_votes.json").write_text("{}")
    (run / OUTPUTS).mkdir(parents=True)
    former = {"results.json": '{"metrics": {}, "num_examples": {"all": 1}}', "submission.json": "a submission"}
    for name, text in former.items():
        (run / OUTPUTS / name).write_text(text)
    (run / "step_00000500").mkdir()
    commands: list[list[str]] = []

    def evaluate(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command[-4:-1])
        shutil.copytree(saved, read_config("evaluate", command[-4:])["out"], dirs_exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", evaluate)
    page = page_of(run, output, "--max-examples", "4")
    assert len(page["examples"]) == 4
    assert commands[0] == [f"checkpoint={run}/step_00000500", SAVING, "max_examples=4"]
    told = capsys.readouterr().err
    assert f"{run} has no saved answers of step 500; its model answers up to 4 puzzles" in told
    assert "python evaluate.py" in told
    names = {file.name for file in saved.iterdir()}
    assert {file.name for file in (run / OUTPUTS).iterdir()} == names | former.keys()
    assert {name: (run / OUTPUTS / name).read_text() for name in former} == former
    page_of(run, output)
    assert len(commands) == 1, "answers that are there must not be made again"

    (run / "step_00000600").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: Mock(returncode=2))
        said = view.view([str(run), "-o", str(output)]).splitlines()[0]
    assert said.startswith(f"{run} has no saved answers of step 600: evaluate.py ended with status 2, and said why")
    words = shlex.split(said.rpartition("view.py: ")[2])
    assert words[2:] == [f"checkpoint={run}/step_00000600", SAVING, "max_examples=200", "out=answers"]
    assert shown(output)["facts"]["outputs"] == "step_00000500"
    assert page_of(run, output)["facts"]["outputs"] == "step_00000600"
    assert page_of(run, output)["step"] == 600 and page_of(run, output, "--step", "500")["step"] == 500
    assert len(commands) == 2
    (run / "step_00000400").mkdir()
    assert page_of(run, output, "--step", "400")["step"] == 400
    assert commands[2][0] == f"checkpoint={run}/step_00000400"
    assert not [*run.rglob(".view-*")]


def test_saved_outputs_without_answers_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be the work of hours. One rank of two has answers: the page would have none."""
    run = write_run(tmp_path / "run", None)
    (run / "step_00000500").mkdir()
    file = run / OUTPUTS / "all_rank1_0000.safetensors"
    save_file({"rows": np.arange(3), "predictions": np.zeros((3, 16), np.uint8)}, file)
    before = contents(run / OUTPUTS)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a model answered puzzles"))
    said = view.view([str(run), "-o", str(tmp_path / "view.html")]).splitlines()[0]
    assert said.startswith(f"{run} has no saved answers of step 500: {run / OUTPUTS} holds outputs without the puzzles")
    assert contents(run / OUTPUTS) == before


# ---- pictures ------------------------------------------------------------------------------------


def colours_of(file: Path) -> set[str]:
    """Return the colours of a picture, which must show more than a background."""
    image = matplotlib.image.imread(file)
    assert min(image.shape[:2]) > 150
    pixels_RC = np.round(image[:, :, :3] * 255).astype(np.int64) @ (0x10000, 0x100, 1)
    colours, counts = np.unique(pixels_RC, return_counts=True)
    assert len(colours) > 20 and counts.max() < 0.99 * counts.sum()
    return {f"#{colour:06x}" for colour in colours}


# For each kind of board: colours that only this kind has, or that mark its wrong cells.
MARKS = {
    "sudoku": {pictures._WRONG_GROUND},
    "maze": {pictures._MAZE_GROUNDS[1], pictures._MAZE_GROUNDS[5], RED},
    "arc": {pictures._ARC_GROUNDS[3], RED},
    "numbers": {pictures._WRONG_GROUND},
}


@pytest.mark.parametrize("kind", MARKS)
def test_pictures_of_a_run_of_every_kind(tmp_path: Path, kind: str) -> None:
    run, drawn = write_any_run(tmp_path / "run", kind), ["curve.png", "puzzle.png"]
    if kind != "sudoku":  # the curves of all kinds look alike
        (run / "metrics.jsonl").unlink()
        drawn.remove("curve.png")
    said = view.view([str(run), "-o", str(tmp_path / "view.html"), "--png"])
    assert shown(tmp_path / "view.html")["board"]["kind"] == kind
    *lines, last = said.splitlines()
    assert lines == [f"drew {run / name}" for name in drawn] and last.startswith(f"wrote {tmp_path / 'view.html'}")
    assert kind != "sudoku" or COLOURS[0] in colours_of(run / "curve.png")
    assert colours_of(run / "puzzle.png") >= MARKS[kind]


def test_the_picture_shows_the_solved_puzzle_with_the_most_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, it shows the mended puzzle, the steps that change something and the solution."""
    figures: list[tuple[str, list[pictures.Board]]] = []

    def record(shape: object, boards: list[pictures.Board], title: str, *_: object, **__: object) -> None:
        figures.append((title, boards))

    monkeypatch.setattr("dataset.pictures.draw_boards", record)
    run = write_run(tmp_path / "run", write_sudoku(tmp_path / "data", [f"puzzle {n}" for n in range(6)]))
    page_of(run, tmp_path / "view.html", "--png")
    title, boards = figures.pop()
    assert title == "run: row 4 of all, puzzle 4"
    assert [board.title.split("\n")[0] for board in boards] == [
        "puzzle",
        *(f"step {t + 1}: {16 - num_wrong} of 16 right" for t, num_wrong in enumerate(NUM_WRONG_NT[4])),
    ]
    assert boards[1].title.endswith("\nhalting confidence 5%")
    assert [int(board.wrong_RC.sum()) for board in boards if board.wrong_RC is not None] == NUM_WRONG_NT[4]
    givens = [{s for s, cell in enumerate(board.cells_RC.flat) if cell.is_given} for board in boards]
    assert givens == [set(GIVEN)] * 5
    for rows in ([3, 5], [3]):
        for file in (run / OUTPUTS).glob("*.safetensors"):
            arrays = load_file(file)
            keep = np.isin(arrays["rows"], rows)
            save_file({name: np.ascontiguousarray(array[keep]) for name, array in arrays.items()}, file)
        page = page_of(run, tmp_path / "view.html", "--png")
        assert page["examples"][page["opens"]]["row"] == rows[-1]
    titles = [board.title.split("\n")[0] for board in figures.pop()[1]]
    assert titles == ["puzzle", "step 1: 12 of 16 right", "step 4: 12 of 16 right", "solution"]


def test_the_picture_of_a_dataset_is_written_beside_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture in the dataset folder would keep a builder from replacing the folder."""
    monkeypatch.setattr(view, "draw_boards", draw := Mock(wraps=pictures.draw_boards))
    data = write_sudoku(tmp_path / "$data")
    before = sorted(data.rglob("*"))
    said = view.view([str(data), "-o", str(tmp_path / "page.html"), "--png"])
    assert said.startswith(f"drew {tmp_path / 'page.png'}\n")
    _, boards, *_ = draw.call_args.args
    rows = ("train/all, row 0", "train/all, row 4", "test/all, row 1", "test/all, row 5")
    assert [board.title for board in boards] == [title for row in rows for title in (row, "solution")]
    assert "".join(cell.text for cell in boards[1].cells_RC.flat) == "1234341221434321"
    colours = colours_of(tmp_path / "page.png")
    assert BLACK in colours and pictures._WRONG_GROUND not in colours
    assert sorted(data.rglob("*")) == before


def test_pictures_that_cannot_be_drawn_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = write_run(tmp_path / "run", None), tmp_path / "view.html"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert "drawing needs matplotlib; pip install" in mistake(capsys, run, "-o", output, "--png")
    assert not output.exists()
    (run / "curve.png").mkdir()
    assert f"{run / 'curve.png'} can't be written (Is a directory)" in mistake(capsys, run, "-o", output, "--png")
    (run / "curve.png").rmdir()
    (run / "curve.png").symlink_to(tmp_path / "elsewhere")
    said = mistake(capsys, run, "-o", output, "--png")
    assert f"wrote {output}, but not all pictures: " in said and "curve.png is a link" in said
    assert len(shown(output)["examples"]) == 6, "a page must not be lost for want of a picture"
    assert list(tmp_path.rglob("*.png")) == [run / "curve.png"] and not (tmp_path / "elsewhere").exists()


# ---- mistakes ------------------------------------------------------------------------------------


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert run_program(view.view, [str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    line = printed.err
    assert line.startswith("error: ") and line.endswith("\n") and line.count("\n") == 1
    return line


def test_paths_and_options_that_fit_neither_a_run_nor_a_dataset_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in (tmp_path / "model.safetensors", "hf://somebody/model"):
        said = mistake(capsys, missing)
        assert "there is no folder" in said and "of weights, give the DIR of python evaluate.py" in said
        assert SAVING in said
    data, run = write_sudoku(tmp_path / "data"), write_run(tmp_path / "run", None)
    assert "--step is for runs" in mistake(capsys, data, "--step", "3")
    assert "has no set other; it has train/all, test/all" in mistake(capsys, data, "--set", "other")
    assert "is no folder that can be written" in mistake(capsys, data, "-o", tmp_path / "no" / "view.html")
    assert "--max-examples is 0" in mistake(capsys, data, "--max-examples", "0")
    assert "has no outputs of step 3, but of: 500" in mistake(capsys, run, "--step", "3")
    assert "data is no run, and only runs are compared" in mistake(capsys, run, data)
    assert "--plot curves.png" in mistake(capsys, run, write_run(tmp_path / "other", None), "--png")
    assert "--png draws one run or puzzles" in mistake(capsys, write_text(tmp_path / "text"), "--png")
    assert page_of(tmp_path / "text", tmp_path / "view.html", "--set", "test")["sets"] == {"test": 1}


def test_a_damaged_run_is_refused_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tests.fuzz damages these files at random."""
    run, output = write_run(tmp_path / "run", None), tmp_path / "view.html"
    output.write_text("the page before")
    file = run / OUTPUTS / "all_rank0_0000.safetensors"
    arrays = load_file(file)
    save_file({**arrays, "labels": arrays["labels"][:2]}, file)
    assert "labels has shape (2, 16)" in mistake(capsys, run, "-o", output)
    for name, damaged in (
        (f"{OUTPUTS}/results.json", b'{"metrics": 3}'),
        (f"{OUTPUTS}/arc_votes.json", b'{"a": [{}]}'),
        ("config.yaml", b"- a"),
        ("metrics.jsonl", b'{"step": 1}\n[1]\n{"step": 2}\n'),
    ):
        run = write_run(tmp_path / "runs" / Path(name).stem, None)
        (run / name).write_bytes(damaged)
        assert str(run / name) in mistake(capsys, run, "-o", output)
    assert output.read_text() == "the page before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "runs", "view.html"]
