"""Sums of metrics equal numbers counted one by one, for any number of ranks (CPU, gloo)."""

# B = slots, N = sequences that leave, T = segments, S = tokens, V = vocabulary

import math
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from models.carry import Outputs
from models.losses import ACT_SUMS, METRICS, LossConfig
from models.metric_sums import EvalSums, OpenSums, reliability, reliability_sums
from tests.spawn import run_ranks
from utils.batch import IGNORE_LABEL
from utils.errors import UserError
from utils.ranks.world import World

SINGLE = World.single()
SLOTS_PER_RANK = 4


# ---- open sums ---------------------------------------------------------------------------------


def _sums_of(step: int, rank: int) -> dict[str, float]:
    """Return the sums that a rank adds in a step. They differ for every rank and step."""
    return {name: float((index + 1) * 2**step + 100 * rank) for index, name in enumerate(METRICS)}


def _add_steps(sums: OpenSums, world: World, steps: range, **other: float) -> None:
    for step in steps:
        values = _sums_of(step, world.rank) | other
        sums.add(torch.tensor([values[name] for name in METRICS], dtype=torch.float64), torch.tensor(float(step)))


def _expected_row(num_ranks: int, steps: range) -> dict[str, float]:
    total = {name: sum(_sums_of(step, rank)[name] for step in steps for rank in range(num_ranks)) for name in METRICS}
    row = {"train/grad_norm": sum(steps) / len(steps)}
    losses = ("lm_loss", "q_halt_loss", "q_continue_loss")
    for name in set(METRICS) - {"count"}:
        row[f"train/{name}"] = total[name] / (
            len(steps) * SLOTS_PER_RANK * num_ranks if name in losses else total["count"]
        )
    return row


def test_a_row_without_halted_sequences_has_only_losses_and_the_norm() -> None:
    sums = OpenSums(ACT_SUMS, SINGLE)
    _add_steps(sums, SINGLE, range(1, 3), count=0.0)
    assert sums.reduce(2, 2 * SLOTS_PER_RANK).keys() == {
        f"train/{name}" for name in ("lm_loss", "q_halt_loss", "q_continue_loss", "grad_norm")
    }


def _opens(world: World) -> list[list[float]]:
    sums = OpenSums(ACT_SUMS, world)
    _add_steps(sums, world, range(1, 4))
    by_rank: list[list[float]] = sums.tensors()["open_sums"].tolist()
    return by_rank


def _goes_on(world: World, saved: list[list[float]]) -> tuple[list[dict[str, float]], list[float]]:
    """Return the rows of a resumed run, and this rank's own part of the restored sums."""
    sums = OpenSums(ACT_SUMS, world)
    sums.restore({"open_sums": torch.tensor(saved, dtype=torch.float64)})
    mine = sums.tensors()["open_sums"][world.rank].tolist()
    rows = [sums.reduce(3, 3 * SLOTS_PER_RANK * len(saved))]
    for steps in (range(4, 6), range(0)):
        _add_steps(sums, world, steps)
        rows.append(sums.reduce(len(steps), len(steps) * SLOTS_PER_RANK * world.size))
    return rows, mine


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 2), (2, 1), (1, 3)])
def test_rows_have_losses_per_slot_and_means_over_halted_sequences_also_after_a_resume(before: int, after: int) -> None:
    """A row covers the steps since the row before. Equally many ranks get their own sums back."""
    saved = run_ranks(_opens, before)[0]
    assert len(saved) == before and {len(values) for values in saved} == {len(METRICS) + 1}
    results = run_ranks(_goes_on, after, saved)
    first, second, nothing = results[0][0]
    assert first == pytest.approx(_expected_row(before, range(1, 4)), rel=1e-7)
    assert second == pytest.approx(_expected_row(after, range(4, 6)), rel=1e-7)
    assert nothing == {}
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
    with pytest.raises(UserError, match=f"open sums of 2 metrics, but this model has {len(METRICS)}; resume from"):
        sums.restore({"open_sums": torch.ones(1, 3)})


