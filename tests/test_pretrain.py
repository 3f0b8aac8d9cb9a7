"""The training loop in this process: what it logs, that it learns, that its losses are right."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataset.loader import TrainLoader
from dataset.sampler import Sampler
from dataset.schema import Split
from models.act import ActSettings, draw_min_halt_steps, initial_carry, segment
from models.base import RecursiveModel
from models.losses import act_loss
from optim.adam import AdamATan2
from optim.schedule import lr_multiplier
from pretrain import after_step, train_step
from records.checkpoint.format import Progress
from records.lock import RunLock
from tests import runs
from tests.in_process import SINGLE, begin, train_here
from tests.models.helpers import build_puzzle_arch
from training.plan import Plan
from training.resume import read_start
from training.session import Evaluation
from training.splits import open_data
from training.state import TrainState
from training.step import StepResult, StepSettings
from utils.errors import UserError
from utils.ranks.launch import Launch

Row = dict[str, float]


def _run(data: Path, run: Path, **changes: object) -> tuple[TrainState, list[Row]]:
    """Train a whole run. Return its state and the rows that it logged."""
    state = train_here(runs.settings(data, run, **changes))
    return state, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def every_step(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Return the rows of a run that logs each of its 12 steps."""
    return _run(data, tmp_path_factory.mktemp("loop") / "run", log_interval=1)[1]


def test_rows_have_the_documented_names(every_step: list[Row]) -> None:
    last = every_step[-1]
    assert [row["epoch"] for row in every_step] == pytest.approx([16 * row["step"] / 30 for row in every_step])
    assert all(isinstance(value, int | float) for row in every_step for value in row.values())
    trained = {"lm_loss", "q_halt_loss", "q_continue_loss", "grad_norm", "lr"}
    evaluated = {"exact_accuracy", "accuracy", "q_halt_accuracy", "steps", "lm_loss", "exact_accuracy_at_step/3"}
    of_sudoku = {"valid_boards", "clues_kept"}  # the evaluator of the data is there without being named
    assert {f"train/{name}" for name in trained} | {f"eval/all/{name}" for name in evaluated | of_sudoku} <= last.keys()
    assert all(last[f"perf/{name}"] > 0 for name in ("examples_per_second", "step_ms", "data_ms", "max_memory_gb"))
    halted = [row for row in every_step if "train/exact_accuracy" in row]
    assert halted and all({"train/accuracy", "train/q_halt_accuracy", "train/steps"} <= row.keys() for row in halted)


def test_losses_and_rates_equal_those_of_a_loop_written_out(data: Path, tmp_path: Path, every_step: list[Row]) -> None:
    """The loop of the test has no sums over steps, no log and no checkpoints."""
    typed = runs.settings(data, tmp_path / "run", log_interval=1)
    config = read_start(typed, RunLock(), Launch()).config
    opened = open_data(config, SINGLE)
    model = build_puzzle_arch(config.arch, **opened.sizes.of_model())
    assert isinstance(model, RecursiveModel) and isinstance(opened.train, Split)
    model.init_weights(torch.Generator().manual_seed(config.seed))
    optimizer = AdamATan2(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    sampler = Sampler(list(opened.train.sets.values()), seed=config.seed, epochs=config.epochs, global_batch_size=16)
    carry = None
    for step, batch in enumerate(TrainLoader(opened.train, sampler, SINGLE).batches(range(1, 13)), start=1):
        minimum_B = draw_min_halt_steps(config.seed, step, 16, 0.5, 3)
        settings = ActSettings(model.config.depth, 16, minimum_B)
        carry, outputs = segment(model, carry or initial_carry(model, batch), batch, settings)
        labels_BS = carry.current["labels"]
        loss, sums = act_loss(
            outputs,
            labels_BS,
            halted_B=carry.halted_B,
            steps_B=carry.steps_B,
            config=config.puzzle_arch.loss,
        )
        (loss / 16).backward()
        multiplier = lr_multiplier(step, 12, config.lr_warmup_steps, config.lr_min_ratio)
        row = every_step[step - 1]
        count, accuracy, exact, _, steps, lm_loss, q_halt_loss, q_continue_loss = sums.tolist()
        assert row["train/lm_loss"] == pytest.approx(lm_loss / 16, rel=1e-9)
        assert row["train/q_halt_loss"] == pytest.approx(q_halt_loss / 16, rel=1e-9)
        assert row["train/q_continue_loss"] == pytest.approx(q_continue_loss / 16, rel=1e-9)
        assert row["train/lr"] == pytest.approx(config.lr * multiplier)
        assert ("train/accuracy" in row) == (count > 0)
        if count > 0:
            expected = [accuracy / count, exact / count, steps / count]
            assert [row[f"train/{name}"] for name in ("accuracy", "exact_accuracy", "steps")] == pytest.approx(expected)
        norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
        assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)

        # All slots name the only puzzle of these data, so that their gradients are summed before
        # the sign.
        assert model.puzzle_embedding is not None and outputs.puzzle_rows_BE is not None
        assert outputs.puzzle_rows_BE.grad is not None
        (identifier,) = set(carry.current["puzzle_identifiers"].tolist())
        table_PE, rate = model.puzzle_embedding.weight, config.puzzle_emb_lr * multiplier
        update_E = rate * outputs.puzzle_rows_BE.grad.sum(0).sign()
        table_PE[identifier] = table_PE[identifier] * (1 - rate * config.puzzle_emb_weight_decay) - update_E
        for group in optimizer.param_groups:
            group["lr"] = config.lr * multiplier
        optimizer.step()
        optimizer.zero_grad()


