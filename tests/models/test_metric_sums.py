"""Sums of metrics equal numbers counted one by one, for any number of ranks (CPU, gloo)."""

# B = slots, N = sequences that leave, T = segments, S = tokens, V = vocabulary

import math
import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from models.carry import Outputs
from models.losses import ACT_SUMS, METRICS, LossConfig
from models.metric_sums import EvalSums, OpenSums, reliability, reliability_sums
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.world import World

SINGLE = World.single()
IGNORE = 0
SLOTS_PER_RANK = 4


# ---- open sums ---------------------------------------------------------------------------------


def _sums_of(step: int, rank: int) -> dict[str, float]:
    """Return the sums that a rank adds in a step. They differ for every rank and step."""
    return {name: float((index + 1) * 2**step + 100 * rank) for index, name in enumerate(METRICS)}


def _vector(values: dict[str, float]) -> Tensor:
    return torch.tensor([values[name] for name in METRICS], dtype=torch.float64)


def _add_steps(sums: OpenSums, world: World, steps: range, *, count: bool = True) -> None:
    for step in steps:
        values = _sums_of(step, world.rank) | ({} if count else {"count": 0.0})
        sums.add(_vector(values), torch.tensor(float(step)))


def _expected_row(num_ranks: int, steps: range) -> dict[str, float]:
    """Return the train metrics of these steps by their definitions."""
    total = {name: sum(_sums_of(step, rank)[name] for step in steps for rank in range(num_ranks)) for name in METRICS}
    row = {"train/grad_norm": sum(steps) / len(steps)}
    losses = ("lm_loss", "q_halt_loss", "q_continue_loss")
    for name in set(METRICS) - {"count"}:
        row[f"train/{name}"] = total[name] / (
            len(steps) * SLOTS_PER_RANK * num_ranks if name in losses else total["count"]
        )
    return row


def _reduces(world: World) -> list[dict[str, float]]:
    sums, rows = OpenSums(ACT_SUMS, world), []
    for steps in (range(1, 4), range(4, 5), range(0)):
        _add_steps(sums, world, steps)
        rows.append(sums.reduce(len(steps), len(steps) * SLOTS_PER_RANK * world.size))
    return rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_row_has_losses_per_slot_and_means_over_halted_sequences(num_ranks: int) -> None:
    """A row covers the steps since the row before. Without any step the row is empty."""
    first, second, nothing = run_ranks(_reduces, num_ranks)[0]
    assert first == pytest.approx(_expected_row(num_ranks, range(1, 4)), rel=1e-7)
    assert second == pytest.approx(_expected_row(num_ranks, range(4, 5)), rel=1e-7)
    assert nothing == {}


def test_a_row_without_halted_sequences_has_only_losses_and_the_norm() -> None:
    sums = OpenSums(ACT_SUMS, SINGLE)
    _add_steps(sums, SINGLE, range(1, 3), count=False)
    assert sums.reduce(2, 2 * SLOTS_PER_RANK).keys() == {
        f"train/{name}" for name in ("lm_loss", "q_halt_loss", "q_continue_loss", "grad_norm")
    }


def _opens(world: World) -> list[list[float]]:
    """Return the sums of every rank, as this rank would save them."""
    sums = OpenSums(ACT_SUMS, world)
    _add_steps(sums, world, range(1, 4))
    by_rank: list[list[float]] = sums.tensors()["open_sums"].tolist()
    return by_rank


def _goes_on(world: World, saved: list[list[float]]) -> tuple[dict[str, float], list[float]]:
    """Return the row of a resumed run, and this rank's own part of the restored sums."""
    sums = OpenSums(ACT_SUMS, world)
    open_sums = torch.tensor(saved, dtype=torch.float64)
    sums.restore({"open_sums": open_sums})
    mine = sums.tensors()["open_sums"][world.rank].tolist()
    return sums.reduce(3, 3 * SLOTS_PER_RANK * len(saved)), mine


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 2), (2, 1), (1, 2)])
def test_open_sums_are_restored_from_a_checkpoint(before: int, after: int) -> None:
    """With an equal number of ranks, each rank gets its own sums back."""
    saved = run_ranks(_opens, before)[0]
    assert len(saved) == before and {len(values) for values in saved} == {len(METRICS) + 1}
    results = run_ranks(_goes_on, after, saved)
    assert results[0][0] == pytest.approx(_expected_row(before, range(1, 4)), rel=1e-7)
    by_rank = [mine for _, mine in results]
    if before == after:
        assert by_rank == saved
    else:
        assert by_rank[0] == pytest.approx([sum(values) for values in zip(*saved, strict=True)])
        assert not any(value for mine in by_rank[1:] for value in mine)


