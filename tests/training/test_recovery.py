"""After a bad step, a run stops, or returns to the last good checkpoint and skips the batch."""

import copy
import importlib
import os
import re
import shutil
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.losses import METRICS
from tests import runs
from tests.in_process import SINGLE, Begun, begin, train_here
from tests.runs import LAST_STEP, assert_same_run, rows, settings, train, with_arguments
from training.number_watch import BadStep
from training.recovery import Recovery
from training.resume import Start
from training.state import TrainState

pytestmark = pytest.mark.faults

Steps = tuple[int, ...]
OFTEN = {"log_interval": 1}


def _at_steps(change: Callable[..., Any]) -> None:
    """Replace `train_step` by `change(step of the run, the real train_step, state, ...)`."""
    import pretrain

    train_step = pretrain.train_step
    pretrain.train_step = lambda state, *args: change(state.progress.step, train_step, state, *args)


def _explodes(at: Steps, rank: int) -> None:
    """Make the gradients of these steps not finite, each time that the steps are run."""

    def step(number: int, real: Any, state: Any, *args: Any) -> Any:
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
        import pretrain

        if number not in at:
            return real(*args)
        return pretrain.StepResult([], torch.zeros(()), 1, torch.zeros(()), was_taken=False)

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
    """The runs are equal bit for bit, and every step is logged once.

    The bad steps lie before the first checkpoint, in the middle and at the last step.
    """
    expected, run = tmp_path / "expected", tmp_path / "run"
    train(settings(data, expected, **OFTEN), log, ranks=ranks, hook=with_arguments(_does_nothing, at)).ok()
    hook = with_arguments(_explodes, at)
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
    train(typed, log, hook=with_arguments(_explodes_and_dies, (3,), 9)).killed()
    output = train([*typed, "resume=auto"], log).ok()  # step 3 would succeed now, but stays left out
    assert "resuming" in output and "not finite" not in output
    assert_same_run(run, expected, metrics=False)


def _explodes_and_dies(at: Steps, dies_at: int, rank: int) -> None:
    def die(number: int, real: Any, *args: Any, **kwargs: Any) -> Any:
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    _explodes(at, rank)
    _at_steps(die)


def test_the_number_of_rewinds_is_limited(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    hook = with_arguments(_explodes, tuple(range(5, LAST_STEP)))
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


def test_a_resumed_run_knows_the_losses_before_it(data: Path, tmp_path: Path, log: Path) -> None:
    """The checkpoint has enough losses to find a spike in the first step after it."""
    expected, run = tmp_path / "expected", tmp_path / "run"
    changes = {"loss_spike": 20, "eval_every_n_steps": None}
    train_here(settings(data, expected, **changes, max_steps=15))
    train_here(settings(data, run, **changes, max_steps=12))
    shutil.copytree(run, tmp_path / "spoiled")
    train_here([f"resume={run}", "max_steps=15"])
    losses = [runs.tensors(folder, 15)["rank_0000.safetensors:progress.losses"].tolist() for folder in (run, expected)]
    assert len(losses[1]) == 15 and losses[0] == losses[1], (
        "the resumed run has other losses in its window than the whole run"
    )
    typed = [f"resume={tmp_path / 'spoiled'}", "max_steps=15"]
    done = train(typed, log, hook=with_arguments(_spikes, (13,)))
    assert done.status == 2, f"the spike in the first step after the checkpoint was not noticed:\n{done.output}"
    assert re.search(r"lm_loss is \S+ at step 13, \S+ times the \S+ of the steps before it", done.error())


def _a_bit_flips(at_step: int, on_rank: int, rank: int) -> None:
    """Change one bit of a weight on one rank, as failing memory does."""

    def step(number: int, real: Any, state: Any, *args: Any) -> Any:
        if number == at_step and rank == on_rank:
            weight = next(state.model.parameters())
            weight.data.view(torch.int32)[0] ^= 1
        return real(state, *args)

    _at_steps(step)


@pytest.mark.parametrize(("every", "found_at"), [("1000", 4), ("1", 3)])
def test_a_rank_whose_weights_are_others_is_named_before_they_are_saved(
    data: Path, tmp_path: Path, log: Path, every: str, found_at: int
) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, global_batch_size=18, check_replicas_every_n_steps=every)
    done = train(typed, log, ranks=3, hook=with_arguments(_a_bit_flips, 3, 1))
    assert done.status == 1, done.output
    assert re.search(rf"rank 1 \(process \d+ on [^)]+\) differs from the others in .* at step {found_at}", done.output)
    assert "says nothing" not in done.output
    assert runs.latest(run) == 2, "weights that differ between ranks were saved"


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