def test_evaluations_do_not_change_training(data: Path, tmp_path: Path, every_step: list[Row]) -> None:
    _, rows = _run(data, tmp_path / "run", log_interval=1, eval_every_n_steps=1, checkpoint_every_eval=False)
    assert [row["train/lm_loss"] for row in rows] == [row["train/lm_loss"] for row in every_step]
    assert all("eval/all/exact_accuracy" in row for row in rows)


def test_bfloat16_on_the_cpu(data: Path, tmp_path: Path, every_step: list[Row]) -> None:
    state, rows = _run(data, tmp_path / "run", arch__forward_dtype="bfloat16", max_steps=3, log_interval=1)
    assert all(parameter.dtype == torch.float32 for parameter in state.model.parameters())
    assert rows[0]["train/lm_loss"] == pytest.approx(every_step[0]["train/lm_loss"], rel=0.03)


def test_float16_scales_the_loss_and_skips_steps_that_overflow(
    data: Path, tmp_path: Path, every_step: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped step changes no trained tensor and no average. The losses fall as in float32."""
    taken = []

    def noting(state: TrainState, *args: Any) -> StepResult:
        assert state.ema is not None
        tensors = {**state.model.trained_tensors(), **{f"ema.{name}": of for name, of in state.ema.tensors().items()}}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        result = train_step(state, *args)
        changed = {name.partition(".")[0] == "ema" for name in before if not torch.equal(before[name], tensors[name])}
        assert changed == ({True, False} if result.was_taken else set())
        taken.append(result.was_taken)
        return result

    monkeypatch.setattr("pretrain.train_step", noting)
    # The scale is so large that steps overflow again and again: it is halved after each of them,
    # and doubled after each step that was taken.
    monkeypatch.setattr("optim.loss_scale._START", 2.0**22)
    monkeypatch.setattr("optim.loss_scale._STEPS_TO_GROW", 1)
    options = {"arch__forward_dtype": "float16", "ema": True, "ema_rate": 0.5}
    _, rows = _run(data, tmp_path / "run", **options, log_interval=1, eval_every_n_steps=None)
    assert not taken[0] and False in taken[taken.index(True) :], "a step must be skipped after a good one"
    expected, scale = [], 2.0**22
    for was_taken in taken:
        scale = scale * 2 if was_taken else scale / 2
        expected.append(scale)
    assert [row["train/loss_scale"] for row in rows] == expected
    assert rows[0]["train/lm_loss"] == pytest.approx(every_step[0]["train/lm_loss"], rel=1e-2)
    assert rows[-1]["train/lm_loss"] < rows[0]["train/lm_loss"]


def test_the_log_begins_with_the_run_and_its_sizes(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state, _ = _run(data, tmp_path / "run", max_steps=2)
    stdout, stderr = capfd.readouterr()
    head, num_parameters = stderr.splitlines()[0], sum(p.numel() for p in state.model.parameters())
    assert f"{tmp_path / 'run'}: hrm, {num_parameters:,} parameters and 32 in the puzzle table; 30 groups" in head
    assert stdout == "" and "\r" not in stderr
    question = "".join(".1234"[token - 1] for token in np.load(data / "test" / "all__inputs.npy")[0])
    assert f"python solve.py checkpoint={tmp_path / 'run'} puzzle={question}" in stderr


def test_the_settings_of_a_step_follow_the_config(data: Path, tmp_path: Path) -> None:
    """Depth and rates depend on the last step, here max_steps and not the end of the data."""
    depths: dict[str, object] = {"arch__H_cycles": 2, "arch__depth_curriculum": "[{until:0.5,H_cycles:1,L_cycles:1}]"}
    rates = {"lr_warmup_steps": 4, "lr_scaling": "linear", "lr_scaling_reference": 8}
    table = {"puzzle_emb_lr": 0.5, "puzzle_emb_weight_decay": 0.25}
    average = {"ema": "true", "ema_rate": 0.75, "ema_start": 0.5}
    begun = begin(
        runs.settings(data, tmp_path / "run", grad_clip=2.0, seed=3, **{**depths, **rates, **table, **average})
    )
    plan = Plan.make(begun.start.config, begun.data, begun.state.progress, SINGLE)
    assert plan.last_step == 12 < plan.sampler.last_step
    arch = begun.start.config.puzzle_arch
    for step in range(1, 13):
        found = StepSettings.at(step, plan, SINGLE)
        assert isinstance(found.objective, ActSettings)
        depth = found.objective.depth
        assert (depth.H_cycles, depth.L_cycles) == ((1, 1) if step <= 6 else (2, 2)), step
        assert (found.objective.global_batch_size, found.grad_clip) == (16, 2.0)
        multiplier = lr_multiplier(step, 12, 4, begun.start.config.lr_min_ratio)
        assert found.lr_factor == pytest.approx(2 * multiplier)
        assert (found.puzzle_emb_lr, found.puzzle_emb_weight_decay) == (pytest.approx(0.5 * multiplier), 0.25)
        assert found.ema_rate == (0.75 if step > 6 else 0.0)
        assert found.objective.min_halt_steps_B is not None
        assert torch.equal(found.objective.min_halt_steps_B, draw_min_halt_steps(3, step, 16, 0.5, arch.halt_max_steps))


LAST = 9


class Followed:
    """A session that records its calls. The evaluation, the votes and the due dates are given."""

    def __init__(
        self,
        step: int,
        evaluation: str | None,
        was_pending: bool,
        votes: tuple[bool, bool, bool],
        worn_out: bool,
        due: bool,
    ) -> None:
        self.done: list[str] = []
        self._ends_as, self._is_paused = evaluation, False
        self.vote = lambda: votes
        self.progress = Progress(step=step, pending_row={"train/lr": 1.0} if was_pending else None)
        self.state = SimpleNamespace(progress=self.progress)
        self.clock = SimpleNamespace(doing=self._doing)
        self.plan = SimpleNamespace(
            last_step=LAST,
            best_metric="eval/all/accuracy",
            evaluation_due=lambda step: evaluation is not None,
            out_of_patience=lambda progress: worn_out,
            checkpoint_due=lambda step, *, evaluated: due or (evaluated and step == LAST),
            replicas_check_due=lambda step: True,
        )
        self.check_replicas, self.mark_stopped = partial(self._note, "check"), partial(self._note, "mark")
        self.say = lambda text: self._note("say")
        self.log = lambda row: self._note(f"log {', '.join(sorted(row))}")

    @contextmanager
    def _doing(self, activity: str) -> Iterator[None]:
        assert activity == "other"
        self._is_paused = True
        yield
        self._is_paused = False

    def _note(self, what: str) -> None:
        assert self._is_paused, f"{what} is counted as time of a step"
        self.done.append(what)

    def evaluate(self, row: Row, *, limited: bool) -> Evaluation:
        self._note(f"evaluate limited={limited}")
        if self._ends_as == "stopped":
            self.progress.pending_row = row
            return Evaluation(row, is_done=False)
        return Evaluation(row | {"eval/all/accuracy": 1.0}, is_done=True, is_best=self._ends_as == "best")

    def save(self, *, is_best: bool, is_last: bool = False) -> None:
        self._note("save" + " best" * is_best + " last" * is_last)

    def raise_data_error(self) -> None:
        self._note("raise")
        raise UserError("no data")


@pytest.mark.parametrize("evaluation", [None, "done", "best", "stopped"])
@pytest.mark.parametrize("step", [4, LAST])
def test_what_follows_a_step(evaluation: str | None, step: int) -> None:
    """For every combination of due tasks, check what is done in which order and if the run ends."""
    for flags in itertools.product((False, True), repeat=7):
        was_pending, has_row, stopping, unreadable, save_due, is_worn_out, checkpoint = flags
        votes = stopping, unreadable, save_due
        session = Followed(step, evaluation, was_pending, votes, is_worn_out, checkpoint)
        is_evaluated, is_interrupted = evaluation in ("done", "best"), evaluation == "stopped"
        ends_early = is_evaluated and is_worn_out
        expected = []
        if evaluation is not None:  # a pending evaluation has no time limit, because the process has just started
            expected.append(f"evaluate limited={not was_pending}")
        names = (["eval/all/accuracy"] if is_evaluated else []) + (["train/lr"] if has_row else [])
        if names and not is_interrupted:  # the row of an interrupted evaluation is pending
            expected.append(f"log {', '.join(names)}")
        is_due = checkpoint or save_due or (is_evaluated and step == LAST)
        if stopping or unreadable or ends_early or evaluation == "best" or is_due:
            is_last = stopping or unreadable or ends_early or step == LAST
            expected.append("save" + " best" * (evaluation == "best") + " last" * is_last)
        else:
            expected.append("check")
        if unreadable:
            expected.append("raise")
        elif ends_early:
            expected.append("say")
        elif stopping and (step < LAST or is_interrupted):  # a finished run must not be queued again
            expected.append("mark")
        row = {"train/lr": 1.0} if has_row else {}
        with pytest.raises(UserError) if unreadable else nullcontext():
            assert after_step(session, row) == (stopping or ends_early)  # type: ignore[arg-type]
        assert session.done == expected
        assert session.progress.pending_row == (row if is_interrupted else None)