def test_sums_of_other_metrics_are_refused_unless_nothing_is_open() -> None:
    """A checkpoint at a logged step has no open sums, so that nothing is lost."""
    sums = OpenSums(ACT_SUMS, SINGLE)
    sums.restore({"open_sums": torch.zeros(2, 3)})
    _add_steps(sums, SINGLE, range(1, 4))
    assert sums.reduce(3, 3 * SLOTS_PER_RANK) == pytest.approx(_expected_row(1, range(1, 4)), rel=1e-7)
    named = (
        f"the checkpoint holds open sums of 2 metrics, but this model has {len(METRICS)}; "
        "resume from a step that was logged, or start a new run with init_from=<run>"
    )
    with pytest.raises(UserError, match=re.escape(named)):
        sums.restore({"open_sums": torch.ones(1, 3)})


# ---- sums of an evaluation ---------------------------------------------------------------------

CONFIG = LossConfig(loss_type="softmax_cross_entropy", label_smoothing=0.0, halt_weight=0.5)
NUM_EXAMPLES, NUM_SEGMENTS, SEQ_LEN, VOCAB_SIZE = 23, 5, 2, 3
CHECKS = ("is_odd", "is_large")


@dataclass
class Example:
    """A sequence of an evaluation, with the outputs of each of its segments."""

    logits_TSV: Tensor
    q_halt_T: Tensor
    labels_S: Tensor
    leaves_after: int  # the number of segments that it takes
    halted_at: int  # the segment at which the Q head halts; beyond NUM_SEGMENTS: never
    checks: dict[str, bool]

    @property
    def is_labelled(self) -> bool:
        return any(label != IGNORE for label in self.labels_S.tolist())

    def right_after(self, segment: int) -> bool:
        """Return whether the answer after a number of segments has every labelled token right."""
        answer_S = self.logits_TSV[min(segment, self.leaves_after) - 1].argmax(-1).tolist()
        return all(label in (IGNORE, token) for token, label in zip(answer_S, self.labels_S.tolist(), strict=True))

    def outputs(self, segment: int) -> Outputs:
        logits_1SV, q_halt_1 = self.logits_TSV[segment - 1 : segment], self.q_halt_T[segment - 1 : segment]
        return Outputs(logits_1SV, q_halt_1, torch.zeros(1), None, None)


def _examples(num: int = NUM_EXAMPLES) -> list[Example]:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    examples = []
    for index in range(num):
        labels_S = torch.randint(0, VOCAB_SIZE, (SEQ_LEN,), generator=generator)  # some labels are IGNORE
        examples.append(
            Example(
                torch.randn(NUM_SEGMENTS, SEQ_LEN, VOCAB_SIZE, generator=generator),
                torch.randn(NUM_SEGMENTS, generator=generator),
                labels_S,
                leaves_after=draw(1, NUM_SEGMENTS + 1),
                halted_at=draw(1, NUM_SEGMENTS + 2),
                checks={"is_odd": index % 2 == 1, "is_large": index > 15},
            )
        )
    assert {example.is_labelled for example in examples} == {True, False}
    return examples


def _cross_entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(value) for value in logits)) - logits[label]


def _expected(examples: list[Example]) -> dict[str, float]:
    """Return the metrics by their definitions, adding one example after another."""
    labelled = [example for example in examples if example.is_labelled]
    row = {"num_examples": float(len(labelled))}
    lm_loss = q_halt_loss = accuracy = q_halt_accuracy = 0.0
    for example in examples:
        last = example.leaves_after - 1
        pairs = zip(example.logits_TSV[last].tolist(), example.labels_S.tolist(), strict=True)
        scored = [(logits, label) for logits, label in pairs if label != IGNORE]
        q, right = float(example.q_halt_T[last]), example.right_after(NUM_SEGMENTS)
        q_halt_loss += math.log(1 + math.exp(-q if right else q))
        if scored:
            lm_loss += sum(_cross_entropy(logits, label) for logits, label in scored) / len(scored)
            accuracy += sum(logits.index(max(logits)) == label for logits, label in scored) / len(scored)
            q_halt_accuracy += (q >= 0) == right
    row |= {"lm_loss": lm_loss / len(examples), "q_halt_loss": q_halt_loss / len(examples)}
    row |= {"accuracy": accuracy / len(labelled), "q_halt_accuracy": q_halt_accuracy / len(labelled)}
    row["steps"] = sum(example.leaves_after for example in labelled) / len(labelled)
    ran_until_halt = [min(example.leaves_after, example.halted_at) for example in labelled]
    row["halt_step"] = sum(ran_until_halt) / len(labelled)
    for name in CHECKS:
        row[name] = sum(example.checks[name] for example in labelled) / len(labelled)
    for n in range(1, NUM_SEGMENTS + 1):
        row[f"exact_accuracy_at_step/{n}"] = sum(example.right_after(n) for example in labelled) / len(labelled)
    return row | {"exact_accuracy": row[f"exact_accuracy_at_step/{NUM_SEGMENTS}"]}


