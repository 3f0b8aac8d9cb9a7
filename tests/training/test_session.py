"""A session: what a run has open while it trains, and every way in which it ends."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from models.losses import METRICS
from tests.in_process import SINGLE, begin
from tests.runs import settings
from training.laps import Interrupts
from training.number_watch import BadStep
from training.plan import Plan
from training.session import Session, describe
from utils.checkpoint import writer as writer_module
from utils.checkpoint.format import step_folders
from utils.checkpoint.reader import Checkpoint
from utils.errors import UserError
from utils.ranks.world import World
from utils.run.stop import StopSignal

BATCH = 16
Open = Callable[..., Session]


@pytest.fixture
def open_session(data: Path, tmp_path: Path) -> Open:
    """Open the session of a run that has done 4 steps."""

    def open_session(
        *, stop: StopSignal | None = None, progress: dict[str, Any] | None = None, **changes: Any
    ) -> Session:
        begun = begin(settings(data, tmp_path / "run", **changes))
        values = {"step": 4, "draws": 4 * BATCH} | (progress or {})
        begun.state.progress = begun.state.progress.model_copy(update=values)
        plan = Plan.make(begun.start.config, begun.data, begun.state.progress, SINGLE)
        return Session(begun.start, begun.data, begun.state, plan, stop or StopSignal(), begun.lock, SINGLE)

    return open_session


def _sums(value: float) -> torch.Tensor:
    return torch.full((len(METRICS),), value, dtype=torch.float64)


def _run(session: Session) -> Path:
    return session.config.run_path


# ---- the beginning -----------------------------------------------------------------------------


@pytest.mark.parametrize(("pending", "kept"), [(None, [1, 3, 4]), ({}, [1, 3])])
def test_rows_after_the_checkpoint_are_dropped(
    open_session: Open, tmp_path: Path, pending: dict[str, float] | None, kept: list[int]
) -> None:
    """The row of a step with a pending evaluation is dropped too, because it is written again."""
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 3, 4, 5)))
    with open_session(progress={"pending_row": pending}):
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == kept


@pytest.mark.parametrize(("changes", "every"), [({}, 7), ({"profile": "true"}, None)])
def test_communication_is_sampled_unless_a_trace_is_taken(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], every: int | None
) -> None:
    given = []
    monkeypatch.setattr("training.session.RankSampler", lambda every, world, **more: given.append((every, more)))
    open_session(perf_every_n_steps=7, perf_max_share=0.25, **changes)
    assert given == [(every, {"num_examples": BATCH, "unit": "examples", "max_share": 0.25})]


def test_a_row_has_the_speed_in_operations(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.flops.UNCOUNTED_S", 0.0)
    with open_session(log_interval=2) as session:
        rows = []
        for _ in session.batches():
            session.add_to_sums(_sums(1.0), torch.tensor(1.0), BATCH)
            rows.append(session.end_step())
        speeds = [row["perf/model_tflops"] * row["perf/step_ms"] for row in rows if row]
        assert len(speeds) == 4 and speeds == pytest.approx(speeds[:1] * 4), "each step has as many operations"


def test_the_head_counts_the_whole_model_where_a_rank_has_a_part(data: Path, tmp_path: Path) -> None:
    begun = begin(settings(data, tmp_path / "run"))
    with begun.lock:
        plan = Plan.make(begun.start.config, begun.data, begun.state.progress, SINGLE)
        head = [describe(begun.start.config, begun.data, begun.state, plan, SINGLE)]
        for block in begun.state.model.blocks():  # as a stage of a pipeline lacks those of other stages
            for weight in block.parameters():
                weight.data = weight.data[:0]
        head.append(describe(begun.start.config, begun.data, begun.state, plan, SINGLE))
    assert head[0] == head[1] and " parameters and " in head[0]


# ---- steps -------------------------------------------------------------------------------------


def test_each_batch_advances_the_progress(open_session: Open) -> None:
    with open_session(max_steps=7) as session:
        progress, seen = session.state.progress, []
        for batch in session.batches():
            assert isinstance(batch, dict)
            assert len(batch["inputs"]) == BATCH
            seen.append((progress.step, progress.draws))
        assert seen == [(step, step * BATCH) for step in (5, 6, 7)]


def test_a_first_batch_that_cannot_be_read_is_a_mistake(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session() as session:
        monkeypatch.setattr(session._loader, "next_mistake", lambda: UserError("the file shrank"))
        with pytest.raises(UserError, match="the file shrank"):
            next(session.batches())
        assert session.state.progress.step == 4


def test_a_row_covers_the_steps_since_the_row_before(open_session: Open) -> None:
    with open_session(log_interval=3, lr=1e-3, lr_warmup_steps=10) as session:
        progress, rows = session.state.progress, {}
        for _ in session.batches():
            session.add_to_sums(_sums(float(progress.step)), torch.tensor(1.0), BATCH)
            assert (progress.open_steps > 0, progress.open_slots) == (True, BATCH * progress.open_steps)
            row = session.end_step()
            if row:
                rows[progress.step] = row
                assert progress.open_steps == progress.open_slots == 0
        assert list(rows) == [6, 9, 12]
        assert rows[6]["train/lm_loss"] == pytest.approx((5 + 6) / (2 * BATCH))
        assert rows[9]["train/lm_loss"] == pytest.approx((7 + 8 + 9) / (3 * BATCH))
        assert rows[9]["train/lr"] == pytest.approx(1e-3 * 9 / 10)
        assert not [name for name in rows[6] if name in ("train/skipped_steps", "train/loss_scale")]


def test_a_vote_distinguishes_a_stop_from_missing_data(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopSignal()
    with open_session(stop=stop) as session:
        session.raise_data_error()
        batches = session.batches()  # without this reference the reader would stop
        next(batches)
        assert session.vote_to_end() == (False, False)
        stop.name = "SIGTERM"
        assert session.vote_to_end() == (True, False)
        stop.name = None
        monkeypatch.setattr(session._loader, "next_mistake", lambda: UserError("the file shrank"))
        session.end_step()
        assert session.vote_to_end() == (False, True)
        with pytest.raises(UserError, match="the file shrank"):
            session.raise_data_error()


# ---- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("limited", [True, False])
def test_an_evaluation_follows_the_config(open_session: Open, monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    given: dict[str, Any] = {}

    def evaluate(model: Any, split: Any, world: World, *others: Any) -> dict[str, float]:
        given.update(zip(("options", "evaluators", "interrupts"), others, strict=False), model=model, split=split)
        weights = model.state_dict()
        assert session.state.ema is not None
        same = [torch.equal(weights[name], tensor) for name, tensor in average.items()]
        assert all(same), "the evaluation did not use the averaged weights"
        return {session.plan.best_metric: 0.5}

    stop = StopSignal()
    options = {"eval_max_examples": 3, "eval_adaptive": "true", "eval_save_outputs": "[labels]", "ema": "true"}
    with open_session(stop=stop, eval_batch_size=5, eval_max_share=0.5, **options) as session:
        state = session.state
        assert state.ema is not None
        for tensor in state.ema.tensors().values():
            tensor.add_(1)
        average = {name: tensor.clone() for name, tensor in state.ema.tensors().items()}
        monkeypatch.setattr("training.kinds.PUZZLES.evaluate", evaluate)
        monkeypatch.setattr(state.layout, "lockstep", limited)
        found = session.evaluate({"train/lr": 1.0}, limited=limited)
        assert given["model"] is state.model and given["split"].path.name == "test"
        assert given["evaluators"] == session.plan.evaluators and given["interrupts"].stop is stop
        assert (given["interrupts"].lockstep, given["interrupts"].deadline.is_set) == (limited, limited)
        made = given["options"]
        assert (made.batch_size, made.num_steps, made.adaptive, made.max_examples) == (5, None, True, 3)
        assert (made.keep_votes, made.save_outputs) == (False, ["labels"])
        assert made.save_to == _run(session) / "eval_outputs" / "step_00000004"
        assert found.row.keys() == {"train/lr", session.plan.best_metric, "perf/eval_share"}
        assert (found.is_done, found.is_best) == (True, True)
        assert (state.progress.best, state.progress.pending_row) == (0.5, None)
        assert not session.evaluate({}, limited=limited).is_best and state.progress.evaluations_since_best == 1


def test_an_interrupted_evaluation_is_pending(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session() as session:
        monkeypatch.setattr("training.kinds.PUZZLES.evaluate", lambda *args, **kwargs: None)
        found, progress = session.evaluate({"train/lr": 1.0}, limited=True), session.state.progress
        assert (found.row, found.is_done, found.is_best) == ({"train/lr": 1.0}, False, False)
        assert (progress.pending_row, progress.evaluations_since_best) == ({"train/lr": 1.0}, 0)
        assert not step_folders(_run(session))


def test_a_failed_evaluation_is_saved_as_pending(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise UserError("the test split is gone")

    session = open_session()
    monkeypatch.setattr("training.kinds.PUZZLES.evaluate", fail)
    with pytest.raises(UserError, match="the test split is gone"), session:
        session.evaluate({"train/lr": 1.0}, limited=True)
    saved = Checkpoint.open(_run(session) / "step_00000004").state
    assert saved.pending_row == {"train/lr": 1.0}
    assert not (_run(session) / "best").exists()


def test_an_evaluation_cut_off_by_its_deadline_cannot_be_the_best(
    open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*args: Any) -> dict[str, float]:
        interrupts = args[5]
        assert isinstance(interrupts, Interrupts)
        interrupts.deadline.was_met = False
        return {session.plan.best_metric: 1.0}

    with open_session() as session:
        monkeypatch.setattr("training.kinds.PUZZLES.evaluate", evaluate)
        found, progress = session.evaluate({}, limited=True), session.state.progress
        assert (found.is_done, found.is_best) == (True, False) and session.plan.best_metric in found.row
        assert (progress.best, progress.evaluations_since_best, progress.pending_row) == (None, 0, None)


# ---- saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["save", "evaluate"])
def test_a_step_that_went_wrong_is_not_saved(open_session: Open, how: str) -> None:
    session = open_session()
    with pytest.raises(BadStep, match="since step 4; there is no checkpoint yet"), session:
        session.add_to_sums(_sums(1.0), torch.tensor(float("nan")), BATCH)
        if how == "save":
            session.save(is_best=False)
        else:
            session.evaluate({}, limited=False)
    assert not step_folders(_run(session))


@pytest.mark.parametrize(("every", "expected"), [(None, []), (1000, [4, 4])])
def test_replicas_are_compared_before_they_are_saved(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, every: int | None, expected: list[int]
) -> None:
    compared = list[int]()

    def compare(tensors: dict[str, torch.Tensor], step: int, world: World) -> None:
        assert tensors.keys() == session.state.replicated_tensors().keys() and not step_folders(_run(session))
        compared.append(step)

    with open_session(check_replicas_every_n_steps=every) as session:
        monkeypatch.setattr("training.session.require_same_replicas", compare)
        session.check_replicas()
        session.save(is_best=True)
    assert compared == expected
    assert (_run(session) / "best").read_text() == (_run(session) / "latest").read_text() == "step_00000004\n"


# ---- the ways out ------------------------------------------------------------------------------


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay each save, so that the session ends during a save."""
    write = writer_module._write_tensors

    def slow(*args: Any) -> Any:
        threading.Event().wait(0.3)
        return write(*args)

    monkeypatch.setattr(writer_module, "_write_tensors", slow)


