"""After a bad step, a run stops, or returns to the last good checkpoint and skips the batch."""

import copy
import importlib
import os
import re
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models.losses import METRICS
from records.checkpoint.reader import find_checkpoint
from tests import runs
from tests.in_process import SINGLE, Begun, begin
from tests.runs import LAST_STEP, assert_same_run, rows, settings, train, with_arguments
from training.number_watch import BadStep
from training.recovery import Recovery
from training.resume import Start
from training.state import TrainState
from training.step import StepResult

pytestmark = pytest.mark.faults

Steps = tuple[int, ...]
OFTEN = {"log_interval": 1}


def _at_steps(change: Callable[..., Any]) -> None:
    """Replace `train_step` by `change(step of the run, the real train_step, state, ...)`."""
    import pretrain

    train_step = pretrain.train_step
    pretrain.train_step = lambda state, *args: change(state.progress.step, train_step, state, *args)


def explodes(at: Steps, rank: int, *, dies_at: int | None = None) -> None:
    """Make the gradients of these steps not finite, each time that the steps are run."""

    def step(number: int, real: Any, state: Any, *args: Any) -> Any:
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(state, *args)
        if number in at:
            result = replace(result, grad_norm=result.grad_norm * float("nan"))
            for weight in state.model.parameters():
                weight.data.fill_(float("nan"))  # such an update spoils every weight
        return result

    _at_steps(step)


def _does_nothing(at: Steps, rank: int) -> None:
    """Leave these batches out in another way: the steps change nothing and count nothing."""
    from training.session import Session

    real_count = Session.add_to_sums

    def count(session: Session, *args: Any) -> None:
        if session.state.progress.step not in at:
            real_count(session, *args)

    Session.add_to_sums = count  # type: ignore[method-assign,assignment]

    def step(number: int, real: Any, *args: Any) -> Any:
        if number not in at:
            return real(*args)
        return StepResult([], torch.zeros(()), 1, torch.zeros(()), was_taken=False)

    _at_steps(step)


