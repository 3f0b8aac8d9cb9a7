"""Evaluation scores every example once, with the numbers of segments that are run by hand."""

from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dataset.schema import Split
from models.act import initial_carry, segment
from models.hrm import HRM
from models.losses import act_loss
from tests.models.helpers import seed_with, small_hrm
from tests.spawn import run_ranks
from tests.training.examples import IGNORED, made_split, random_rows
from training.evaluation import EvalOptions, evaluate
from training.laps import Interrupts
from training.samples import AnswerSample
from training.saved_outputs import SavedOutput
from utils.batch import IGNORE_LABEL
from utils.perf.clocks import Deadline
from utils.ranks.world import World
from utils.stop import StopSignal

# N = examples, T = segments, S = tokens
SINGLE = World.single()
SAVED_OUTPUTS = list(get_args(SavedOutput))
STEPS = 4


@torch.no_grad()
def _by_hand(model: HRM, rows: dict[str, np.ndarray]) -> list[dict[str, torch.Tensor]]:
    """Run all examples in one batch. Return the outputs of each segment."""
    batch = {name: torch.from_numpy(array.astype(np.int32)) for name, array in rows.items()}
    batch["labels"][batch["labels"] == IGNORED] = IGNORE_LABEL
    carry = initial_carry(model, batch)
    said = []
    for _ in range(STEPS):
        carry, outputs = segment(model, carry, batch)
        loss, _ = act_loss(
            outputs,
            batch["labels"],
            halted_B=carry.halted_B,
            steps_B=carry.steps_B,
            config=model.config.loss,
        )
        said.append(
            {
                "logits": outputs.logits_BSV,
                "predictions": outputs.logits_BSV.argmax(-1).int(),
                "q_halt": outputs.q_halt_B,
                "q_continue": outputs.q_continue_B,
                "steps": carry.steps_B,
                "loss": loss,
                **batch,
            }
        )
    said[-1]["predictions_at_step"] = torch.stack([segment["predictions"] for segment in said], 1).to(torch.uint8)
    said[-1]["q_halt_at_step"] = torch.stack([segment["q_halt"] for segment in said], 1)
    return said


@pytest.fixture(scope="module")
def seed() -> int:
    """Return the seed of a model whose sequences halt and settle at different segments."""

    def differ(seed: int) -> bool:
        said = _by_hand(_model(seed), random_rows(23, seed=1))
        changed_N = (said[0]["predictions"] != said[-1]["predictions"]).any(-1)
        halts_at = {_halts_at(said, n) for n in range(23)}
        return len(halts_at) > 1 and len({_settled_at(said, n) for n in range(23)}) > 1 and int(changed_N.sum()) > 11

    return seed_with(differ, "sequences that halt and settle at different segments")


@pytest.fixture(scope="module")
def model(seed: int) -> HRM:
    return _model(seed)


def _model(seed: int) -> HRM:
    return small_hrm(seed=seed, halt_max_steps=STEPS)


def _halts_at(said: list[dict[str, torch.Tensor]], n: int) -> int:
    wants = [t + 1 for t in range(STEPS) if said[t]["q_halt"][n] > said[t]["q_continue"][n]]
    return min([*wants, STEPS])


def _settled_at(said: list[dict[str, torch.Tensor]], n: int) -> int:
    """Return the step at which the Q head halts and the answer equals the one before."""
    wants = [t for t in range(1, STEPS) if said[t]["q_halt"][n] > said[t]["q_continue"][n]]
    same = [t for t in wants if torch.equal(said[t]["predictions"][n], said[t - 1]["predictions"][n])]
    return min([*(t + 1 for t in same), STEPS])


