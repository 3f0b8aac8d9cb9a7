"""ARC from JSON tasks to a score and a submission.

The evaluation, the training loop and the programs are real. Only the answers come from predictors,
whose score is known.
"""
# N = examples, S = cells of the canvas

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dataset import arc_votes
from dataset.arc import FIRST_COLOUR, PADDING, VOCAB_SIZE, parse_name, to_tokens
from dataset.build_arc_dataset import main
from dataset.evaluators import build_evaluators
from dataset.schema import open_split
from models import inference
from models.act import segment
from models.base import RecursiveModel
from models.carry import Carry, Outputs
from tests import runs
from tests.dataset.builders import build, write_arc_tasks
from tests.in_process import SINGLE, load_run, mistake, train_here
from tests.spawn import run_ranks
from training.evaluation import EvalOptions, evaluate
from utils.batch import Batch
from utils.errors import UserError
from utils.ranks.world import World

KS = (1, 2, 5, 10, 100, 1000)
NUM_AUG = 4
NUM_VERSIONS = NUM_AUG + 1
# The wrong answer of a predictor is one black cell, because every augmentation maps it to itself.
WRONG = [[0]]
BATCH_SIZE = 16

Tasks = dict[str, dict[str, Any]]
Segment = Callable[..., tuple[Carry, Outputs]]


# ---- tasks and data ----------------------------------------------------------------------------


def _pairs(rng: np.random.Generator, *shapes: tuple[tuple[int, int], tuple[int, int]]) -> list[dict[str, Any]]:
    """Return pairs of random grids. One has all ten colours, so that no two versions are equal."""
    return [
        {name: rng.integers(10, size=shape).tolist() for name, shape in zip(("input", "output"), pair, strict=True)}
        for pair in shapes
    ]


def _tasks() -> dict[str, Tasks]:
    """Return tasks with grids of many shapes.

    Two tasks have the same test input, so that only the identifier tells them apart.
    """
    rng = np.random.default_rng(0)

    def task(*test: tuple[tuple[int, int], tuple[int, int]]) -> dict[str, Any]:
        return {"train": _pairs(rng, ((4, 5), (5, 4)), ((3, 3), (6, 2))), "test": _pairs(rng, *test)}

    evaluation = {
        "flat": task(((2, 7), (1, 12))),
        "two": task(((1, 1), (30, 30)), ((30, 30), (13, 1))),
        "this": task(((4, 4), (4, 4))),
        "that": task(((4, 4), (3, 8))),
    }
    evaluation["that"]["test"][0]["input"] = evaluation["this"]["test"][0]["input"]
    return {"training": {name: task(((3, 4), (4, 3))) for name in "ab"}, "evaluation": evaluation}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arc")
    tasks = write_arc_tasks(folder / "tasks", **_tasks())
    build(main, folder / "data", "--dataset-dirs", tasks, "--num-aug", NUM_AUG)
    return folder / "data"


# ---- predictors --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictor:
    """Answers right in the first `num_right` versions of every task, and WRONG in the others."""

    num_right: int = NUM_VERSIONS
    q_right: float = 1.0
    q_wrong: float = 1.0


