"""A session: what a run has open while it trains, and every way in which it ends."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import training.session
from dataset.evaluators import NO_EVALUATORS
from models.losses import METRICS
from records.checkpoint import storage
from records.checkpoint.format import step_folders
from records.checkpoint.reader import Checkpoint
from records.folder import Launched
from tests.in_process import SINGLE, begin, pretrain_config
from tests.runs import settings
from training.laps import Interrupts
from training.number_watch import BadStep
from training.plan import Plan
from training.session import Session, warnings_of
from utils.errors import UserError
from utils.ranks.launch import Launch
from utils.ranks.world import World
from utils.stop import StopSignal

BATCH = 16
Open = Callable[..., Session]


@pytest.fixture
def open_session(data: Path, tmp_path: Path) -> Open:
    """Open the session of a run that has done 4 steps."""

    def open_session(
        *, stop: StopSignal | None = None, progress: dict[str, Any] | None = None, world: World = SINGLE, **changes: Any
    ) -> Session:
        begun = begin(settings(data, tmp_path / "run", **changes))
        values = {"step": 4, "draws": 4 * BATCH} | (progress or {})
        begun.state.progress = begun.state.progress.model_copy(update=values)
        plan = Plan.make(begun.start.config, begun.data, begun.state.progress, SINGLE)
        return Session(begun.start, begun.data, begun.state, plan, stop or StopSignal(), begun.lock, world)

    return open_session


def _sums(value: float) -> torch.Tensor:
    return torch.full((len(METRICS),), value, dtype=torch.float64)


def _run(session: Session) -> Path:
    return session.config.run_path


@pytest.mark.parametrize(("changes", "every"), [({}, 7), ({"profile": "true"}, None)])
def test_communication_is_sampled_unless_a_trace_is_taken(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], every: int | None
) -> None:
    given = []
    monkeypatch.setattr("training.session.RankSampler", lambda every, world, **more: given.append((every, more)))
    open_session(perf_every_n_steps=7, perf_max_share=0.25, **changes)
    options = {"num_examples": BATCH, "unit": "examples", "max_share": 0.25}
    assert [(each, options | {"say": more["say"]} == more) for each, more in given] == [(every, True)]


def test_a_row_has_the_speed_in_operations(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.flops.UNCOUNTED_S", 0.0)
    depths = {"arch__H_cycles": 2, "arch__depth_curriculum": "[{until: 0.5, H_cycles: 1, L_cycles: 1}]"}
    with open_session(log_interval=2, progress={"skipped_steps": [9]}, **depths) as session:
        rows = []
        for _ in session.batches():
            session.add_to_sums(_sums(1.0), torch.tensor(1.0), BATCH)
            rows.append(session.end_step())
        speeds = [row["perf/model_tflops"] * row["perf/step_ms"] for row in rows if row]
        shallow, deep, *others = speeds
        assert 1.2 * shallow < deep and others == pytest.approx([deep / 2, deep]), "step 9 was left out"


def test_a_row_covers_the_steps_since_the_row_before(open_session: Open) -> None:
    scaling = {"lr_scaling": "linear", "lr_scaling_reference": 8}
    with open_session(log_interval=3, lr=1e-3, lr_warmup_steps=10, **scaling) as session:
        progress, rows = session.state.progress, {}
        for batch in session.batches():
            assert isinstance(batch, dict) and len(batch["inputs"]) == BATCH
            assert progress.draws == BATCH * progress.step
            session.add_to_sums(_sums(float(progress.step)), torch.tensor(2.0 * progress.step), BATCH)
            assert (progress.open_steps > 0, progress.open_slots) == (True, BATCH * progress.open_steps)
            row = session.end_step()
            if row:
                rows[progress.step] = row
                assert progress.open_steps == progress.open_slots == 0
        assert list(rows) == [6, 9, 12]
        assert rows[6]["train/lm_loss"] == pytest.approx((5 + 6) / (2 * BATCH))
        assert rows[9]["train/lm_loss"] == pytest.approx((7 + 8 + 9) / (3 * BATCH))
        assert rows[9]["train/grad_norm"] == pytest.approx(2 * 8)
        assert rows[9]["train/lr"] == pytest.approx(2 * 1e-3 * 9 / 10)
        assert not [name for name in rows[6] if name in ("train/skipped_steps", "train/loss_scale")]


def test_what_a_user_would_find_out_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(dtype: torch.dtype, last_step: int, num_weights: int = 1, lr: float = 1e-4) -> list[str]:
        weights = [torch.empty(num_weights, device="meta")]
        model = Mock(dtype=dtype, positions_per_slot=2, parameters=lambda: weights)
        plan = Plan(pretrain_config("lr_warmup_steps=2000", f"lr={lr}"), Mock(), last_step, NO_EVALUATORS, "", None)
        return [line.rpartition("; ")[2].split(",")[0] for line in warnings_of(plan, Mock(model=model), SINGLE)]

    for in_hardware in (True, False):
        monkeypatch.setattr("training.session.multiplies_bfloat16", lambda device, answer=in_hardware: answer)
        assert told(torch.float32, 2000) == ["set lr_warmup_steps=200"] and told(torch.float32, 2001) == []
        assert told(torch.bfloat16, 2001) == ([] if in_hardware else ["set arch.forward_dtype=float32"])
    assert told(torch.float32, 2000, lr=0.0) == [], "without a learning rate nothing warms up"
    assert told(torch.float32, 10**6, 10**6) == ["try experiment=demo"] and told(torch.float32, 3000, 10**6) == []


def test_a_vote_distinguishes_a_stop_from_missing_data(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopSignal(may_end=True)
    with open_session(stop=stop) as session:
        session.raise_data_error()
        batches = session.batches()  # without this reference the reader would stop
        next(batches)
        for name, votes in (
            (None, (False, False, False)),
            ("SIGTERM", (True, False, False)),
            (None, (False, False, False)),
        ):
            stop.name = name
            assert session.vote() == votes
        monkeypatch.setattr(session._loader, "next_mistake", lambda: UserError("the file shrank"))
        session.end_step()
        assert not stop.may_end, "a second Ctrl-C would lose the steps since the last checkpoint"
        assert session.vote() == (False, True, False)
        for raises in (session.raise_data_error, lambda: next(session.batches())):
            with pytest.raises(UserError, match="the file shrank"):
                raises()


@pytest.mark.parametrize("patience", [None, 1])
def test_failed_saves_end_a_run_only_if_no_last_save_follows(open_session: Open, patience: int | None) -> None:
    with open_session(early_stop_patience=patience, progress={"evaluations_since_best": 1}) as session:
        session.saves.require_attempts_left = Mock()  # type: ignore[method-assign]
        session.vote()
        assert session.saves.require_attempts_left.called == (patience is None)


def test_the_sinks_know_the_run_and_get_its_pictures_and_checkpoints(
    open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = Mock(num_pictures=3)
    monkeypatch.setattr("training.session.Metrics", Mock(return_value=sinks))
    world = replace(SINGLE, launch=Launch(identity="torchrun-1"))
    with open_session(project_name="p", run_name="r", world=world) as session:
        config, (made,) = session.config, training.session.Metrics.call_args_list  # type: ignore[attr-defined]
        named = {"id": session.state.progress.wandb_run_id, "project": "p", "name": "r", "config": config.model_dump()}
        assert made.args[1:] == (config.run_path, config.wandb, False, False, named, 4, 12)
        start = {"last_step": 12, "ranks": 1, "device": "cpu", "host": socket.gethostname(), "launch": "torchrun-1"}
        launched = Launched.read(config.run_path)
        assert launched is not None and launched.began_at == launched.since > 0
        assert launched == Launched.model_validate(start | {"began_at": launched.since, "since": launched.since})
        session.evaluate({}, limited=True)
        assert [(step, len(pictures)) for (step, pictures), _ in sinks.show.call_args_list] == [(4, 3)]
        for is_best in (True, False):
            session.save(is_best=is_best)
    added = [(folder.name, how) for (folder,), how in sinks.add_checkpoint.call_args_list]
    assert added == [("step_00000004", {"is_best": True}), ("step_00000004", {"is_best": False})]


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


def test_an_evaluation_that_was_interrupted_or_failed_is_pending(
    open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session saves the pending row on its way out, if the evaluation failed."""
    row = {"train/lr": 1.0}
    session = open_session()
    with pytest.raises(UserError, match="the test split is gone"), session:
        progress = session.state.progress
        monkeypatch.setattr("training.kinds.PUZZLES.evaluate", lambda *args: None)
        found = session.evaluate(row, limited=True)
        assert (found.row, found.is_done, found.is_best) == (row, False, False)
        assert (progress.pending_row, progress.evaluations_since_best) == (row, 0)
        assert not step_folders(_run(session))
        progress.pending_row = None
        fails = Mock(side_effect=UserError("the test split is gone"))
        monkeypatch.setattr("training.kinds.PUZZLES.evaluate", fails)
        session.evaluate(row, limited=True)
    assert Checkpoint.open(_run(session) / "step_00000004").state.pending_row == row
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