@pytest.fixture(scope="module")
def rows(model: HRM) -> dict[str, np.ndarray]:
    """Return 23 examples.

    The labels of most examples are the answer of some segment. One example has no labels, and four
    are labelled only in part.
    """
    rows = random_rows(23, seed=1)
    said = _by_hand(model, rows)
    for n in range(20):
        answer = said[n % STEPS]["predictions"][n]
        rows["labels"][n] = np.where(answer == IGNORED, rows["labels"][n], answer)
    rows["labels"][4] = IGNORED
    rows["labels"][5:9, ::2] = IGNORED
    return rows


def _evaluate(model: HRM, split: Split, batch_size: int, **options: Any) -> dict[str, float]:
    metrics = evaluate(model, split, SINGLE, EvalOptions(batch_size, **options))
    assert metrics is not None
    return metrics


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("batch_size", [2, 23])
def test_a_sample_has_the_answers_to_the_first_examples(
    model: HRM, rows: dict[str, np.ndarray], batch_size: int, adaptive: bool, tmp_path: Path
) -> None:
    """Halting early changes the order of the answers, and not the examples that they answer."""
    sample, split = AnswerSample(3), made_split(all=rows, more=random_rows(5, seed=2))
    options = EvalOptions(batch_size, adaptive=adaptive, save_outputs=["predictions"], save_to=tmp_path)
    sampled = evaluate(model, split, SINGLE, options, sample=sample)
    assert sampled == evaluate(model, split, SINGLE, EvalOptions(batch_size, adaptive=adaptive))
    saved = load_file(tmp_path / "all_rank0_0000.safetensors")
    predictions = dict(zip(saved["rows"].tolist(), saved["predictions"].numpy(), strict=True))
    assert sample.set_name == "all"
    assert sorted(sample.answers) == list(range(min(3, batch_size)))
    for row, found in sample.answers.items():
        expected = (rows["inputs"][row], rows["labels"][row], predictions[row])
        assert [each_S.tolist() for each_S in found] == [each_S.tolist() for each_S in expected]


@pytest.mark.parametrize("batch_size", [1, 8, 1000])
def test_the_metrics_equal_those_of_segments_run_by_hand(
    model: HRM, rows: dict[str, np.ndarray], batch_size: int
) -> None:
    said = _by_hand(model, rows)
    labels_NS = torch.from_numpy(rows["labels"].astype(np.int32))
    counted = [n for n in range(23) if (labels_NS[n] != IGNORED).any()]
    assert len(counted) == 22

    def right(t: int, n: int) -> bool:
        return all(
            label in (IGNORED, guess)
            for guess, label in zip(said[t]["predictions"][n].tolist(), labels_NS[n].tolist(), strict=True)
        )

    def share_of_right_tokens(n: int) -> float:
        pairs = zip(said[-1]["predictions"][n].tolist(), labels_NS[n].tolist(), strict=True)
        hits = [guess == label for guess, label in pairs if label != IGNORED]
        return sum(hits) / len(hits)

    metrics = _evaluate(model, made_split(all=rows), batch_size)
    at_step = [metrics[f"eval/all/exact_accuracy_at_step/{t + 1}"] for t in range(STEPS)]
    assert at_step == pytest.approx([sum(right(t, n) for n in counted) / 22 for t in range(STEPS)])
    assert len(set(at_step)) > 1 and 0 < at_step[-1] < 1  # otherwise the comparison would prove little
    assert metrics["eval/all/exact_accuracy"] == at_step[-1]
    assert metrics["eval/all/accuracy"] == pytest.approx(sum(map(share_of_right_tokens, counted)) / 22)
    assert metrics["eval/all/steps"] == STEPS
    assert 1 < metrics["eval/all/halt_step"] < STEPS
    assert metrics["eval/all/halt_step"] == pytest.approx(sum(_halts_at(said, n) for n in counted) / 22)
    confident = [(float(said[-1]["q_halt"][n]) >= 0) == right(STEPS - 1, n) for n in counted]
    assert metrics["eval/all/q_halt_accuracy"] == pytest.approx(sum(confident) / 22)
    # The losses include the example without labels.
    total = metrics["eval/all/lm_loss"] + 0.5 * metrics["eval/all/q_halt_loss"]
    assert total * 23 == pytest.approx(float(said[-1]["loss"]), rel=1e-6)
    assert f"eval/all/exact_accuracy_at_step/{STEPS + 1}" not in metrics
    assert "eval/all/q_continue_loss" not in metrics  # q_continue has a target only in training


