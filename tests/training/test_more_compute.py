"""Trajectories and restarts choose the answers that the definition chooses puzzle by puzzle."""

# N = examples, K = trajectories of an example, S = tokens

from functools import cache
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from dataset.evaluators import NO_EVALUATORS
from models.base import RecursiveModel
from models.inference import Trace, trace
from models.se_mixer import SEMixer, SEMixerConfig
from models.trajectories import Trajectories
from tests.dataset.shapes import mixed_split
from tests.models.helpers import seed_with, small_model, small_options
from tests.spawn import run_ranks
from tests.training.examples import IGNORED, made_split, random_rows
from training import more_compute
from training.evaluation import EvalOptions
from training.more_compute import MoreCompute, evaluate_more, trace_with_more
from utils.errors import UserError
from utils.ranks.world import World

SINGLE = World.single()
NUM, COUNT, STEPS, NOISE = 7, 5, 4, 0.5
TRAJECTORIES = Trajectories(COUNT, NOISE, seed=3)


class Pass:
    """A trajectory of one example, run alone."""

    def __init__(self, seen: Trace, labels: list[int], *, adaptive: bool) -> None:
        self.steps = int(seen.settled_at_N) if adaptive else STEPS
        self.settled = self.steps < STEPS or bool(seen.settled_N)
        self.answer = seen.predictions_TNS[self.steps - 1, 0].tolist()
        self.confidence = float(seen.confidence_TN[self.steps - 1, 0])
        self.right = all(label in (IGNORED, cell) for label, cell in zip(labels, self.answer, strict=True))


@cache
def _model(seed: int) -> RecursiveModel:
    return small_model("trm", seed=seed, halt_max_steps=3, H_cycles=1, L_cycles=1)


@cache
def _trace(seed: int, n: int, k: int) -> Trace:
    batch = {name: torch.from_numpy(array[n : n + 1].astype(np.int32)) for name, array in random_rows(NUM, 1).items()}
    return trace(_model(seed), batch, STEPS, trajectories=TRAJECTORIES, numbers_N=np.array([n * COUNT + k]))


def _passes(seed: int, rows: dict[str, np.ndarray], *, adaptive: bool) -> list[list[Pass]]:
    return [
        [Pass(_trace(seed, n, k), labels, adaptive=adaptive) for k in range(COUNT)]
        for n, labels in enumerate(rows["labels"].tolist())
    ]


def _rows(seed: int) -> dict[str, np.ndarray]:
    """Return examples whose label is the answer of some trajectory. The last one has no label."""
    rows = random_rows(NUM, seed=1)
    for n, of_example in enumerate(_passes(seed, rows, adaptive=True)):
        answer = np.array(of_example[n % COUNT].answer)
        rows["labels"][n] = np.where(answer == IGNORED, rows["labels"][n], answer)
    rows["labels"][-1] = IGNORED
    return rows


@pytest.fixture(scope="module")
def seed() -> int:
    def differ(seed: int) -> bool:
        passes = _passes(seed, _rows(seed), adaptive=True)[:-1]
        _calibration_error([_boldest(each) for each in passes])  # for the margins of its bins
        settled_by = {next((k for k, each in enumerate(run) if each.settled), None) for run in passes}
        is_less_sure = any(_first_settled(run).right != _boldest(_that_run(run)).right for run in passes)
        return settled_by > {0, None} and is_less_sure and len({_boldest(each).right for each in passes}) == 2

    return seed_with(differ, "examples that the first pass, a later one or none settles, and one less sure than others")


def _boldest(passes: list[Pass]) -> Pass:
    """Return the trajectory with the highest confidence, the earliest of several."""
    return passes[int(torch.tensor([each.confidence for each in passes]).argmax(0))]


def _first_settled(passes: list[Pass]) -> Pass:
    return next((each for each in passes if each.settled), _boldest(passes))