def test_a_step_that_went_wrong_is_not_saved(open_session: Open) -> None:
    session = open_session()
    with pytest.raises(BadStep, match="since step 4; there is no checkpoint yet"), session:
        session.add_to_sums(_sums(1.0), torch.tensor(float("nan")), BATCH)
        with pytest.raises(BadStep):
            session.evaluate({}, limited=False)
        session.save(is_best=False)
    assert not step_folders(_run(session))


@pytest.mark.parametrize(("every", "expected"), [(None, []), (1000, [4, 4])])
def test_replicas_are_compared_before_they_are_saved(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, every: int | None, expected: list[int]
) -> None:
    compared = list[int]()

    def compare(tensors: dict[str, torch.Tensor], step: int, world: World, off: str) -> None:
        assert tensors.keys() == session.state.replicated_tensors().keys() and not step_folders(_run(session))
        compared.append(step)

    with open_session(check_replicas_every_n_steps=every) as session:
        monkeypatch.setattr("training.session.require_same_replicas", compare)
        session.check_replicas()
        session.save(is_best=True)
    assert compared == expected
    assert (_run(session) / "best").read_text() == (_run(session) / "latest").read_text() == "step_00000004\n"


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay each save, so that the session ends during a save."""
    write = storage.write_tensors  # type: ignore[attr-defined]

    def slow(*args: Any) -> Any:
        threading.Event().wait(0.3)
        return write(*args)

    monkeypatch.setattr(storage, "write_tensors", slow)


def _closings(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    closed: list[str] = []
    monkeypatch.setattr(session._metrics, "close", lambda **how: closed.append(f"metrics {how}"))
    monkeypatch.setattr(session._profiler, "close", lambda: closed.append("profiler"))
    return closed


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(
    ("error", "on_nonfinite", "how"),
    [
        (None, "stop", {}),
        (UserError("no data"), "rewind", {"failed": True, "at_most_s": 60.0}),
        (BadStep(4, "bad", "good"), "stop", {"failed": True, "at_most_s": 50.0}),
        (BadStep(4, "bad", "good"), "rewind", {"failed": False, "at_most_s": 50.0}),
        (RuntimeError("a bug"), "stop", None),  # the launcher does not wait for the sinks of a failed rank
    ],
    ids=["in order", "a mistake", "a bad step", "a rewind", "a fault"],
)
def test_every_way_out_finishes_the_save_and_closes_the_sinks(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, error: Exception | None, on_nonfinite: str, how: Any
) -> None:
    session = open_session(on_nonfinite=on_nonfinite)
    session._world = replace(SINGLE, timeout=timedelta(seconds=100 if isinstance(error, BadStep) else 600))
    closed, expected = _closings(session, monkeypatch), [] if how is None else ["profiler", f"metrics {how}"]
    with suppress(UserError, RuntimeError), session:
        session.save(is_best=False)
        if error is not None:
            raise error
    assert (_run(session) / "latest").read_text() == "step_00000004\n", "the session did not wait for its save"
    assert closed == expected
    if isinstance(error, RuntimeError):
        (note,) = error.__notes__
        assert note == f"at step 4; the last good checkpoint is {_run(session) / 'step_00000004'}"


def test_a_fault_in_the_last_save_names_the_step(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session()
    closed = _closings(session, monkeypatch)
    monkeypatch.setattr(storage, "write_tensors", Mock(side_effect=KeyError("a bug")))
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
            patched.setattr(rows, "write_waiting", Mock(side_effect=OSError(28, os.strerror(28))))
            session.log({"train/lm_loss": 1.0})
            session.save(is_best=False)
            session.saves.finish()
        assert not (_run(session) / "latest").exists() and not (_run(session) / "metrics.jsonl").exists()
        session.save(is_best=False)
        session.saves.finish()
        assert '"step": 4' in (_run(session) / "metrics.jsonl").read_text()
        assert (_run(session) / "latest").exists() and session.state.progress.failed_saves == 1


@pytest.mark.usefixtures("slow_disk")
def test_the_marker_of_a_stop_is_written_after_its_checkpoint(open_session: Open) -> None:
    stop = StopSignal()
    with open_session(stop=stop) as session:
        session.save(is_best=False)
        for stop.name, reason in (("SIGUSR1", "SIGUSR1"), (None, "a signal to another rank")):
            session.mark_stopped()
            assert (_run(session) / "latest").exists(), "the marker was written before the checkpoint"
            assert (_run(session) / "stopped").read_text() == f"{reason}\n"