def test_the_comparison_of_ranks_can_be_switched_off(data: Path, tmp_path: Path, log: Path) -> None:
    typed = settings(data, tmp_path / "run", check_replicas_every_n_steps=None)
    train(typed, log, ranks=2, hook=with_arguments(_a_bit_flips, 3, 1)).ok()


def _rows_explode(at: Steps, rank: int) -> None:
    """Make the gradients of puzzle rows not finite, the only ones with freeze_weights."""
    program: Any = importlib.import_module("pretrain")
    real, now = program.sparse_sign_sgd_, iter(range(1, 10**6))

    def update(table: Any, ids: Any, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return real(table, ids, grad * float("nan") if next(now) in at else grad, **kwargs)

    program.sparse_sign_sgd_ = update


@pytest.mark.parametrize("ranks", [2])
def test_gradients_of_the_puzzle_table_are_checked_too(data: Path, tmp_path: Path, log: Path, ranks: int) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, freeze_weights="true", **OFTEN)
    message = train(typed, log, ranks=ranks, hook=with_arguments(_rows_explode, (7,))).error()
    assert "not finite (NaN or infinite) since step 7" in message and "step_00000006" in message
    assert runs.latest(run) == 6


def test_a_branch_does_not_count_earlier_rewinds_of_its_source(data: Path, tmp_path: Path, log: Path) -> None:
    run, branch = tmp_path / "run", tmp_path / "branch"
    hook = with_arguments(_explodes, (3,))
    train(settings(data, run, on_nonfinite="rewind", max_rewinds=1, **OFTEN), log, hook=hook).ok()
    typed = [f"resume={run / 'step_00000006'}", f"checkpoint_path={branch}"]
    output = train(typed, log, hook=with_arguments(_explodes, (7,))).ok()
    assert "rewind 1 of 1" in output, output
    source = run / "step_00000006"  # the branch has no checkpoint of its own yet
    assert f"going on from {source} at step 6, without the batch of step 7" in output, output
    assert rows(branch)[-1]["train/skipped_steps"] == 1


def test_a_rewind_ends_an_unfinished_trace(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, on_nonfinite="rewind", profile="true", **OFTEN)
    output = train(typed, log, hook=with_arguments(_explodes, (5,))).ok()
    assert output.index("no trace: the run ended before step 6") < output.index("rewind 1 of 3"), output
    assert len([*run.glob("profile/rank_0.*.pt.trace.json.gz")]) == 1


@pytest.mark.parametrize(
    ("hook", "differs"),
    [(_a_bit_of_the_optimizer_flips, r"optimizer\.\S+ at step 4"), (_an_average_drifts, r"ema\.\S+ at step 2")],
)
def test_a_rank_with_another_state_is_named(
    data: Path, tmp_path: Path, log: Path, hook: Callable[[int], None], differs: str
) -> None:
    """A checkpoint takes tensors of the optimizer and of the average from all ranks in turn."""
    typed = settings(data, tmp_path / "run", global_batch_size=18, ema="true")
    done = train(typed, log, ranks=3, hook=hook)
    named = re.search(rf"rank 1 \(process \d+ on [^)]+\) differs from the others in {differs}", done.output)
    assert done.status == 1 and named, done.output


# ---- starts, one by one ------------------------------------------------------------------------


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
    """Return the state that is built after the next start."""
    state = replace(begun.state, progress=begun.state.progress.model_copy(deep=True))
    state.progress.wandb_run_id, state.progress.skipped_steps = "another", []
    return state


def test_the_next_start_knows_all_steps_that_are_left_out(begun: Begun) -> None:
    """The steps are those of the resumed checkpoint and later ones.

    All starts share one W&B run.
    """
    begun.state.progress.skipped_steps = [8]
    recovery = Recovery(begun.start, SINGLE)
    _fails(recovery, begun.state, _bad(5))
    assert begun.state.progress.skipped_steps == [8] and not recovery.is_done
    with recovery.next_start() as start:
        state = recovery.with_history(_fresh(begun))
        assert (state.progress.skipped_steps, state.progress.wandb_run_id) == ([5, 8], "first")
    assert recovery.is_done
    assert start.checkpoint is None and start.config is begun.start.config
    assert start.notes == [
        "step 5 is bad: going back (rewind 2 of 2 at most)",
        "going on from the start, without the batch of step 5, 8",
    ]


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