def _that_run(passes: list[Pass]) -> list[Pass]:
    """Return the passes until one settles."""
    ran = []
    for each in passes:
        ran.append(each)
        if each.settled:
            break
    return ran


def _evaluate(model: RecursiveModel, rows: dict[str, np.ndarray], world: World, **options: Any) -> dict[str, float]:
    given = (model, made_split(all=rows), world, EvalOptions(num_steps=STEPS, **options))
    return evaluate_more(_config(trajectories=COUNT, restarts=COUNT - 1, noise=NOISE, seed=3), *given, NO_EVALUATORS)


def _config(**given: Any) -> MoreCompute:
    defaults: dict[str, Any] = {"num_steps": None, "trajectories": 1, "restarts": 0, "noise": 0.0, "tta": None}
    return MoreCompute(**defaults | {"seed": 0} | given)


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_answers_are_those_of_trajectories_run_alone(seed: int, adaptive: bool) -> None:
    rows = _rows(seed)
    found = _evaluate(_model(seed), rows, SINGLE, batch_size=10, adaptive=adaptive)
    labelled = _passes(seed, rows, adaptive=adaptive)[:-1]
    num = len(labelled)

    for k, name in ((1, "_of/1"), (2, "_of/2"), (4, "_of/4"), (COUNT, "")):
        first_k = [of_example[:k] for of_example in labelled]
        expected = {
            f"trajectories/exact_accuracy{name}": sum(_boldest(each).right for each in first_k) / num,
            f"trajectories/segments{name}": sum(one.steps for each in first_k for one in each) / num,
            f"restarts/exact_accuracy{name}": sum(_first_settled(each).right for each in first_k) / num,
            f"restarts/segments{name}": sum(one.steps for each in first_k for one in _that_run(each)) / num,
        }
        for metric, value in expected.items():
            assert found[f"eval/all/{metric}"] == pytest.approx(value), metric
    ran = {"trajectories": labelled, "restarts": [_that_run(each) for each in labelled]}
    for method, passes in ran.items():
        share = sum(any(one.right for one in each) for each in passes) / num
        assert found[f"eval/all/{method}/any_exact_accuracy"] == pytest.approx(share)
    assert found["eval/all/trajectories/calibration_error"] == pytest.approx(
        _calibration_error([_boldest(each) for each in labelled]), abs=1e-5
    )


def _calibration_error(answers: list[Pass]) -> float:
    """Return the expected calibration error: the definition, bin by bin."""
    error = 0.0
    tenths = [int((torch.tensor(each.confidence) >= torch.arange(1, 10) / 10).sum()) for each in answers]
    for tenth in range(10):
        if of_bin := [each for each, its_tenth in zip(answers, tenths, strict=True) if its_tenth == tenth]:
            confidence = sum(each.confidence for each in of_bin) / len(of_bin)
            accuracy = sum(each.right for each in of_bin) / len(of_bin)
            error += len(of_bin) / len(answers) * abs(confidence - accuracy)
    return error


def _on_rank(world: World, seed: int, rows: dict[str, np.ndarray], batch_size: int) -> dict[str, float]:
    return _evaluate(_model(seed), rows, world, batch_size=batch_size, adaptive=True)


def test_ranks_and_batches_change_no_result(seed: int) -> None:
    given = seed, _rows(seed)
    expected, *others = (_on_rank(SINGLE, *given, batch_size) for batch_size in (10, 1, 100))
    for found in [*others, *run_ranks(_on_rank, 3, *given, 7)]:
        assert found == pytest.approx(expected, abs=1e-5)
        exact = [name for name in expected if "calibration" not in name]
        assert [found[name] for name in exact] == [expected[name] for name in exact]