def _closings(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    closed: list[str] = []
    monkeypatch.setattr(session._metrics, "close", lambda **how: closed.append(f"metrics {how}"))
    monkeypatch.setattr(session._profiler, "close", lambda: closed.append("profiler"))
    return closed


def _leave(session: Session, error: BaseException | None) -> None:
    with suppress(UserError, RuntimeError), session:
        session.save(is_best=False)
        if error is not None:
            raise error


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(
    ("error", "on_nonfinite", "expected"),
    [
        (None, "stop", ["profiler", "metrics {}"]),
        (UserError("no data"), "rewind", ["profiler", "metrics {'failed': True, 'at_most_s': 60.0}"]),
        (BadStep(4, "bad", "good"), "stop", ["profiler", "metrics {'failed': True, 'at_most_s': 60.0}"]),
        (BadStep(4, "bad", "good"), "rewind", ["profiler", "metrics {'failed': False, 'at_most_s': 60.0}"]),
        (RuntimeError("a bug"), "stop", []),  # the launcher does not wait for the sinks of a failed rank
    ],
    ids=["in order", "a mistake", "a bad step", "a rewind", "a fault"],
)
def test_every_way_out_finishes_the_save_and_closes_the_sinks(
    open_session: Open,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception | None,
    on_nonfinite: str,
    expected: list[str],
) -> None:
    session = open_session(on_nonfinite=on_nonfinite)
    closed = _closings(session, monkeypatch)
    _leave(session, error)
    assert (_run(session) / "latest").read_text() == "step_00000004\n", "the session did not wait for its save"
    assert closed == expected
    if isinstance(error, RuntimeError):
        (note,) = error.__notes__
        assert note == f"at step 4; the last good checkpoint is {_run(session) / 'step_00000004'}"


def _full(*args: Any) -> Any:
    raise OSError(28, os.strerror(28))


def test_a_fault_in_the_last_save_names_the_step(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise KeyError("a bug")

    session = open_session()
    closed = _closings(session, monkeypatch)
    monkeypatch.setattr(writer_module, "_write_tensors", broken)
    with pytest.raises(Exception, match="a bug") as caught, session:
        session.save(is_best=False)
    assert not isinstance(caught.value, UserError) and closed == []
    assert caught.value.__notes__ == ["at step 4; there is no checkpoint yet"]


def test_a_checkpoint_comes_after_the_rows_that_wait(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed from the checkpoint does not repeat the steps of these rows."""
    session = open_session(on_save_error="continue")
    with session:
        rows = session._metrics._rows
        assert rows is not None
        with monkeypatch.context() as patched:
            patched.setattr(rows, "write_waiting", _full)
            session.log({"train/lm_loss": 1.0})
            session.save(is_best=False)
            session._saves.finish()
        assert not (_run(session) / "latest").exists() and not (_run(session) / "metrics.jsonl").exists()
        session.save(is_best=False)
        session._saves.finish()
        assert '"step": 4' in (_run(session) / "metrics.jsonl").read_text()
        assert (_run(session) / "latest").exists() and session.state.progress.failed_saves == 1


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(("name", "reason"), [("SIGUSR1", "SIGUSR1"), (None, "a signal to another rank")])
def test_the_marker_of_a_stop_is_written_after_its_checkpoint(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, name: str | None, reason: str
) -> None:
    stop = StopSignal()
    stop.name = name
    with open_session(stop=stop) as session:
        session.save(is_best=False)
        session.mark_stopped()
        assert (_run(session) / "latest").exists(), "the marker was written before the checkpoint"
        assert (_run(session) / "stopped").read_text() == f"{reason}\n"
