"""Runs of text are evaluated while they train, and by evaluate.py, with the same numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharing.export import export, parse_settings
from tests import runs
from tests.dataset.text.samples import write_split
from tests.in_process import mistake, train_here
from training.results import wilson_interval
from utils.errors import UserError

START, BETWEEN, END = 256, 257, 258
LAST = 120
TASKS = ["copying", "guessing"]


def _write_problems(folder: Path, num: int, seed: int) -> None:
    """Write problems to copy a letter, and others to guess a number, which nobody can."""
    rng = np.random.default_rng(seed)
    tokens, table = list[int](), list[tuple[int, int, int, int]]()
    for n in range(num):
        letter = int(rng.integers(97, 105))
        response = [letter] if n % 3 else rng.integers(48, 58, 4).tolist()
        table.append((len(tokens), 3, len(response) + 1, int(n % 3 == 0)))
        tokens += [START, letter if n % 3 else 63, BETWEEN, *response, END]
    write_split(folder, np.array(tokens, np.uint16), np.array(table), tasks=TASKS)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "problems"
    _write_problems(folder / "train", 400, seed=0)
    _write_problems(folder / "test", 40, seed=1)
    return folder


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of text, whose samples go on where others end."""
    folder = tmp_path_factory.mktemp("data") / "book"
    for name, num in (("train", 20), ("test", 4)):
        text = np.array([START, *np.tile(np.frombuffer(b"abcd", np.uint8), 4 * num), END], np.uint16)
        write_split(folder / name, text, np.array([(16 * n, 1, 16, 0) for n in range(num)]), tasks=["text"])
    return folder


SMALL = (
    "arch=gpt arch.hidden_size=32 arch.num_layers=1 arch.num_heads=2 arch.num_kv_heads=2 arch.width_multiple=16 "
    "device=cpu global_batch_size=256 rows_per_step=2 epochs=100 lr=0.02 lr_warmup_steps=2 log_interval=10 "
    f"max_steps={LAST} eval_every_n_steps={LAST // 2} wandb.mode=disabled"
)


def _settings(data: Path, run: Path, **changes: object) -> list[str]:
    values = {"data_path": data, "checkpoint_path": run, **changes}
    small = [word for word in SMALL.split() if word.partition("=")[0] not in values]
    return [*small, *(f"{key}={value}" for key, value in values.items())]


@pytest.fixture(scope="module")
def run(problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    train_here(_settings(problems, folder))
    return folder


def _evaluations(run: Path) -> dict[int, dict[str, float]]:
    found = {
        row["step"]: {name: value for name, value in row.items() if name.startswith("eval/")} for row in runs.rows(run)
    }
    return {int(step): metrics for step, metrics in found.items() if metrics}


def _results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def test_a_run_measures_what_it_learns(run: Path) -> None:
    half, last = _evaluations(run).values()
    assert set(half) == set(last)
    assert last["eval/all/exact_accuracy/copying"] == 1 and last["eval/all/exact_accuracy/guessing"] < 0.2
    copied, guessed = (last[f"eval/all/num_answers/{task}"] for task in TASKS)
    assert copied + guessed == last["eval/all/num_answers"] == last["eval/all/num_examples"] == 40
    assert last["eval/all/loss"] < half["eval/all/loss"]
    assert (run / "best").exists()
    names = sorted(file.name for file in (run / "samples").iterdir())
    assert names == [f"step_{step:08d}.json" for step in (LAST // 2, LAST)]
    answers = json.loads((run / "samples" / names[-1]).read_text())
    of_letters = [answer for answer in answers if answer["task"] == "copying"]
    assert len(answers) == 8 and all(answer["answer"] == answer["right"] == answer["prompt"] for answer in of_letters)


def test_evaluate_gives_the_numbers_of_the_run(run: Path, evaluate_here: runs.Evaluate) -> None:
    lines = evaluate_here(f"checkpoint={run}", "batch_size=50")
    results = _results(run / "eval_outputs" / f"step_{LAST:08d}")
    assert results["metrics"] == pytest.approx(_evaluations(run)[LAST], rel=1e-5)
    accuracy = results["metrics"]["eval/all/exact_accuracy"]
    assert lines[-1] == f"exact_accuracy={accuracy:.4f}"
    assert any(line.startswith("  eval/all/exact_accuracy/copying ") and ".. 1.0000" in line for line in lines)
    low, high = results["intervals"]["eval/all/exact_accuracy"]
    assert low < accuracy < high and len(results["intervals"]) == 3
    num = results["metrics"]["eval/all/num_answers/copying"]
    assert results["intervals"]["eval/all/exact_accuracy/copying"] == pytest.approx(wilson_interval(1.0, num))
    assert results["num_examples"] == {"all": 40}
    lines = evaluate_here(f"checkpoint={run}", "max_examples=10")
    assert "10 examples" in lines[0]
    assert _results(run / "eval_outputs" / f"step_{LAST:08d}")["num_examples"] == {"all": 40}


def test_an_exported_model_is_scored_by_the_loss_of_its_training(
    problems: Path, tmp_path: Path, evaluate_here: runs.Evaluate
) -> None:
    run, file = tmp_path / "run", tmp_path / "model.safetensors"
    train_here(_settings(problems, run, target_only="false", max_steps=2, eval_every_n_steps=2, log_interval=1))
    export(parse_settings([str(run), "-o", str(file)]))
    evaluate_here(f"checkpoint={file}", f"data_path={problems}", f"out={tmp_path / 'out'}")
    assert _results(tmp_path / "out")["metrics"] == pytest.approx(_evaluations(run)[2], rel=1e-5)


def test_the_loss_of_a_book_decides_its_best_step(book: Path, tmp_path: Path, evaluate_here: runs.Evaluate) -> None:
    run = tmp_path / "run"
    train_here(_settings(book, run, max_steps=20, eval_every_n_steps=10))
    losses = {step: metrics["eval/all/loss"] for step, metrics in _evaluations(run).items()}
    assert (run / "best").read_text().strip() == f"step_{min(losses, key=lambda step: losses[step]):08d}"
    assert evaluate_here(f"checkpoint={run}", f"out={tmp_path / 'out'}")[-1] == f"loss={losses[20]:.4f}"
    message = mistake(_settings(book, tmp_path / "other", best_metric="exact_accuracy"))
    assert message.startswith("best_metric=exact_accuracy is no metric of this data; take one of eval/all/loss, ")


def test_mistakes_of_evaluate(run: Path, book: Path, tmp_path: Path, evaluate_here: runs.Evaluate) -> None:
    with pytest.raises(UserError, match=r"^num_steps=\d+ is for puzzles, but .* reads text; leave it out$"):
        evaluate_here(f"checkpoint={run}", "num_steps=3")
    other = tmp_path / "other"
    tokens, table = np.array([1, 2, 3], np.uint16), np.array([(0, 1, 2, 0)])
    write_split(other / "test", tokens, table, tokenizer="unknown", special_tokens=None)
    with pytest.raises(UserError, match=r"has other tokens \(unknown, .*\) than .* build it with that tokenizer$"):
        evaluate_here(f"checkpoint={run}", f"data_path={other}")
    assert evaluate_here(f"checkpoint={run}", f"data_path={book}")[-1].startswith("loss=")
    assert (run / "eval_outputs" / f"step_{LAST:08d}_book" / "results.json").exists()