@pytest.mark.parametrize("last", [[18.0, 25.0, 17.0], [float("nan"), 0.5, float("nan")], [1.0, float("inf"), 2.0]])
def test_the_surest_trajectory_answers_a_puzzle_of_a_user(monkeypatch: pytest.MonkeyPatch, last: list[float]) -> None:
    """The sigmoids of 18 and of 25 are both 1, and NaN is the largest value for argmax."""
    seen = Trace(
        torch.arange(3).view(1, 3, 1), torch.tensor([last]), torch.ones(3, dtype=torch.int64), torch.zeros(3).bool()
    )
    monkeypatch.setattr(more_compute, "trace", lambda *_, **__: seen)
    batch = {"inputs": torch.zeros(1, 9, dtype=torch.int32)}
    answered = trace_with_more(small_model("trm"), batch, np.array([0]), _config(trajectories=3, noise=0.1), None)
    assert answered.predictions_TNS.tolist() == [[[1]]]


@pytest.mark.parametrize("asked", [{"trajectories": 2, "noise": 0.1}, {"tta": 2}])
def test_boards_are_judged_without_their_canvas(asked: dict[str, Any]) -> None:
    judged = set[tuple[str, int, int]]()

    def judge(inputs_NS: Tensor, answers_NS: Tensor, set_name: str) -> dict[str, Tensor]:
        judged.add((set_name, inputs_NS.shape[1], answers_NS.shape[1]))
        return {}

    config = SEMixerConfig.model_validate(small_options("se_mixer"))
    model = SEMixer(config, seq_len=81, vocab_size=11, num_puzzle_identifiers=1)
    model.init_weights(torch.Generator().manual_seed(0))
    options, evaluators = EvalOptions(batch_size=4), Mock(checks=(), judge=judge)
    evaluate_more(_config(**asked), model, mixed_split(), SINGLE, options, evaluators)
    assert judged == {("four.all", 16, 16), ("six.all", 36, 36), ("nine.all", 81, 81)}


def test_passes_that_would_be_the_same_are_refused() -> None:
    three = small_model("trm", num_states=3)
    for fitting in (_config(trajectories=3), _config(restarts=2), _config(trajectories=9, noise=0.1), _config()):
        fitting.require_different_passes(three)
    for given in ({"trajectories": 4}, {"restarts": 3}):
        with pytest.raises(UserError, match="without noise repeats the same pass, as the model has 3 initial states"):
            _config(**given).require_different_passes(three)
    with pytest.raises(UserError, match="but arch=transformer has none; leave it out"):
        _config(trajectories=2, noise=0.1).require_different_passes(small_model("transformer"))


def test_without_labels_there_are_no_metrics(seed: int) -> None:
    rows = random_rows(3, seed=2)
    rows["labels"][:] = IGNORED
    assert _evaluate(_model(seed), rows, SINGLE, batch_size=2) == {}


def test_no_pass_follows_the_one_that_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass k of puzzle n has the noise of number 3n + k, also where other puzzles have settled."""
    q_halt = {15: 0.0, 16: 1.0, 17: 0.5, 18: 0.0, 21: 1.0, 22: 0.0}
    given = list[list[int]]()

    def traced(*_: Any, numbers_N: np.ndarray, **__: Any) -> Trace:
        given.append(numbers_N.tolist())
        numbers = torch.from_numpy(numbers_N)
        q_halt_TN = torch.tensor([[q_halt[number] for number in given[-1]]])
        return Trace(numbers.view(1, -1, 1), q_halt_TN, numbers - 10, torch.isin(numbers, torch.tensor([18, 22])))

    monkeypatch.setattr(more_compute, "trace", traced)
    batch = {"inputs": torch.zeros(3, 9, dtype=torch.int32)}
    config = _config(restarts=2, noise=0.1)
    answered = trace_with_more(small_model("trm"), batch, np.array([5, 6, 7]), config, None)
    assert given == [[15, 18, 21], [16, 22], [17]]
    assert answered.predictions_TNS.flatten().tolist() == [16, 18, 22]
    assert answered.settled_N.tolist() == [False, True, True] and answered.settled_at_N.tolist() == [6, 8, 12]
    assert answered.q_halt_TN.flatten().tolist() == [1.0, 0.0, 0.0]