# ---- sums of an evaluation ---------------------------------------------------------------------

CONFIG = LossConfig(loss_type="softmax_cross_entropy", label_smoothing=0.0, halt_weight=0.5)
NUM_EXAMPLES, NUM_SEGMENTS, SEQ_LEN, VOCAB_SIZE = 23, 5, 2, 3
CHECKS = ("is_odd", "is_large")


@dataclass
class Examples:
    logits_NTSV: Tensor
    q_halt_NT: Tensor
    labels_NS: Tensor
    leaves_after_N: Tensor  # the number of segments that each takes
    halted_at_N: Tensor  # the segment at which the Q head halts; beyond NUM_SEGMENTS: never
    deltas_NT: Tensor
    checks: dict[str, Tensor]

    def __getitem__(self, chosen: Any) -> "Examples":
        tensors = {field.name: getattr(self, field.name)[chosen] for field in fields(self) if field.name != "checks"}
        return Examples(**tensors, checks={name: of[chosen] for name, of in self.checks.items()})

    def __len__(self) -> int:
        return len(self.labels_NS)

    @property
    def is_labelled_N(self) -> Tensor:
        return (self.labels_NS != IGNORE_LABEL).any(1)

    def right_after(self, n: int, segment: int) -> bool:
        """Return whether the answer after a number of segments has every labelled token right."""
        answer_S = self.logits_NTSV[n, min(segment, int(self.leaves_after_N[n])) - 1].argmax(-1).tolist()
        pairs = zip(answer_S, self.labels_NS[n].tolist(), strict=True)
        return all(label in (IGNORE_LABEL, token) for token, label in pairs)

    def outputs(self, segment: int) -> Outputs:
        logits_NSV, q_halt_N = self.logits_NTSV[:, segment - 1], self.q_halt_NT[:, segment - 1]
        return Outputs(logits_NSV, q_halt_N, torch.zeros(len(self)), None, None)


def _examples() -> Examples:
    generator, num = torch.Generator().manual_seed(0), NUM_EXAMPLES
    labels_NS = torch.randint(0, VOCAB_SIZE, (num, SEQ_LEN), generator=generator)
    found = Examples(
        torch.randn(num, NUM_SEGMENTS, SEQ_LEN, VOCAB_SIZE, generator=generator),
        torch.randn(num, NUM_SEGMENTS, generator=generator),
        labels_NS.masked_fill(labels_NS == 0, IGNORE_LABEL),
        torch.randint(1, NUM_SEGMENTS + 1, (num,), generator=generator),
        torch.randint(1, NUM_SEGMENTS + 2, (num,), generator=generator),
        torch.rand(num, NUM_SEGMENTS, generator=generator),
        {"is_odd": torch.arange(num) % 2 == 1, "is_large": torch.arange(num) > 15},
    )
    assert found.is_labelled_N.any() and not found.is_labelled_N.all()
    return found


def _cross_entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(value) for value in logits)) - logits[label]