def _answering(data: Path, predictor: Predictor) -> Segment:
    """Return models.act.segment of the real model, with the answers of the predictor.

    The answers are looked up in the test split. Where a label is padding, the answer is a colour,
    because cells after the end markers must not matter.
    """
    puzzle_set = open_split(data, "test").sets["all"]
    names = json.loads((data / "identifiers.json").read_text())
    versions: dict[str, list[int]] = {}
    table: dict[tuple[int, bytes], tuple[torch.Tensor, float]] = {}
    for puzzle, identifier in enumerate(puzzle_set.puzzle_identifiers.tolist()):
        of_task = versions.setdefault(parse_name(names[identifier])[0], [])
        of_task.append(identifier)
        is_right = len(of_task) <= predictor.num_right
        for row in range(puzzle_set.puzzle_indices[puzzle], puzzle_set.puzzle_indices[puzzle + 1]):
            answer_S = puzzle_set.labels[row] if is_right else to_tokens(np.array(WRONG))
            answer_S = np.where(answer_S == PADDING, FIRST_COLOUR + row % 10, answer_S).astype(np.int64)
            key = identifier, puzzle_set.inputs[row].astype(np.int32).tobytes()
            table[key] = torch.from_numpy(answer_S), predictor.q_right if is_right else predictor.q_wrong

    def answering(model: RecursiveModel, carry: Carry, batch: Batch, **options: Any) -> tuple[Carry, Outputs]:
        carry, outputs = segment(model, carry, batch, **options)
        identifiers, inputs = carry.current["puzzle_identifiers"].tolist(), carry.current["inputs"].numpy()
        said = [table[identifier, input_S.tobytes()] for identifier, input_S in zip(identifiers, inputs, strict=True)]
        logits_BSV = F.one_hot(torch.stack([answer_S for answer_S, _ in said]), VOCAB_SIZE).float()
        q_halt_B = torch.tensor([q for _, q in said])
        return carry, replace(outputs, logits_BSV=logits_BSV, q_halt_B=q_halt_B)

    return answering


@dataclass
class Judge:
    """One evaluator of a dataset, which scores predictors one after another."""

    data: Path
    run: Path
    world: World = SINGLE

    def __post_init__(self) -> None:
        self.split = open_split(self.data, "test")
        self.model = load_run(self.run, self.world)[1]
        self.evaluators = build_evaluators(["arc"], self.split)

    def __call__(self, predictor: Predictor, **options: Any) -> dict[str, float]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inference, "segment", _answering(self.data, predictor))
            settings = EvalOptions(**{"batch_size": BATCH_SIZE, **options})
            metrics = evaluate(self.model, self.split, self.world, settings, evaluators=self.evaluators)
        assert metrics is not None
        return {name.removeprefix("eval/all/"): value for name, value in metrics.items()}


def _scores(metrics: dict[str, float]) -> dict[int, float]:
    assert [name for name in metrics if name.startswith("pass@")] == [f"pass@{k}" for k in KS]
    return {k: metrics[f"pass@{k}"] for k in KS}


def _votes(folder: Path) -> list[dict[str, Any]]:
    return [of_input for task in json.loads((folder / "arc_votes.json").read_text()).values() for of_input in task]


# ---- predictors through evaluate ---------------------------------------------------------------


def _on_rank(world: World, data: Path, run: Path, predictor: Predictor, folder: Path) -> dict[str, float]:
    arc_votes.TASKS_AT_A_TIME = 3  # of four tasks, so that the last part is smaller
    return Judge(data, run, world)(predictor, save_to=folder, batch_size=7)


@pytest.mark.invariance
def test_the_number_of_ranks_changes_no_score(data: Path, run: Path, tmp_path: Path) -> None:
    """3 unsure answers win against 2 sure ones, because the count decides before the confidence.

    The ranks get unequal shares of each batch of 7 rows, and the last batch is short.
    """
    predictor = Predictor(num_right=3, q_right=-1.0, q_wrong=2.0)
    expected = Judge(data, run)(predictor, save_to=tmp_path / "one")
    adaptive = Judge(data, run)(predictor, adaptive=True)
    assert _scores(adaptive) == _scores(expected) and adaptive["exact_accuracy"] == expected["exact_accuracy"]
    assert (expected["pass@1"], expected["num_examples"]) == (1.0, NUM_VERSIONS * 5)
    for of_input in _votes(tmp_path / "one"):
        assert (of_input["num_votes"], of_input["num_empty"]) == (NUM_VERSIONS, 0)
        assert of_input["candidates"][0]["confidence"] == pytest.approx(1 / (1 + math.exp(1)))
    for metrics in run_ranks(_on_rank, 3, data, run, predictor, tmp_path / "many"):
        assert _scores(metrics) == _scores(expected)
        assert metrics == pytest.approx(expected, rel=1e-5)
    for name in ("submission.json", "arc_votes.json"):
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


# ---- training and evaluate.py ------------------------------------------------------------------


