"""The plan of a run equals the answers found by counting, over many settings."""

# B = slots

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dataset.evaluators import NO_EVALUATORS
from dataset.online import OnlineAugmentation
from dataset.sampler import Sampler
from dataset.schema import Split
from records.checkpoint.format import Progress
from tests.dataset.shapes import split_with
from tests.in_process import SINGLE, pretrain_config
from tests.spawn import world_of
from training.config import PretrainConfig
from training.plan import Plan, full_best_metric, online_augmentation
from training.splits import open_data
from utils.errors import UserError

_defaults = functools.cache(pretrain_config)


def _config(**changes: object) -> PretrainConfig:
    assert changes.keys() <= PretrainConfig.model_fields.keys()
    return _defaults().model_copy(update=changes)


def _sampler(epoch: int, epochs: int, batch: int, first_step: int = 1, first_draw: int = 0) -> Sampler:
    """Return a stream with `epoch` draws in each epoch."""
    zeros = np.zeros((epoch, 1), np.uint8)
    puzzles = split_with(zeros, zeros, 1).sets["all"]
    return Sampler(
        [puzzles], seed=0, epochs=epochs, global_batch_size=batch, first_step=first_step, first_draw=first_draw
    )


def _plan(
    sampler: Sampler | None = None, *, last_step: int = 1000, metric: str = "eval/all/exact_accuracy", **changes: object
) -> Plan:
    return Plan(_config(**changes), sampler or _sampler(1, 1, 1), last_step, NO_EVALUATORS, metric, None)


def test_the_first_step_and_every_interval_are_logged() -> None:
    for interval in (1, 2, 3, 5, 10, 1000):
        plan = _plan(log_interval=interval, last_step=49)
        logged = [step for step in range(1, 50) if plan.log_due(step)]
        assert logged == sorted({1, *range(interval, 50, interval)})


def _evaluations_by_epochs(
    every: int, leave_out: int, sampler: Sampler, epoch: int, first_step: int, first_draw: int
) -> Iterator[int]:
    """Count the draws of a run one by one. Yield the steps with an evaluation."""
    draws = first_draw
    for step in range(first_step, sampler.last_step + 1):
        is_due = False
        for _ in range(sampler.global_batch_size):
            draws += 1
            if draws % epoch == 0 and draws // epoch % every == 0 and draws // epoch // every > leave_out:
                is_due = True
        if is_due:
            yield step


@given(
    epoch=st.integers(1, 9),
    epochs=st.integers(1, 12),
    batch=st.integers(1, 12),
    every=st.integers(1, 4),
    leave_out=st.integers(0, 3),
    every_n_steps=st.none() | st.integers(1, 5),
    where=st.integers(0, 5),
)
def test_evaluations_by_epochs_and_by_steps(
    epoch: int, epochs: int, batch: int, every: int, leave_out: int, every_n_steps: int | None, where: int
) -> None:
    """Several epochs may end within a step. A resumed run may have another batch size."""
    first_step, first_draw = 1 + where, where * (batch + 1)
    sampler = _sampler(epoch, epochs, batch, first_step, first_draw)
    last_step = sampler.last_step
    options: dict[str, Any] = {
        "eval_interval": every,
        "eval_every_n_steps": every_n_steps,
        "min_eval_interval": leave_out,
    }
    plan = _plan(sampler, last_step=last_step, **options)
    steps = range(first_step, last_step + 1)
    expected = {*_evaluations_by_epochs(every, leave_out, sampler, epoch, first_step, first_draw)}
    if every_n_steps is not None:
        expected |= {*range(every_n_steps * (1 + leave_out), last_step + 1, every_n_steps)}
    expected = {step for step in expected | {last_step} if step in steps}
    assert {step for step in steps if plan.evaluation_due(step)} == expected


@pytest.mark.parametrize("every", [None, 1, 3, 4, 100])
def test_checkpoints_are_due_at_intervals_and_after_evaluations(every: int | None) -> None:
    last_step = 10
    at_intervals = range(every, last_step + 1, every) if every is not None else ()
    for after_evaluations in (True, False):
        plan = _plan(last_step=last_step, checkpoint_every_n_steps=every, checkpoint_every_eval=after_evaluations)
        for step, evaluated in itertools.product(range(1, last_step + 1), (False, True)):
            expected = step == last_step or step in at_intervals or (evaluated and after_evaluations)
            assert plan.checkpoint_due(step, evaluated=evaluated) == expected, (step, evaluated)


def test_the_schedule_counts_from_0_for_urm_as_published_and_from_1_for_others() -> None:
    """The schedule ends at the last step of the run."""
    urm = pretrain_config("arch=urm").arch
    changes: dict[str, Any] = {"last_step": 8, "lr_warmup_steps": 4, "lr_min_ratio": 0.5}
    from_1, from_0 = ([_plan(**changes).lr_multiplier(step) for step in range(n, n + 8)] for n in (1, 0))
    assert from_0[:5] == [0.0, 0.25, 0.5, 0.75, 1.0] and from_1[-1] == 0.5 < from_0[-1]
    assert from_1[5] == pytest.approx(0.75)
    own = _defaults().arch
    cases: list[Any] = [("auto", own, from_1), ("auto", urm, from_0), (1, urm, from_1), (0, own, from_0)]
    for counts_from, arch, expected in cases:
        plan = _plan(**changes, lr_counts_from=counts_from, arch=arch)
        assert [plan.lr_multiplier(step) for step in range(1, 9)] == expected