def _expected(examples: Examples) -> dict[str, float]:
    """Return the metrics by their definitions, adding one example after another."""
    total = defaultdict[str, float](float)
    labelled = [n for n in range(len(examples)) if examples.is_labelled_N[n]]
    for n in range(len(examples)):
        last = int(examples.leaves_after_N[n])
        pairs = zip(examples.logits_NTSV[n, last - 1].tolist(), examples.labels_NS[n].tolist(), strict=True)
        scored = [(logits, label) for logits, label in pairs if label != IGNORE_LABEL]
        q, right = float(examples.q_halt_NT[n, last - 1]), examples.right_after(n, NUM_SEGMENTS)
        total["q_halt_loss"] += math.log(1 + math.exp(-q if right else q))
        if n not in labelled:
            continue
        total["lm_loss"] += sum(_cross_entropy(logits, label) for logits, label in scored) / len(scored)
        total["accuracy"] += sum(logits.index(max(logits)) == label for logits, label in scored) / len(scored)
        total["q_halt_accuracy"] += (q >= 0) == right
        total["steps"] += last
        total["halt_step"] += min(last, int(examples.halted_at_N[n]))
        for name in CHECKS:
            total[name] += bool(examples.checks[name][n])
        for step in range(1, NUM_SEGMENTS + 1):
            total[f"exact_accuracy_at_step/{step}"] += examples.right_after(n, step)
        for step in range(1, last + 1):
            total[f"running/{step}"] += 1
            total[f"loop_deltas/{step}"] += float(examples.deltas_NT[n, step - 1])
    total["exact_accuracy"] = total[f"exact_accuracy_at_step/{NUM_SEGMENTS}"]
    losses = ("lm_loss", "q_halt_loss")
    num_running = {f"loop_deltas/{step}": total.get(f"running/{step}", 0) for step in range(1, NUM_SEGMENTS + 1)}
    divisors = num_running | dict.fromkeys(losses, len(examples))
    row = {name: value / divisors.get(name, len(labelled)) for name, value in total.items()}
    return row | {"num_examples": len(labelled)}


def _count(sums: EvalSums, examples: Examples) -> None:
    for segment in range(1, NUM_SEGMENTS + 1):
        there = examples[examples.leaves_after_N >= segment]
        leaving = examples[examples.leaves_after_N == segment]
        if len(there):
            halted_N, steps_N = there.halted_at_N < segment, torch.full((len(there),), segment)
            deltas_N = there.deltas_NT[:, segment - 1]
            sums.add_segment(there.outputs(segment), there.labels_NS, steps_N, halted_N, deltas_N)
        if len(leaving):
            sums.add_last(
                leaving.outputs(segment),
                leaving.labels_NS,
                torch.full((len(leaving),), segment),
                leaving.checks,
                config=CONFIG,
            )


def _evaluates(world: World, num_examples: int) -> dict[str, float]:
    """Evaluate the examples of this rank in batches of three, and add the batches up."""
    mine = _examples()[:num_examples][world.slice_of(num_examples)]
    sums = EvalSums(NUM_SEGMENTS, CHECKS, world)
    for first in range(0, len(mine), 3):
        of_batch = EvalSums(NUM_SEGMENTS, CHECKS, world)
        _count(of_batch, mine[first : first + 3])
        sums.add(of_batch)
    return sums.reduce(calibration=True)


@pytest.mark.parametrize(("num_ranks", "num_examples"), [(1, NUM_EXAMPLES), (2, NUM_EXAMPLES), (3, 2)])
def test_an_evaluation_counts_every_example_once(num_ranks: int, num_examples: int) -> None:
    """All ranks get the same metrics, even a rank without examples."""
    expected = _expected(_examples()[:num_examples])
    for found in run_ranks(_evaluates, num_ranks, num_examples):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        counts = [value for name, value in found.items() if name.endswith("/count")]
        assert sum(counts) == expected["num_examples"], "an answer without labels has a confidence that may be right"


def test_an_evaluation_without_labels_has_only_losses_and_one_without_examples_nothing() -> None:
    examples, sums = _examples(), EvalSums(NUM_SEGMENTS, CHECKS, SINGLE)
    assert sums.reduce() == {}
    _count(sums, examples[~examples.is_labelled_N])
    found = sums.reduce()
    assert found.keys() == {"lm_loss", "q_halt_loss"} and found["lm_loss"] == 0


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


def test_confidences_of_one_are_in_the_last_bin_and_one_that_is_no_number_stops_nothing() -> None:
    right, counted = torch.tensor([True, False]), torch.tensor([True, True])
    row = reliability(reliability_sums(torch.tensor([100.0, -100.0]), right, counted).tolist())
    assert row["calibration_error"] == 0 and row["reliability/10/count"] == row["reliability/1/count"] == 1
    row = reliability(reliability_sums(torch.tensor([torch.nan, 0.0]), right, counted).tolist())
    assert math.isnan(row["calibration_error"])