def _on_rank(world: World, seed: int, rows: dict[str, np.ndarray], batch_size: int) -> dict[str, float] | None:
    return evaluate(_model(seed), made_split(all=rows), world, EvalOptions(batch_size))


def test_the_number_of_ranks_does_not_change_the_metrics(model: HRM, seed: int, rows: dict[str, np.ndarray]) -> None:
    """Three ranks take 22 rows in batches of 7. The last row is left for one rank alone."""
    some = {name: array[:22] for name, array in rows.items()}
    expected = _evaluate(model, made_split(all=some), 7)
    assert expected is not None and expected != _evaluate(model, made_split(all=rows), 7)
    for rank, metrics in enumerate(run_ranks(_on_rank, 3, seed, some, 7)):
        assert metrics == pytest.approx(expected, rel=1e-5), f"rank {rank}"


def test_each_set_has_its_own_metrics(model: HRM, rows: dict[str, np.ndarray]) -> None:
    """A set without labels has only losses."""
    other = random_rows(3, seed=9)
    other["labels"][:] = IGNORED
    first, second = (_evaluate(model, made_split(**of), 4) for of in ({"first": rows}, {"second": other}))
    assert _evaluate(model, made_split(first=rows, second=other), 4) == first | second
    assert sorted(second) == ["eval/second/lm_loss", "eval/second/q_halt_loss"]


def test_settled_sequences_leave_with_their_answer(model: HRM, rows: dict[str, np.ndarray], tmp_path: Path) -> None:
    said = _by_hand(model, rows)
    settled_at = partial(_settled_at, said)
    options: dict[str, Any] = {"adaptive": True, "save_outputs": ["predictions", "steps"], "save_to": tmp_path}
    metrics = _evaluate(model, made_split(all=rows), 5, **options)
    saved = load_file(tmp_path / "all_rank0_0000.safetensors")
    labels_NS = torch.from_numpy(rows["labels"].astype(np.int32))
    is_label_NS = labels_NS != IGNORED
    assert sorted(saved["rows"].tolist()) == list(range(23))
    for n, predictions_S, steps in zip(saved["rows"].tolist(), saved["predictions"], saved["steps"], strict=True):
        assert int(steps) == settled_at(n)
        assert torch.equal(predictions_S, said[settled_at(n) - 1]["predictions"][n])
    counted = [n for n in range(23) if is_label_NS[n].any()]
    assert metrics["eval/all/exact_accuracy"] == pytest.approx(metrics[f"eval/all/exact_accuracy_at_step/{STEPS}"])
    assert metrics["eval/all/steps"] == pytest.approx(sum(settled_at(n) for n in counted) / 22)
    assert 1 < metrics["eval/all/steps"] < STEPS
    # A sequence that has left keeps its answer in the metrics of later segments.
    for t in range(STEPS):
        answers = [said[min(t + 1, settled_at(n)) - 1]["predictions"][n] for n in counted]
        exact = [
            bool((answer == labels_NS[n])[is_label_NS[n]].all()) for n, answer in zip(counted, answers, strict=True)
        ]
        assert metrics[f"eval/all/exact_accuracy_at_step/{t + 1}"] == pytest.approx(sum(exact) / 22)


