"""The viewer: the data of its page, its mistakes, and the page in a browser without a network."""
# N = examples, T = reasoning steps, S = cells, P = puzzles, G = groups

import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import view
from dataset import maze, pictures, tasks
from dataset.arc import to_tokens
from dataset.pictures import board_of
from dataset.tasks import task_of_shape, task_of_tokens
from dataset.tasks.base import BoardTask
from dataset.tasks.lights_out import LightsOutTask
from dataset.text.tokenizer import ByteTokenizer
from tests.dataset.samples import samples_of
from tests.dataset.text.samples import write_hrm_text, write_split
from utils.command_line import read_config
from utils.drawing import BLACK, BLUE, RED
from utils.shell import run_command as run_program
from viewer import answers
from viewer.pages import ALPHABET, IGNORED, to_text
from viewer.run_page import MAX_POINTS, SAVE_OUTPUTS, rank_of, thinned
from viewer.text_page import pieces_of

REPOSITORY = Path(__file__).resolve().parents[1]
# A name with code that would run if the page treated the name as HTML.
EVIL = "</script><script>document.title='taken over'</script><img src=x onerror=alert(1)>"
SUDOKU_TOKENS = ["padding", "blank", "1", "2", "3", "4"]
SUDOKU_BOARD = {"kind": "sudoku", "rows": 4, "columns": 4, "tokens": SUDOKU_TOKENS, "box": [2, 2]}
SOLUTION_S = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]) + 1
GIVEN = (0, 3, 5, 6, 9, 10, 12, 15)
NUM_STEPS = 4
# The number of wrong cells of six puzzles at each step. Three puzzles are solved, one of them only
# at the last step.
NUM_WRONG_NT = [[0, 0, 0, 0], [3, 2, 1, 1], [2, 1, 0, 0], [4, 4, 4, 4], [3, 2, 1, 0], [5, 3, 3, 2]]


def shown(output: Path) -> dict[str, Any]:
    """Return the data of a page."""
    block = output.read_text().split('id="data">')[1].split("</script>")[0]
    data = json.loads(zlib.decompress(base64.b64decode(block)))
    assert isinstance(data, dict)
    return data


def page_of(path: Path, output: Path, *options: str) -> dict[str, Any]:
    view.view([str(path), "-o", str(output), *options])
    return shown(output)


def tokens_of(text: str | list[int]) -> list[int]:
    if isinstance(text, list):
        return text
    return [-1 if character == IGNORED else ALPHABET.index(character) for character in text]


def write_dataset(
    folder: Path, inputs_NS: np.ndarray, labels_NS: np.ndarray, vocab_size: int, names: list[str], group_size: int = 1
) -> Path:
    """Write a dataset with two equal splits.

    Puzzle p has one example, and the identifier p modulo the number of names.
    """
    num = len(inputs_NS)
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        arrays = {
            "inputs": inputs_NS,
            "labels": labels_NS,
            "puzzle_identifiers": np.arange(num) % len(names),
            "puzzle_indices": np.arange(num + 1),
            "group_indices": np.arange(0, num + 1, group_size),
        }
        for name, array in arrays.items():
            np.save(folder / split / f"all__{name}.npy", array.astype(np.int32))
        metadata = {
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "vocab_size": vocab_size,
            "seq_len": inputs_NS.shape[1],
            "num_puzzle_identifiers": len(names),
            "total_groups": num // group_size,
            "mean_puzzle_examples": 1,
            "sets": ["all"],
        }
        (folder / split / "dataset.json").write_text(json.dumps(metadata))
    (folder / "identifiers.json").write_text(json.dumps(names))
    return folder


def questions() -> np.ndarray:
    """Return one 4x4 Sudoku six times, with shape (6, 16)."""
    return np.tile(np.where(np.isin(np.arange(16), GIVEN), SOLUTION_S, 1), (6, 1))


def write_sudoku(folder: Path, names: list[str] | None = None, group_size: int = 1) -> Path:
    labels_NS = np.tile(SOLUTION_S, (6, 1))
    return write_dataset(folder, questions(), labels_NS, 6, names or ["<blank>"], group_size)


def write_metrics(run: Path) -> None:
    rows: list[dict[str, float]] = []
    for step in (1, *range(10, 510, 10)):
        rows.append({"step": step, "time_s": step / 8, "epoch": step / 2, "train/lm_loss": 2 / step})
        rows[-1] |= {"train/exact_accuracy": step / 500, "perf/step_ms": 12.5}
        if step % 100 == 0:
            rows[-1] |= {"eval/all/exact_accuracy": step / 1000, "eval/all/lm_loss": 3 / step}
            rows[-1] |= {f"eval/all/exact_accuracy_at_step/{n}": n * step / 4000 for n in (1, 2, 3, 4)}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def predictions() -> np.ndarray:
    """Return the answers at each step, with shape (6, 4, 16).

    NUM_WRONG_NT says how many of the free cells are wrong. The first free cells are wrong.
    """
    free = [cell for cell in range(16) if cell not in GIVEN]
    predictions_NTS = np.tile(SOLUTION_S, (6, NUM_STEPS, 1)).astype(np.uint8)
    for n, num_wrong_T in enumerate(NUM_WRONG_NT):
        for t, num_wrong in enumerate(num_wrong_T):
            for cell in free[:num_wrong]:
                predictions_NTS[n, t, cell] = SOLUTION_S[cell] % 4 + 2
    return predictions_NTS


def write_run(run: Path, data: Path | None) -> Path:
    """Write a run. Its predictions are in two files, as two ranks would save them."""
    outputs = run / "eval_outputs" / "step_00000500"
    outputs.mkdir(parents=True)
    config = {"data_path": str(data), "arch": {"name": "trm", "hidden_size": 64}, "lr": 0.001, "seed": 0}
    (run / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    write_metrics(run)
    q_halt_NT = np.tile(np.linspace(-3, 3, NUM_STEPS, dtype=np.float32), (6, 1))
    for rank in range(2):
        mine = slice(rank, None, 2)
        arrays = {
            "rows": np.arange(6)[mine],
            "inputs": questions()[mine].astype(np.int32),
            "labels": np.tile(SOLUTION_S, (6, 1))[mine].astype(np.int32),
            "puzzle_identifiers": np.arange(6)[mine].astype(np.int32),
            "predictions_at_step": predictions()[mine],
            "q_halt_at_step": q_halt_NT[mine],
        }
        # safetensors would write slices with the strides of the whole array.
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(whole, outputs / f"all_rank{rank}_0000.safetensors")
    results = {
        "checkpoint": f"{run}/step_00000500",
        "data": str(data and data / "test"),
        "num_examples": {"all": 6},
        "metrics": {"eval/all/num_examples": 6, "eval/all/exact_accuracy": 0.5, "eval/all/lm_loss": float("nan")},
        "intervals": {"eval/all/exact_accuracy": [0.1876, 0.8124]},
        "reliability": {"all": [{"low": 0.2, "high": 0.3, "count": 6, "confidence": 0.25, "accuracy": 0.5}]},
        "compute": [{"set_name": "all", "method": "tta=8", "segments": 12.5, "exact_accuracy": 0.5}],
    }
    (outputs / "results.json").write_text(json.dumps(results))
    return run


def write_arc(folder: Path) -> tuple[Path, Path]:
    """Write a dataset of two tasks, and a run that voted on them.

    The right answer of the first task is in the first place. The candidates of the second task are
    all wrong.
    """
    grids = [np.array([[1, 2], [3, 4]]), np.array([[5, 0, 5], [0, 5, 0]])]
    inputs_NS = np.stack([to_tokens(grid.astype(np.uint8)) for grid in grids])
    labels_NS = np.stack([to_tokens(grid.astype(np.uint8)[::-1]) for grid in grids])
    names = ["<blank>", "aaaa0001|||t1|||0213456789"]
    data = write_dataset(folder / "arc", inputs_NS, labels_NS, 12, names)
    pair = {"input": [[1, 2]], "output": [[2, 1]]}
    tasks = {f"aaaa000{n}": {"train": [pair], "test": [pair]} for n in range(2)}
    (data / "test_puzzles.json").write_text(json.dumps(tasks))
    run = folder / "run"
    outputs = run / "eval_outputs" / "step_00000500"
    outputs.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps({"data_path": str(data)}))
    write_metrics(run)
    wrong_NS = labels_NS.copy()
    wrong_NS[0, 0] += 1
    arrays: dict[str, np.ndarray] = {
        "rows": np.arange(2),
        "inputs": inputs_NS.astype(np.int32),
        "labels": np.where(labels_NS == 0, -100, labels_NS.astype(np.int32)),
        "puzzle_identifiers": np.arange(2).astype(np.int32),
        "predictions": wrong_NS.astype(np.int32),
        "q_halt": np.zeros(2, np.float32),
    }
    save_file(arrays, outputs / "all_rank0_0000.safetensors")

    def candidate(grid: list[list[int]], count: int, right: bool) -> dict[str, Any]:
        return {"grid": grid, "count": count, "confidence": count / 10, "right": right}

    votes = {
        "aaaa0000": [candidate([[2, 1]], 7, True), candidate([[9, 9]], 2, False)],
        "aaaa0001": [candidate([[3, 3]], 8, False)],
    }
    report = {
        name: [{"input": [[1, 2]], "solution": [[2, 1]], "num_votes": 9, "num_empty": 1, "candidates": candidates}]
        for name, candidates in votes.items()
    }
    (outputs / "arc_votes.json").write_text(json.dumps(report))
    return data, run


def write_text(folder: Path) -> Path:
    """Write a dataset of two problems and, for testing, of a text. Each byte is a token."""
    prompts, responses = [b"1 + 1?", "Größe <b>?".encode()], [b"2", b"9"]
    tokens, table = list[int](), list[tuple[int, int, int, int]]()
    for task, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        table.append((len(tokens), len(prompt) + 2, len(response) + 1, task))
        tokens += [256, *prompt, 257, *response, 258]
    write_split(folder / "train", np.array(tokens, np.uint16), np.array(table), tasks=["adding", EVIL])
    text = np.array([256, *b"In the beginning", 258], np.uint16)
    write_split(folder / "test", text, np.array([(0, 1, len(text) - 1, 0)]), tasks=["adding", EVIL])
    return folder


