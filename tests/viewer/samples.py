"""Runs and datasets that pages are written of."""
# N = examples, T = reasoning steps, S = cells

import base64
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import view
from dataset import maze, tasks
from dataset.arc import to_tokens
from dataset.tasks.lights_out import LightsOutTask
from tests.dataset.text.samples import write_split

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
OUTPUTS = "eval_outputs/step_00000500"


class UndrawnTask(LightsOutTask):
    """A new task. The viewer has no drawing for its kind."""

    kind = "undrawn"


def shown(output: Path) -> dict[str, Any]:
    block = output.read_text().split('id="data">')[1].split("</script>")[0]
    data = json.loads(zlib.decompress(base64.b64decode(block)))
    assert isinstance(data, dict)
    return data


def page_of(path: Path, output: Path, *options: str) -> dict[str, Any]:
    view.view([str(path), "-o", str(output), *options])
    return shown(output)


def write_dataset(
    folder: Path, inputs_NS: np.ndarray, labels_NS: np.ndarray, vocab_size: int, names: list[str], group_size: int = 1
) -> Path:
    """Write a dataset with two equal splits.

    Puzzle p has one example, and the identifier p modulo the number of names.
    """
    num = len(inputs_NS)
    arrays = {
        "inputs": inputs_NS,
        "labels": labels_NS,
        "puzzle_identifiers": np.arange(num) % len(names),
        "puzzle_indices": np.arange(num + 1),
        "group_indices": np.arange(0, num + 1, group_size),
    }
    metadata = {
        **dict.fromkeys(("pad_id", "ignore_label_id", "blank_identifier_id"), 0),
        **{"vocab_size": vocab_size, "seq_len": inputs_NS.shape[1], "num_puzzle_identifiers": len(names)},
        **{"total_groups": num // group_size, "mean_puzzle_examples": 1, "sets": ["all"]},
    }
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for name, array in arrays.items():
            np.save(folder / split / f"all__{name}.npy", array.astype(np.int32))
        (folder / split / "dataset.json").write_text(json.dumps(metadata))
    (folder / "identifiers.json").write_text(json.dumps(names))
    return folder


def questions() -> np.ndarray:
    return np.tile(np.where(np.isin(np.arange(16), GIVEN), SOLUTION_S, 1), (6, 1))


def write_sudoku(folder: Path, names: list[str] | None = None, group_size: int = 1) -> Path:
    labels_NS = np.tile(SOLUTION_S, (6, 1))
    return write_dataset(folder, questions(), labels_NS, 6, names or ["<blank>"], group_size)


def write_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_metrics(run: Path) -> None:
    rows: list[dict[str, float]] = []
    for step in (1, *range(10, 510, 10)):
        rows.append({"step": step, "time_s": step / 8, "epoch": step / 2, "train/lm_loss": 2 / step})
        rows[-1] |= {"train/exact_accuracy": step / 500, "perf/step_ms": 12.5}
        if step % 100 == 0:
            rows[-1] |= {"eval/all/exact_accuracy": step / 1000, "eval/all/lm_loss": 3 / step}
            rows[-1] |= {f"eval/all/exact_accuracy_at_step/{n}": n * step / 4000 for n in (1, 2, 3, 4)}
    write_rows(run, rows)


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
    config |= {"optim": {"name": "muon"}, "global_batch_size": 32}
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

    The right answer of the first task is in the second place. The candidates of the second task are
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

    wrong, right = candidate([[9, 9]], 7, False), candidate([[2, 1]], 2, True)
    votes = {"aaaa0000": [[wrong, right]], "aaaa0001": [[wrong], [wrong, wrong, right]]}
    test = {"input": [[1, 2]], "solution": [[2, 1]], "num_votes": 9, "num_empty": 1}
    report = {name: [test | {"candidates": candidates} for candidates in tests] for name, tests in votes.items()}
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
    write_rows(run, rows)
    return run


def write_runs(folder: Path, data: Path) -> Path:
    """Write two seeds of a TRM, the second without answers, and an HRM that solves other puzzles.

    The TRM solves rows 0, 2 and 4 (NUM_WRONG_NT), the HRM solves rows 0 to 4 but row 1.
    """
    hrm = {"arch": {"name": "hrm", "no_ACT_continue": False}, "lr": 0.0002}
    for name, change in (("hrm", hrm), ("trm-0", {}), ("trm-1", {"seed": 1})):
        change_json(write_run(folder / name, data) / "config.yaml", change)
    for file in (folder / "hrm" / OUTPUTS).glob("*.safetensors"):
        arrays = load_file(file)
        arrays["predictions_at_step"][arrays["rows"] == 3, -1] = SOLUTION_S
        save_file(arrays, file)
    shutil.rmtree(folder / "trm-1" / "eval_outputs")
    return folder


def change_json(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_mixed_runs(folder: Path) -> Path:
    """Write an HRM and two seeds of a TRM. The HRM comes first.

    The HRM has final answers only, evaluated on fewer examples. Its config has a long key and a
    long value. The lower edge of the seeds' band is zero: the second seed has solved nothing.
    """
    runs = write_runs(folder, folder / "data")
    arch = {"name": "hrm", "no_ACT_continue": False, "puzzle_emb_weight_decay_of_every_layer": 1}
    long_value = ["/a/long/way/to/the/data/sudoku-extreme-1k-aug-1000-hard"]
    change_json(runs / "hrm" / "config.yaml", {"arch": arch, "data_paths": long_value})
    for file in (runs / "hrm" / OUTPUTS).glob("*.safetensors"):
        arrays = load_file(file)
        arrays["predictions"] = np.ascontiguousarray(arrays.pop("predictions_at_step")[:, -1])
        del arrays["q_halt_at_step"]
        save_file(arrays, file)
    metrics = {"eval/all/num_examples": 3, "eval/all/exact_accuracy": 0.6667, "eval/all/lm_loss": float("nan")}
    change_json(runs / "hrm" / OUTPUTS / "results.json", {"num_examples": {"all": 3}, "metrics": metrics})
    rows = [json.loads(line) for line in (runs / "trm-1" / "metrics.jsonl").read_text().splitlines()]
    write_rows(runs / "trm-1", [row | {name: 0 for name in row if name.endswith("exact_accuracy")} for row in rows])
    return runs


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


def write_pages(folder: Path) -> dict[str, Path]:
    """Write a page of each kind of run and dataset, and return them by name."""
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