def _settings(data: Path, run: Path, *typed: str) -> list[str]:
    """Return the settings of a run with one block and two segments, which is fast on 900 cells."""
    paths = [f"data_path={data}", f"checkpoint_path={run}", "device=cpu", "arch=transformer"]
    sizes = {"recurrent": "true", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "halt_max_steps": 2}
    often = ["max_steps=4", "eval_every_n_steps=2", "checkpoint_every_n_steps=2", "evaluators=[arc]"]
    batches = ["global_batch_size=2", f"eval_batch_size={BATCH_SIZE}"]
    return ["debug=tiny", *paths, *(f"arch.{key}={value}" for key, value in sizes.items()), *often, *batches, *typed]


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with evaluations after steps 2 and 4. `best` follows pass@2.

    All answers of the first evaluation are wrong, and all answers of the second are right.
    """
    folder = tmp_path_factory.mktemp("run") / "run"
    wrong, right = _answering(data, Predictor(num_right=0, q_wrong=3.0)), _answering(data, Predictor(q_right=-3.0))
    with pytest.MonkeyPatch.context() as patch:
        evaluations = iter([wrong, right])

        def evaluated(*args: Any, **options: Any) -> Any:
            patch.setattr(inference, "segment", next(evaluations))
            return evaluate(*args, **options)

        patch.setattr("training.kinds.PUZZLES.evaluate", evaluated)
        train_here(_settings(data, folder, "best_metric=pass@2"))
    return folder


def test_an_evaluation_in_training_has_only_its_own_votes(run: Path) -> None:
    """The sure wrong votes of step 2 would also win at step 4 if the votes were kept."""
    first, second = (row for row in runs.rows(run) if "eval/all/pass@1" in row)
    for row, step, expected in ((first, 2, 0.0), (second, 4, 1.0)):
        assert row["step"] == step
        assert {k: row[f"eval/all/pass@{k}"] for k in KS} == dict.fromkeys(KS, expected)
        assert row["eval/all/exact_accuracy"] == expected
    outputs = run / "eval_outputs"
    read = {step: json.loads((outputs / f"step_0000000{step}" / "submission.json").read_text()) for step in (2, 4)}
    assert read[4] == {
        name: [{"attempt_1": pair["output"], "attempt_2": pair["output"]} for pair in task["test"]]
        for name, task in _tasks()["evaluation"].items()
    }
    assert read[2]["flat"] == [{"attempt_1": WRONG, "attempt_2": WRONG}]
    assert (run / "best").read_text().strip() == "step_00000004"


def test_an_evaluation_without_time_has_no_score(data: Path, tmp_path: Path) -> None:
    """A score of 0 would mislead early stopping, which would take it for a real score."""
    run = tmp_path / "run"
    train_here(_settings(data, run, "best_metric=pass@2", "early_stop_patience=1", "eval_max_share=1e-9"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 4 and not [name for row in rows for name in row if name.startswith("eval/")]
    assert not list(run.rglob("submission.json")) and not (run / "best").exists()


def test_the_program_prints_scores_with_intervals_over_tasks(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate_here: runs.Evaluate
) -> None:
    """The program finds out that the data are ARC. The intervals count 4 tasks, not 25 examples."""
    monkeypatch.setattr(inference, "segment", _answering(data, Predictor(num_right=2, q_right=3.0)))
    first, *lines, _, last = evaluate_here(f"checkpoint={run}", f"out={tmp_path}")
    assert "25 examples in" in first and last == f"exact_accuracy={2 / 5:.4f}"
    rows = {name.removeprefix("eval/all/"): rest for name, *rest in (line.split() for line in lines)}
    z = 1.959964**2  # of Wilson's interval
    assert rows["pass@1"][:4] == ["0.0000", "0.0000", "..", f"{z / (4 + z):.4f}"]
    for k in KS[1:]:
        assert rows[f"pass@{k}"][:4] == ["1.0000", f"{4 / (4 + z):.4f}", "..", "1.0000"]
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["metrics"]["eval/all/pass@2"] == 1.0
    assert saved["intervals"]["eval/all/pass@2"] == pytest.approx((4 / (4 + z), 1.0), abs=1e-4)


def test_checkpoints_vote_together(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate_here: runs.Evaluate
) -> None:
    """The joint votes equal the votes of both checkpoints, which are the model's own, added."""
    monkeypatch.setattr("dataset.arc_votes.NUM_SHOWN", 10**6)
    first, second = (run / f"step_0000000{step}" for step in (2, 4))
    folders = [tmp_path / name for name in ("early", "late", "both")]
    for folder, step, more in zip(folders, (first, second, second), ([], [], [f"vote_with=[{first}]"]), strict=True):
        evaluate_here(f"checkpoint={step}", *more, f"out={folder}")
    num_shared = 0
    for one, other, joint in zip(*map(_votes, folders), strict=True):
        assert joint["num_empty"] == one["num_empty"] + other["num_empty"]
        assert joint["num_empty"] + joint["num_votes"] == 2 * NUM_VERSIONS
        added: dict[str, list[float]] = {}
        for candidate in one["candidates"] + other["candidates"]:
            count, total = added.get(json.dumps(candidate["grid"]), (0, 0))
            confidence = candidate["count"] * candidate["confidence"]
            added[json.dumps(candidate["grid"])] = [count + candidate["count"], total + confidence]
        found = {json.dumps(each["grid"]): [each["count"], each["confidence"]] for each in joint["candidates"]}
        assert found == {grid: [count, pytest.approx(total / count)] for grid, (count, total) in added.items()}
        num_shared += len(one["candidates"]) + len(other["candidates"]) - len(found)
    assert num_shared, "the checkpoints have no answer in common, so that the test proves little"
    # Metrics without votes must be those of the later checkpoint alone.
    alone, together = (json.loads((folder / "results.json").read_text())["metrics"] for folder in folders[1:])
    assert all("pass@" in name or together[name] == value for name, value in alone.items())