def _count(sums: EvalSums, examples: list[Example]) -> None:
    """Run all segments of these examples in slots side by side, until each example leaves."""
    for segment in range(1, NUM_SEGMENTS + 1):
        there = [example for example in examples if example.leaves_after >= segment]
        if there:
            sums.add_segment(
                _joined(there, segment),
                torch.stack([example.labels_S for example in there]),
                torch.full((len(there),), segment),
                torch.tensor([example.halted_at < segment for example in there]),
                ignore_label=IGNORE,
            )
        leaving = [example for example in there if example.leaves_after == segment]
        if leaving:
            sums.add_last(
                _joined(leaving, segment),
                torch.stack([example.labels_S for example in leaving]),
                torch.full((len(leaving),), segment),
                {name: torch.tensor([example.checks[name] for example in leaving]) for name in CHECKS},
                config=CONFIG,
                ignore_label=IGNORE,
            )


def _joined(examples: list[Example], segment: int) -> Outputs:
    outputs = [example.outputs(segment) for example in examples]
    return Outputs(
        torch.cat([each.logits_BSV for each in outputs]),
        torch.cat([each.q_halt_B for each in outputs]),
        torch.cat([each.q_continue_B for each in outputs]),
        None,
        None,
    )


def _evaluates(world: World, num_examples: int) -> dict[str, float]:
    """Evaluate the examples of this rank in batches of three, and add the batches up."""
    mine = _examples()[:num_examples][world.slice_of(num_examples)]
    sums = EvalSums(NUM_SEGMENTS, CHECKS, world)
    for first in range(0, len(mine), 3):
        of_batch = EvalSums(NUM_SEGMENTS, CHECKS, world)
        _count(of_batch, mine[first : first + 3])
        sums.add(of_batch)
    return sums.reduce()


@pytest.mark.parametrize(("num_ranks", "num_examples"), [(1, NUM_EXAMPLES), (2, NUM_EXAMPLES), (3, 2)])
def test_an_evaluation_counts_every_example_once(num_ranks: int, num_examples: int) -> None:
    """All ranks get the same metrics, even a rank without examples."""
    expected = _expected(_examples()[:num_examples])
    for found in run_ranks(_evaluates, num_ranks, num_examples):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_an_evaluation_without_labels_has_only_losses() -> None:
    unlabelled = [example for example in _examples() if not example.is_labelled]
    sums = EvalSums(NUM_SEGMENTS, CHECKS, SINGLE)
    _count(sums, unlabelled)
    found = sums.reduce()
    assert found.keys() == {"lm_loss", "q_halt_loss"} and found["lm_loss"] == 0


def test_an_evaluation_without_examples_has_no_metrics() -> None:
    assert EvalSums(NUM_SEGMENTS, CHECKS, SINGLE).reduce() == {}


def test_the_reliability_of_hand_made_answers() -> None:
    """Two of three answers in a bin are right, one of two in another; the last does not count."""
    confidence = torch.tensor([0.61, 0.65, 0.69, 0.05, 0.07, 0.99], dtype=torch.float64)
    right = torch.tensor([True, True, False, False, True, True])
    counted = torch.tensor([True] * 5 + [False])
    row = reliability(reliability_sums(confidence.logit(), right, counted).tolist())
    assert row == pytest.approx(
        {
            "calibration_error": 3 / 5 * (2 / 3 - 0.65) + 2 / 5 * (0.5 - 0.06),
            **{"reliability/1/count": 2, "reliability/1/confidence": 0.06, "reliability/1/accuracy": 0.5},
            **{"reliability/7/count": 3, "reliability/7/confidence": 0.65, "reliability/7/accuracy": 2 / 3},
        }
    )


def test_a_confidence_of_one_is_in_the_last_bin() -> None:
    sums = reliability_sums(torch.tensor([100.0, -100.0]), torch.tensor([True, False]), torch.tensor([True, True]))
    row = reliability(sums.tolist())
    assert row["calibration_error"] == 0 and row["reliability/10/count"] == row["reliability/1/count"] == 1


def test_a_confidence_that_is_not_a_number_stops_no_evaluation() -> None:
    sums = reliability_sums(torch.tensor([torch.nan, 0.0]), torch.tensor([False, True]), torch.tensor([True, True]))
    assert math.isnan(reliability(sums.tolist())["calibration_error"])