def write_text_run(run: Path) -> Path:
    """Write a run of text with two evaluations. In the second, the model solves the problem."""
    run.mkdir(parents=True)
    config = {"data_path": "data/gone", "arch": {"name": "gpt", "attention": "causal"}, "lr": 0.001}
    (run / "config.yaml").write_text(json.dumps(config))
    rows: list[dict[str, float]] = []
    (run / "samples").mkdir()
    for step, answer in ((100, "3"), (200, "2")):
        rows.append({"step": step, "time_s": step / 8, "epoch": 1, "train/loss": 2 / step, "train/exact_accuracy": 0.5})
        rows[-1] |= {"eval/all/loss": 3 / step, "eval/all/perplexity": 1.5, "eval/all/bits_per_byte": 1.1}
        rows[-1] |= {"eval/all/exact_accuracy": step / 200}
        told = [
            {"row": 0, "task": "adding", "is_problem": True, "prompt": "1 + 1?", "answer": answer, "right": "2"},
            {"row": 7, "task": EVIL, "is_problem": False, "prompt": "In the", "answer": " sea", "right": " beginning"},
        ]
        (run / "samples" / f"step_{step:08d}.json").write_text(json.dumps(told))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


# ---- what the page holds -------------------------------------------------------------------------


def test_a_dataset_is_shown_with_its_groups_and_names(tmp_path: Path) -> None:
    data = write_sudoku(tmp_path / "data", ["<blank>", EVIL], group_size=3)
    page = page_of(data, tmp_path / "view.html")
    assert page["board"] == SUDOKU_BOARD and page["facts"]["task"] == "Sudoku 2x2"
    assert page["sets"] == {"train/all": 6, "test/all": 6}
    rows = [(one["set"], one["row"], one["group"], one["puzzle"], one["name"]) for one in page["examples"]]
    of_set = [(n, n // 3, n % 3, ["<blank>", EVIL][n % 2]) for n in range(6)]
    assert rows == [("train/all", *row) for row in of_set] + [("test/all", *row) for row in of_set]
    for example in page["examples"]:
        assert tokens_of(example["input"]) == questions()[0].tolist()
        assert tokens_of(example["label"]) == SOLUTION_S.tolist()


def test_the_page_is_one_file_and_treats_names_as_text(tmp_path: Path) -> None:
    data = write_sudoku(tmp_path / "<b>@@DATA@@&", ["<blank>", EVIL])
    text_of = tmp_path / "view.html"
    page_of(data, text_of)
    text = text_of.read_text()
    assert "taken over" not in text and "<b>@@DATA" not in text
    assert "<title>&lt;b&gt;@@DATA@@&amp;</title>" in text
    for outside in ("http://", "https://", "src=", "@import", "url("):
        assert outside not in text.replace(
            "http://www.w3.org/2000/svg", ""
        )  # the name of a namespace, which browsers do not fetch


def test_text_is_shown_by_token(tmp_path: Path) -> None:
    page = page_of(write_text(tmp_path / "data"), tmp_path / "view.html")
    first, second, text = page["texts"]
    assert [(each["set"], each["row"], each["task"]) for each in (first, second, text)] == [
        ("train", 0, "adding"),
        ("train", 1, EVIL),
        ("test", 0, "adding"),
    ]
    assert [part["title"] for part in first["parts"]] == ["instruction", "response"]
    assert first["parts"][0]["pieces"] == [{"special": "start"}, "1 + 1?", {"special": "end of instruction"}]
    assert second["parts"][0]["pieces"][1] == "Größe <b>?" and second["parts"][0]["num_tokens"] == 14
    assert [part["title"] for part in text["parts"]] == ["text"]
    assert page["lengths"][0] == {
        "set": "train",
        "least": 9,
        "width": 1,
        "counts": [1, 0, 0, 0, 0, 0, 1],
        "mean": 12.0,
        "longest": 15,
    }
    only = page_of(tmp_path / "data", tmp_path / "view.html", "--set", "test")
    assert len(only["texts"]) == 1 and only["sets"] == {"test": 1}


def test_tokens_of_a_tokenizer_are_pieces_of_whole_characters() -> None:
    class Halves(ByteTokenizer):
        name = "0" * 64  # the tokens are not bytes

        def __init__(self) -> None:
            self.special_tokens = ByteTokenizer().special_tokens

    pieces = pieces_of([256, *"aé".encode(), 0xC3, 258], Halves())
    assert pieces == [{"special": "start"}, ["a", 97], ["é", 0xC3, 0xA9], ["\ufffd", 0xC3], {"special": "end"}]
    assert pieces_of([7, 8], None) == [["7", 7], ["8", 8]]


def test_text_of_hrm_texts_own_format_is_shown(tmp_path: Path) -> None:
    epoch = {"inst_start": [0], "inst_len": [2], "resp_start": [2], "resp_len": [2]}
    arrays = {name: np.array(values) for name, values in epoch.items()}
    write_hrm_text(tmp_path / "data", np.array([1, 2, 3, 4], np.int32), [arrays])
    page = page_of(tmp_path / "data", tmp_path / "view.html")
    assert [part["pieces"] for part in page["texts"][0]["parts"]] == [[["1", 1], ["2", 2]], [["3", 3], ["4", 4]]]


def test_a_run_of_text_is_shown_with_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_text_run(tmp_path / "run")
    (run / "step_00000200").mkdir()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("evaluate.py saves no answers to text")

    monkeypatch.setattr(answers, "_evaluate", refuse)
    page = page_of(run, tmp_path / "view.html", "--png")
    assert [(text["set"], text["row"], text.get("is_right")) for text in page["texts"]] == [
        ("step 200", 0, True),
        ("step 200", 7, None),
        ("step 100", 0, False),
        ("step 100", 7, None),
    ]
    assert [part["title"] for part in page["texts"][0]["parts"]] == ["instruction", "answer", "right answer"]
    assert [part["pieces"] for part in page["texts"][1]["parts"]] == [["In the"], [" sea"], [" beginning"]]
    assert [one["metric"] for one in page["curves"]] == ["exact_accuracy", "loss", "perplexity", "bits_per_byte"]
    assert (run / "curve.png").stat().st_size and not (run / "puzzle.png").exists()
    assert len(page_of(run, tmp_path / "view.html", "--step", "100")["texts"]) == 2
    assert run_program(view.view, [str(run), "--step", "5", "-o", str(tmp_path / "no.html")]) == 2
    assert "has no answers of step 5, but of: 100, 200; choose one of them" in capsys.readouterr().err
    (run / "samples" / "step_00000200.json").write_text('[{"row": 1}]')
    assert run_program(view.view, [str(run), "-o", str(tmp_path / "no.html")]) == 2
    assert "step_00000200.json: isn't what an evaluation writes; remove it" in capsys.readouterr().err


def test_runs_of_text_are_compared_without_puzzles(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_text_run(tmp_path / "runs" / name)
    page = page_of(tmp_path / "runs", tmp_path / "view.html")
    assert page["unanswered"] == [] and page["answering"] == []
    better = {number["metric"]: number["better"] for number in page["numbers"]}
    assert better["eval/all/perplexity"] == better["eval/all/bits_per_byte"] == better["eval/all/loss"] == "min"


def test_a_picture_of_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_text(tmp_path / "data")
    assert run_program(view.view, [str(data), "-o", str(tmp_path / "view.html"), "--png"]) == 2
    assert "--png draws puzzles, and a dataset of text has none; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "view.html").exists()


def test_a_run_is_shown_with_answers_confidence_and_curves(tmp_path: Path) -> None:
    data = write_sudoku(tmp_path / "data", [f"puzzle {n}" for n in range(6)])
    page = page_of(write_run(tmp_path / "run", data), tmp_path / "view.html")
    assert page["board"]["kind"] == "sudoku" and page["sets"] == {"all": 6}
    assert [example["row"] for example in page["examples"]] == list(range(6)), (
        "the files of two ranks must be joined in the order of rows"
    )
    assert [example["name"] for example in page["examples"]] == [f"puzzle {n}" for n in range(6)]
    for example, predictions_TS in zip(page["examples"], predictions(), strict=True):
        assert [tokens_of(answer) for answer in example["answers"]] == predictions_TS.tolist()
        assert example["confidence"] == pytest.approx([0.0474, 0.2689, 0.7311, 0.9526])
    series = {(one["metric"], line["name"]): line for one in page["curves"] for line in one["series"]}
    assert set(series) == {
        ("exact_accuracy", "train"),
        ("exact_accuracy", "eval all"),
        ("lm_loss", "train"),
        ("lm_loss", "eval all"),
        ("perf/step_ms", "perf/step_ms"),
    }
    assert series["exact_accuracy", "eval all"] == {
        "name": "eval all",
        "steps": [100, 200, 300, 400, 500],
        "values": [0.1, 0.2, 0.3, 0.4, 0.5],
    }
    assert [one["metric"] for one in page["curves"]] == ["exact_accuracy", "lm_loss", "perf/step_ms"]
    last = page["over_steps"][-1]
    assert last == {"set": "all", "step": 500, "counts": [1, 2, 3, 4], "values": [0.125, 0.25, 0.375, 0.5]}
    assert page["results"]["rows"][1:] == [
        ["eval/all/exact_accuracy", 0.5, 0.1876, 0.8124],
        ["eval/all/lm_loss", None],
    ]
    assert [(table["columns"][0], table["rows"]) for table in page["results"]["tables"]] == [
        ("method", [["tta=8", "all", 12.5, 0.5]]),
        ("confidence", [["0.2 to 0.3", 6, 0.25, 0.5]]),
    ]


def test_without_the_dataset_the_tokens_decide_the_kind_of_board(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", None), tmp_path / "view.html")
    assert page["board"] == SUDOKU_BOARD and page["facts"]["task"] == "Sudoku 2x2"


@pytest.mark.parametrize(
    "seq_len, largest, title",
    [(36, 7, "Sudoku 2x3"), (25, 3, "Lights Out 5x5"), (100, 4, "maze 10x10"), (900, 6, "ARC"), (16, 88, None)],
)
def test_the_smallest_vocabulary_that_holds_the_tokens_tells_the_task(
    seq_len: int, largest: int, title: str | None
) -> None:
    task = task_of_tokens(seq_len, largest)
    assert (task and task.title) == title


def test_metrics_that_a_task_judges_come_before_others() -> None:
    logged = ["perf/step_ms", "grad_norm", "lamps_off", "exact_accuracy"]
    assert sorted(logged, key=rank_of) == ["exact_accuracy", "lamps_off", "grad_norm", "perf/step_ms"]


@pytest.mark.parametrize(
    "seq_len, vocab_size, kind, rows, columns",
    [
        (81, 11, "sudoku", 9, 9),
        (36, 8, "sudoku", 6, 6),
        (900, 6, "maze", 30, 30),
        (900, 12, "arc", 30, 30),
        (25, 9, "numbers", 5, 5),
        (50, 9, "numbers", 4, 16),
    ],
)
def test_the_sizes_of_the_data_decide_the_board(
    seq_len: int, vocab_size: int, kind: str, rows: int, columns: int
) -> None:
    board = board_of(task_of_shape(seq_len, vocab_size), seq_len)
    assert (board["kind"], board["rows"], board["columns"]) == (kind, rows, columns)
    assert board.get("wrapped", False) == (rows != columns)


class UndrawnTask(LightsOutTask):
    """A new task. The viewer has no drawing for its kind."""

    kind = "undrawn"


def test_a_task_without_a_drawing_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", (UndrawnTask,))
    task = task_of_shape(25, 5)
    names = ["padding", "dark", "lit", "leave", "press"]
    assert board_of(task, 25) == {"kind": "undrawn", "rows": 5, "columns": 5, "tokens": names}
    # The class does not override `drawing`, which describes a square. 20 cells form no square.
    assert board_of(task, 20) == {"kind": "numbers", "rows": 2, "columns": 16, "tokens": names, "wrapped": True}


@pytest.mark.parametrize(
    "rows, columns, drawn",
    [
        *((3, 7, (3, 7, False)), (1, 16, (1, 16, False)), (10, 60, (10, 60, False))),
        # Nobody could see the cells of these boards.
        *((1, 17, (2, 16, True)), (1, 1000, (33, 31, True)), (10, 100, (33, 31, True))),
    ],
)
def test_a_board_that_is_too_wide_for_a_screen_is_drawn_in_lines(
    rows: int, columns: int, drawn: tuple[int, int, bool]
) -> None:
    task = UndrawnTask(5)
    task.rows, task.columns = rows, columns
    board = board_of(task, rows * columns)
    assert (board["rows"], board["columns"], board.get("wrapped", False)) == drawn


@pytest.mark.parametrize("kind", tasks.TASKS, ids=lambda kind: kind.kind)
def test_the_task_names_every_token(kind: type[BoardTask]) -> None:
    task, split = samples_of(kind)
    names = board_of(task, split.metadata.seq_len)["tokens"]
    assert not names or len(set(names)) == split.metadata.vocab_size


def test_a_limited_number_of_examples_is_spread_over_all(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    page = page_of(run, tmp_path / "view.html", "--max-examples", "3")
    assert [example["row"] for example in page["examples"]] == [0, 2, 5]
    assert page["sets"] == {"all": 6}
    data = write_sudoku(tmp_path / "data", group_size=3)
    page = page_of(data, tmp_path / "view.html", "--max-examples", "3", "--set", "test/all")
    assert [(example["set"], example["row"]) for example in page["examples"]] == [("test/all", n) for n in range(3)]


def test_tokens_of_large_vocabularies_are_numbers() -> None:
    assert to_text(np.array([0, 63, -100])) == "A/-"
    assert to_text(np.array([0, 64, -100])) == [0, 64, -1]


def test_a_sequence_ends_where_it_halted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    for file in (run / "eval_outputs" / "step_00000500").glob("*.safetensors"):
        arrays = load_file(file)
        save_file({**arrays, "steps": np.full(3, 2, np.int32)}, file)
    page = page_of(run, tmp_path / "view.html")
    assert {(len(one["answers"]), len(one["confidence"])) for one in page["examples"]} == {(2, 2)}


def test_the_newest_outputs_are_shown_unless_another_step_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    shutil.copytree(run / "eval_outputs" / "step_00000500", run / "eval_outputs" / "step_00000090")
    shutil.copytree(run / "eval_outputs" / "step_00000500", run / "eval_outputs" / "step_00000500_other")
    assert page_of(run, tmp_path / "view.html")["facts"]["outputs"] == "step_00000500"
    assert page_of(run, tmp_path / "view.html", "--step", "90")["facts"]["outputs"] == "step_00000090"
    other = page_of(run / "eval_outputs" / "step_00000500_other", tmp_path / "view.html")
    assert other["facts"]["outputs"] == "step_00000500_other" and len(other["examples"]) == 6


def test_a_run_without_predictions_names_the_command(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    write_metrics(run)
    page = page_of(run, tmp_path / "view.html")
    assert page["examples"] == [] and len(page["curves"]) == 3
    saved = "save_outputs=[inputs,labels,puzzle_identifiers,predictions_at_step,q_halt_at_step]"
    words = shlex.split(page["command"])
    assert words[:2] == ["python", "evaluate.py"] and words[3:] == [saved]
    assert read_config("evaluate", words[2:3])["checkpoint"] == str(run), "the command can't be pasted"
    outputs = run / "eval_outputs" / "step_00000500"
    outputs.mkdir(parents=True)
    save_file({"rows": np.arange(2), "q_halt": np.zeros(2, np.float32)}, outputs / "all_rank0_0000.safetensors")
    assert "q_halt" in page_of(run, tmp_path / "view.html")["notes"][0]


def test_curves_need_no_dataset(tmp_path: Path) -> None:
    """Without saved answers the page draws no puzzle, so that the dataset may be damaged."""
    data = write_sudoku(tmp_path / "data", ["a puzzle"])
    run = write_run(tmp_path / "run", data)
    shutil.rmtree(run / "eval_outputs")
    assert page_of(run, tmp_path / "view.html")["facts"]["task"] == "Sudoku 2x2"
    (data / "test" / "all__inputs.npy").unlink()
    page = page_of(run, tmp_path / "view.html")
    assert len(page["curves"]) == 3 and "task" not in page["facts"]


def test_a_line_that_the_run_is_writing_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 510, "train/lm_l')
    assert page_of(run, tmp_path / "view.html")["curves"][0]["series"][0]["steps"][-1] == 500


def test_long_curves_are_thinned_to_means() -> None:
    values_N = np.random.default_rng(0).random(4001)
    thin = thinned([(10 * n, float(value)) for n, value in enumerate(values_N)])
    assert len(thin["steps"]) == len(thin["values"]) == MAX_POINTS
    assert thin["steps"][-1] == 40_000
    places = [0, *(step // 10 + 1 for step in thin["steps"])]
    for begin, end, mean in zip(places, places[1:], thin["values"], strict=False):
        assert mean == pytest.approx(values_N[begin:end].mean(), rel=1e-5)
    assert thinned([(1, float("inf"))]) == {"steps": [1], "values": [None]}


def test_arc_votes_come_with_the_tasks_own_pairs(tmp_path: Path) -> None:
    data, run = write_arc(tmp_path)
    page = page_of(run, tmp_path / "view.html")
    assert page["board"]["kind"] == "arc"
    first, second = page["votes"]
    assert first["task"] == "aaaa0000" and first["train"] == [[["12"], ["21"]]]
    (test,) = first["tests"]
    assert test["solution"] == ["21"] and (test["num_votes"], test["num_empty"]) == (9, 1)
    assert [one["right"] for one in test["candidates"]] == [True, False]
    assert second["tests"][0]["candidates"][0] == {"grid": ["33"], "count": 8, "confidence": 0.8, "right": False}
    shutil.rmtree(data)
    assert page_of(run, tmp_path / "view.html")["votes"][0]["train"] == []


# ---- several runs --------------------------------------------------------------------------------


def write_runs(folder: Path, data: Path) -> Path:
    """Write two seeds of a TRM, the second without answers, and an HRM that solves other puzzles.

    The TRM solves rows 0, 2 and 4 (NUM_WRONG_NT), the HRM solves rows 0 to 4 but row 1.
    """
    hrm = {"arch": {"name": "hrm", "no_ACT_continue": False}, "lr": 0.0002}
    for name, change in (("hrm", hrm), ("trm-0", {}), ("trm-1", {"seed": 1})):
        run = write_run(folder / name, data)
        config = json.loads((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(json.dumps(config | change))
    for file in (folder / "hrm" / OUTPUTS).glob("*.safetensors"):
        arrays = load_file(file)
        arrays["predictions_at_step"][arrays["rows"] == 3, -1] = SOLUTION_S
        save_file(arrays, file)
    shutil.rmtree(folder / "trm-1" / "eval_outputs")
    return folder


def test_runs_of_a_folder_are_compared(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", write_sudoku(tmp_path / "data"))
    page = page_of(runs, tmp_path / "view.html")
    assert page["kind"] == "runs" and [run["name"] for run in page["runs"]] == ["hrm", "trm-0", "trm-1"]
    differences = dict(page["differences"])
    assert differences["arch.name"] == ["hrm", "trm", "trm"] and differences["lr"] == ["0.0002", "0.001", "0.001"]
    assert differences["seed"] == ["0", "0", "1"], "a reader must see which seed a run has"
    (accuracy,) = [one for one in page["numbers"] if one["metric"] == "eval/all/exact_accuracy"]
    number = {"last": 0.5, "step": 500, "best": 0.5, "best_step": 500}
    assert accuracy == {"metric": "eval/all/exact_accuracy", "better": "max", "runs": [number] * 3}
    curve = page["curves"][0]
    assert curve["metric"] == "eval/all/exact_accuracy" and set(curve["over"]) == {"step", "seconds"}
    assert [(one["name"], "low" in one) for one in curve["over"]["step"]] == [
        ("arch=hrm lr=0.0002", False),
        ("arch=trm lr=0.001 (2 seeds)", True),
    ]
    assert page["answering"] == [0, 1] and page["sets"] == {"all": 6}
    assert [sorted(puzzle["runs"]) for puzzle in page["examples"]] == [["0", "1"]] * 6
    last = {run: tokens_of(answers["answers"][-1]) for run, answers in page["examples"][3]["runs"].items()}
    assert last["0"] == SOLUTION_S.tolist() != last["1"]
    labels = [run["label"] for run in page["runs"]]
    assert labels == ["arch=hrm lr=0.0002", "arch=trm lr=0.001, seed 0", "arch=trm lr=0.001, seed 1"]


def write_mixed_runs(folder: Path) -> Path:
    """Write an HRM and two seeds of a TRM. The HRM comes first.

    The HRM has final answers only, evaluated on fewer examples. Its config has a long key and a
    long value. The lower edge of the seeds' band is zero: the second seed has solved nothing.
    """
    runs = write_runs(folder, folder / "data")
    config = json.loads((runs / "hrm" / "config.yaml").read_text())
    config["arch"] |= {"puzzle_emb_weight_decay_of_every_layer": 1}
    config["data_paths"] = ["/a/long/way/to/the/data/sudoku-extreme-1k-aug-1000-hard"]
    (runs / "hrm" / "config.yaml").write_text(json.dumps(config))
    for file in (runs / "hrm" / OUTPUTS).glob("*.safetensors"):
        arrays = load_file(file)
        arrays["predictions"] = np.ascontiguousarray(arrays.pop("predictions_at_step")[:, -1])
        del arrays["q_halt_at_step"]
        save_file(arrays, file)
    results = runs / "hrm" / OUTPUTS / "results.json"
    of_three = json.loads(results.read_text()) | {"num_examples": {"all": 3}}
    of_three["metrics"] |= {"eval/all/num_examples": 3, "eval/all/exact_accuracy": 0.6667}
    results.write_text(json.dumps(of_three))
    metrics = runs / "trm-1" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row | {name: 0 for name in row if name.endswith("exact_accuracy")} for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return runs


def test_each_evaluation_names_its_data_and_its_number_of_examples(tmp_path: Path) -> None:
    page = page_of(write_mixed_runs(tmp_path / "runs"), tmp_path / "view.html")
    of_data = {"data": "data"}
    assert page["evaluated"] == [{**of_data, "num_examples": {"all": num}} for num in (3, 6)] + [None]
    assert [row["metric"] for row in page["results"]] == ["eval/all/exact_accuracy", "eval/all/lm_loss"]


def test_runs_of_a_folder_without_answers_are_told_with_the_command(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", write_sudoku(tmp_path / "data"))
    said = view.view([str(runs), "-o", str(tmp_path / "view.html")]).splitlines()
    command = f"python view.py {runs / 'hrm'} {runs / 'trm-0'} {runs / 'trm-1'} -o {tmp_path / 'view.html'}"
    assert said[0] == f"1 run has no saved answers; this makes them: {command}"


def test_a_folder_of_one_run_shows_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets answers and pictures, as the run itself would."""
    run = write_run(tmp_path / "project" / "run", None)
    shutil.rmtree(run / "eval_outputs")
    (run / "step_00000500").mkdir()
    monkeypatch.setattr("viewer.answers._evaluate", lambda typed: "the dataset is gone")
    for paths in ([run.parent], [run, run]):
        said = view.view([*map(str, paths), "-o", str(tmp_path / "view.html"), "--png"]).splitlines()
        assert said[:2] == [f"{run} has no answers on its page: the dataset is gone", f"drew {run / 'curve.png'}"]
        assert shown(tmp_path / "view.html")["title"] == "run"


def test_columns_of_runs_name_their_seed_or_three_keys(tmp_path: Path) -> None:
    for name, change in (("s0", {}), ("s1", {"seed": 1})):
        run = write_run(tmp_path / "runs" / name, None)
        config = json.loads((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(json.dumps(config | change))
    page = page_of(tmp_path / "runs", tmp_path / "view.html")
    assert [run["label"] for run in page["runs"]] == ["seed 0", "seed 1"], "a column is one run with one seed"
    other = {"lr": 0.002, "lr_min_ratio": 0.5, "epochs": 7, "global_batch_size": 9, "lr_warmup_steps": 3}
    (tmp_path / "runs" / "s1" / "config.yaml").write_text(json.dumps(config | other))
    labels = [run["label"] for run in page_of(tmp_path / "runs", tmp_path / "view.html")["runs"]]
    assert all(label.count("=") == 3 and " more" in label for label in labels), labels


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


def test_the_compared_runs_show_the_puzzles_that_all_have_answered(tmp_path: Path) -> None:
    """One run has answers to all puzzles, the other to three of them."""
    one, other = (write_run(tmp_path / name, None) for name in ("one", "other"))
    (other / OUTPUTS / "all_rank0_0000.safetensors").unlink()
    view.view([str(one), str(other), "-o", str(tmp_path / "view.html"), "--max-examples", "2"])
    examples = shown(tmp_path / "view.html")["examples"]
    assert [(example["row"], sorted(example["runs"])) for example in examples] == [(1, ["0", "1"]), (5, ["0", "1"])]


def test_runs_are_compared_by_the_names_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_runs(tmp_path / "runs", write_sudoku(tmp_path / "data"))
    for run, names in (("hrm", ("best", "latest")), ("trm-0", ("best",))):
        (runs / run / "step_00000500").mkdir()
        for name in names:
            (runs / run / name).write_text("step_00000500\n")
    output = str(tmp_path / "view.html")
    view.view([str(runs / "hrm"), str(runs / "trm-0"), "-o", output])
    expected = shown(tmp_path / "view.html")
    for named in ("best", "step_00000500"):
        view.view([str(runs / "hrm" / named), str(runs / "trm-0" / named), "-o", output])
        assert shown(tmp_path / "view.html") == expected
    assert capsys.readouterr().err == ""
    view.view([str(runs / "hrm" / "best"), str(runs / "trm-0"), "-o", output])
    assert shown(tmp_path / "view.html") == expected
    assert "the paths name different steps" in capsys.readouterr().err
    assert "name a step; give one of them" in mistake(capsys, runs / "hrm" / "best", runs / "trm-0", "--step", "500")


def test_only_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = write_run(tmp_path / "run", None), write_sudoku(tmp_path / "data")
    assert "data is no run, and only runs are compared" in mistake(capsys, run, data)
    assert "watch.py ... --plot curves.png" in mistake(capsys, run, write_run(tmp_path / "other", None), "--png")


def test_runs_of_different_steps_are_told_apart(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", write_sudoku(tmp_path / "data"))
    outputs = runs / "hrm" / "eval_outputs"
    (outputs / "step_00000500").rename(outputs / "step_00000400")
    (runs / "hrm" / "step_00000500").mkdir()
    said = view.view([str(runs), "-o", str(tmp_path / "view.html")]).splitlines()
    older = f"the page shows the answers of {runs / 'hrm'} at step 400, but its newest checkpoint is step 500"
    assert older in said and said[2].startswith("this makes the answers of the newest checkpoints: python view.py")
    page = shown(tmp_path / "view.html")
    assert [run["step"] for run in page["runs"]] == [400, 500, None]
    note = "The answers and the evaluations are of different training steps: hrm at 400, trm-0 at 500."
    assert page["notes"] == [note]


def test_a_branch_names_the_run_that_it_went_on_from(tmp_path: Path) -> None:
    """The configs say nothing about the values with which the parent has trained."""
    for name, resume in (("one", "runs/parent/best"), ("own", str(tmp_path / "runs" / "own")), ("auto", "auto")):
        run = write_run(tmp_path / "runs" / name, None)
        config = json.loads((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(json.dumps(config | {"resume": resume, "started_in": str(tmp_path)}))
    page = page_of(tmp_path / "runs", tmp_path / "view.html")
    assert page["differences"] == []
    assert dict(zip((run["name"] for run in page["runs"]), page["branched"], strict=True)) == {
        "auto": None,
        "one": "runs/parent/best",
        "own": None,
    }


# ---- answers that are not saved yet --------------------------------------------------------------


def test_answers_of_an_older_step_are_not_taken_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run went on after view.py had saved its answers."""
    run = write_run(tmp_path / "run", None)
    for step in ("step_00000500", "step_00000600"):
        (run / step).mkdir()
    output = tmp_path / "view.html"
    monkeypatch.setattr("viewer.answers._evaluate", lambda typed: "the dataset is gone")
    said = view.view([str(run), "-o", str(output)]).splitlines()[0]
    older = f"the page shows the answers of {run} at step 500, but its newest checkpoint is step 600"
    assert said == f"{older}: the dataset is gone"
    assert shown(output)["facts"]["outputs"] == "step_00000500"
    capsys.readouterr()

    def evaluate(typed: list[str]) -> None:
        folder = Path(typed[-1].removeprefix("out=").strip("'"))
        shutil.copytree(run / OUTPUTS, folder, dirs_exist_ok=True)
        results = (folder / "results.json").read_text()
        (folder / "results.json").write_text(results.replace("step_00000500", "step_00000600"))

    monkeypatch.setattr("viewer.answers._evaluate", evaluate)
    assert page_of(run, output)["facts"]["outputs"] == "step_00000600"
    assert f"{run} has no saved answers of step 600; its model answers" in capsys.readouterr().err
    monkeypatch.setattr("viewer.answers._evaluate", lambda typed: pytest.fail("a model answered puzzles again"))
    assert page_of(run, output)["step"] == 600 and page_of(run, output, "--step", "500")["step"] == 500


def test_a_run_without_answers_gets_them_from_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results of a whole evaluation stay: those of a few puzzles must not replace them."""
    run = write_run(tmp_path / "my run", None)
    answers = tmp_path / "answers"
    (run / OUTPUTS).rename(answers)
    (run / "step_00000500").mkdir()
    commands: list[list[str]] = []

    def evaluate(typed: list[str]) -> None:
        commands.append(typed)
        shutil.copytree(answers, typed[-1].removeprefix("out=").strip("'"), dirs_exist_ok=True)

    monkeypatch.setattr("viewer.answers._evaluate", evaluate)
    (run / OUTPUTS).mkdir(parents=True)
    whole = (answers / "results.json").read_text().replace('"all": 6', '"all": 999')
    (run / OUTPUTS / "results.json").write_text(whole)
    page = page_of(run, tmp_path / "view.html", "--max-examples", "4")
    assert len(page["examples"]) == 4 and page["results"]["num_examples"] == {"all": 999}
    saved = f"save_outputs={SAVE_OUTPUTS}"
    assert commands[0][:3] == [f"checkpoint={run}", saved, "max_examples=4"]
    told = capsys.readouterr().err
    assert (
        f"{run} has no saved answers of step 500; its model answers up to 4 puzzles" in told
        and "python evaluate.py" in told
    )
    assert [path.name for path in (run / "eval_outputs").iterdir()] == ["step_00000500"], "no temporary folder is left"
    page_of(run, tmp_path / "view.html")
    assert len(commands) == 1, "answers that are there must not be made again"


def test_saved_outputs_without_answers_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be the work of hours. One rank of two has answers: the page would have none."""
    run = write_run(tmp_path / "run", None)
    (run / "step_00000500").mkdir()
    file = run / OUTPUTS / "all_rank1_0000.safetensors"
    save_file({"rows": np.arange(3), "predictions": np.zeros((3, 16), np.uint8)}, file)
    before = {path: path.read_bytes() for path in (run / OUTPUTS).iterdir()}
    monkeypatch.setattr("viewer.answers._evaluate", lambda typed: pytest.fail("a model answered puzzles"))
    said = view.view([str(run), "-o", str(tmp_path / "view.html")]).splitlines()[0]
    assert said.startswith(f"{run} has no answers on its page: {run / OUTPUTS} holds outputs without the puzzles")
    assert said.endswith(
        f"python evaluate.py checkpoint={run} 'save_outputs={SAVE_OUTPUTS}' max_examples=200 out=answers"
    )
    assert {path: path.read_bytes() for path in (run / OUTPUTS).iterdir()} == before


def test_a_read_only_run_without_answers_keeps_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", None)
    shutil.rmtree(run / "eval_outputs")
    (run / "step_00000500").mkdir()
    mkdir = Path.mkdir

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        if path.parent == run:  # permissions do not bind root, as which tests may run
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    said = view.view([str(run), "-o", str(tmp_path / "view.html")]).splitlines()[0]
    reason = f"{run / 'eval_outputs'} can't be written (Permission denied)"
    assert said.startswith(f"{run} has no answers on its page: {reason}; this saves answers in another folder")
    assert said.endswith("out=answers") and len(shown(tmp_path / "view.html")["curves"]) == 3


def test_what_evaluate_says_is_passed_on_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; print('a table'); print('a warning', file=sys.stderr); sys.exit('error: ' + sys.argv[1])"
    monkeypatch.setattr("viewer.answers.started", lambda command: [sys.executable, "-c", script])
    assert answers._evaluate(["the dataset is gone"]) == "the dataset is gone"
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == ["a warning", "error: the dataset is gone"]


def test_a_run_whose_model_cannot_answer_keeps_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", None)
    shutil.rmtree(run / "eval_outputs")
    (run / "step_00000500").mkdir()
    monkeypatch.setattr("viewer.answers._evaluate", lambda typed: "the dataset is gone")
    said = view.view([str(run), "-o", str(tmp_path / "view.html")])
    assert said.splitlines()[0] == f"{run} has no answers on its page: the dataset is gone"
    assert len(shown(tmp_path / "view.html")["curves"]) == 3


# ---- pictures ------------------------------------------------------------------------------------


def colours_of(file: Path) -> set[str]:
    """Return the colours of a picture, which must show more than a background."""
    image = matplotlib.image.imread(file)
    assert min(image.shape[:2]) > 150
    colours, counts = np.unique(
        np.round(image[:, :, :3] * 255).astype(np.uint8).reshape(-1, 3), axis=0, return_counts=True
    )
    assert len(colours) > 20 and counts.max() < 0.99 * counts.sum()
    return {f"#{bytes(colour).hex()}" for colour in colours}


def write_other_run(run: Path, inputs_NS: np.ndarray, labels_NS: np.ndarray, wrong: int) -> Path:
    """Write a run with two steps.

    At the first step the first labelled cell is wrong. At the second step all cells are right.
    """
    outputs = run / "eval_outputs" / "step_00000500"
    outputs.mkdir(parents=True)
    write_metrics(run)
    answers_NTS = np.stack([labels_NS, labels_NS], axis=1).clip(0).astype(np.int32)
    answers_NTS[:, 0, labels_NS[0].nonzero()[0][0]] = wrong
    arrays: dict[str, np.ndarray] = {"rows": np.arange(len(inputs_NS)), "inputs": inputs_NS.astype(np.int32)}
    arrays |= {"labels": labels_NS.astype(np.int32), "predictions_at_step": answers_NTS}
    save_file(arrays, outputs / "all_rank0_0000.safetensors")
    return run


def write_undrawn(folder: Path) -> tuple[Path, Path]:
    """Write a dataset of `UndrawnTask`, and a run on it.

    At the first step of the run, one cell of every answer is wrong.
    """
    inputs_NS = np.random.default_rng(0).integers(1, 3, (2, 25))
    labels_NS = inputs_NS + 2
    data = write_dataset(folder / "undrawn", inputs_NS, labels_NS, 5, ["<blank>"])
    return data, write_other_run(folder / "undrawn_run", inputs_NS, labels_NS, wrong=2)


def write_any_run(folder: Path, kind: str) -> Path:
    """Write a run on a kind of board.

    The run has no dataset, so that the tokens decide the kind.
    """
    if kind == "sudoku":
        return write_run(folder, None)
    if kind == "maze":
        pairs = [next(iter(maze.generate(1, 6, np.random.default_rng(0))))]
        question_S, answer_S = pairs[0]
        return write_other_run(folder, question_S[None], answer_S[None], wrong=5 if answer_S[0] != 5 else 2)
    if kind == "arc":
        grid = np.array([[1, 2, 3], [3, 4, 5]], np.uint8)
        tokens_S = to_tokens(grid)[None].astype(np.int64)
        return write_other_run(folder, tokens_S, np.where(tokens_S == 0, -100, tokens_S), wrong=9)
    return write_other_run(folder, np.arange(50)[None], np.arange(50)[None] * 3, wrong=88)


# For each kind of board: colours that only this kind has, or that mark its wrong cells.
MARKS = {
    "sudoku": {pictures._WRONG_GROUND},
    "maze": {pictures._MAZE_GROUNDS[1], pictures._MAZE_GROUNDS[5], RED},
    "arc": {pictures._ARC_GROUNDS[3], RED},
    "numbers": {pictures._WRONG_GROUND},
}


@pytest.mark.parametrize("kind", MARKS)
def test_pictures_of_a_run_of_every_kind(tmp_path: Path, kind: str) -> None:
    run = write_any_run(tmp_path / "run", kind)
    said = view.view([str(run), "-o", str(tmp_path / "view.html"), "--png"])
    assert shown(tmp_path / "view.html")["board"]["kind"] == kind
    assert said.splitlines()[:2] == [f"drew {run / 'curve.png'}", f"drew {run / 'puzzle.png'}"]
    assert said.splitlines()[2].startswith(f"wrote {tmp_path / 'view.html'}")
    assert BLUE in colours_of(run / "curve.png")
    assert colours_of(run / "puzzle.png") >= MARKS[kind]


def test_a_picture_of_tokens_says_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", (UndrawnTask,))
    notes: list[str] = []
    draw_boards = pictures.draw_boards

    def record(shape: Any, boards: Any, title: str, note: str, path: Path, *, in_pairs: bool) -> None:
        notes.append(note)
        draw_boards(shape, boards, title, note, path, in_pairs=in_pairs)

    monkeypatch.setattr("dataset.pictures.draw_boards", record)
    monkeypatch.setattr("viewer.pictures.draw_boards", record)
    data, run = write_undrawn(tmp_path)
    page_of(run, tmp_path / "view.html", "--png")
    page_of(data, tmp_path / "view.html", "--png")
    assert colours_of(run / "puzzle.png") >= MARKS["numbers"]
    names = "0: padding, 1: dark, 2: lit, 3: leave, 4: press"
    assert notes == [f"bold: as in the puzzle, blue: the model's, red: wrong\n{names}", names]


def drawn_boards(monkeypatch: pytest.MonkeyPatch, run: Path, output: Path) -> tuple[str, list[pictures.Board]]:
    """Return the title and the boards of a run's puzzle.png."""
    figures: list[tuple[str, list[pictures.Board]]] = []

    def record(shape: object, boards: list[pictures.Board], title: str, *_: object, **__: object) -> None:
        figures.append((title, boards))

    monkeypatch.setattr("dataset.pictures.draw_boards", record)
    page_of(run, output, "--png")
    return figures[0]


def test_the_solved_puzzle_with_the_most_changes_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", None)
    title, boards = drawn_boards(monkeypatch, run, tmp_path / "view.html")
    assert title == "run: row 4 of all"
    assert [board.title.split("\n")[0] for board in boards] == [
        "puzzle",
        *(f"step {t + 1}: {16 - num_wrong} of 16 right" for t, num_wrong in enumerate(NUM_WRONG_NT[4])),
    ]
    assert boards[1].title.endswith("\nhalting confidence 5%")
    marked = [int(board.wrong_RC.sum()) for board in boards if board.wrong_RC is not None]
    assert marked == NUM_WRONG_NT[4]
    givens = [{s for s, cell in enumerate(board.cells_RC.flat) if cell.is_given} for board in boards]
    assert givens == [set(GIVEN)] * 5


def keep_rows(run: Path, rows: list[int]) -> None:
    """Remove all other rows from a run's saved outputs."""
    for file in (run / OUTPUTS).glob("*.safetensors"):
        arrays = load_file(file)
        keep = np.isin(arrays["rows"], rows)
        file.unlink()
        if keep.any():
            save_file({name: np.ascontiguousarray(array[keep]) for name, array in arrays.items()}, file)


def test_a_failed_puzzle_that_the_steps_mend_comes_before_one_that_is_solved_at_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    keep_rows(run, [0, 1, 3, 5])
    page = page_of(run, tmp_path / "view.html")
    assert page["examples"][page["opens"]]["row"] == 5


def test_a_picture_leaves_out_steps_without_changes_and_has_the_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only row 3 is kept. It is not solved, and its answer never changes."""
    run = write_run(tmp_path / "run", None)
    keep_rows(run, [3])
    title, boards = drawn_boards(monkeypatch, run, tmp_path / "view.html")
    assert title == "run: row 3 of all"
    titles = [board.title.split("\n")[0] for board in boards]
    assert titles == ["puzzle", "step 1: 12 of 16 right", "step 4: 12 of 16 right", "solution"]
    assert [cell.text for cell in boards[-1].cells_RC.flat] == [str(token - 1) for token in SOLUTION_S]


def test_an_arc_board_is_cropped_to_the_solution_and_the_wrong_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_any_run(tmp_path / "run", "arc")
    _, boards = drawn_boards(monkeypatch, run, tmp_path / "view.html")
    assert [board.cells_RC.shape for board in boards] == [(2, 3)] * 3
    assert [board.title for board in boards[1:]] == ["step 1: 5 of 6 right", "step 2: 6 of 6 right"]


def test_without_saved_outputs_the_curve_is_drawn_and_the_command_named(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    said = view.view([str(tmp_path), "-o", str(tmp_path / "view.html"), "--png"]).splitlines()
    assert said[0] == f"drew {tmp_path / 'curve.png'}" and not (tmp_path / "puzzle.png").exists()
    command = f"python evaluate.py checkpoint={tmp_path} "
    assert said[1].startswith(f"{tmp_path / 'puzzle.png'} needs saved outputs") and command in said[1]


def test_the_picture_of_a_dataset_is_written_beside_the_page(tmp_path: Path) -> None:
    """A picture in the dataset folder would keep a builder from replacing the folder."""
    data = write_sudoku(tmp_path / "$data", ["<blank>"], group_size=3)
    before = sorted(data.rglob("*"))
    said = view.view([str(data), "-o", str(tmp_path / "page.html"), "--png"])
    assert said.startswith(f"drew {tmp_path / 'page.png'}\n")
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
    (run / "curve.png").symlink_to(tmp_path / "elsewhere")
    said = mistake(capsys, run, "-o", output, "--png")
    assert f"wrote {output}, but not all pictures: " in said and "curve.png is a link" in said
    assert len(shown(output)["examples"]) == 6, "a page must not be lost for want of a picture"
    assert list(tmp_path.rglob("*.png")) == [run / "curve.png"] and not (tmp_path / "elsewhere").exists()


# ---- mistakes ------------------------------------------------------------------------------------


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Return the one line with which a command is refused."""
    assert run_program(view.view, [str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    line = printed.err
    assert line.startswith("error: ") and line.endswith("\n") and line.count("\n") == 1
    return line


def test_paths_and_options_that_fit_neither_a_run_nor_a_dataset_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no folder" in mistake(capsys, tmp_path / "missing")
    assert "there is no checkpoint at" in mistake(capsys, tmp_path)
    (tmp_path / "it's.pt").touch()
    assert f"""evaluate.py "checkpoint='{tmp_path}/it\\'s.pt'" out=DIR""" in mistake(capsys, tmp_path / "it's.pt")
    data = write_sudoku(tmp_path / "data")
    assert "--step is for runs" in mistake(capsys, data, "--step", "3")
    assert "has no set other; it has train/all, test/all" in mistake(capsys, data, "--set", "other")
    assert "--max-examples is 0" in mistake(capsys, data, "--max-examples", "0")
    assert "--max" in mistake(capsys, data, "--max", "3")
    (data / "test" / "all__labels.npy").write_bytes(b"nothing")
    assert "all__labels.npy" in mistake(capsys, data)


OUTPUTS = "eval_outputs/step_00000500"


@pytest.mark.parametrize(
    "file, contents, expected",
    [
        ("metrics.jsonl", b"", "is empty"),
        ("metrics.jsonl", b'{"step": 1}\n[1]\n{"step": 2}\n', ":2: is no JSON object"),
        ("config.yaml", b"a: [", "cannot be read"),
        ("config.yaml", b"- a", "is no config of a run"),
        (f"{OUTPUTS}/results.json", b"{", "no JSON"),
        (f"{OUTPUTS}/results.json", b'{"metrics": 3}', "isn't what evaluate.py writes"),
        (f"{OUTPUTS}/arc_votes.json", b'{"a": [{}]}', "isn't what evaluation writes"),
        (f"{OUTPUTS}/all_rank1_0000.safetensors", b"\x10", "is damaged"),
    ],
)
def test_a_damaged_run_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, contents: bytes, expected: str
) -> None:
    run, output = write_run(tmp_path / "run", None), tmp_path / "view.html"
    output.write_text("the page before")
    (run / file).write_bytes(contents)
    line = mistake(capsys, run, "-o", output)
    assert str(run / file) in line and expected in line
    assert output.read_text() == "the page before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "view.html"]


def test_missing_outputs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", None)
    assert "has no outputs of step 3, but of: 500" in mistake(capsys, run, "--step", "3")
    assert "has no set other; it has all" in mistake(capsys, run, "--set", "other")


def test_arrays_that_contradict_one_another_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", None)
    file = run / "eval_outputs" / "step_00000500" / "all_rank0_0000.safetensors"
    arrays = load_file(file)
    save_file({**arrays, "labels": arrays["labels"][:2]}, file)
    assert "labels has shape (2, 16)" in mistake(capsys, run)
    save_file({**arrays, "labels": arrays["labels"][0]}, file)
    assert "labels has shape (16,), but 2 axes" in mistake(capsys, run)


def test_a_page_in_a_missing_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model answers puzzles for it, which takes long."""
    run = write_run(tmp_path / "run", None)
    shutil.rmtree(run / "eval_outputs")
    (run / "step_00000500").mkdir()
    monkeypatch.setattr("viewer.answers._evaluate", lambda typed: pytest.fail("a model answered puzzles"))
    output = tmp_path / "no" / "view.html"
    assert f"there is no folder {output.parent}" in mistake(capsys, run, "-o", output)


def test_pictures_of_a_read_only_run_lie_beside_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", None)
    monkeypatch.setattr("view.os.access", lambda path, mode: path != run)
    (tmp_path / "pages").mkdir()
    said = view.view([str(run), "-o", str(tmp_path / "pages" / "v.html"), "--png"])
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["v.html", "v_curve.png", "v_puzzle.png"]
    assert f"drew {tmp_path / 'pages' / 'v_curve.png'}" in said and not list(run.glob("*.png"))


def test_the_title_may_be_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    folder, link = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "link"
    write_sudoku(folder)
    link.symlink_to(folder)
    view.view([str(link), "-o", str(tmp_path / "view.html")])
    assert "<title>caf?" in (tmp_path / "view.html").read_text(encoding="utf-8")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        view.view(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "--max-examples" in text and "python evaluate.py checkpoint=" in text
    write_sudoku(tmp_path / "data")
    command = [sys.executable, str(REPOSITORY / "view.py"), "data"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("wrote view.html") and (tmp_path / "view.html").is_file()


# ---- in a browser --------------------------------------------------------------------------------


class Browser:
    """Chromium without a window and without a network."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, page: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._driver.get(f"file://{page}")
        self.wait("document.documentElement.dataset.ready === 'true'")

    def run(self, script: str) -> Any:
        return self._driver.execute_script(script)

    def get(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self._driver, 20, 0.02).until(lambda _: self.get(condition), condition)

    def text(self, selector: str) -> str:
        return str(self.get(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Click on an element. Selenium refuses to click on an invisible element."""
        from selenium.webdriver.common.by import By

        self._driver.find_element(By.CSS_SELECTOR, selector).click()

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self._driver).send_keys(*keys).perform()

    def picture(self, selector: str = "#board") -> str:
        return str(self.get(f"document.querySelector({json.dumps(selector)}).toDataURL()"))

    def drawn_texts(self) -> set[str]:
        """Draw all boards twice again, thumbnails included, and return the texts in their cells."""
        draws = "CanvasRenderingContext2D.prototype.fillText"
        self.run(f"window.texts = []; {draws} = function (text) {{ window.texts.push(text) }}")
        self.keys("t", "t")
        return set(self.get("window.texts"))

    def num_lines(self, text: str) -> int:
        """Return over how many lines the first text node of a table that is `text` runs."""
        find = "document.createNodeIterator(document.querySelector('#panel-compare'), NodeFilter.SHOW_TEXT)"
        loop = f"const all = {find}; for (let n; (n = all.nextNode()); ) if (n.data === {json.dumps(text)})"
        lines = "{ const r = new Range(); r.selectNode(n); return r.getClientRects().length }"
        return int(self.run(f"{loop} {lines} return 0"))

    def choose(self, select: str, value: str) -> None:
        change = "dispatchEvent(new Event('change'))"
        self.run(f"const e = document.querySelector('{select}'); e.value = {json.dumps(value)}; e.{change}")

    def cell_title(self, selector: str, columns: int, row: int, column: int) -> str:
        """Return the tooltip of a cell."""
        at = f"{{offsetX: ({column} + .5) * c, offsetY: ({row} + .5) * c}}"
        canvas = f"const e = document.querySelector('{selector}'); const c = e.clientWidth / {columns}; "
        return str(self.run(f"{canvas} e.onpointermove({at}); return e.title"))

    def rows(self) -> list[int]:
        """Return the rows in the list, in their order."""
        texts = self.get("[...document.querySelectorAll('#items .item b')].map((b) => b.textContent)")
        return [int(text.split()[-1]) for text in texts]

    def overflow(self) -> int:
        """Return the number of pixels by which the page is wider than the screen."""
        return int(self.get("document.documentElement.scrollWidth - window.innerWidth"))

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        return list(self.get("performance.getEntriesByType('resource').map((entry) => entry.name)"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium isn't installed")
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("chromium and chromedriver (Debian: chromium, chromium-driver) aren't installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield Browser(driver)
    driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Return a browser. A test must leave no error in the console and fetch nothing."""
    chromium.errors()
    yield chromium
    assert chromium.errors() == []
    assert chromium.requests() == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a page of each kind of run and dataset."""
    folder = tmp_path_factory.mktemp("pages")
    data = write_sudoku(folder / "sudoku", ["<blank>", EVIL], group_size=3)
    names = ["<blank>", EVIL, *(f"puzzle {n}" for n in range(2, 6))]
    run = write_run(folder / "run", write_sudoku(folder / "named", names))
    arc_data, arc_run = write_arc(folder / "both")
    bare = folder / "bare"
    bare.mkdir()
    write_metrics(bare)
    other = write_dataset(folder / "numbers", np.arange(50)[None] % 7, np.arange(50)[None] % 5, 100, ["<blank>"])
    undrawn, undrawn_run = write_undrawn(folder)
    sources = {"data": data, "run": run, "arc_data": arc_data, "arc_run": arc_run, "bare": bare, "other": other}
    sources |= {"text": write_text(folder / "text"), "text_run": write_text_run(folder / "text_run")}
    for name in ("a", "b"):
        write_text_run(folder / "text_runs" / name)
    sources["text_runs"] = folder / "text_runs"
    sources |= {"undrawn": undrawn, "undrawn_run": undrawn_run}
    sources |= {"runs": write_runs(folder / "runs", folder / "named"), "mixed": write_mixed_runs(folder / "mixed")}
    outputs = {name: folder / f"{name}.html" for name in sources}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TASKS", (*tasks.TASKS[:-1], UndrawnTask))
        for name, source in sources.items():
            page_of(source, outputs[name])
    return outputs


def test_reasoning_plays_and_can_be_stepped_through(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    assert browser.text("#heading") == "Row 4", "the page must open with the row of puzzle.png"
    assert "solved from step 4" in browser.text("#verdict") and "step 1 of 4 · 3 wrong" in browser.text("#said")
    browser.click("#items li:nth-of-type(2) .item")
    assert browser.text("#heading") == "Row 1" and "1 wrong cell in the end" in browser.text("#verdict")
    # The model is confident at step 3 too, but its answer has just changed.
    assert "Halts at step 4" in browser.text("#confidence-card")
    browser.click("#last")
    assert "step 4 of 4 · nothing changed · 1 wrong · confidence 0.95" in browser.text("#said")
    browser.click("#first")
    assert browser.get("document.querySelector('#slider').value") == "0"
    pictures = [browser.picture()]
    for step, said in enumerate(["3 wrong", "1 cell changed · 2 wrong", "1 cell changed · 1 wrong"], start=1):
        browser.click("#forward")
        assert f"step {step} of 4 · {said}" in browser.text("#said")
        pictures.append(browser.picture())
    assert len(set(pictures)) == 4, "two steps show the same board"
    assert "would halt here" not in browser.text("#said")
    browser.click("#forward")
    assert "would halt here" in browser.text("#said")
    browser.click("#back")
    browser.click("#back")
    assert browser.picture() == pictures[2]

    browser.choose("#speed", "250")
    browser.click("#first")
    browser.click("#play")
    assert browser.get("document.querySelector('#play').ariaLabel") == "Pause"
    browser.wait("document.querySelector('#slider').value === '4'")
    browser.wait("document.querySelector('#play').ariaLabel === 'Play'")
    browser.click("#play")  # starts from the beginning, and is paused below
    browser.wait("document.querySelector('#slider').value === '1'")
    browser.click("#play")
    assert browser.get("document.querySelector('#play').ariaLabel") == "Play"
    assert browser.get("document.querySelector('#slider').value") in ("1", "2")


def test_filters_order_and_search_change_the_list(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    assert browser.rows() == [0, 1, 2, 3, 4, 5]
    browser.click("#filter [data-value=solved]")
    assert browser.rows() == [0, 2, 4]
    browser.choose("#sort", "slowest")
    assert browser.rows() == [4, 2, 0]
    browser.click("#items .item")
    assert browser.text("#heading") == "Row 4" and "solved from step 4 on" in browser.text("#verdict")
    browser.click("#filter [data-value=unsolved]")
    assert browser.text("#heading") == "Row 5", "the filter must select the first row that remains"
    browser.choose("#sort", "most")
    assert browser.rows() == [3, 5, 1]
    browser.choose("#sort", "fewest")
    assert browser.rows() == [1, 5, 3]
    browser.click("#filter [data-value=all]")
    browser.click("#search")
    browser.keys("puzzle 3")
    assert browser.rows() == [3] and browser.text("#heading") == "Row 3"
    browser.run("document.querySelector('#search').value = ''")
    browser.keys("9")
    assert browser.rows() == [] and "Nothing matches" in browser.text("#count")


def test_the_keyboard_can_do_everything(browser: Browser, pages: dict[str, Path]) -> None:
    from selenium.webdriver import Keys

    browser.open(pages["run"])
    browser.keys("k", Keys.ARROW_UP, Keys.ARROW_UP, "j")
    assert browser.text("#heading") == "Row 2"
    browser.keys(Keys.HOME)
    assert "4 reasoning steps to come" in browser.text("#said")
    browser.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert "step 1 of 4 · 2 wrong" in browser.text("#said")
    browser.run("document.querySelector('#slider').focus()")
    browser.keys(Keys.ARROW_RIGHT)
    assert "step 2 of 4" in browser.text("#said"), (
        "the arrow must move one step, not one for the slider and one for the player"
    )
    browser.keys("h")
    assert "step 4 of 4" in browser.text("#said")
    browser.keys(Keys.END)
    assert "step 4 of 4" in browser.text("#said")
    browser.keys(" ")
    assert browser.get("document.querySelector('#play').ariaLabel") == "Pause"
    browser.keys(" ")
    assert browser.get("document.querySelector('#play').ariaLabel") == "Play"
    browser.keys("f")
    assert browser.rows() == [0, 2, 4]
    browser.keys("/")
    assert browser.get("document.activeElement.id") == "search"
    browser.keys("4j")
    assert browser.text("#heading") == "Row 4", "letters in the search field must be text"
    browser.keys(Keys.ESCAPE)
    browser.keys("?")
    assert browser.get("document.querySelector('#keys').open")
    assert "play and pause" in browser.text("#keys")
    browser.keys(Keys.ESCAPE)
    assert not browser.get("document.querySelector('#keys').open")
    browser.run("document.querySelector('#tab-examples').focus()")
    browser.keys(Keys.ARROW_RIGHT)
    assert browser.get("document.activeElement.id") == "tab-curves"
    assert browser.get("document.activeElement.matches(':focus-visible')")
    browser.keys(Keys.ARROW_LEFT)
    assert browser.get("document.activeElement.id") == "tab-examples"
    assert "steps to come" in browser.text("#said"), "arrows on the tabs must not move the player"


def test_a_name_that_looks_like_a_script_is_text(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    browser.keys("k", "k", "k")
    assert browser.get("document.title") == "run"
    assert EVIL in browser.get("document.querySelector('#verdict').textContent")
    assert browser.get("document.querySelectorAll('img').length") == 0


def test_dark_and_light(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    dark, board = browser.get(background), browser.picture()
    assert browser.get("document.querySelector('#theme').ariaPressed") == "true"
    browser.click("#theme")
    light = browser.get(background)
    assert light != dark and browser.picture() != board
    browser.open(pages["run"], dark=True)
    assert browser.get(background) == light, "the chosen theme was not kept"
    browser.keys("t")
    assert browser.get(background) == dark
    browser.run("localStorage.clear()")
    browser.open(pages["run"])
    assert browser.get(background) == light, "without a choice the theme must be that of the system"


SMALL = (
    "[...document.querySelectorAll('button, select, input')].filter((e) => e.checkVisibility()).filter((e) => "
    "{ const r = e.getBoundingClientRect(); return r.height < 39.5 || r.width < 39.5 }).map((e) => e.id || e.outerHTML)"
)
UNNAMED = (
    "[...document.querySelectorAll('button, select, input, canvas[role=img]')].filter((e) => "
    "!(e.ariaLabel || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)"
)


@pytest.mark.parametrize(
    "name", ["run", "data", "arc_run", "arc_data", "bare", "other", "undrawn_run", "runs", "mixed"]
)
def test_a_phone_shows_every_view(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], width=360, height=740)
    for tab in browser.get("[...document.querySelectorAll('[role=tab]')].map((tab) => tab.id)"):
        browser.run(f"document.querySelector('#{tab}').click()")
        assert browser.overflow() == 0, tab
        assert browser.get(SMALL) == [], tab
        assert browser.get(UNNAMED) == [], tab


def test_long_keys_leave_room_for_the_runs_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["mixed"], width=360, height=740)
    names = "[...document.querySelectorAll('.scroll tr > :first-child')].map((e) => e.getBoundingClientRect().width)"
    assert max(browser.get(names)) < 150, "the columns of the runs are hidden"
    browser.run("document.querySelector('#tab-curves').click()")
    keys = "document.querySelector('#curve .keys')"
    assert browser.get(f"{keys}.scrollWidth - {keys}.clientWidth") == 0, "the legend is wider than its card"


def test_curves_can_be_chosen_and_read(browser: Browser, pages: dict[str, Path]) -> None:
    from selenium.webdriver import Keys

    browser.open(pages["bare"])
    assert browser.get("document.querySelector('#tab-curves').ariaSelected") == "true", (
        "a run without other data must open the curves"
    )
    assert browser.get("document.querySelector('#metric').value") == "exact_accuracy"
    first = browser.get("document.querySelector('#curve').innerHTML")
    browser.choose("#metric", "lm_loss")
    assert browser.get("document.querySelector('#curve').innerHTML") != first
    browser.click("#log")
    assert browser.get("document.querySelector('#log').ariaPressed") == "true"
    browser.run("document.querySelector('#curve').focus()")
    browser.keys(Keys.ARROW_LEFT)
    assert browser.text("#curve .tip").splitlines()[0] == "step 500"
    assert "eval all 0.006" in browser.text("#curve .tip")
    browser.click("#minis button:last-child")
    assert browser.get("document.querySelector('#metric').value") == "perf/step_ms"
    assert "training step 500" in browser.text("#over-steps")
    browser.click("#tab-none")
    assert "python evaluate.py checkpoint=" in browser.text("#panel-none")


def test_runs_are_compared(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["runs"])
    assert browser.get("document.querySelector('#tab-compare').ariaSelected") == "true"
    text = browser.text("#panel-compare")
    assert "arch.name\thrm\ttrm\ttrm" in text and "eval/all/exact_accuracy" in text
    assert browser.text("#panel-compare thead").split() == ["hrm", "trm-0", "trm-1"], "its rows say the rest"
    assert "No saved answers: trm-1." in text and "python view.py" in text
    assert browser.num_lines("exact_accuracy") == 1, "a name must not be broken"
    tally = browser.get("[...document.querySelectorAll('.tally button')].map((button) => button.innerText)")
    assert tally == [
        *("1 runs differ", "3 all runs solve it", "2 no run solves it"),
        *("1 only hrm solves it", "0 only trm-0 solves it"),
    ]
    browser.click(".tally button:nth-of-type(4)")
    assert browser.rows() == [3] and browser.text("#heading") == "Row 3 · hrm"
    assert "alts at step" not in browser.text("#confidence-card"), "the page cannot know when an HRM halts"
    browser.click("#last")
    verdicts = "[...document.querySelectorAll('#rivals button')].map((button) => button.innerText)"
    assert browser.get(verdicts) == ["hrm\nstep 4: ✓ solved", "trm-0\nstep 4: ✗ 4 wrong"]
    assert browser.picture("#rivals button:nth-of-type(1) canvas") != browser.picture(
        "#rivals button:nth-of-type(2) canvas"
    )
    browser.keys("r")
    assert browser.text("#heading") == "Row 3 · trm-0" and "4 wrong cells" in browser.text("#verdict")
    browser.click("#back")
    assert browser.get(verdicts) == ["hrm\nstep 3: ✗ 4 wrong", "trm-0\nstep 3: ✗ 4 wrong"]
    browser.choose("#agreement", "none")
    assert browser.rows() == [1, 5]
    browser.click("#rivals button:nth-of-type(1)")
    assert browser.text("#heading") == "Row 1 · hrm"
    browser.click("#tab-curves")
    assert browser.text("#curve .keys").splitlines() == ["arch=hrm lr=0.0002", "arch=trm lr=0.001 (2 seeds)"]
    over_steps = browser.get("document.querySelector('#curve').innerHTML")
    browser.choose("#over", "seconds")
    assert browser.get("document.querySelector('#curve').innerHTML") != over_steps


RESULTS = "[...document.querySelectorAll('#panel-compare .card')].find((e) => e.innerText.startsWith('Newest eval'))"


def test_evaluations_of_other_examples_have_no_winner(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["mixed"])
    text = " ".join(browser.get(f"{RESULTS}.innerText").split())
    assert "data data data –" in text and "examples 3 examples of the set all 6 examples of the set all –" in text
    assert "step 500 500 –" in text
    assert "0.6667" in text and "no value is marked as the best" in text
    assert browser.get(f"{RESULTS}.querySelectorAll('.good').length") == 0
    browser.open(pages["runs"])
    assert "marked as the best" not in browser.get(f"{RESULTS}.innerText"), "they are of the same examples"


def test_each_run_has_the_player_that_its_answers_allow(browser: Browser, pages: dict[str, Path]) -> None:
    from selenium.webdriver import Keys

    browser.open(pages["mixed"])
    browser.click("#tab-examples")
    controls, hint = (f"document.querySelector('#{name}').checkVisibility()" for name in ("controls", "hint"))
    assert browser.text("#heading") == "Row 0 · hrm" and not browser.get(controls) and browser.get(hint)
    assert "python evaluate.py checkpoint=" in browser.text("#hint"), "view.py makes no answers where there are some"
    verdicts = "[...document.querySelectorAll('#rivals button')].map((button) => button.innerText)"
    assert browser.get(verdicts) == ["hrm\nstep 1: ✓ solved", "trm-0\nstep 4: ✓ solved"]
    browser.click("#rivals button:nth-of-type(2)")
    assert browser.text("#heading") == "Row 0 · trm-0" and browser.get(controls) and not browser.get(hint)
    browser.keys(Keys.ARROW_LEFT)
    assert "step 3 of 4" in browser.text("#said")
    browser.keys("r")
    assert browser.text("#heading") == "Row 0 · hrm" and not browser.get(controls) and browser.get(hint)


def test_a_band_that_touches_zero_is_drawn_on_a_log_scale(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["mixed"])
    browser.click("#tab-curves")
    browser.click("#log")
    paths = browser.get("[...document.querySelectorAll('#curve path')].map((path) => path.getAttribute('d'))")
    assert any(d.endswith("Z") for d in paths), "there must be a band"
    assert not [d for d in paths if "Infinity" in d or "NaN" in d]


def test_results_are_a_table(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    browser.click("#tab-results")
    assert "eval/all/exact_accuracy\t0.5\t0.1876 to 0.8124" in browser.text("#results")
    assert "6 examples of the set all" in browser.text("#results-about")
    assert "tta=8\tall\t12.5\t0.5" in browser.text("#panel-results")
    assert "0.2 to 0.3\t6\t0.25\t0.5" in browser.text("#panel-results")


def test_a_dataset_is_browsed_by_group(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["data"])
    assert browser.rows() == [0, 1, 0, 1], "the list must have two groups of each split"
    assert browser.picture("#question") != browser.picture("#solution")
    browser.choose("#set", "test/all")
    assert browser.text("#heading") == "group 0, row 0"
    browser.click("#strip button:nth-of-type(3)")
    assert browser.text("#heading") == "group 0, puzzle 2, row 2"
    assert "3 puzzles" in browser.text("#strip")
    browser.click("#next")
    assert browser.text("#heading") == "group 1, row 3"


def test_text_is_browsed(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["text"])
    assert browser.text("#text-count") == "3 samples"
    assert browser.text("#text-stage h2") == "train, sample 0 adding"
    assert "start1 + 1?end of instruction" in browser.text("#text-stage").replace("\n", "")
    browser.keys("j")
    assert "Größe <b>?" in browser.text("#text-stage") and EVIL in browser.text("#text-stage h2")
    browser.choose("#text-set", "test")
    assert "In the beginning" in browser.text("#text-stage") and browser.text("#text-count") == "1 sample"
    browser.choose("#text-set", "")
    browser.keys("/", "größe")
    assert browser.text("#text-count") == "1 sample"
    browser.click("#tab-lengths")
    assert browser.text("#panel-lengths h2") == "Tokens of the samples of train"
    browser.run("document.querySelector('#panel-lengths .plot').focus()")
    browser.keys("\ue014", "\ue014")  # the right arrow twice: the first bar is empty
    assert browser.text("#panel-lengths .tip") == "tokens 9\nsamples 1"
    for width in (360, 1400):
        browser.open(pages["text"], width)
        assert browser.overflow() <= 0


def test_answers_of_a_run_of_text_are_read(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["text_run"])
    assert browser.text("#text-stage h2") == "step 200, sample 0 adding ✓ right"
    browser.keys("j", "j")
    assert browser.text("#text-stage h2") == "step 100, sample 0 adding ✗ wrong"
    browser.keys("j")
    assert browser.text("#text-stage h2") == f"step 100, sample 7 {EVIL}"
    browser.click("#tab-curves")
    assert browser.get("document.querySelectorAll('#minis .mini').length") == 4
    browser.open(pages["text_runs"])
    assert "saved answers" not in browser.text("#panel-compare")


def test_tokens_of_an_unknown_task_are_numbers(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["other"])
    assert browser.picture("#question") != browser.picture("#solution")
    assert browser.get("document.querySelector('#question').width > document.querySelector('#question').height")
    assert not browser.get("document.querySelector('#legend').checkVisibility()"), (
        "a board of numbers must have no legend"
    )
    assert browser.cell_title("#question", 16, 1, 1) == "token 18: 3", "the tooltip must not name rows and columns"


def test_a_task_without_a_drawing_is_shown_by_its_tokens(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["undrawn"])
    assert browser.picture("#question") != browser.picture("#solution")
    assert not browser.get("document.querySelector('#legend').checkVisibility()"), "the cells show the names"
    assert browser.drawn_texts() == {"dark", "lit", "leave", "press"}, "thumbnails must show names, as the boards do"
    name = browser.cell_title("#solution", 5, 0, 0).removeprefix("row 1, column 1: ")
    assert name in ("leave", "press")
    browser.open(pages["undrawn_run"])
    legend = browser.text("#legend").splitlines()
    assert legend == ["as in the puzzle", "answered", "changed in this step", "wrong"]
    pictures_T = [browser.picture()]
    for key in ("\ue010", "\ue011"):  # End, Home
        browser.keys(key)
        pictures_T.append(browser.picture())
    assert len(set(pictures_T)) == 3, "the first answer, the last one and the puzzle must be three pictures"
    browser.keys("t")
    assert browser.picture() != pictures_T[-1]
    browser.run("localStorage.clear()")
    browser.open(pages["undrawn"], width=120)
    assert browser.drawn_texts() == {"1", "2", "3", "4"}, "no name fits into a cell"
    assert browser.text("#legend").split() == ["dark", "lit", "leave", "press"]


def test_arc_answers_and_votes(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["arc_run"])
    assert "1 wrong cell" in browser.text("#verdict")
    assert not browser.get("document.querySelector('#controls').checkVisibility()"), (
        "a run with only final answers must have no player"
    )
    assert "python evaluate.py checkpoint=" in browser.text("#hint")
    browser.keys("j")
    assert "aaaa0001, turned by 90°, colours 0–9 become 0213456789" in browser.text("#verdict")
    size = "document.querySelector('#board')"
    assert browser.get(f"{size}.width / {size}.height") == pytest.approx(1.5, abs=0.05), (
        "the board must be cropped to 3 columns and 2 rows"
    )
    browser.click("#tab-votes")
    assert "right answer in place 1" in browser.text("#vote-stage h2")
    assert browser.text(".candidates li.is-right").splitlines() == ["✓ right", "7 votes", "confidence 0.7"]
    assert "9 votes, 1 prediction without a grid" in browser.text("#vote-stage")
    assert "Training pairs of the task" in browser.text("#vote-stage")
    browser.click("#vote-filter [data-value=unsolved]")
    assert "not among the candidates" in browser.text("#vote-stage h2")
    assert browser.get("document.querySelectorAll('#vote-items .item').length") == 1