def test_votes_of_few_examples_replace_none_of_more(run: Path, tmp_path: Path, evaluate_here: runs.Evaluate) -> None:
    """Saved answers were asked for. The votes of a whole evaluation stay."""
    copy = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("eval_outputs")))
    found = []
    for typed in ([], ["max_examples=2", "save_outputs=[inputs]"]):
        evaluate_here(f"checkpoint={copy}", *typed)
        (folder,) = (copy / "eval_outputs").iterdir()
        found.append({file.name: file.read_bytes() for file in folder.iterdir()})
    before, after = found
    assert before.keys() == {"results.json", "arc_votes.json", "submission.json"}
    assert after.keys() - before.keys() == {"all_rank0_0000.safetensors"}
    assert before == {name: after[name] for name in before}


# ---- mistakes ----------------------------------------------------------------------------------


def test_data_without_the_list_of_tasks_cannot_be_voted_on(
    run: Path, data: Path, tmp_path: Path, evaluate_here: runs.Evaluate
) -> None:
    """If nobody asks for votes, such data are scored without votes."""
    other = tmp_path / "other"
    other.mkdir()
    for entry in data.iterdir():
        if entry.name != "test_puzzles.json":
            (other / entry.name).symlink_to(entry)
    expected = f"{other / 'test_puzzles.json'} is missing, without which votes can't be counted; rebuild the dataset"
    assert expected in mistake(_settings(other, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    typed = [f"checkpoint={run}", f"data_path={other}", f"out={tmp_path / 'out'}", "max_examples=1"]
    assert not any("pass@" in line for line in evaluate_here(*typed))


def test_a_voter_trained_on_other_data_is_refused(
    run: Path, data: Path, tmp_path: Path, evaluate_here: runs.Evaluate
) -> None:
    """The rows of the voter's puzzle table belong to other puzzles."""
    other, voter = tmp_path / "other", tmp_path / "voter"
    shutil.copytree(data, other)
    train_here(_settings(other, voter, "max_steps=1", "eval_every_n_steps=null"))
    typed = [f"checkpoint={run}", f"vote_with=[{voter}]", "max_examples=1", f"out={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=f"vote_with={voter} was trained on {other}, but the votes are on {data}"):
        evaluate_here(*typed)
    # A user who names the data asserts that both runs number their puzzles alike.
    evaluate_here(*typed, f"data_path={data}")