@given(
    logged=st.lists(st.sampled_from([None, math.nan, *map(float, range(6))]), max_size=12),
    mode=st.sampled_from(["max", "min"]),
)
def test_of_equal_best_evaluations_the_first_counts(logged: list[float | None], mode: str) -> None:
    """An evaluation without labels, or of NaN, is not the best, but it uses up patience."""
    plan, progress = _plan(best_mode=mode), Progress()
    values = [None if value is None or math.isnan(value) else value for value in logged]
    for n, value in enumerate(values):
        earlier = [known for known in values[:n] if known is not None]
        expected = value is not None and all(value > old if mode == "max" else value < old for old in earlier)
        metrics = {"eval/all/lm_loss": 9.0, plan.best_metric: logged[n]}
        of_evaluation = {name: number for name, number in metrics.items() if number is not None}
        assert plan.update_best(of_evaluation, progress) == expected
        known = [each for each in values[: n + 1] if each is not None]
        assert progress.best == (None if not known else max(known) if mode == "max" else min(known))
        first_of_best = values.index(progress.best) if known else -1
        assert progress.evaluations_since_best == n - first_of_best


@pytest.mark.parametrize(
    "name", ["accuracy", "exact_accuracy/loss", "loss", "loss/adding", "perplexity", "bits_per_byte/b"]
)
def test_losses_of_text_and_of_its_tasks_are_best_when_lowest(name: str) -> None:
    plan, progress = _plan(metric=f"eval/all/{name}"), Progress(best=1.0)
    assert plan.update_best({plan.best_metric: 0.5}, progress) == ("accuracy" not in name)


def test_a_run_is_finished_at_its_last_step_or_out_of_patience() -> None:
    plan = _plan(last_step=5, early_stop_patience=2)
    for step, since_best, pending in itertools.product(range(8), range(4), (None, {}, {"train/lm_loss": 1.0})):
        progress = Progress(step=step, evaluations_since_best=since_best, pending_row=pending)
        is_over = step in (5, 6, 7) or since_best in (2, 3)
        assert plan.is_finished(progress) == (is_over and pending is None), progress


def _small(data: Path, **changes: object) -> PretrainConfig:
    """Return a config with 5 steps: three epochs of 30 draws leave 10 draws over."""
    small = {"data_path": str(data), "global_batch_size": 16, "epochs": 3, "max_steps": None, "evaluators": []}
    return _config(**(small | changes))


def test_a_run_ends_with_its_epochs_or_its_steps(data: Path) -> None:
    """A resumed run reaches the same step with other draws, if it had another batch size."""
    for max_steps, expected in ((None, 5), (1000, 5), (5, 5), (3, 3)):
        config = _small(data, max_steps=max_steps)
        assert Plan.make(config, open_data(config, SINGLE), Progress(), SINGLE).last_step == expected
    config = _small(data)
    opened = open_data(config, SINGLE)
    for step, draws, last_step in ((2, 32, 5), (2, 64, 3), (4, 32, 7), (5, 80, 5)):
        plan = Plan.make(config, opened, Progress(step=step, draws=draws), SINGLE)
        assert (plan.last_step, plan.sampler.draws_before(step + 1)) == (last_step, draws)
    config = _small(data, global_batch_size=64, epochs=2)
    with pytest.raises(UserError, match="2 epochs don't fill one global batch of 64 examples"):
        Plan.make(config, opened, Progress(), SINGLE)


def test_all_ranks_together_augment_like_one_process(data: Path) -> None:
    """The seed of the run decides the boards, whatever the number of ranks."""
    examples_B = np.zeros(16, np.int64)

    def drawn(seed: int, size: int) -> Tensor:
        config, parts = _small(data, seed=seed, augment="online", augment_clues=0.75), []
        for world in (world_of(rank, size) for rank in range(size)):
            augmentation = online_augmentation(config, open_data(config, SINGLE), world)
            assert augmentation is not None
            parts.append(torch.cat([*augmentation.draw(3, examples_B[world.slice_of(16)]).values()], dim=1))
        return torch.cat(parts)

    split = open_data(_small(data), SINGLE).train
    assert isinstance(split, Split)
    expected = OnlineAugmentation(split, seed=7, global_batch_size=16, slots=slice(0, 16), most_clues=0.75)
    whole = torch.cat([*expected.draw(3, examples_B).values()], dim=1)
    assert torch.equal(drawn(7, 1), whole) and torch.equal(drawn(7, 2), whole)
    assert not torch.equal(drawn(8, 1), whole)


def test_the_default_set_of_the_best_metric_is_the_first_set(data: Path) -> None:
    """A name with a slash must begin with the set."""
    opened = open_data(_small(data), SINGLE)
    at_step = "exact_accuracy_at_step"
    for typed, expected in (
        (None, ""),
        ("exact_accuracy", "eval/all/exact_accuracy"),
        ("eval/all/lm_loss", "eval/all/lm_loss"),
        (f"eval/all/{at_step}/16", f"eval/all/{at_step}/16"),
    ):
        assert full_best_metric(_small(data, best_metric=typed), opened, NO_EVALUATORS) == expected
    for typed in (f"{at_step}/16", f"eval/all/{at_step}/17", "eval/other/exact_accuracy", "train/lm_loss"):
        with pytest.raises(ValueError, match=f"best_metric={typed} is no metric of this data; take one of eval/all/"):
            full_best_metric(_small(data, best_metric=typed), opened, NO_EVALUATORS)