def _spikes(at: Steps, rank: int) -> None:
    """Multiply only the logged loss of these steps by 100."""

    def step(number: int, real: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if number in at:
            result.sums[METRICS.index("lm_loss")] *= 100
        return result

    _at_steps(step)


@pytest.mark.parametrize(
    ("ranks", "at", "goes_back_to"),
    [(2, (7, 12), "step_00000006 at step 6"), (1, (1,), "the start")],
)
def test_a_rewound_run_equals_a_run_without_those_batches(
    data: Path, tmp_path: Path, log: Path, ranks: int, at: Steps, goes_back_to: str
) -> None:
    """The bad steps lie before the first checkpoint, in the middle and at the last step."""
    expected, run = tmp_path / "expected", tmp_path / "run"
    train(settings(data, expected, **OFTEN), log, ranks=ranks, hook=with_arguments(_does_nothing, at)).ok()
    hook = with_arguments(explodes, at)
    output = train(settings(data, run, on_nonfinite="rewind", **OFTEN), log, ranks=ranks, hook=hook).ok()
    for number, step in enumerate(at, start=1):
        assert f"not finite (NaN or infinite) since step {step}:" in output and f"rewind {number} of 3" in output
    assert f"{goes_back_to}, without the batch of step {at[0]}" in output
    logged = [{k: v for k, v in row.items() if k != "train/skipped_steps"} for row in rows(run)]
    assert logged == rows(expected)
    assert rows(run)[-1]["train/skipped_steps"] == len(at)
    assert_same_run(run, expected, metrics=False)


def test_a_rewound_run_that_was_killed_resumes_without_the_batch(data: Path, tmp_path: Path, log: Path) -> None:
    """The checkpoints after a rewind store which steps were left out."""
    expected, run = tmp_path / "expected", tmp_path / "run"
    train(settings(data, expected), log, hook=with_arguments(_does_nothing, (3,))).ok()
    typed = settings(data, run, on_nonfinite="rewind")
    train(typed, log, hook=partial(explodes, (3,), dies_at=9)).killed()
    output = train([*typed, "resume=auto"], log).ok()  # step 3 would succeed now, but stays left out
    assert "resuming" in output and "not finite" not in output
    assert_same_run(run, expected, metrics=False)


def test_the_number_of_rewinds_is_limited(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    hook = with_arguments(explodes, tuple(range(5, LAST_STEP)))
    typed = settings(data, run, on_nonfinite="rewind", max_rewinds=2, **OFTEN)
    message = train(typed, log, hook=hook).error()
    assert "since step 7;" in message and "steps 5, 6 were left out already (max_rewinds=2)" in message
    assert runs.latest(run) == 6 and rows(run)[-1]["step"] == 6


def test_a_spike_of_the_loss_is_a_bad_step(data: Path, tmp_path: Path, log: Path) -> None:
    """The median of the steps before it decides, even if the host looks at the loss much later."""
    expected, run, stopped = tmp_path / "expected", tmp_path / "run", tmp_path / "stopped"
    changes = {"max_steps": 24, "log_interval": 8, "eval_every_n_steps": None, "checkpoint_every_n_steps": 7}
    hook = with_arguments(_spikes, (5, 17))  # step 5 has too few losses before it
    watched = settings(data, run, loss_spike=20, on_nonfinite="rewind", **changes)
    output = train(watched, log, ranks=2, hook=hook).ok()
    assert re.search(r"lm_loss is \d+\.?\d* at step 17, (8|9|1\d)\d\.?\d* times", output), output
    assert "loss_spike=20" in output and "going back (rewind 1" in output
    assert "step_00000014 at step 14, without the batch of step 17" in output
    train(settings(data, expected, **changes), log, ranks=2, hook=with_arguments(_does_nothing, (17,))).ok()
    mine, theirs = runs.tensors(run, 24), runs.tensors(expected, 24)
    assert not [name for name in theirs if "open_sums" not in name and not torch.equal(mine[name], theirs[name])]
    message = train(settings(data, stopped, loss_spike=20, **changes), log, ranks=2, hook=hook).error()
    assert "lm_loss is" in message and "at step 17" in message and "on_nonfinite=rewind" in message


def _a_bit_flips(rank: int) -> None:
    """Change one bit of a weight on one rank, as failing memory does."""

    def step(number: int, real: Any, state: Any, *args: Any) -> Any:
        if number == 3 and rank == 1:
            weight = next(state.model.parameters())
            weight.data.view(torch.int32)[0] ^= 1
        return real(state, *args)

    _at_steps(step)


def _a_bit_of_the_optimizer_flips(rank: int) -> None:
    """Change one bit of the optimizer's state, before an update has used it."""

    def step(number: int, real: Any, state: Any, *args: Any) -> Any:
        result = real(state, *args)
        if number == 4 and rank == 1:
            moments = [of for of in state.optimizers.export_state(state.model).values() if of.dtype == torch.float32]
            moments[-1].view(torch.int32).view(-1)[0] ^= 1
        return result

    _at_steps(step)


def _an_average_drifts(rank: int) -> None:
    from optim.ema import EMA

    real = EMA.update

    def update(average: EMA, rate: float) -> None:
        real(average, rate)
        if rank == 1:
            next(iter(average.tensors().values())).add_(1)

    EMA.update = update  # type: ignore[method-assign,assignment]


def _rows_explode(at: Steps, rank: int) -> None:
    """Make the gradients of puzzle rows not finite, the only ones with freeze_weights."""
    program: Any = importlib.import_module("pretrain")
    real, now = program.sparse_sign_sgd_, iter(range(1, 10**6))

    def update(table: Any, ids: Any, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return real(table, ids, grad * float("nan") if next(now) in at else grad, **kwargs)

    program.sparse_sign_sgd_ = update


def test_gradients_of_the_puzzle_table_are_checked_too(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, freeze_weights="true", **OFTEN)
    message = train(typed, log, ranks=2, hook=with_arguments(_rows_explode, (7,))).error()
    assert "not finite (NaN or infinite) since step 7" in message and "step_00000006" in message
    assert runs.latest(run) == 6


@pytest.mark.parametrize(
    ("hook", "every", "differs", "saved"),
    [
        (_a_bit_flips, 1000, r".* at step 4", 2),
        (_a_bit_flips, 1, r".* at step 3", 2),
        (_a_bit_of_the_optimizer_flips, 1000, r"optimizer\.\S+ at step 4", 2),
        (_an_average_drifts, 1000, r"ema\.\S+ at step 2", 0),
    ],
)
def test_a_rank_with_another_state_is_named_before_it_is_saved(
    data: Path, tmp_path: Path, log: Path, hook: Callable[[int], None], every: int, differs: str, saved: int
) -> None:
    """A checkpoint takes tensors of the optimizer and of the average from all ranks in turn."""
    run = tmp_path / "run"
    typed = settings(data, run, global_batch_size=18, ema="true", check_replicas_every_n_steps=every)
    done = train(typed, log, ranks=3, hook=hook)
    named = re.search(rf"rank 1 \(process \d+ on [^)]+\) differs from the others in {differs}", done.output)
    assert done.status == 1 and named and "says nothing" not in done.output, done.output
    assert runs.latest(run) == saved, "state that differs between ranks was saved"


@pytest.fixture
def begun(data: Path, tmp_path: Path) -> Begun:
    begun = begin(settings(data, tmp_path / "run", on_nonfinite="rewind", max_rewinds=2))
    begun.state.progress.wandb_run_id = "first"
    return begun


def _bad(step: int) -> BadStep:
    return BadStep(step, f"step {step} is bad", "nothing is good")


def _fails(recovery: Recovery, state: TrainState, error: Exception) -> Start:
    """Make the run after a start end with an error. Return the start."""
    with recovery.next_start() as start:
        recovery.with_history(state)
        raise error
    return start


def _fresh(begun: Begun) -> TrainState:
    state = replace(begun.state, progress=begun.state.progress.model_copy(deep=True))
    state.progress.wandb_run_id, state.progress.skipped_steps = "another", []
    return state


def test_the_next_start_knows_all_steps_that_are_left_out(begun: Begun) -> None:
    """Also those of the resumed checkpoint. All starts share one W&B run."""
    begun.state.progress.skipped_steps = [8]
    recovery = Recovery(begun.start, SINGLE)
    _fails(recovery, begun.state, _bad(5))
    assert not recovery.is_done
    with recovery.next_start() as start:
        state = recovery.with_history(_fresh(begun))
        assert (state.progress.skipped_steps, state.progress.wandb_run_id) == ([5, 8], "first")
    assert recovery.is_done
    assert start.checkpoint is None and start.config is begun.start.config
    assert start.notes == [
        "step 5 is bad: going back (rewind 2 of 2 at most)",
        "going on from the start, without the batch of step 5, 8",
    ]


def test_a_branch_without_a_checkpoint_of_its_own_goes_back_to_that_of_its_source(begun: Begun, quiet: Path) -> None:
    of_source = find_checkpoint(quiet, pytest.fail)
    recovery = Recovery(replace(begun.start, checkpoint=of_source), SINGLE)
    _fails(recovery, begun.state, _bad(5))
    with recovery.next_start() as start:
        assert of_source is not None and start.checkpoint == of_source


def test_a_start_frees_its_memory_before_the_next(begun: Begun) -> None:
    """This holds even if the state is part of a reference cycle, like a layout with hooks."""
    state = _fresh(begun)
    state.layout = copy.copy(state.layout)
    state.layout.itself = state  # type: ignore[attr-defined]
    recovery, gone = Recovery(begun.start, SINGLE), weakref.ref(state)
    _fails(recovery, state, _bad(5))
    del state
    with recovery.next_start():
        assert gone() is None