def test_an_evaluation_may_have_more_or_fewer_segments_than_training(model: HRM, rows: dict[str, np.ndarray]) -> None:
    short, usual, long = (_evaluate(model, made_split(all=rows), 8, num_steps=n) for n in (2, STEPS, 6))
    for n in range(1, 7):
        name = f"eval/all/exact_accuracy_at_step/{n}"
        assert (name in short, name in usual) == (n <= 2, n <= STEPS)
        assert long[name] == usual.get(name, long[name]) == short.get(name, long[name])
    assert short["eval/all/exact_accuracy"] == usual["eval/all/exact_accuracy_at_step/2"]
    assert long["eval/all/steps"] == 6


class Clock(Deadline):
    """A deadline that is over after some readings. Each segment and each end of a batch reads."""

    def __init__(self, num_segments: int, lap: int) -> None:
        super().__init__(1e9)
        self._left, self._lap = num_segments + 1, lap

    def shared_by(self, names: list[str]) -> Any:
        return ((name, self) for name in names)

    @property
    def is_over(self) -> bool:
        self._left -= 1
        return self._left <= 0

    @property
    def is_near(self) -> bool:
        return self._left <= self._lap


# A batch of 5 takes 4 segments and reads the deadline once more at its end.
@pytest.mark.parametrize("num_segments, lap, num_batches", [(3, 0, 0), (3, 5, 0), (7, 0, 1), (8, 5, 1), (99, 5, 5)])
def test_a_batch_before_a_deadline_counts_completely_or_not_at_all(
    model: HRM, rows: dict[str, np.ndarray], tmp_path: Path, num_segments: int, lap: int, num_batches: int
) -> None:
    """Sequences that halted early in an unfinished batch must not count: they are the easy ones."""
    deadline, adaptive = Clock(num_segments, lap), num_batches == 5
    options = EvalOptions(5, adaptive=adaptive, save_outputs=["labels"], save_to=tmp_path)
    metrics = evaluate(model, made_split(all=rows), SINGLE, options, interrupts=Interrupts(deadline=deadline))
    assert metrics is not None
    assert deadline.was_met == (num_batches == 5)
    seen = sorted(row for file in tmp_path.iterdir() for row in load_file(file)["rows"].tolist())
    # Each batch takes rows from all parts of the file.
    expected = sorted([row for first in range(5) for row in range(first, 23, 5)][: 5 * num_batches])
    assert seen == expected
    if num_batches == 0:
        assert metrics == {}
        return
    part = {name: array[expected] for name, array in rows.items()}
    assert metrics == pytest.approx(_evaluate(model, made_split(all=part), 5, adaptive=adaptive), abs=1e-6)


def test_a_stop_abandons_the_evaluation(model: HRM, rows: dict[str, np.ndarray], tmp_path: Path) -> None:
    answers = iter([False, False, True])

    class Stop(StopSignal):
        def requested(self) -> bool:
            return next(answers)

    options = EvalOptions(5, save_outputs=["logits"], save_to=tmp_path / "outputs")
    assert evaluate(model, made_split(all=rows), SINGLE, options, interrupts=Interrupts(stop=Stop())) is None
    assert not (tmp_path / "outputs").exists()
    assert next(answers, None) is None


@pytest.mark.parametrize("names", [SAVED_OUTPUTS, ["predictions"], ["inputs", "q_halt"], ["q_halt_at_step"]])
def test_exactly_the_named_outputs_are_saved(
    model: HRM, rows: dict[str, np.ndarray], tmp_path: Path, names: list[SavedOutput]
) -> None:
    (tmp_path / "more_rank1_0000.safetensors").touch()  # of an earlier evaluation on two ranks
    _evaluate(model, made_split(all=rows, more=random_rows(2, 5)), 5, save_outputs=names, save_to=tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["all_rank0_0000.safetensors", "more_rank0_0000.safetensors"]
    saved = load_file(tmp_path / files[0])
    assert sorted(saved) == sorted([*names, "rows"])
    assert saved.pop("rows").tolist() == list(range(23))
    expected = _by_hand(model, rows)[-1]
    for name, tensor in saved.items():
        # All rows are saved in the order of the file, also those of the last incomplete batch.
        assert len(tensor) == 23
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
